"""LLMA's experiments: tables, grid and turns, replayed and timed over a tiny model."""

import json

import pytest
from recorded import ANSWER, PASSAGE, make_target, write_inputs
from tiny_llm import tiny_tokenizer

from eval.__main__ import find_run
from eval.data import DATA_VARIABLE, Recorded, lay_out
from eval.papers import llma
from eval.papers.bench import NO_DRAFTS, TREES, Bench, answered_rows, llma_decoder
from eval.runner import ResultsLog
from ragaccel.decoding import Reference

LAMP = "The lamp burns oil, and a keeper trims the wick at dusk."
BELL = "A bell rings in fog, and boats keep to the west of it."
SAID = "A keeper trims the wick at dusk, and again at midnight."


def row(row_id, answer, question="Who trims the wick?", passages=(LAMP,), history=()):
    return {
        "id": row_id,
        "question": question,
        "passages": [{"title": "", "text": text} for text in passages],
        "answer": answer,
        "history": list(history),
    }


ASKED = ({"role": "user", "text": "Who?"}, {"role": "agent", "text": SAID})
ROWS = (
    row("c<::>1/a", SAID, passages=(LAMP, BELL)),
    row("c<::>1/b", SAID),
    row("c<::>2/a", SAID, "And then?", history=ASKED),
    row("d<::>1/a", BELL, "What rings?", passages=(BELL,)),
    row("e<::>1/a", "", "Nobody knows?"),
)


@pytest.fixture
def arguments(tmp_path):
    """A data folder with ROWS under every name, and the arguments that name it and its words."""
    model, data, _ = write_inputs(tmp_path)
    rag = tmp_path / "data" / "rag"
    rag.mkdir()
    lines = "".join(json.dumps(one) + "\n" for one in ROWS)
    for name in ("turns", llma.CACHED):
        (rag / f"{name}.jsonl").write_text(lines)
    return [data, "--sets=turns"], model


def run(name, arguments, capsys, out):
    find_run(name)([*arguments, f"--out={out}"])
    printed = capsys.readouterr().out
    document = json.loads(out.read_text())
    assert {"kind", "settings", "machine", "run", "published"} <= document.keys()
    assert f"-m eval {name}" in document["run"]["command"]
    assert "arXiv 2304.04487" in printed
    json.loads(printed.splitlines()[-1])
    return document


def test_tables_leave_the_answer_itself_out_and_replay_every_decoder(arguments, tmp_path, capsys):
    some, _ = arguments
    document = run("llma_tables", [*some, "--tokenizer=words"], capsys, tmp_path / "t.json")
    assert document["same_answers"] == {llma.CACHED: 2}
    found = {(p["table"], p["references"], p["decoder"]): p for p in document["grid"]}
    assert len(found) == len(document["grid"]) == 3 + 3 * 3
    assert {p["answers"] for p in document["grid"] if p["table"] == 1} == {4}
    assert {p["answers"] for p in document["grid"] if p["table"] == 2} == {2}
    plain = found[1, "passages", "ours_plain"]
    assert plain["passes"] == plain["tokens"]
    assert plain["triggered"] == 0
    # Of two answers that are the same, each is copied whole from the other after its first token.
    known, unknown = found[2, "answers", "llma"], found[2, "passages", "llma"]
    assert known["passes"] < unknown["passes"] < known["tokens"]
    assert "ratio" not in plain


def test_sets_that_our_trees_were_fitted_to_are_named():
    def told(name, answers, decoder="ours_trie"):
        point = {"set": name, "answers": answers, "decoder": decoder}
        return llma._published({"published": [], "grid": [point]})

    assert "some of mtrag_human_answers among them" in told("mtrag_human_answers", 1)
    assert "some of mtrag_un among them" in told("mtrag_un", 314)
    assert "fitted" not in told("mtrag_un", 150) + told("mtrag_un", 314, "llma")
    assert "fitted" not in told("llma_rag_original", 100)


def test_cached_answers_stand_before_passages_and_the_prompt_holds_what_is_a_reference():
    words = tiny_tokenizer()
    (first, others), *_ = llma.with_others(ROWS[:4], words)
    assert (first["id"], others) == ("c<::>1/a", [SAID])
    own = lay_out(first, words)
    alone = llma.cached(first, others, words, "answers")
    assert [reference.passage_id for reference in alone.apart] == ["cached/0"]
    assert len(alone.prompt_ids) < len(own.prompt_ids)
    assert llma.cached(first, others, words, "passages") == own
    both = llma.cached(first, others, words, "both")
    assert both.prompt_ids == own.prompt_ids
    assert [reference.passage_id for reference in both.apart] == ["cached/0", "0", "1"]
    assert both.references[1:] == own.references


