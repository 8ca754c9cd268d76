"""Replaying recorded answers: what a model that gave them would have accepted."""

import json
import sys

import pytest
from eval_replayed import COPIED, EOS, PASSAGE
from fakes import RandomDrafter
from recorded import SENTENCE, write_inputs

from eval.data import Recorded
from eval.experiments import replay
from eval.experiments.replay import LookupDrafter, ReplayedDrafter, SuffixDrafter, Tally
from eval.report import build
from ragaccel.decoding import Context
from ragaccel.drafting import CopyDrafter, TrieDrafter


def tally_of(decoder, recorded=COPIED):
    tally = Tally()
    decoder.replay(recorded, tally)
    return tally


def test_a_copied_answer_takes_few_passes_and_a_new_one_a_pass_a_token():
    copied = tally_of(ReplayedDrafter(CopyDrafter, 31))
    assert copied.tokens == len(PASSAGE) + 1
    assert copied.passes <= 4
    new = Recorded((0, 5), (), (), (*range(70, 90), EOS))
    assert tally_of(ReplayedDrafter(CopyDrafter, 31), new).passes == 21


def test_nonsense_is_never_accepted_by_mistake():
    tally = tally_of(ReplayedDrafter(lambda: RandomDrafter(3, 60), 64))
    assert tally.tokens == len(PASSAGE) + 1
    assert tally.passes + sum(tally.by_source.values()) == tally.tokens


def test_trees_are_counted_without_their_root():
    tally = tally_of(ReplayedDrafter(TrieDrafter, 16))
    assert tally.drafted <= 16 * tally.passes
    assert tally.passes < 8
    figures = tally.figures()
    assert figures["tokens_per_pass"] == round(tally.tokens / tally.passes, 3)
    assert figures["accepted_by_source"].keys() <= {"reference", "output", "frequent", "prompt"}


def test_what_was_replayed_is_remembered_by_those_that_remember():
    outputs = SuffixDrafter.Outputs()
    decoder = ReplayedDrafter(lambda: SuffixDrafter(outputs), 32, past=outputs)
    new = Recorded((0, 5), (), (), (*range(70, 90), EOS))
    first, second = tally_of(decoder, new), tally_of(decoder, new)
    assert first.passes == 21
    assert second.passes < 12


def test_prompt_lookup_takes_the_leftmost_match_of_two_tokens_then_of_one():
    drafter = LookupDrafter(num_tokens=2)
    assert drafter.draft(Context([1, 2, 3, 4, 1, 2, 5, 6, 1, 2]), 9).token_ids == (2, 3, 4)
    assert drafter.draft(Context([7, 2, 3, 4, 1, 2]), 9).token_ids == (2, 3, 4)
    assert drafter.draft(Context([1, 2, 3]), 9).token_ids == (3,)


def test_suffix_decoding_copies_as_many_tokens_as_match_and_the_commonest():
    drafter = SuffixDrafter(SuffixDrafter.Outputs())
    assert drafter.draft(Context([1, 2, 3, 4, 5, 9, 2, 3]), 9).token_ids == (3, 4, 5)
    assert drafter.draft(Context([2, 7, 2, 8, 2, 8, 6, 2]), 9).token_ids == (2, 8)


def test_a_history_is_bounded_as_that_of_a_namespace():
    run = replay.replayed_drafters(4 * 4096)["ours_64_history"]
    for _ in range(20):
        tally_of(run)
    assert 0 < run.past.num_requests < 20
    assert run.past.max_bytes == 4096


def test_a_folder_is_replayed_and_reported(tmp_path, monkeypatch, capsys):
    write_inputs(tmp_path)
    line = {"question": "Who?", "passages": [{"text": SENTENCE}], "answer": SENTENCE}
    (tmp_path / "sets").mkdir()
    rows = "".join(json.dumps({"id": str(i), **line}) + "\n" for i in range(3))
    (tmp_path / "sets" / "lamps.jsonl").write_text(rows)
    results = tmp_path / "results"
    results.mkdir()
    arguments = [
        "replay", f"--folder={tmp_path / 'sets'}", f"--json={results / 'replay.json'}",
        f"--data={tmp_path / 'data'}", "--tokenizer=words",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", arguments)
    replay.run_replay()
    shown = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    kept = json.loads((results / "replay.json").read_text())
    assert kept["lamps"].keys() == shown["lamps"].keys() == replay.replayed_drafters().keys()
    assert kept["lamps"]["ours_64_history"] > 3
    table = build.all_results(results)
    assert "| lamps |" in table
    assert "LLMA as published" in table
    monkeypatch.setattr(sys, "argv", ["replay", f"--folder={tmp_path / 'nowhere'}"])
    with pytest.raises(SystemExit, match="--folder"):
        replay.run_replay()
