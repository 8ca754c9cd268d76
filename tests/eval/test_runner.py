"""Rows that are never lost, runs that continue, and suites that lose no result."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from subprocess import TimeoutExpired

import pytest
import torch
from recorded import SENTENCE, make_job, make_target, write_inputs
from tiny_models import tiny_model

from eval import runner, suites
from eval.__main__ import find_run
from eval.data import MissingDataError
from eval.decoders import DEFAULT, ForcedTokens
from eval.experiments import gpu_tests, memory, speed
from eval.experiments.batch import run_generate
from eval.models import with_graphs
from eval.runner import ResultsLog, _arguments, in_turns, result, rotated
from ragaccel.models import HuggingFaceModel


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


def test_commands_name_no_places_of_one_machine(tmp_path):
    shown = _arguments([f"--data={tmp_path}/data", "--out", f"{tmp_path}/x.json", "--limit", "3"])
    assert shown == "--data=data --out x.json --limit 3"


ARGUMENTS = ["--max-new-tokens=40", "--threads=1"]


COSTS = "--cost-repeats=1"


def test_a_stopped_run_goes_on_and_a_changed_one_is_refused(tmp_path, capsys, monkeypatch):
    arguments = [*write_inputs(tmp_path), *ARGUMENTS, COSTS, f"--out={tmp_path / 'x.json'}"]
    run_once, calls = speed.run_once, []

    def stopping(*args, **kwargs):
        calls.append(1)
        if len(calls) > 12:  # the warm-up, one example whole, the next begun
            raise KeyboardInterrupt
        return run_once(*args, **kwargs)

    monkeypatch.setattr(speed, "run_once", stopping)
    with pytest.raises(KeyboardInterrupt):
        speed.run_speed(arguments)
    rows = (tmp_path / "x.rows.jsonl").read_text().splitlines()
    assert len(rows) == 1 + 1 + len(DEFAULT)  # settings, costs of passes
    monkeypatch.setattr(speed, "run_once", run_once)
    speed.run_speed(arguments)
    assert (tmp_path / "x.rows.jsonl").read_text().splitlines()[: len(rows)] == rows
    (resumed,) = json.loads((tmp_path / "x.json").read_text())["resumed"]
    assert resumed == {"round": 0, "example": "1"}
    assert "2/2" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"other settings .*repeats"):
        speed.run_speed([*arguments, "--repeats=2"])


def test_examples_of_the_same_id_are_refused(tmp_path):
    arguments = write_inputs(tmp_path, 2)
    task = tmp_path / "task.jsonl"
    task.write_text(task.read_text().replace('"id": "1"', '"id": "0"'))
    with pytest.raises(SystemExit, match="2 examples have the id '0'"):
        speed.run_speed(arguments)


def test_a_decoder_that_leaves_the_recording_is_caught(tmp_path, monkeypatch):
    def forget(*_args, **_kwargs):
        return None

    monkeypatch.setattr("eval.measure._force", forget)
    with pytest.raises(RuntimeError, match="left the recording"):
        speed.run_speed([*write_inputs(tmp_path), *ARGUMENTS, COSTS])


def test_an_answer_that_is_not_the_recorded_one_is_an_error(monkeypatch):
    target, job = make_target(), make_job()
    monkeypatch.setattr(ForcedTokens, "__call__", lambda self, _ids, scores: scores)
    with pytest.raises(ValueError, match="was not followed"):
        run_generate(target, [job])


def test_a_stopped_run_goes_on_with_the_next_process(tmp_path, monkeypatch, capsys):
    figures = {"growth_bytes": 1, "remembered_growth_bytes": 2, "kept_growth_bytes": 3}
    figures |= {"readings": [{"requests": n, "resident_bytes": n} for n in (2, 4)]}
    asked = []

    def in_own_process(_function, _options, name):
        if asked == ["default"]:
            asked.append("stopped")
            raise KeyboardInterrupt
        asked.append(name)
        return figures

    monkeypatch.setattr(memory, "in_own_process", in_own_process)
    out = tmp_path / "m.json"
    arguments = [*write_inputs(tmp_path), "--requests=4", "--every=2", f"--out={out}"]
    with pytest.raises(KeyboardInterrupt):
        memory.run_memory(arguments)
    memory.run_memory(arguments)
    assert asked == ["default", "stopped", "remember=False"]
    processes = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert processes == dict.fromkeys(memory.MEMORY_SETTINGS, figures)
    assert json.loads(out.read_text())["processes"] == processes
    with pytest.raises(SystemExit, match=r"other settings .*every"):
        memory.run_memory([*arguments, "--every=1"])


SUITES = ("quick", "full")


def parsed(step):
    """Have the step's own run read its arguments, as its process would."""
    return find_run(step.run).parse(list(step.arguments))


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("with_data", [True, False])
def test_every_step_is_a_command_that_there_is(suite, with_data, tmp_path, monkeypatch):
    monkeypatch.delenv("RAGACCEL_DATA", raising=False)
    (tmp_path / "data" / "rag").mkdir(parents=True)
    asked = [f"--out={tmp_path}", *[f"--data={tmp_path / 'data'}"] * with_data]
    made = list(getattr(suites, f"{suite}_steps")(find_run(suite).parse(asked)))
    assert len({step.out for step in made}) == len(made) > 5
    for step in made:
        options = parsed(step)
        assert (options.json if step.run == "replay" else options.out) == step.out
        assert step.out.parent == tmp_path
        if step.run != "registry":
            assert options.data == (tmp_path / "data" if with_data else None)


