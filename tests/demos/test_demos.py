"""Every demo runs with a tiny random model, and with the bundled reader if it is there."""

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

import ragaccel
from eval.robustness.stand_ins import save_tiny_model

pytest.importorskip("faiss")
pytest.importorskip("sentence_transformers")

DEMOS = Path(__file__).parents[2] / "demos"
FILES = (
    "equipment/batteries-and-solar-power.rst",
    "procedures/landing-by-boat.txt",
    "incidents/2020-lantern-fire-at-wether-holm.txt",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three of the documents, in a folder that the demos may index."""
    target = tmp_path_factory.mktemp("documents")
    for name in FILES:
        shutil.copy(DEMOS / "documents" / name, target)
    return target


HAS_READER = (Path(ragaccel.__file__).parent / "models/reader/model.safetensors").exists()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("random model", marks=[pytest.mark.slow] * HAS_READER),
        "bundled reader",
    ],
)
def model(request, tmp_path_factory):
    """The arguments that choose a model."""
    if request.param == "random model":
        folder = tmp_path_factory.mktemp("model")
        return ["--model", str(save_tiny_model(folder, context=16384))]
    if not HAS_READER:
        pytest.skip("the bundled reader's weights are not in this checkout")
    return []


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a demo as ``python demos/NAME.py ARGUMENTS`` would; returns what it printed."""

    def run_demo(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(DEMOS / name), run_name="__main__")
        return capsys.readouterr().out

    monkeypatch.setenv("COLUMNS", "120")
    return run_demo


QUESTION = "How high may the swell be for a landing at Gannet Ledge?"


def test_ask_folder_answers_and_shows_its_speed(run, folder, model, monkeypatch):
    printed = run("ask_folder.py", folder, QUESTION, *model)
    assert re.search(r"\d+ tokens/s, \d+\.\d tokens a pass", printed)
    if not model:
        assert "higher than one metre" in printed
        assert "landing-by-boat.txt:" in printed
    typed = [QUESTION, "", "And when was she born?"]  # without a question it is a prompt loop

    def typing(*_):
        if not typed:
            raise EOFError
        return typed.pop(0)

    monkeypatch.setattr("builtins.input", typing)
    assert run("ask_folder.py", folder, *model).count("tokens a pass") == 2


def test_highlight_numbers_the_spans_and_lists_the_passages(run, folder, model):
    printed = run("highlight.py", "--folder", folder, *model)
    assert printed.count("‹") == printed.count("›")
    assert re.search(r"^\[1\] \S+:\d+", printed, re.MULTILINE)
    if not model:
        assert re.search(r"‹\d .*higher than one metre", printed)


def test_race_ends_with_the_same_tokens(run, folder, model):
    printed = run("race.py", "--folder", folder, *model)
    assert printed.rstrip().endswith("same tokens: yes")


def test_own_drafter_changes_the_speed_and_no_token(run, model):
    printed = run("own_drafter.py", *model)
    rows = [line for line in printed.splitlines() if "Drafter" in line]
    assert [row.split()[1] for row in rows] == [
        "NoDrafter",
        "CopyDrafter",
        "BigramDrafter",
        "NonsenseDrafter",
    ]
    assert all("yes" in row and "NO " not in row for row in rows)


def test_screens_show_what_a_command_leaves_on_the_terminal():
    screens = runpy.run_path(str(DEMOS / "screens.py"))
    assert screens["shown"]("--version").startswith("ragaccel")
    spinner = "\x1b[?25l⠋ loading\r\x1b[2K⠙ loading\n\x1b[?25h\r\x1b[1A\x1b[2K"
    assert screens["left_of"](f"first\n{spinner}\x1b[36mlast\x1b[0m\n") == (
        "first\n\x1b[36mlast\x1b[0m\n"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("no_event_loop_is_left")
@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("langchain_chain.py", "langchain_ragaccel"),
        ("llamaindex_query.py", "llama_index.llms.ragaccel"),
    ],
)
def test_a_frameworks_chain_answers_and_cites(name, package, run, folder, model):
    pytest.importorskip(package)
    printed = " ".join(run(name, "--folder", folder, *model).split())
    if not model:  # what random weights say may be nothing that shows
        said = "At Gannet Ledge no landing is attempted when the swell is higher than one metre."
        assert printed.startswith(f"{said} [1]")
        assert f"{said!r}" in printed
        assert "landing" in printed.split(f": {said!r}")[0].rpartition("[1]")[2]
