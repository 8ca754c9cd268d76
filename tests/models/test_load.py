"""Models by folder, by name and by object; missing ones fail quickly."""

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from time import perf_counter

import pytest
import torch
from decoding import decode
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from small_tokenizers import byte_level
from tiny_models import make_tiny_model, random_prompt
from transformers import AutoConfig, AutoModelForCausalLM, T5Config
from transformers.models.qwen2 import modeling_qwen2
from transformers.utils import logging

from ragaccel.decoding import Request
from ragaccel.engine import Engine, bfloat16
from ragaccel.errors import (
    ConfigurationError,
    MissingExtraError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from ragaccel.models import (
    LANGUAGE_MODEL,
    HuggingFaceModel,
    bundled_reader_path,
    expected_passes,
    find_folder,
    has_packed,
    hf_model,
    load,
    load_for_training,
    load_model,
    read_model_info,
    self_check,
    tokenizer as chat_template,
)

SAID = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("a model")
    model = make_tiny_model("qwen2", torch.float16, vocab_size=len(byte_level()))
    model.generation_config.eos_token_id = [1, 7]
    model.save_pretrained(path)
    byte_level().save_pretrained(path)
    return path


@pytest.fixture
def own_folder(folder, tmp_path):
    """A copy that the test may damage."""
    return shutil.copytree(folder, tmp_path / "model")


@pytest.fixture
def load_counted(tmp_path, monkeypatch):
    """Load with records in a folder; the result is how often the weights were checked."""

    def load_counted(folder, **arguments):
        checks = []

        def count(target):
            checks.append(target)
            return expected_passes(target)

        monkeypatch.setattr(hf_model, "expected_passes", count)
        load_model(folder, device="cpu", check_folder=tmp_path / "checks", **arguments)
        return len(checks)

    return load_counted


def test_checked_weights_are_not_checked_again_until_anything_changes(
    own_folder, load_counted, monkeypatch
):
    assert [load_counted(own_folder) for _ in range(2)] == [1, 0]
    assert load_counted(own_folder, dtype="float64") == 1
    assert load_counted(own_folder, dtype="float64", attn_implementation="eager") == 1
    assert load_counted(own_folder, owned=False) == 1
    weights = own_folder / "model.safetensors"
    before = weights.stat()
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))  # as copying with times does
    assert [load_counted(own_folder) for _ in range(2)] == [1, 0]
    with monkeypatch.context() as patch:
        patch.setattr(self_check.transformers, "__version__", "1.0")
        assert load_counted(own_folder) == 1
    with monkeypatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        assert load_counted(own_folder) == 1
    rotate = modeling_qwen2.apply_rotary_pos_emb
    with monkeypatch.context() as patch:  # as libraries of faster kernels do
        patch.setattr(modeling_qwen2, "apply_rotary_pos_emb", lambda *args: rotate(*args))
        assert load_counted(own_folder) == 1
    assert load_counted(own_folder) == 0
    (own_folder / "elsewhere").symlink_to(own_folder.parent)  # files that are not described
    assert [load_counted(own_folder) for _ in range(2)] == [1, 1]


