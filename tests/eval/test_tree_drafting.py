"""The time of a draft tree, from context to cut tree."""

import json

import pytest
from eval_replayed import COPIED, PASSAGE
from recorded import SENTENCE, write_inputs

from eval.data import Recorded
from eval.experiments import drafting
from eval.experiments.drafting import behind_others, full_history, steps, time_steps
from eval.report import build
from ragaccel.drafting import NoPast, TrieDrafter


def test_steps_are_those_of_a_session():
    found = list(steps(COPIED, TrieDrafter(16)))
    assert 1 < len(found) < len(PASSAGE)
    assert all(0 <= num <= 16 for _, num in found)
    assert all(seconds > 0 for seconds, _ in found)
    figures = time_steps([COPIED, COPIED], 16, NoPast())
    assert figures["steps"] == 2 * (len(found) - 1)
    assert 0 < figures["median_us"] <= figures["p95_us"]


def test_prompts_stand_behind_those_of_others():
    rows = [Recorded((i, i, i), (), (), (9, 1)) for i in (2, 3, 4)]
    assert behind_others(rows, 5)[0].prompt_ids == (4, 4, 2, 2, 2)
    assert behind_others(rows, 100)[1].prompt_ids == (4, 4, 4, 2, 2, 2, 3, 3, 3)
    assert behind_others(rows, 2)[0].prompt_ids == (2, 2)


def test_a_history_is_filled_by_shuffled_prompts():
    rows = [Recorded((*range(2, 40),), (), (), (50, 1)), COPIED]
    assert full_history(iter(rows), 60).num_requests == 1
    history = full_history(iter(rows), 500)
    assert 500 <= len(history.suffix_array().token_ids) < 600
    assert history.num_requests > 2


def test_trees_are_measured_and_reported(tmp_path, monkeypatch, capsys):
    compiling = {"compiling_seconds": 9.0, "compiled_seconds": 0.3}
    monkeypatch.setattr(drafting, "first_drafts", lambda: compiling)
    write_inputs(tmp_path)
    (tmp_path / "data" / "rag").mkdir()
    line = {"question": "Who?", "passages": [{"text": SENTENCE}], "answer": SENTENCE * 3}
    rows = "".join(json.dumps({"id": str(i), **line}) + "\n" for i in range(3))
    for name in (drafting.FOLLOWED, *drafting.PAST_SETS):
        (tmp_path / "data" / "rag" / f"{name}.jsonl").write_text(rows)
    arguments = [f"--data={tmp_path / 'data'}", "--tokenizer=words", "--tree"]
    drafting.run_drafting(
        [*arguments, "--context=100", "--past-tokens=900", f"--out={tmp_path / 'r' / 'd.json'}"]
    )
    budgets = json.loads(capsys.readouterr().out.splitlines()[-1])
    document = json.loads((tmp_path / "r" / "d.json").read_text())
    assert document["budgets"] == budgets
    assert document["settings"]["past_tokens"] >= 900
    assert list(budgets) == ["16", "64"]
    assert budgets["16"]["past"]["steps"] > 0
    assert document["add_ms"] > 0
    assert str(tmp_path) not in json.dumps(document)
    table = build.all_results(tmp_path / "r")
    assert "100 tokens of context" in table
    assert "9.0 s while it is compiled" in table
    with pytest.raises(SystemExit, match="holds no rag/llma"):
        drafting.run_drafting(["--tree", f"--data={tmp_path}"])


def test_the_first_draft_of_a_process_is_timed():
    assert drafting.first_draft_seconds() > 0
