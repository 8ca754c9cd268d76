"""How answers are drafted: flags and settings, with a real model and a real adapter."""

import json

import pytest
from fakes import HashEmbedder
from space_models import random_adapter

from eval.robustness.stand_ins import save_tiny_model
from ragaccel import LLM
from ragaccel.cli import index as index_module
from ragaccel.cli.ask import choose_adapter, make_drafter
from ragaccel.cli.settings import Settings


@pytest.mark.parametrize(
    ("drafter", "space", "attached"),
    [
        (None, None, None),
        (None, "dir", "dir"),
        ("trees", "dir", None),
        ("copy", None, None),
        ("space", None, True),
        ("space", "dir", "dir"),
        ("mixed", None, True),
    ],
)
def test_an_adapter_is_attached_where_it_is_used(home, drafter, space, attached):
    assert choose_adapter(Settings(drafter=drafter, space=space)) == attached


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "load_embedder", lambda settings: HashEmbedder())
    folder = save_tiny_model(tmp_path / "model")
    random_adapter(LLM.load(folder).model.model).save(folder / "space")
    return folder


def test_every_drafter_gives_the_same_answer(cli, tmp_path, model):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "key.txt").write_text("The key hangs behind the water tank on the north side.\n")
    answers = {}
    for drafter in ("trees", "copy", "space", "mixed", None):
        flags = ("--drafter", drafter) if drafter else ("--no-accel",)
        ended = cli(
            "ask", docs, "Where is it?", "--model", model, "--json", "--max-tokens", "20", *flags
        )
        assert ended.code == 0, ended.err
        answers[drafter] = json.loads(ended.out)["answer"]
    assert len(set(answers.values())) == 1


def test_an_unknown_drafter(cli, tmp_path):
    ended = cli("ask", tmp_path, "Where?", "--drafter", "tree")
    assert ended.code == 2
    assert "'trees', 'copy', 'space', 'mixed'" in ended.err


def test_a_model_without_an_adapter_is_told(cli, tmp_path, model):
    (tmp_path / "key.txt").write_text("The key hangs behind the water tank.\n")
    for file in (model / "space").iterdir():
        file.unlink()
    (model / "space").rmdir()
    ended = cli("ask", tmp_path, "Where?", "--model", model, "--drafter", "space")
    assert ended.code == 1
    assert "has no SPACE adapter" in ended.err
    assert "ragaccel train space" in ended.err


def test_the_default_drafter_is_the_models(home):
    for drafter in (None, "trees", "mixed"):
        assert make_drafter(Settings(drafter=drafter), None) is None
