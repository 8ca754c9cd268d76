"""A data folder, a model and tasks on which every run can be tried in seconds."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from recorded import SENTENCE, write_inputs

from eval.__main__ import find_run
from eval.robustness.stand_ins import save_tiny_model

LAMP = "The lamp burns oil, and a keeper trims the wick at dusk."
BELL = "A bell rings in fog, and boats keep to the west of it."
PAIRS = (  # an article, a passage of it, a question, and its answer in the passage
    ("Gannet_Ledge", LAMP, "What does the lamp burn?", "oil"),
    ("Gannet_Ledge", "At midnight it is trimmed again.", "When is it trimmed again?", "midnight"),
    ("Wether Holm", BELL, "What rings in fog?", "A bell"),
    ("Amity", "Sand covered the doorstep of the low light.", "What covered it?", "Sand"),
)
ASKED = [{"role": "user", "text": "Who?"}, {"role": "agent", "text": SENTENCE}]


def row(row_id, answer, question="Who trims the wick?", passages=(LAMP,), history=(), title=""):
    parts = [{"title": title, "text": text} for text in passages]
    return {
        "id": row_id, "question": question, "passages": parts, "answer": answer,
        "history": list(history),
    }  # fmt: skip


TURNS = (
    row("c<::>1/a", SENTENCE, passages=(LAMP, BELL)),
    row("c<::>1/b", SENTENCE),
    row("c<::>2/a", SENTENCE, "And then?", history=ASKED),
    row("d<::>1/a", BELL, "What rings?", passages=(BELL,)),
    row("e<::>1/a", "", "Nobody knows?"),
)


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")


@pytest.fixture(autouse=True)
def threads_of_its_own():
    """An experiment sets the threads of its process: the tests after it have theirs again."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Write a shape, a saved model, tasks and a data folder; return their paths and arguments."""
    folder = tmp_path_factory.mktemp("world")
    model, data, task = write_inputs(folder)
    shutil.copytree(folder / "data/tokenizers/words", folder / "data/tokenizers/llama2")
    pairs = [
        row(str(n), answer, question, [text], title=title)
        for n, (title, text, question, answer) in enumerate(PAIRS)
    ]
    lamps = [row(str(n), f"{SENTENCE} {n}") for n in range(4)]
    original = {"query": "Who?", "docs": [LAMP, SENTENCE], "result": {"text": f" {SENTENCE}"}}
    rag = {
        "lamps": lamps, "turns": TURNS, "mtrag_human_answers": TURNS, "mtrag_un": lamps,
        "sum_qmsum_valtest_goldspan": lamps, "pubmedqa_long": lamps, "sum_scitldr_dev": lamps,
        "llma_rag_original": [original], "squad_like": [*pairs, {**pairs[0], "id": "again"}],
        "nq_open_oracle": pairs[:3], "clapnq_dev": pairs,
        "llma_msmarco_davinci003": [row("a", SENTENCE * 3, "lamp wick", [LAMP, BELL])],
    }  # fmt: skip
    for name, rows in rag.items():
        write_rows(folder / "data" / "rag" / f"{name}.jsonl", rows)
    (folder / "data" / "qa").mkdir()
    sums = [{"question": f"{n} and {n}?", "answer": f"{n} and {n} is {2 * n}."} for n in (2, 3)]
    write_rows(folder / "data" / "prompts" / "gsm8k_test.jsonl", sums)
    (folder / "documents").mkdir()
    for number in range(60):
        words = (f"In {n} the keeper of light {number} saw {n * number} ships." for n in range(100))
        (folder / "documents" / f"{number}.md").write_text("\n".join(words))
    talk = [row("first", "", passages=[SENTENCE]), row("later", "", history=ASKED)]
    write_rows(folder / "talk.jsonl", talk)
    return SimpleNamespace(
        folder=folder,
        data=folder / "data",
        tiny=[model, data, "--threads=1"],
        task=task,
        words=[data, "--tokenizer=words"],
        saved=f"--model={save_tiny_model(folder / 'saved', seed=4)}",
    )


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run an experiment by name; return its exit code, its result and what it printed."""
    monkeypatch.setenv("RAGACCEL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAGACCEL_DATA", raising=False)

    def tried(name, *arguments, out=tmp_path / "r" / "result.json"):
        kept = "--json" if name == "replay" else "--out"
        out.parent.mkdir(exist_ok=True)
        code = None
        try:
            find_run(name)([*map(str, arguments), f"{kept}={out}"])
        except SystemExit as ended:
            code = ended.code
        document = json.loads(out.read_text()) if out.exists() else None
        return SimpleNamespace(code=code, document=document, out=out, printed=capsys.readouterr())

    return tried