def test_code_that_was_replaced_in_this_process_is_checked(own_folder, load_counted, monkeypatch):
    assert load_counted(own_folder) == 1
    layer = modeling_qwen2.Qwen2MLP
    make, forward, linear = layer.__init__, layer.forward, torch.nn.functional.linear

    def make_own(mlp, *args):
        make(mlp, *args)
        mlp.forward = functools.partial(forward, mlp)

    for owner, name, other in (
        (layer, "forward", functools.wraps(forward)(lambda *args: forward(*args))),
        (layer, "__init__", functools.wraps(make)(make_own)),
        (torch.nn.functional, "linear", lambda *args: linear(*args)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, other)
            assert load_counted(own_folder) == 1, name
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert load_counted(own_folder) == 1
    hook.remove()
    assert load_counted(own_folder) == 0
    with (
        pytest.raises(UnsupportedModelError, match=r"torch\.autocast is on"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        load_counted(own_folder)


def test_a_setting_of_precision_for_one_backend_is_read(own_folder, load_counted, monkeypatch):
    if not hasattr(torch.backends.mkldnn, "matmul"):
        pytest.skip("this torch has one setting for all backends")
    assert load_counted(own_folder) == 1
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        assert load_counted(own_folder) == 1
    except UnsupportedModelError as refusal:  # a processor that can, and rounds each row its way
        assert "torch multiplies float32 numbers in a lower precision" in str(refusal)  # noqa: PT017
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert load_counted(own_folder) == 0


def test_weights_outside_the_folder_are_checked_when_they_change(own_folder, load_counted):
    weights = load_file(own_folder / "model.safetensors")
    (own_folder / "model.safetensors").unlink()
    shards = {"metadata": {}, "weight_map": dict.fromkeys(weights, "../shard.safetensors")}
    index = own_folder / "model.safetensors.index.json"
    index.write_text(json.dumps(shards), encoding="utf-8")
    for more in (0, 1):
        changed = {name: weight + more for name, weight in weights.items()}
        save_file(changed, own_folder.parent / "shard.safetensors", metadata={"format": "pt"})
        assert [load_counted(own_folder) for _ in range(2)] == [1, 0]


def test_a_damaged_or_unwritable_record_is_as_none(own_folder, load_counted, tmp_path):
    assert load_counted(own_folder) == 1
    for damage in (b"", b"[]", b'{"found": {}}', b"\xff"):
        for record in (tmp_path / "checks").iterdir():
            record.write_bytes(damage)
        assert [load_counted(own_folder) for _ in range(2)] == [1, 0]
    for record in (tmp_path / "checks").iterdir():
        record.unlink()
        os.mkfifo(record)  # reading it would wait for a writer
    assert [load_counted(own_folder) for _ in range(2)] == [1, 0]
    shutil.rmtree(tmp_path / "checks")
    (tmp_path / "checks").write_text("a file", encoding="utf-8")
    assert [load_counted(own_folder) for _ in range(2)] == [1, 1]


def test_the_oldest_records_are_removed(own_folder, load_counted, tmp_path, monkeypatch):
    monkeypatch.setattr(self_check, "MAX_KEPT_CHECKS", 1)
    assert load_counted(own_folder) == 1
    assert load_counted(own_folder, dtype="float64") == 1
    assert len(list((tmp_path / "checks").iterdir())) == 1
    assert load_counted(own_folder, dtype="float64") == 0


def test_neither_refusals_nor_a_fallback_are_recorded(own_folder, load_counted, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(hf_model, "passes_check", lambda *_: False)
        assert [load_counted(own_folder) for _ in range(2)] == [1, 1]
    assert [load_counted(own_folder) for _ in range(2)] == [1, 0]
    monkeypatch.setattr(hf_model, "make_shared_copy", lambda _: None)
    assert load_counted(own_folder) == 1  # the record is of passes through the copy


def test_a_model_that_was_not_read_from_a_folder_is_checked_each_time(
    own_folder, load_counted, tmp_path, monkeypatch
):
    assert load_counted(own_folder) == 1
    model = AutoModelForCausalLM.from_pretrained(own_folder, dtype=torch.float32)
    monkeypatch.setattr(hf_model, "expected_passes", None)
    with pytest.raises(TypeError):
        HuggingFaceModel(model, owned=True, check_folder=tmp_path / "checks")


@pytest.mark.slow
def test_two_processes_at_once_leave_whole_records(own_folder, load_counted, tmp_path):
    program = (
        "import sys; from pathlib import Path; from ragaccel.models import load_model\n"
        "load_model(sys.argv[1], device='cpu', check_folder=Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", program, str(own_folder), str(tmp_path / "checks")]
    assert [process.wait() for process in [subprocess.Popen(command) for _ in range(2)]] == [0, 0]
    assert load_counted(own_folder) == 0
    assert {path.suffix for path in (tmp_path / "checks").iterdir()} == {".json"}


def test_a_folder(folder):
    target, tokenizer = load_model(folder, dtype="float64", device="cpu")
    assert target.dtype == torch.float64
    assert tokenizer.eos_ids == {1, 7}
    answer = decode(Engine(target), Request(random_prompt(9), max_new_tokens=5))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    ids = torch.tensor([random_prompt(9)])
    assert model.generate(ids, max_new_tokens=5, do_sample=False)[0, 9:].tolist() == answer


def test_model_info_is_read_without_the_weights(folder, tmp_path, monkeypatch):
    target, tokenizer = load_model(folder, device="cpu")
    monkeypatch.setattr(load, "AutoModelForCausalLM", None)
    info = read_model_info(folder, device="cpu", attn_implementation="eager")
    assert info.context_length == target.max_positions == 256
    assert info.tokenizer.encode("wick") == tokenizer.encode("wick")
    assert not info.tokenizer.has_chat_template
    assert read_model_info().context_length == 2048  # the bundled reader
    with pytest.raises(ModelNotFoundError, match="without a config"):
        read_model_info(tmp_path)


def test_float16_is_not_computed_on_a_processor(folder):
    assert load_model(str(folder), device="cpu")[0].dtype == torch.float32
    assert load_model(folder, device="cpu", dtype=torch.float16)[0].dtype == torch.float16
    assert load_model(folder, device="cpu", dtype="bfloat16")[0].dtype == torch.bfloat16
    with pytest.raises(ConfigurationError, match="dtype must be auto"):
        load_model(folder, dtype="fp8")


@pytest.mark.parametrize(
    ("family", "changes", "is_compiled"),
    [
        ("llama", {}, True),
        ("llama", {"vocab_size": 99}, False),
        ("llama", {"partial_rotary_factor": 0.5}, False),
        ("gemma2", {}, False),
    ],
)
def test_bfloat16_stays_where_torch_or_compiled_code_is_quick(
    family, changes, is_compiled, tmp_path, monkeypatch
):
    sizes = {"vocab_size": 96, "head_dim": 32, **changes}
    make_tiny_model(family, torch.bfloat16, **sizes).save_pretrained(tmp_path)
    tokenizer = byte_level()
    tokenizer.save_pretrained(tmp_path)
    for is_quick in (False, True):
        monkeypatch.setattr(load, "multiplies_bfloat16", lambda: is_quick)  # noqa: B023
        stays = is_quick or (is_compiled and bfloat16.is_supported())
        kinds = {True: torch.bfloat16, False: torch.float32}
        assert load_model(tmp_path, device="cpu")[0].dtype == kinds[stays]
        assert load.expansion_on_cpu(AutoConfig.from_pretrained(tmp_path)) == 2 - stays
        assert load_model(tmp_path, device="cpu", trust_remote_code=True)[0].dtype == kinds[stays]
        eager, _ = load_model(tmp_path, device="cpu", attn_implementation="eager")
        assert eager.dtype == load.load_for_training(tmp_path)[0].dtype == kinds[is_quick]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attn_implementation": "eager"}))
    monkeypatch.setattr(load, "multiplies_bfloat16", lambda: False)
    assert load_model(tmp_path, device="cpu")[0].dtype == torch.float32


def test_nothing_is_compiled_to_choose_a_dtype_that_is_given(folder, monkeypatch):
    def fail(*_args):
        raise AssertionError("asked")

    monkeypatch.setattr(load, "has_compiled_form", fail)
    assert load_model(folder, device="cpu", dtype="float32")[0].dtype == torch.float32


def test_bfloat16_does_not_stay_where_nothing_compiles(folder, tmp_path, monkeypatch):
    sizes = {"vocab_size": 96, "head_dim": 32}
    make_tiny_model("llama", torch.bfloat16, **sizes).save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    monkeypatch.setattr(load, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(bfloat16, "kernels", lambda name: None)
    assert load_model(tmp_path, device="cpu")[0].dtype == torch.float32


def test_keywords_go_to_transformers(folder):
    target, _ = load_model(folder, device="cpu", attn_implementation="eager")
    assert not target.architecture.omits_causal_masks
    with pytest.raises(ConfigurationError, match="device or device_map"):
        load_model(folder, device="cpu", device_map="auto")


def test_a_gpu_that_is_not_there_is_told(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigurationError, match="'cuda:1', and torch finds 1 CUDA devices"):
        load_model(folder, device="cuda:1")


def test_models_that_are_spread_or_split_over_processes(folder, monkeypatch):
    monkeypatch.setattr(load, "is_accelerate_available", lambda: False)
    with pytest.raises(MissingExtraError, match=r"ragaccel\[multi-gpu\]"):
        load_model(folder, device_map="auto")
    model = make_tiny_model("llama", torch.float32)
    model._tp_size = 2
    with pytest.raises(UnsupportedModelError, match=r"tensor parallel.*'auto', or use vLLM"):
        load.make_target(model)


def test_end_tokens_fall_back_to_the_tokenizer(folder):
    model = make_tiny_model("llama", torch.float32)
    assert load.find_eos_ids(model, byte_level()) == {byte_level().eos_token_id}
    model.generation_config.eos_token_id = 9
    assert load.find_eos_ids(model, byte_level()) == {9}


@pytest.mark.parametrize(
    "name", ["./missing", "/no/such/folder", "~/nothing here", "a/b/c", "x" * 9]
)
def test_missing_names_are_refused_at_once(name, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    started = perf_counter()
    with pytest.raises(ModelNotFoundError, match=r"no (folder|model)"):
        load_model(name, cache_dir=tmp_path)
    assert perf_counter() - started < 1.0


@pytest.fixture
def connections(monkeypatch):
    """Record connections and lookups, and let all of them fail."""
    tried = []

    def refuse(*args, **kwargs):
        tried.append(args)
        raise OSError("there is no network")

    for name in ("socket", "getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    return tried


def test_a_cached_name_opens_no_socket(folder, connections, monkeypatch, tmp_path):
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(folder)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    target, _ = load_model("someone/tiny", cache_dir=tmp_path, device="cpu")
    assert target.max_positions == 256
    assert target.model.name_or_path == "someone/tiny"
    assert target.model.config._commit_hash == "a" * 40
    assert read_model_info("someone/tiny", cache_dir=tmp_path).context_length == 256
    assert not connections
    with pytest.raises(ModelNotFoundError, match="hub cannot be reached"):
        load_model("someone/other", cache_dir=tmp_path)
    assert connections


def test_folders_and_files_that_are_no_models(folder, tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"without a config\.json"):
        load_model(tmp_path)
    with pytest.raises(ModelNotFoundError, match="is a file"):
        load_model(folder / "config.json")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelNotFoundError, match="cannot load"):
        load_model(tmp_path)


def test_what_cannot_be_decoded_is_refused_before_its_weights_are_read(tmp_path):
    T5Config(num_layers=1).save_pretrained(tmp_path)
    for read in (load_model, read_model_info):
        with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
            read(tmp_path)


def test_code_of_its_own_is_not_run(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "homegrown"
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemExit('run')")
    with pytest.raises(UnsupportedModelError, match="trust_remote_code=True"):
        load_model(tmp_path)


def test_the_bundled_reader_is_a_folder_or_a_clear_error(monkeypatch, tmp_path):
    monkeypatch.setattr(load, "__file__", str(tmp_path / "load.py"))
    with pytest.raises(ModelNotFoundError, match="no bundled reader"):
        bundled_reader_path()
    (tmp_path / "reader").mkdir()
    (tmp_path / "reader" / "config.json").write_text("{}")
    assert bundled_reader_path() == tmp_path / "reader"


def test_what_is_trained_is_a_stock_model(folder, capfd):
    enabled = logging.is_progress_bar_enabled()
    load_model(bundled_reader_path())
    model, tokenizer = load_for_training(folder)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert not has_packed(model)
    assert tokenizer.eos_ids == {1, 7}
    assert load_for_training(folder, dtype="bfloat16")[0].dtype == torch.bfloat16
    assert "Loading" not in capfd.readouterr().err
    assert logging.is_progress_bar_enabled() == enabled
    assert load_for_training()[0].config.vocab_size > 8000, "the bundled reader"
    with pytest.raises(ModelNotFoundError):
        load_for_training("someone/nothing")


# Damaged folders and hostile templates

DAMAGE = {
    "model.safetensors": [
        lambda data: data[: len(data) // 2],
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data.replace(b"F32", b"F99", 1).replace(b"F16", b"F99", 1),
        lambda data: b"",
    ],
    "tokenizer.json": [
        lambda data: data.replace(b'"BPE"', b'"XYZ"'),
        lambda data: b'{"version": "1.0", "model": {"type": "BPE"}}',
        lambda data: b"[]",
    ],
    "config.json": [
        lambda data: b'{"model_type": []}',
        lambda data: data.replace(b'"qwen2"', b'"no such type"'),
    ],
    "tokenizer_config.json": [lambda data: b"[1]"],
}


@pytest.mark.parametrize("file", DAMAGE)
def test_a_damaged_file_is_refused_by_an_error_of_ours(folder, own_folder, file):
    for damage in DAMAGE[file]:
        (own_folder / file).write_bytes(damage((folder / file).read_bytes()))
        with pytest.raises((UnsupportedModelError, ModelNotFoundError), match="cannot load") as no:
            load_model(own_folder, device="cpu")
        assert no.value.__cause__ is not None
        assert str(own_folder) in str(no.value)


def test_wrong_weights_are_refused_and_model_info_does_not_read_them(own_folder):
    (own_folder / "model.safetensors").write_bytes(b"none")
    assert read_model_info(own_folder).context_length == 256
    config = json.loads((own_folder / "config.json").read_text())
    (own_folder / "config.json").write_text(json.dumps(config | {"hidden_size": "x"}))
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        read_model_info(own_folder)


def test_end_tokens_that_are_none_are_refused(own_folder):
    (own_folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(UnsupportedModelError, match="eos_token_id must be a token id"):
        load_model(own_folder, device="cpu")


def test_errors_of_ours_and_of_the_caller_are_not_blamed_on_the_folder(folder, monkeypatch):
    def broken(*_):
        raise KeyError("a fault of ours")

    with pytest.raises(TypeError, match="no_such_argument"):
        load_model(folder, device="cpu", no_such_argument=1)
    monkeypatch.setattr("ragaccel.models.load.refuse_by_config", broken)
    with pytest.raises(KeyError, match="a fault of ours"):
        load_model(folder, device="cpu")


def test_hostile_templates_are_given_up(own_folder, monkeypatch):
    def with_template(text):
        (own_folder / "chat_template.jinja").write_text(text)
        return load_model(own_folder, device="cpu")[1]

    with pytest.raises(UnsupportedModelError, match="characters"):  # it is megabytes long
        with_template("{{ messages }}" + " " * (1 << 20) + ".")
    with pytest.raises(ConfigurationError, match="20,000,000 characters"):
        with_template("{{ 'a' * 20000000 }}").chat_text(SAID)
    monkeypatch.setattr(chat_template, "_TEMPLATE_TIMEOUT", 0.2)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    endless = with_template(loop)
    for use in (lambda: endless.chat_text(SAID), lambda: endless.takes_tools):
        with pytest.raises(UnsupportedModelError, match="made to hang"):
            use()
    for thread in threading.enumerate():
        if thread.name == "ragaccel-template":
            thread.join(10)
            assert not thread.is_alive()


def test_an_impossible_name_is_not_found():
    long = ("a" * 300, "a" * 5000, "a/" + "b" * 200, "/" + "b" * 300)
    for name in (*long, "x\0y", "\ud800", "-a", "a/b."):
        with pytest.raises(ModelNotFoundError, match="no such folder"):
            find_folder(name, LANGUAGE_MODEL, {})
