"""What drafting costs where nothing is copied."""

import json

import pytest
from recorded import SENTENCE, make_target, write_inputs

from eval.data import Example, make_jobs
from eval.experiments import speed
from eval.experiments.speed import modelled_seconds, summarize_set
from eval.report import build
from eval.tasks import load_task

SOLUTION = "    x\n" * 30


def write_prompts(folder, num=3):
    prompts = folder / "data" / "prompts"
    prompts.mkdir(parents=True)
    problems = [{"question": f"How many lamps are {i}?", "answer": SENTENCE} for i in range(num)]
    (prompts / "gsm8k_test.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems))
    tasks = [
        {
            "task_id": f"HumanEval/{i}",
            "prompt": f"def f{i}():\n",
            "canonical_solution": SOLUTION,
        }
        for i in range(2 * num + 1)
    ]
    (prompts / "humaneval.jsonl").write_text("".join(json.dumps(t) + "\n" for t in tasks))


def test_continuations_keep_their_prompts_as_they_are(tmp_path):
    write_prompts(tmp_path)
    tokenizer = make_target().tokenizer
    functions = load_task("humaneval", None, tmp_path / "data")
    assert [example.example_id for example in functions] == [f"HumanEval/{i}" for i in (0, 3)]
    assert functions[0].prompt == "def f0():\n\n\ndef f1():\n\n\ndef f2():\n"
    assert len(load_task("humaneval", 1, tmp_path / "data")) == 1
    problems = load_task("gsm8k", 2, tmp_path / "data")
    for example in (*functions, *problems):
        (job,) = make_jobs([example], tokenizer, max_new_tokens=1000)
        assert tokenizer.decode(job.prompt_ids) == example.prompt
        assert tokenizer.decode(job.answer_ids).strip() == example.answer.strip()
        assert job.references == job.apart == ()


def test_random_tokens_are_no_special_ones_and_the_same_every_time():
    tokenizer = make_target().tokenizer
    jobs = make_jobs(load_task("random_tokens", 3), tokenizer, max_new_tokens=1000)
    again = make_jobs(load_task("random_tokens", 3), tokenizer, max_new_tokens=1000)
    assert jobs == again
    assert len({job.prompt_ids for job in jobs} | {job.answer_ids for job in jobs}) == 6
    for job in jobs:
        ids = {*job.prompt_ids, *job.answer_ids}
        assert not ids & {*tokenizer.eos_ids, *tokenizer.tokenizer.all_special_ids}
        assert max(ids) < len(tokenizer)
        assert len(job.answer_ids) >= 100


def test_modelled_time_goes_by_rows_and_adds_drafting():
    costs = {1: 1.0, 2: 1.2, 4: 2.0, 8: 4.0}
    row = {"rows_of_each": [1, 3, 8], "stages": {"draft": 0.5}}
    assert modelled_seconds(row, costs) == pytest.approx(1.0 + 1.6 + 4.0 + 0.5)


def test_sets_are_summed_up_by_pairs():
    def row(decoder, example, seconds, rows):
        stages = {"draft": 0.1, "verify": seconds}
        return {
            "example": example, "decoder": decoder, "tokens": 4, "decode_seconds": seconds,
            "passes": len(rows), "rows": sum(rows), "rows_of_each": rows, "stages": stages,
        }  # fmt: skip

    rows = [
        row("ours_tree", "a", 4.0, [2, 1, 1]), row("ours_plain", "a", 4.0, [1] * 4),
        row("ours_plain", "b", 4.0, [1] * 4), row("ours_tree", "b", 5.0, [1] * 4),
        row("ours_tree", "alone", 9.0, [1] * 4),
    ]  # fmt: skip
    figures = summarize_set(rows, "ours_tree", {1: 1.0, 2: 1.5})
    assert figures["requests"] == 2
    assert figures["ratio"] == pytest.approx(0.9)
    assert figures["ratio_worst"] == 0.8
    assert figures["acceptance_length"] == pytest.approx(8 / 7)
    assert figures["rows_per_pass"] == pytest.approx(8 / 7)
    assert figures["modelled"] == pytest.approx((3.5 + 4 + 0.2) / 8)
    assert figures["modelled_worst"] == pytest.approx(4.1 / 4)


def test_a_run_is_reported_and_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    inputs = [one for one in write_inputs(tmp_path) if not one.startswith("--task")]
    write_prompts(tmp_path)
    arguments = [
        *inputs, "--limit=2", "--min-answer=10", "--max-new-tokens=24", "--cost-repeats=1",
        "--threads=1", f"--out={tmp_path / 'r' / 'n.json'}",
    ]  # fmt: skip
    run_once, calls = speed.run_once, []

    def stopping(*args, **kwargs):
        calls.append(1)
        if len(calls) > 5:  # the warm-up, one request whole, the next begun
            raise KeyboardInterrupt
        return run_once(*args, **kwargs)

    monkeypatch.setattr(speed, "run_once", stopping)
    with pytest.raises(KeyboardInterrupt):
        speed.run_never_slower(arguments)
    rows = (tmp_path / "r" / "n.rows.jsonl").read_text().splitlines()
    assert len(rows) == 1 + 1 + 2  # settings, costs, two decoders
    monkeypatch.setattr(speed, "run_once", run_once)
    speed.run_never_slower(arguments)
    assert (tmp_path / "r" / "n.rows.jsonl").read_text().splitlines()[: len(rows)] == rows
    sets = json.loads(capsys.readouterr().out.splitlines()[-1])
    document = json.loads((tmp_path / "r" / "n.json").read_text())
    assert document["sets"] == sets
    assert list(sets) == list(speed.NEVER_SLOWER_TASKS)
    for figures in sets.values():
        assert figures["requests"] == 2
        assert figures["ratio"] > 0
        assert figures["rows_per_pass"] >= 1.0
        assert figures["modelled"] > 0
    assert str(tmp_path) not in json.dumps(document)
    assert "| random_tokens | 2 |" in build.all_results(tmp_path / "r")
    with pytest.raises(SystemExit, match=r"other settings .*decoder"):
        speed.run_never_slower([*arguments, "--decoder=ours"])
    with pytest.raises(SystemExit, match="no answers of 999 tokens"):
        speed.run_never_slower([*arguments, "--min-answer=999"])


def test_each_request_starts_cold(monkeypatch):
    made = []
    make = speed.make_decoder
    monkeypatch.setattr(speed, "make_decoder", lambda *args: made.append(make(*args)) or made[-1])
    target = make_target()

    def draw(_token_ids):
        return tuple(range(20, 40)), tuple(range(40, 50))

    examples = [Example("1", draw=draw), Example("2", draw=draw)]
    jobs = make_jobs(examples, target.tokenizer, max_new_tokens=10)
    results_log = speed.ResultsLog(None, {})
    costs = {1: 0.002, 16: 0.003}
    speed.run_set(target, "t", jobs, results_log, decoder="ours_tree", costs=costs)
    known = [
        one._engine.latency_profile.by_profile() for one in made[2:] if one.name == "ours_tree"
    ]
    assert all(set(ways["greedy"]) >= {1, 16} for ways in known)
    assert len({id(one._engine) for one in made}) == len(made) == 2 + 4
    order = [(row["example"], row["decoder"]) for row in results_log.rows]
    assert order == [
        ("1", "ours_tree"), ("1", "ours_plain"), ("2", "ours_plain"), ("2", "ours_tree"),
    ]  # fmt: skip
    assert all(sum(row["rows_of_each"]) == row["rows"] for row in results_log.rows)
