"""Lookahead's two lengths: what is replayed, what is timed, and what a table says of both."""

import json

import pytest
from eval_replayed import COPIED, EOS
from eval_sets import SMALL, write_sets
from recorded import make_target

from eval.data import DATA_VARIABLE, Recorded
from eval.experiments import speed
from eval.papers import lookahead
from eval.papers.bench import Bench
from eval.papers.lookahead import (
    add_times,
    distinct,
    gains,
    replay_rows,
    spread,
    trie_point,
    weights,
)
from eval.report import build
from eval.report.plots import sets_of
from eval.runner import ResultsLog
from ragaccel.drafting import History

NEW = Recorded((0, 5), (), (), (*range(70, 90), EOS))


def entries_of(document, name, memory="cold"):
    return {
        (entry["decoding_length"], entry["branch_length"]): entry
        for entry in document["grid"]
        if (entry["set"], entry["memory"]) == (name, memory)
    }


def test_neither_length_is_exceeded_and_both_hold_what_is_accepted_back():
    points = [trie_point(*pair) for pair in ((16, 2), (4, 16), (16, 16))]
    short, narrow, long = replay_rows([COPIED], points)
    assert short["tokens_per_pass"] <= 3
    assert short["drafted_per_pass"] <= 16
    assert narrow["drafted_per_pass"] <= 4
    assert narrow["tokens_per_pass"] <= 5
    assert long["tokens_per_pass"] > max(short["tokens_per_pass"], narrow["tokens_per_pass"])
    for entry in (short, narrow, long):
        assert entry["tokens"] == len(COPIED.answer_ids)
        assert entry["accepted_per_pass"] == pytest.approx(entry["tokens_per_pass"] - 1, abs=2e-3)
        assert 0 < entry["triggered"] <= 1


def test_a_request_knows_those_before_it_only_where_memory_grows():
    point = [trie_point(16, 8)]
    (alone,) = replay_rows([NEW], point)
    (cold,) = replay_rows([NEW, NEW], point)
    (grown,) = replay_rows([NEW, NEW], point, History())
    assert alone["passes"] == 21
    assert cold["passes"] == 42  # nothing is carried over, corrections of chances neither
    assert grown["passes"] < 30


def test_settings_that_cannot_differ_are_replayed_once_and_told_of_all():
    assert distinct([(4, 2), (4, 8), (4, 16), (8, 8)]) == [(4, 2), (4, 4), (8, 8)]
    found = {"set": "a", "memory": "cold", "decoding_length": 4, "branch_length": 4, "passes": 7}
    assert spread([found], [(4, 8), (4, 16)]) == [
        found | {"branch_length": 8},
        found | {"branch_length": 16},
    ]


def test_what_drafts_beyond_32_gain_is_a_mean_over_sets():
    lengths = {("a", 32): 2.0, ("a", 64): 2.2, ("b", 32): 4.0, ("b", 64): 4.0}
    entries = [
        {"set": name, "decoding_length": length, "branch_length": 8, "tokens_per_pass": figure}
        for (name, length), figure in lengths.items()
    ]
    assert "64 draft tokens give +5 % tokens a pass over 32 (+0 to +10 % by set)" in gains(
        entries, 8
    )
    assert gains(entries[::2], 8) == ""


def test_sets_that_the_drafter_was_fitted_to_are_named():
    assert weights({"sets": {"mtrag_un": 150, "clapnq_dev": 500}}).endswith("rows than these.")
    assert "some of mtrag_un, which may" in weights({"sets": {"mtrag_un": 151, "clapnq_dev": 500}})
    asked = {"asked": 50, "may_warm": 300}
    told = weights({"sets": {"mtrag_un": asked, "mtrag_human_answers": asked}})
    assert "but for some of mtrag_human_answers, which" in told


