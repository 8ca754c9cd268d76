from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from recorded import write_inputs
from transformers import AutoConfig, AutoModelForCausalLM

from eval.data import Example, make_jobs, read_unified, without_answers_of
from eval.experiments.cost import seconds_of
from eval.experiments.speed import summarize
from eval.measure import bootstrap_interval, paired_ratio
from eval.models import SHAPES, load_tokenizer, read_shape
from eval.report import build
from eval.runner import ResultsLog, _arguments, open_results_log
from eval.tasks import load_task


def test_ratios_are_paired_within_rounds():
    theirs = {("a", 0): 10.0, ("a", 1): 1.0, ("b", 0): 4.0, ("c", 0): 8.0, ("only", 0): 1.0}
    ours = {("a", 0): 20.0, ("a", 1): 2.0, ("b", 0): 12.0, ("c", 0): 8.0}
    ratio = paired_ratio(ours, theirs)
    assert (ratio.value, ratio.worst, ratio.examples) == (2.0, 1.0, 3)
    assert ratio.low <= ratio.value <= ratio.high
    with pytest.raises(ValueError, match="both sides"):
        paired_ratio(ours, {("z", 0): 1.0})


def test_intervals_hold_the_median_and_shrink_with_more_examples():
    few, many = [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0] * 40
    for values in (few, many):
        low, high = bootstrap_interval(values)
        assert low <= 3.0 <= high
        assert bootstrap_interval(values) == (low, high)
    assert bootstrap_interval(many)[1] - bootstrap_interval(many)[0] < 2.0
    low, high = bootstrap_interval(list(range(101)))  # by order statistics from 40 to 60
    assert abs(low - 40) <= 2 >= abs(high - 60)
    assert bootstrap_interval([2.5] * 9) == (2.5, 2.5)


def row(decoder, example, decode, prefill=1.0, tokens=10, passes=10, turn=0):
    return {
        "example": example,
        "round": turn,
        "decoder": decoder,
        "tokens": tokens,
        "answer_hash": "h",
        "prefill_seconds": prefill,
        "decode_seconds": decode,
        "passes": passes,
        "rows": 2 * passes,
        "draft_tokens": passes,
        "accepted_tokens": tokens - passes,
        "stages": {"draft": 0.1, "verify": decode - 0.2, "model": decode - 0.3},
        "forcing_seconds": 0.01,
    }


def test_summaries_tell_decoding_from_the_whole():
    rows = [
        row("ours", "a", 1.0, passes=2),
        row("ours_plain", "a", 2.0),
        row("generate", "a", 4.0),
        row("ours", "b", 1.0, passes=3),
        row("ours_plain", "b", 2.0),
        row("generate", "b", 4.0),
    ]
    lookup = [row("generate_lookup", example, 2.5, prefill=2.0) for example in "ab"]
    over = summarize([*rows, *lookup])["ours"]
    assert (over["ratio_lookup"], over["end_to_end"]["ratio_lookup"]) == (2.5, 2.25)
    ours = summarize(rows)["ours"]
    assert "ratio_lookup" not in ours
    assert (ours["tokens_per_second"], ours["ratio"], ours["ratio_generate"]) == (10.0, 2.0, 4.0)
    assert ours["end_to_end"]["tokens_per_second"] == 5.0
    assert ours["end_to_end"]["ratio"] == 1.5
    assert ours["acceptance_length"] == 4.0
    assert ours["seconds"]["other"] == pytest.approx(0.2)
    assert ours["identical_to_generate"] == 1.0


def test_answers_are_compared_within_their_round():
    told = {"ours": "ab", "ours_plain": "aa", "generate": "ab"}
    rows = [
        row(name, "a", 1.0, turn=turn) | {"answer_hash": answer}
        for name, answers in told.items()
        for turn, answer in enumerate(answers)
    ]
    found = {name: one["identical_to_generate"] for name, one in summarize(rows).items()}
    assert found == {"ours": 1.0, "ours_plain": 0.5, "generate": 1.0}