def test_a_grid_has_a_point_for_every_n_and_k(arguments, tmp_path, capsys):
    some, _ = arguments
    some = [*some, "--tokenizer=words", "--n=1,3", "--k=2,20"]
    document = run("llma_sweep", some, capsys, tmp_path / "s.json")
    points = {(p["n"], p["k"]): p for p in document["grid"]}
    assert list(points) == [(1, 2), (1, 20), (3, 2), (3, 20)]
    assert points[1, 20]["triggered"] > points[3, 20]["triggered"] > 0
    assert points[1, 20]["passes"] < points[1, 2]["passes"] < points[1, 2]["tokens"]
    assert points[3, 20]["accepted_per_trigger"] > points[3, 2]["accepted_per_trigger"]
    assert document["plain"]["turns"]["passes"] == points[1, 2]["tokens"]
    assert document["follows"] is None


def test_a_timed_grid_makes_the_passes_of_the_replay_and_goes_on(arguments, tmp_path, capsys):
    some, model = arguments
    some = [*some, model, "--threads=1", "--limit=2", "--n=1,2", "--k=2,20"]
    document = run("llma_sweep", some, capsys, tmp_path / "s.json")
    for point in [*document["grid"], *document["plain"].values()]:
        assert point["timed_passes"] == point["passes"]
        assert point["timed_answers"] == point["answers"] == 2
        assert point["tokens_per_second"] > 0
        assert point["seconds"] > 0
    assert document["plain"]["turns"]["ratio"] == 1.0
    assert document["follows"]["points"]["pairs"] == 4
    assert list(document["follows"]["by_k"]) == ["2", "20"]
    assert document["follows"]["answers"]["pairs"] == 4 * 2
    before = (tmp_path / "s.rows.jsonl").read_text()
    again = run("llma_sweep", some, capsys, tmp_path / "s.json")
    assert again["grid"] == document["grid"]
    assert (tmp_path / "s.rows.jsonl").read_text() == before


def test_speed_that_follows_steps_is_told_by_correlation_and_slope():
    fit = llma.fitted([(1.0, 1.0), (2.0, 1.5), (3.0, 2.0)])
    assert fit == {"pairs": 3, "correlation": 1.0, "slope": 0.5, "intercept": 0.5}
    assert llma.fitted([(1, 3), (2, 2), (3, 1)])["correlation"] == -1.0
    assert llma.fitted([(2.0, 1.0), (2.0, 1.5)]) is None
    assert llma.fitted([(2.0, 1.0)]) is None


def test_points_of_one_width_are_fitted_apart_and_answers_by_their_own_plain_run():
    grid = [
        {"k": k, "timed_tokens_per_pass": x, "ratio": x / k}
        for k, x in ((2, 1.0), (2, 3.0), (4, 1.0), (4, 2.0))
    ]

    def measured_row(example, decoder, passes, seconds):
        kept = {"example": example, "round": 0, "decoder": decoder, "tokens": 12}
        return kept | {"passes": passes, "decode_seconds": seconds}

    rows = [
        measured_row("a", "n1_k2", 6, 2.0),
        measured_row("a", "ours_plain", 12, 4.0),
        measured_row("b", "ours_plain", 12, 9.0),
        measured_row("b", "n1_k2", 4, 3.0),
    ]
    follows = llma.follows(grid, rows)
    assert {k: fit["slope"] for k, fit in follows["by_k"].items()} == {"2": 0.5, "4": 0.25}
    assert follows["points"]["pairs"] == 4
    assert follows["points"]["correlation"] < 1
    assert llma.answer_pairs(rows) == [(2.0, 2.0), (3.0, 3.0)]
    assert follows["answers"]["slope"] == 1.0


