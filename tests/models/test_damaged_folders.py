"""A damaged model folder is refused by an error of ours, whatever transformers raises over it."""

import json
import shutil
import threading

import pytest

from eval.robustness.stand_ins import save_tiny_model
from ragaccel.errors import ConfigurationError, ModelNotFoundError, UnsupportedModelError
from ragaccel.models import (
    LANGUAGE_MODEL,
    find_folder,
    load_model,
    read_model_info,
    tokenizer as chat_template,
)

SAID = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def change(folder, file, **fields):
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(config | fields))


@pytest.mark.parametrize(
    ("file", "cut"),
    [
        ("model.safetensors", lambda data: data[: len(data) // 2]),
        ("model.safetensors", lambda data: b"\xff" * 8 + data[8:]),
        ("model.safetensors", lambda data: data.replace(b"F32", b"F99", 1)),
        ("model.safetensors", lambda data: b""),
        ("tokenizer.json", lambda data: data.replace(b'"BPE"', b'"XYZ"')),
        ("tokenizer.json", lambda data: b'{"version": "1.0", "model": {"type": "BPE"}}'),
        ("tokenizer.json", lambda data: b"[]"),
        ("config.json", lambda data: b'{"model_type": []}'),
        ("config.json", lambda data: data.replace(b'"llama"', b'"no such type"')),
        ("tokenizer_config.json", lambda data: b"[1]"),
    ],
)
def test_a_damaged_file_is_refused(folder, file, cut):
    (folder / file).write_bytes(cut((folder / file).read_bytes()))
    with pytest.raises((UnsupportedModelError, ModelNotFoundError), match="cannot load") as refused:
        load_model(folder, device="cpu")
    assert refused.value.__cause__ is not None
    assert str(folder) in str(refused.value)


def test_wrong_weights_are_refused_and_model_info_does_not_read_them(folder):
    (folder / "model.safetensors").write_bytes(b"none")
    assert read_model_info(folder).context_length == 4096
    change(folder, "config.json", hidden_size="x")
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        read_model_info(folder)


def test_our_own_errors_are_not_blamed_on_the_folder(folder, monkeypatch):
    def broken(*_):
        raise KeyError("a fault of ours")

    monkeypatch.setattr("ragaccel.models.load.refuse_by_config", broken)
    with pytest.raises(KeyError, match="a fault of ours"):
        load_model(folder, device="cpu")


def test_an_unknown_argument_raises_type_error(folder):
    with pytest.raises(TypeError, match="no_such_argument"):
        load_model(folder, device="cpu", no_such_argument=1)


def test_a_template_that_never_ends_is_given_up(folder, monkeypatch):
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(loop)
    monkeypatch.setattr(chat_template, "_TEMPLATE_TIMEOUT", 0.2)
    _, tokenizer = load_model(folder, device="cpu")
    with pytest.raises(UnsupportedModelError, match="made to hang"):
        tokenizer.chat_text(SAID)
    with pytest.raises(UnsupportedModelError, match="made to hang"):
        assert tokenizer.takes_tools
    for thread in threading.enumerate():
        if thread.name == "ragaccel-template":
            thread.join(10)
            assert not thread.is_alive()


def test_a_template_that_makes_far_more_than_it_is_given_is_refused(folder):
    (folder / "chat_template.jinja").write_text("{{ 'a' * 20000000 }}")
    _, tokenizer = load_model(folder, device="cpu")
    with pytest.raises(ConfigurationError, match="20,000,000 characters"):
        tokenizer.chat_text(SAID)


def test_a_template_of_megabytes_is_refused(folder):
    (folder / "chat_template.jinja").write_text("{{ messages }}" + " " * (1 << 20) + ".")
    with pytest.raises(UnsupportedModelError, match="characters"):
        load_model(folder, device="cpu")


@pytest.mark.parametrize(
    "name",
    ["a" * 300, "a" * 5000, "a/" + "b" * 200, "/" + "b" * 300, "x\0y", "\ud800", "-a", "a/b."],
)
def test_an_impossible_name_is_not_found(name):
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        find_folder(name, LANGUAGE_MODEL, {})