def test_efficiency_is_the_share_of_what_passes_promise():
    rows = [
        row("ours", "a", 1.0, passes=2) | {"rows_of_each": [1, 4]},
        row("ours_plain", "a", 3.0) | {"rows_of_each": [1] * 10},
        row("generate", "a", 3.0) | {"stages": {"model": 3.0}},
    ]
    costs = {1: 0.5, 2: 0.75, 8: 2.25}  # so that 4 rows take 1.25
    assert seconds_of([1, 4, 8, 99], costs) == pytest.approx([0.5, 1.25, 2.25, 2.25])
    figures = summarize(rows, costs)
    assert figures["ours"]["efficiency"] == pytest.approx(3.0 / (5.0 * (1.0 + 0.4) / 2))
    assert figures["ours"]["efficiency_harmonic"] == pytest.approx(3.0 / (5.0 * 0.5 / 0.875))
    assert "efficiency" not in figures["ours_plain"] | figures["generate"]
    assert "efficiency" not in summarize(rows)["ours"]


def test_a_results_log_goes_on_where_it_was_cut(tmp_path):
    path = tmp_path / "rows.jsonl"
    results_log = ResultsLog(path, {"task": "a"})
    results_log.add({"example": "1"})
    results_log.add({"example": "2"})
    path.write_text(path.read_text() + '{"example": "3", "stages": {}')  # killed while writing
    assert len(ResultsLog(path, {"task": "a"}).rows) == 2
    path.write_text(path.read_text()[:-8])
    again = ResultsLog(path, {"task": "a"})
    assert again.rows == [{"example": "1"}]
    again.add({"example": "2"}, {"example": "3"})
    assert ResultsLog(path, {"task": "a"}).rows == [{"example": str(i)} for i in (1, 2, 3)]
    with pytest.raises(ValueError, match=r"\(task\)"):
        ResultsLog(path, {"task": "b"})
    with pytest.raises(ValueError, match=r"\(tokenizer, task\)"):
        ResultsLog(path, {"tokenizer": "a"})
    assert ResultsLog(None, {}).rows == []


def test_a_results_log_is_never_without_its_rows_and_says_what_is_damaged(tmp_path, monkeypatch):
    path = tmp_path / "x.rows.jsonl"
    ResultsLog(path, {"task": "a"}).add({"example": "1"}, {"example": "2"})
    before = path.read_text()

    def full(file, _text, **_how):
        file.open("w").close()
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="no space"):
            ResultsLog(path, {"task": "a"})
    assert path.read_text() == before
    path.write_text(before.replace('{"example": "1"}', '{"examp'))
    with pytest.raises(ValueError, match=r"x\.rows\.jsonl is damaged .*delete it"):
        ResultsLog(path, {"task": "a"})


def test_rows_lie_beside_a_result_whatever_it_is_called(tmp_path):
    for name in ("qwen2.5-a", "qwen2.5-b.json"):
        open_results_log(tmp_path / name, {"name": name})
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"qwen2.5-a.rows.jsonl", "qwen2.5-b.rows.jsonl"}


def test_own_files_are_tasks_whatever_separators_they_hold(tmp_path):
    path = tmp_path / "own.jsonl"
    passages = [{"title": "T", "text": "One\u2029two."}, {"text": "  "}]
    history = [{"role": "user", "text": "Hi"}, {"role": "agent", "text": "Hello"}]
    rows = [
        {"id": i, "question": " Why? ", "passages": passages, "history": history} for i in (1, 2)
    ]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(text + "\n", encoding="utf-8")
    (example,) = load_task(str(path), 1)
    assert (example.example_id, example.question, example.answer) == ("1", "Why?", "")
    assert [passage.text for passage in example.passages] == ["One\u2029two."]
    assert [turn["role"] for turn in example.history] == ["user", "assistant"]
    assert len(read_unified(path)) == 2


def test_rows_that_tell_a_measured_answer_are_left_out():
    history = ({"role": "assistant", "content": "As I said: At dusk. Then it burns."},)
    measured = [Example("1", "When?", answer="At dusk."), Example("2", "Who?")]
    rows = [
        Example("2", "Who?", answer="Nobody."),
        Example("3", "When is it?", answer="At dusk."),
        Example("4", "And then?", answer="It burns.", history=history),
        Example("5", prompt="Q: When? A: At dusk. Q: Why?", answer="It is dark."),
        Example("6", "Why?", answer="It is dark."),
    ]
    assert [row.example_id for row in without_answers_of(rows, measured)] == ["6"]