def test_what_is_longer_than_the_model_reads_is_left_out_of_timing_and_said(capsys):
    target, passage = make_target(), (Reference(PASSAGE),)  # it reads 256 tokens
    short = Recorded((0, *PASSAGE, 5), passage, passage, ANSWER)
    long = Recorded((0, *PASSAGE * 4), passage, passage, ANSWER)
    points = Bench(target, ResultsLog(None, {})).points(
        "x", [short, long], [NO_DRAFTS, llma_decoder(), TREES]
    )
    assert [point["timed_answers"] for point in points] == [1, 1, 1]
    assert points[0]["tokens"] == 2 * len(ANSWER) == 2 * points[0]["timed_passes"]
    assert 2 * points[1]["timed_passes"] == points[1]["passes"] < points[0]["passes"]
    assert "x: 1 are longer than the model reads" in capsys.readouterr().err


def test_turns_are_distinct_and_earlier_ones_are_copied_from(arguments, tmp_path, capsys):
    some, model = arguments
    some = [*some, model, "--threads=1"]
    document = run("llma_dialogue", some, capsys, tmp_path / "d.json")
    found = {(p["references"], p["decoder"], p["turn"]): p for p in document["grid"]}
    assert len(found) == len(document["grid"]) == 3 * 2 * 3
    assert [found["passages", "llma", turn]["answers"] for turn in ("1", "2", "all")] == [3, 1, 4]
    # The second turn says what the first one said: LLMA copies that only where it is told.
    without, told = (found[kind, "llma", "2"]["passes"] for kind in ("passages", "answers"))
    assert told < without
    assert (
        found["passages", "llma", "1"] | {"references": "answers"} == found["answers", "llma", "1"]
    )
    whole = found["answers", "llma", "all"]
    assert whole["passes"] == sum(found["answers", "llma", t]["passes"] for t in "12")
    assert whole["timed_passes"] == whole["passes"]
    assert "ratio" not in found["answers", "llma", "1"]


def test_earlier_passages_are_those_of_the_same_conversation_that_are_not_shown_again():
    assert llma.earlier_passages(ROWS[2], ROWS) == [BELL]
    assert llma.earlier_passages(ROWS[1], ROWS) == []  # BELL is of the same turn
    later = row("c<::>3/a", SAID, passages=("What nobody knew yet.",), history=(*ASKED, *ASKED))
    assert llma.earlier_passages(ROWS[2], [*ROWS, later]) == [BELL]
    assert llma.kinds_of(ROWS[:2]) == ("passages", "answers")
    assert llma.kinds_of(ROWS) == llma.DIALOGUE_KINDS
    words = tiny_tokenizer()
    turns = list(llma.laid_out_turns(ROWS[:4], words, "earlier passages"))
    assert [turn.number for turn in turns] == [1, 1, 2, 1]
    assert [llma.Turn(n, turns[0].recorded).label for n in (6, 7, 11)] == [
        "6",
        "7 and later",
        "7 and later",
    ]
    ids = [reference.passage_id for reference in turns[2].recorded.apart]
    assert ids == ["0", "earlier/0", "earlier/1"]


def test_without_data_what_ships_is_replayed_and_said(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    document = run("llma_tables", ["--limit=2"], capsys, tmp_path / "t.json")
    sets = {point["table"]: (point["set"], point["answers"]) for point in document["grid"]}
    assert sets == {1: ("handbook", 2), 2: ("handbook_answers", 2)}
    assert document["settings"]["sets"] == "what ships"
    assert document["settings"]["tokenizer"] == "reader"
    llma.run_llma_dialogue(["--limit=18"])
    printed = capsys.readouterr()
    assert "eval/tasks/handbook.jsonl, which ships, in place of mtrag_un" in printed.err
    assert {point["turn"] for point in json.loads(printed.out.splitlines()[-1])} >= {"1", "3"}


def test_answers_that_nobody_else_gave_make_no_second_table(arguments, tmp_path):
    some, _ = arguments
    (tmp_path / "data" / "rag" / "alone.jsonl").write_text(json.dumps(ROWS[3]) + "\n")
    with pytest.raises(SystemExit, match="alone holds no two answers to a question"):
        llma.run_llma_tables([*some, "--tokenizer=words", "--cached=alone"])


def test_a_set_that_is_missing_is_named(arguments):
    some, _ = arguments
    with pytest.raises(SystemExit, match=r"eval llma_sweep: .* holds no rag/poems.jsonl"):
        llma.run_llma_sweep([*some, "--sets=poems", "--tokenizer=words"])


def test_rows_without_an_answer_are_not_replayed(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in reversed(ROWS)))
    assert [one["id"] for one in answered_rows(file, 2)] == ["d<::>1/a", "c<::>2/a"]