def test_a_run_replays_sets_and_prompts_times_the_same_and_goes_on(tmp_path, capsys, monkeypatch):
    sets, model = write_sets(tmp_path)
    out = tmp_path / "r" / "sweep.json"
    arguments = [*sets, *SMALL, model, "--threads=1", f"--out={out}"]
    lookahead.run_lookahead_sweep(arguments)
    document = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"grid": document["grid"]}
    assert document["kind"] == "lookahead_sweep"
    assert document["sets"] == {"lamps": 2, "gsm8k": 1}
    assert document["run"]["command"].startswith("python -m eval lookahead_sweep")
    assert str(tmp_path) not in json.dumps(document)
    for memory in ("cold", "grown"):
        lamps = entries_of(document, "lamps", memory)
        assert list(lamps) == [(2, 2), (2, 8), (8, 2), (8, 8)]
        assert lamps[8, 8]["tokens_per_pass"] > lamps[8, 2]["tokens_per_pass"] > 2
        assert lamps[2, 8]["passes"] == lamps[2, 2]["passes"]
        assert all(("ratio" in entry) == (memory == "cold") for entry in lamps.values())
    assert entries_of(document, "gsm8k")[8, 8]["tokens_per_pass"] > 1.2
    for name, rows in document["sets"].items():
        for entry in entries_of(document, name).values():
            assert entry["tokens_per_second"] > 0
            assert entry["timed_answers"] == rows
            # Corrections of chances last where answers are timed: passes may differ by a few.
            assert entry["timed_tokens_per_pass"] == pytest.approx(
                entry["tokens_per_pass"], rel=0.2
            )
    assert document["beside"].keys() == document["sets"].keys()
    drawn = sets_of(document)["lamps"]
    assert [point["memory"] for point in drawn] == ["cold"] * 4
    table = str(build.result_tables("any", document))
    assert "| 8 | " in table
    assert "AntGLM-10b" in table
    assert "answers of gsm8k followed, drafts in full length" in table

    def never(*_args, **_kwargs):
        raise AssertionError("measured again")

    monkeypatch.setattr(speed, "run_once", never)
    monkeypatch.setattr("eval.papers.lookahead.replay_rows", never)
    lookahead.run_lookahead_sweep(arguments)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["grid"] == document["grid"]
    with pytest.raises(SystemExit, match="other settings"):
        lookahead.run_lookahead_sweep([*arguments, "--limit=1"])
    with pytest.raises(SystemExit, match="include cold"):
        lookahead.run_lookahead_sweep([*arguments, "--memory=grown"])


def test_a_timed_draft_is_of_full_length_and_wider_than_an_engine_takes_by_itself():
    target = make_target()
    (entry,) = ({"set": "a", "memory": "cold", "decoding_length": 100, "branch_length": 8},)
    answer = (*range(30, 90), EOS)
    rows = [Recorded((0, *range(20, 80), 5), (), (), answer)]
    bench = Bench(target, ResultsLog(None, {}))
    beside = add_times([entry], "a", rows, bench)
    assert beside.keys() == {"ours_plain", "ours_trie"}
    assert beside["ours_plain"]["timed_passes"] == len(answer)
    assert entry["timed_passes"] < len(answer)
    widths = [row["rows_of_each"] for row in bench.results_log.rows if row["decoder"] == "100x8"]
    assert max(widths[0]) > 64


def test_without_data_what_ships_is_replayed_and_what_is_missing_is_said(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    lookahead.run_lookahead_sweep([*SMALL, "--limit=1", "--memory=cold"])
    shown = capsys.readouterr()
    assert "no data folder" in shown.err
    grid = json.loads(shown.out.splitlines()[-1])["grid"]
    assert {entry["set"] for entry in grid} == {"handbook", "demo"}
    assert all(entry["tokens_per_pass"] > 1 for entry in grid)
    with pytest.raises(SystemExit, match=r"holds no .*llama2"):
        lookahead.run_lookahead_sweep([f"--data={tmp_path}", "--limit=1"])


@pytest.mark.parametrize("wrong", ["--decoding-lengths=0", "--branch-lengths=a", "--memory=hot"])
def test_settings_that_make_no_sense_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        lookahead.run_lookahead_sweep([wrong])
    assert "error: argument" in capsys.readouterr().err