def test_the_task_that_ships_needs_no_data(monkeypatch):
    monkeypatch.delenv("RAGACCEL_DATA", raising=False)
    examples = load_task("demo")
    assert len(examples) == 24
    assert sum(bool(example.answer) for example in examples) >= 20
    assert all(example.passages for example in examples)


def test_a_recorded_answer_is_tokenized_as_it_would_follow_the_prompt(tmp_path):
    write_inputs(tmp_path)
    tokenizer = load_tokenizer("words", tmp_path / "data")
    examples = read_unified(tmp_path / "task.jsonl", 1)
    (job,) = make_jobs(examples, tokenizer, max_new_tokens=100)
    assert job.answer_ids[-1] in tokenizer.eos_ids
    assert tokenizer.decode(job.answer_ids).strip() == examples[0].answer
    assert tokenizer.decode(job.apart[0].token_ids) == examples[0].passages[0].text
    (short,) = make_jobs(examples, tokenizer, max_new_tokens=5)
    assert short.answer_ids == job.answer_ids[:5]


BILLIONS = {
    "llama-135m": 0.1345,
    "llama-2-7b": 6.738,
    "llama-2-13b": 13.016,
    "llama-3.1-8b": 8.030,
    "mistral-7b": 7.248,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-1.5b": 1.544,
    "qwen2.5-7b": 7.616,
    "qwen3-8b": 8.191,
}
"""Parameters; their makers tell the same, rounded."""


def test_every_shape_is_checked():
    assert {path.stem for path in SHAPES.glob("*.json")} == set(BILLIONS)


@pytest.mark.parametrize("path", sorted(SHAPES.glob("*.json")), ids=lambda path: path.stem)
def test_shapes_are_true_to_their_names(path):
    config = AutoConfig.for_model(**read_shape(path.stem)["config"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    billions = sum(weight.numel() for weight in model.parameters()) / 1e9
    assert billions == pytest.approx(BILLIONS[path.stem], rel=0.002)


def test_commands_name_no_places_of_one_machine(tmp_path):
    shown = _arguments([f"--data={tmp_path}/data", "--out", f"{tmp_path}/x.json", "--limit", "3"])
    assert shown == "--data=data --out x.json --limit 3"


def test_reports_hold_every_result(tmp_path):
    machine = {"gpu": None, "processor": "P", "threads": 2, "torch": "2", "transformers": "5"}
    shared = {"machine": machine, "run": {"commit": "c", "date": "d", "command": "python -m x"}}
    rows = [row("ours", "a", 1.0, passes=2), row("ours_plain", "a", 2.0), row("generate", "a", 4.0)]
    settings = {"model": "m", "task": "t", "forced": True, "examples": 1, "dtype": "float32"}
    speed = {"kind": "speed", "settings": settings, "decoders": summarize(rows), **shared}
    difference = {"gap": 3e-6}
    counted = {"answers": 9, "identical": 8, "differences": [difference]}
    compared = {"task": "t", "dtype": "float32", "found": "ours", "acceptance_length": 2, **counted}
    same = {"kind": "lossless", "settings": settings, "comparisons": [compared], **shared}
    (tmp_path / "a.json").write_text(json.dumps(speed))
    (tmp_path / "b.json").write_text(json.dumps(same))
    timed = {"first_seconds": 9.6, "embed_share": 0.97, "unchanged_seconds": 0.5}
    timed |= {"edit_seconds": 2.0, "peak_mb": 512.0, "query_ms_median": 11.0}
    figures = {"folder": "manuals", "files": 3, "passages": 4000, **timed}
    (tmp_path / "c.json").write_text(json.dumps({"kind": "indexing", "figures": figures, **shared}))
    text = build.all_results(tmp_path)
    assert "### indexing: manuals" in text
    assert "| 3 | 4,000 | 10 s | 97 % | 512 MB | 0.5 s | 2.0 s | 11 ms |" in text
    assert "| ours, copying | 10.0 | 2.00 (2.00 to 2.00) | 4.00" in text
    assert "| 5.00 |  | 5.0 | 1.50" in text
    assert "| t | float32 | ours, copying | 9 | 8 | 2.00 | 3e-06 |" in text
    assert text.count("`python -m x`") == 3