@pytest.mark.parametrize("suite", SUITES)
def test_a_data_folder_that_is_none_is_an_error_before_anything_is_timed(
    suite, tmp_path, monkeypatch
):
    ran = []
    monkeypatch.setattr(runner, "run_process", lambda *given: ran.append(given[0]) or 1)
    with pytest.raises(SystemExit, match="holds no rag"):
        find_run(suite)([f"--out={tmp_path}", f"--data={tmp_path / 'nowhere'}"])
    assert "speed" not in ran


def test_only_what_is_named_is_made(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(runner, "run_process", lambda *_given: made.append(_given) or 1)
    with pytest.raises(SystemExit, match=r"no reader-demo\.json, quality\.json: run"):
        suites.run_full([f"--out={tmp_path}", "--only=reader-demo,quality"])
    assert [run for run, *_ in made] == ["speed", "quality", "report"]


def test_what_was_cut_short_is_made_again(tmp_path, monkeypatch, capsys):
    step = runner.Step("quality", (), tmp_path / "quality.json")
    monkeypatch.setattr(runner, "run_process", lambda *_given: step.out.write_text("{}") and 0)
    step.out.write_text('{"kind": "qua')
    assert runner.done(step)
    assert step.out.read_text() == "{}"
    assert "skipped" not in capsys.readouterr().err
    assert runner.done(step)
    assert "skipped" in capsys.readouterr().err


def test_a_report_is_written_even_where_a_step_failed(tmp_path, monkeypatch):
    reported = []

    def run_process(module, arguments, _seconds):
        if module == "report":
            reported.extend(arguments)
            return 0
        (out,) = [one.partition("=")[2] for one in arguments if one.startswith("--out=")]
        if module == "llma_sweep":
            return 1
        with open(out, "w") as file:
            json.dump({}, file)
        return 0

    monkeypatch.setattr(runner, "run_process", run_process)
    with pytest.raises(SystemExit, match=r"no llma-sweep\.json: run the same command again"):
        suites.run_quick([f"--out={tmp_path}"])
    assert reported == [f"--results={tmp_path}"]


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


def test_where_compiling_fails_the_others_are_run(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "compiling", lambda _device: {})
    (made,) = speed.matrix_steps(
        speed.run_matrix.parse([f"--out={tmp_path}", "--models=random:a.5b", "--tasks=b.c.jsonl"])
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
        options = speed.run_matrix.parse([f"--out={tmp_path}", "--models=x", "--tasks=t", asked])
        with pytest.raises(SystemExit, match=r"2 results would be matrix-x-t\.json"):
            next(speed.matrix_steps(options))


def test_what_fails_loses_no_other(tmp_path, monkeypatch, capsys):
    calls = []

    def run_process(module, arguments, _seconds):
        calls.append(module)
        out = next(a for a in arguments if a.startswith("--out="))
        if module == "roofline":
            raise RuntimeError("the device is lost")
        if module == "speed" and "not-static" not in out:
            return 1
        (tmp_path / out.partition("=")[2]).write_text("{}")
        return 0

    monkeypatch.setattr(runner, "run_process", run_process)
    monkeypatch.delenv("RAGACCEL_DATA", raising=False)
    lost = r"no gpu-x-roofline\.json, gpu-x-speed\.json, matrix-gpu-x-handbook\.json: run"
    with pytest.raises(SystemExit, match=lost):
        suites.run_gpu(["--models=random:x", f"--out={tmp_path}"])
    assert calls == ["roofline", "speed", "speed", "batch", "exactness", "speed", "speed", "memory"]
    printed = capsys.readouterr().err
    assert "the device is lost" in printed
    assert "gpu-x-speed-not-static.json stands in for gpu-x-speed.json" in printed


def test_a_gpu_without_data_measures_what_ships(tmp_path, monkeypatch):
    monkeypatch.delenv("RAGACCEL_DATA", raising=False)
    options = suites.run_gpu.parse(["--models=random:x", f"--out={tmp_path}"])
    for step in suites.gpu_steps(options):
        needed = "--tokenizer=reader" in step.arguments
        assert needed, step.arguments
        assert "--task=llma" not in step.arguments
    empty = suites.run_gpu.parse([f"--data={tmp_path}", f"--out={tmp_path}"])
    with pytest.raises(MissingDataError, match="holds no rag"):
        next(suites.gpu_steps(empty))


def test_the_first_half_hour_on_a_gpu_goes_part_by_part(tmp_path, monkeypatch):
    monkeypatch.delenv("RAGACCEL_DATA", raising=False)
    options = suites.run_gpu_first.parse([f"--out={tmp_path}"])
    steps = list(suites.first_steps(options))
    assert [step.out.stem for step in steps] == [
        "kernels", "cuda",
        *(
            f"{model}-passes-{way}"
            for model in ("llama-3.1-8b", "llama-3.2-1b", "llama-135m")
            for way in ("launched", "graphs", "compiled")
        ),
        *(f"{model}-answers" for model in ("llama-3.1-8b", "llama-3.2-1b", "llama-135m")),
    ]  # fmt: skip
    assert all(step.seconds <= 480 for step in steps)
    for step in steps:  # every run knows its arguments
        parsed = find_run(step.run).parse(list(step.arguments))
        assert parsed.device == "cuda"
    named = {file for files in suites.FIRST_TESTS.values() for file in files}
    recipe = (runner.ROOT / "Makefile").read_text().partition("\ngpu:")[2].partition("\n\n")[0]
    assert named == {word for word in recipe.split() if word.endswith(".py")}


def test_tests_are_counted_and_must_run_on_a_gpu(tmp_path, monkeypatch):
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert 1 + 1 == 3\n"
        "@pytest.mark.skip(reason='no device')\n"
        "def test_waits(): pass\n"
    )
    counted = gpu_tests.run_gpu_tests.measure(Namespace(device="cpu", files=str(file)))
    assert counted["counts"] == {"passed": 1, "skipped": 1, "failed": 1}
    with pytest.raises(ValueError, match=r"test_some\.py: test_fails: assert \(1 \+ 1\) == 3"):
        gpu_tests.run_gpu_tests.measure(Namespace(device="cuda", files=str(file)))
    file.write_text("import pytest\n@pytest.mark.skip\ndef test_waits(): pass\n")
    with pytest.raises(ValueError, match="no test ran"):
        gpu_tests.run_gpu_tests.measure(Namespace(device="cuda", files=str(file)))


def test_a_model_on_a_gpu_whose_passes_are_not_replayed_is_not_measured():
    ours = make_target().ours
    assert with_graphs(ours) is ours
    ours.device = torch.device("cuda")
    assert with_graphs(ours) is ours, "in float64 there are no graphs to expect"
    ours = HuggingFaceModel(tiny_model("llama", torch.float32), self_check=False, pack=False)
    ours.device, ours.graphs_status = torch.device("cuda"), "off: no C compiler"
    with pytest.raises(RuntimeError, match="CUDA graphs are off: no C compiler"):
        with_graphs(ours)
    ours.graphs_status = "on"
    assert with_graphs(ours) is ours


def test_a_module_runs_in_a_process_of_its_own():
    assert runner.run_process("roofline", ["--no-such-option"], 120.0) == 2
    with pytest.raises(TimeoutExpired):
        runner.run_process("roofline", ["--help"], 0.01)


def test_what_is_measured_in_turns_continues_where_it_stopped(tmp_path, capsys):
    path, seen = tmp_path / "x.rows.jsonl", []

    def measure_until(stop):
        results_log = ResultsLog(path, {"task": "a"})

        def measure(name, example):
            seen.append(f"{name}{example}")
            if len(seen) == stop:
                raise KeyboardInterrupt
            return {"value": f"{name}{example}"}

        in_turns(
            results_log, "abc", {"x": 1, "y": 2}, measure, lambda row: row["value"], repeats=2,
            warm_up=lambda name: seen.append(f"warm {name}"),
            forget=lambda name: seen.append(f"forget {name}"),
            notes=lambda: [{"pass_seconds": len(seen)}],
        )  # fmt: skip
        return results_log

    warm, forget = ([f"{what} {name}" for name in "abc"] for what in ("warm", "forget"))
    with pytest.raises(KeyboardInterrupt):
        measure_until(11)  # in the second group
    assert seen == [*warm, *forget, "a1", "b1", "c1", "b2", "c2"]
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 1 + 3
    path.write_text("".join(lines[:-1]))  # a group that lacks a row is measured again
    seen.clear()
    results_log = measure_until(None)
    first = [*warm, *forget, "a1", "b1", "c1", "b2", "c2", "a2"]
    assert seen == [*first, *forget, "b1", "c1", "a1", "c2", "a2", "b2"]
    values = [row["value"] for row in results_log.measurements]
    assert values == ["a1", "b1", "c1", "a2", "b2", "c2"] * 2
    assert "resumed" not in [key for row in results_log.rows for key in row]
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-4]))  # the last group
    seen.clear()
    results_log = measure_until(None)
    assert seen == [*warm, *forget, "c2", "a2", "b2"]
    assert {"resumed": {"round": 1, "example": "y"}} in results_log.rows
    assert result("x", {}, log=results_log)["resumed"] == [{"round": 1, "example": "y"}]
    seen.clear()
    measure_until(None)
    assert seen == []
    assert "1/1 round 2 example y: c c2, a a2, b b2" in capsys.readouterr().err


def test_every_contestant_is_first_and_follows_every_other():
    orders = ["".join(rotated("abc", number)) for number in range(7)]
    assert orders == ["abc", "bca", "cab", "cba", "acb", "bac", "abc"]
