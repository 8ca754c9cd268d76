from __future__ import annotations

import json
from itertools import count

import pytest
from recorded import ANSWER, SENTENCE, make_job, make_target, write_inputs

from eval import runner
from eval.__main__ import find_run
from eval.decoders import make_decoder
from eval.experiments import speed


@pytest.fixture
def in_process(monkeypatch):
    calls = []

    def run_process(run, arguments, _seconds):
        calls.append(arguments)
        find_run(run)([*arguments, "--cost-repeats=1"])
        return 0

    monkeypatch.setattr(runner, "run_process", run_process)
    monkeypatch.setattr("eval.decoders.compiling", lambda _device: {"disable_compile": True})
    return calls


def test_every_model_and_set_has_a_file_of_all_decoders(tmp_path, in_process):
    model, data, task = write_inputs(tmp_path, 5)
    asked = [model.replace("--model", "--models"), data, task.replace("--task", "--tasks")]
    out = tmp_path / "r"
    path = tmp_path / "task.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[2:]:  # a row that tells what is measured warms no memory
        row["answer"] = "The lamp burns oil."
    rows[4]["history"] = [{"role": "agent", "text": f"As I said: {SENTENCE}"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked += [f"--out={out}", "--limit=2", "--threads=1", "--max-new-tokens=12"]
    speed.run_matrix(asked)
    (path,) = out.glob("*.json")
    document = json.loads(path.read_text())
    assert path.name == "matrix-tiny-task.json"
    assert list(document["decoders"]) == list(speed.MATRIX_DECODERS)
    assert document["settings"]["forced"] is True
    assert document["warmed_by"] == 2
    for figures in document["decoders"].values():
        assert figures["identical_to_generate"] == 1.0
        assert sum(figures["acceptance_histogram"].values()) == figures["passes"]
        assert figures["first_token_seconds_median"] > 0
    assert "remember" in document["decoders"]["ours_full"]["seconds"]
    speed.run_matrix(asked)
    assert len(in_process) == 1


def test_without_data_what_ships_is_run_and_said(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("RAGACCEL_DATA", raising=False)
    monkeypatch.setattr("shutil.which", lambda _name: None)
    made = list(speed.matrix_steps(speed.parse_matrix([f"--out={tmp_path}"])))
    assert {step.run for step in made} == {"speed"}
    assert len(made) == 2
    for step in made:
        assert "--task=handbook" in step.arguments
        assert "--tokenizer=reader" in step.arguments
        (names,) = [one for one in step.arguments if one.startswith("--decoders=")]
        assert "generate_static" not in names
    told = capsys.readouterr().err
    assert "--data" in told
    assert "install g++" in told


def test_where_compiling_fails_the_others_are_run(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "compiling", lambda _device: {})
    (made,) = speed.matrix_steps(
        speed.parse_matrix([f"--out={tmp_path}", "--models=random:a.5b", "--tasks=b.c.jsonl"])
    )
    assert made.out.name == "matrix-a.5b-b.c.json"
    assert made.fallback.out.name == "matrix-a.5b-b.c-not-static.json"
    changed = [
        (one, other)
        for one, other in zip(made.arguments, made.fallback.arguments, strict=True)
        if one != other
    ]
    (outs, names) = changed
    assert outs == (f"--out={made.out}", f"--out={made.fallback.out}")
    assert names[0].replace("generate_static,", "") == names[1]
    assert made.fallback.fallback is None


def test_two_results_of_one_name_are_refused(tmp_path):
    for asked in ("--models=a/x,b/x", "--tasks=a/t.jsonl,b/t.jsonl"):
        options = speed.parse_matrix([f"--out={tmp_path}", "--models=x", "--tasks=t", asked])
        with pytest.raises(SystemExit, match=r"2 results would be matrix-x-t\.json"):
            next(speed.matrix_steps(options))


def test_shapes_have_as_many_rows_as_they_are_due(tmp_path):
    (tmp_path / "rag").mkdir()
    made = list(speed.matrix_steps(speed.parse_matrix([f"--out={tmp_path}", f"--data={tmp_path}"])))
    limits = {
        step.arguments[0]: one
        for step in made
        for one in step.arguments
        if one.startswith("--limit=")
    }
    assert limits["--model=random:llama-135m"] == "--limit=20"
    assert limits["--model=random:qwen2.5-0.5b"] == "--limit=8"
    assert len(made) == 2 * len(speed.MATRIX_TASKS.split(","))


def test_a_warm_memory_knows_other_rows_and_takes_fewer_passes():
    target, job = make_target(), make_job(references=(), apart=(), prompt_ids=(0, 5, 6, 23))
    passes = {}
    for name in ("ours_tree", "ours_full", "ours_warm"):
        decoder = make_decoder(name, target, [job])
        with decoder.teacher_forced(job):
            first = decoder.run(job)
        assert first.token_ids == ANSWER
        passes[name] = first.passes
    assert passes["ours_warm"] < passes["ours_full"] == passes["ours_tree"]


def test_every_second_between_the_request_and_what_is_remembered_is_charged(monkeypatch):
    target, job = make_target(), make_job()
    runs = {}
    for name in ("ours_plain", "ours_full"):
        decoder, clock = make_decoder(name, target), count()
        monkeypatch.setattr("eval.decoders.perf_counter", lambda clock=clock: next(clock))
        opened = decoder._engine.open

        def late(request, opened=opened, clock=clock):
            next(clock)
            return opened(request)

        decoder._engine.open = late
        with decoder.teacher_forced(job):
            runs[name] = decoder.run(job)
    # Started, opened, prompt read, first token, last token; ended, remembered.
    assert runs["ours_plain"].prefill_seconds == runs["ours_full"].prefill_seconds == 2
    assert runs["ours_plain"].first_token_seconds == runs["ours_full"].first_token_seconds == 3
    assert (runs["ours_plain"].decode_seconds, runs["ours_full"].decode_seconds) == (2, 3)
    assert runs["ours_full"].stages["remember"] == 1


def test_generate_is_charged_from_its_call_to_its_end(monkeypatch):
    target, job, clock = make_target(), make_job(), count()
    for module in ("decoders", "measure"):
        monkeypatch.setattr(f"eval.{module}.perf_counter", lambda: next(clock))
    decoder = make_decoder("generate", target)
    with decoder.teacher_forced(job):
        run = decoder.run(job)
    ticks = 4 * len(ANSWER)  # before and after each pass, and before and after forcing in it
    assert (run.prefill_seconds, run.decode_seconds) == (4, ticks - 4 + 1)
    assert run.first_token_seconds == 4


def test_a_memory_lasts_from_request_to_request_until_it_is_to_forget():
    target, job = make_target(), make_job(references=(), apart=(), prompt_ids=(0, 5, 6, 23))
    decoder = make_decoder("ours_full", target)
    with decoder.teacher_forced(job):
        first, second = decoder.run(job), decoder.run(job)
        decoder.forget()
        again = decoder.run(job)
    assert second.passes < first.passes == again.passes
    assert second.stages["remember"] > 0


def test_nothing_to_be_warm_with_is_an_error(tmp_path):
    asked = [*write_inputs(tmp_path, 2), "--decoders=ours_warm", "--threads=1"]
    for few in ([], ["--limit=2"]):
        with pytest.raises(SystemExit, match="rows that are not measured"):
            speed.run_speed([*asked, *few])
