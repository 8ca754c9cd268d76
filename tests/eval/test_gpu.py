"""What is asked of a GPU: tried out on a CPU, with eager versions of what is replayed there."""

import shutil
from functools import partial
from subprocess import TimeoutExpired
from types import SimpleNamespace

import pytest
import torch
from fakes import RandomDrafter
from plain_kernel import PlainKernel
from recorded import ANSWER, SENTENCE, make_job, make_target, write_inputs

from eval import runner, suites
from eval.__main__ import find_run
from eval.decoders import ForcedTokens, Ours, capture_passes, contexts, make_decoder
from eval.experiments import cost
from eval.experiments.cost import copied_answer, measure_step
from eval.experiments.speed import summarize
from eval.measure import count_passes
from eval.report import build
from eval.report.tables import roofline_table, speed_table
from ragaccel.engine import Engine


def static_target(family="llama"):
    target = make_target(family)
    target.ours.enable_graphs(PlainKernel, capture=False)
    assert target.ours.graphs is not None
    return target


@pytest.fixture
def in_process(monkeypatch):
    calls = []

    def run_process(run, arguments, _seconds):
        calls.append(run)
        find_run(run)([*arguments, "--threads=1"])
        return 0

    monkeypatch.setattr(runner, "run_process", run_process)
    monkeypatch.setattr(
        "eval.experiments.memory.in_own_process", lambda function, *given: function(*given)
    )
    return calls


@pytest.mark.usefixtures("uncompiled")
def test_one_command_makes_all_results_once(tmp_path, monkeypatch, in_process, capsys):
    monkeypatch.setenv("RAGACCEL_HOME", str(tmp_path / "home"))
    model, data, task = write_inputs(tmp_path)
    path = tmp_path / "task.jsonl"
    *first, last = path.read_text().splitlines(keepends=True)  # which warms a memory
    path.write_text("".join([*first, last.replace(SENTENCE, "The lamp burns oil.")]))
    out = tmp_path / "r"
    model = model.replace("--model", "--models")
    arguments = [model, data, task, "--device=cpu", "--quick", f"--out={out}"]
    suites.run_gpu(arguments)
    kinds = ["roofline", "speed", "batch", "exactness", "memory"]
    assert in_process == [*kinds[:-1], "speed", kinds[-1]]
    assert sorted(path.name for path in out.glob("*.json")) == sorted(
        ["matrix-tiny-task.json", *(f"cpu-tiny-{kind}.json" for kind in kinds)]
    )
    text = build.all_results(out)
    for title in ("memory's bandwidth", "several at a time", "identical answers", "goes on"):
        assert title in text
    assert "`model.generate`, static cache" in text
    assert "x static cache" in text
    suites.run_gpu(arguments)
    assert len(in_process) == len(kinds) + 1
    assert capsys.readouterr().err.count("there already: skipped") == len(kinds) + 1


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


def test_a_module_runs_in_a_process_of_its_own():
    assert runner.run_process("roofline", ["--no-such-option"], 120.0) == 2
    with pytest.raises(TimeoutExpired):
        runner.run_process("roofline", ["--help"], 0.01)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-sliding", "gemma3"])
def test_replayed_passes_follow_the_recording_too(family):
    target, job = static_target(family), make_job()
    decoders = [make_decoder(name, target) for name in ("ours_tree", "ours_plain")]
    decoders.append(Ours("nonsense", target, partial(RandomDrafter, 1, 97), token_budget=12))
    for decoder in decoders:
        with decoder.teacher_forced(job) as forcing:
            run = decoder.run(job)
        assert run.token_ids == ANSWER
        assert forcing.passes >= run.passes == len(run.rows_of_each)
        assert run.rows == sum(run.rows_of_each) > 0
    assert not hasattr(target.ours.graphs.run, "func")  # nothing is left around it


@pytest.fixture
def uncompiled(monkeypatch):
    """Compiling takes a compiler and its time: one test below is enough."""
    monkeypatch.setattr("eval.decoders.compiling", lambda _device: {"disable_compile": True})


def test_generate_over_a_static_cache_gives_what_generate_gives(uncompiled):
    target = make_target()
    static, plain = (make_decoder(name, target) for name in ("generate_static", "generate"))
    jobs = [make_job(), make_job(ANSWER[:9], prompt_ids=(0, 5, 6, 23), eos_ids=frozenset())]
    static.prepare(jobs)
    for job in (*jobs, *jobs):
        assert static.run(job).token_ids == plain.run(job).token_ids
        with static.teacher_forced(job):
            run = static.run(job)
        assert run.token_ids == job.answer_ids
        assert run.passes == len(job.answer_ids)
        assert run.prefill_seconds > 0 < run.decode_seconds
        assert static.held_bytes(0) > plain.held_bytes(0) == plain.held_bytes(10**12)


def test_a_static_caches_prompt_is_read_when_the_first_choice_is_made(uncompiled, monkeypatch):
    static, ticks = make_decoder("generate_static", make_target()), []
    static.prepare([make_job()])

    def clock():
        ticks.append(0)
        return len(ticks)

    choose = ForcedTokens.__call__

    def late(*given):
        clock()  # each choice takes a second
        return choose(*given)

    monkeypatch.setattr("eval.decoders.perf_counter", clock)
    monkeypatch.setattr(ForcedTokens, "__call__", late)
    with static.teacher_forced(make_job()):
        run = static.run(make_job())
    assert (run.prefill_seconds, run.decode_seconds) == (2, len(ANSWER))
    assert run.first_token_seconds == 2


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_generate_compiles_its_passes_on_a_processor_and_follows_the_recording():
    target, jobs = make_target(), [make_job(), make_job(prompt_ids=(0, 5, 6, 23))]
    torch.compiler.reset()
    static = make_decoder("generate_static", target)
    static.prepare(jobs)
    for job in jobs:
        with static.teacher_forced(job):
            assert static.run(job).token_ids == ANSWER
    frames = torch._dynamo.utils.counters["frames"]
    assert frames["ok"] == frames["total"] > 0


def test_without_a_compiler_the_static_cache_says_what_it_needs(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _name: None)
    with pytest.raises(ValueError, match="install g"):
        make_decoder("generate_static", make_target())


def test_peaks_are_told_where_they_were_measured():
    rows = [
        {
            "decoder": name,
            "example": "a",
            "round": 0,
            "tokens": 4,
            "passes": 4,
            "rows": 4,
            "answer_hash": "h",
            "prefill_seconds": 1.0,
            "decode_seconds": 2.0,
            "draft_tokens": 0,
            "accepted_tokens": 0,
            "stages": {},
            "forcing_seconds": 0.0,
            "peak_bytes": peak,
        }
        for name, peak in (("generate", 3e9), ("generate", 5e9), ("generate_static", 7e9))
    ]
    figures = summarize(rows)
    assert [one["peak_bytes"] for one in figures.values()] == [5e9, 7e9]
    assert figures["generate"]["ratio_static"] == 1.0
    table = speed_table({"decoders": figures})
    assert "peak memory" in table
    assert "| 5.0 GB |" in table


def test_steps_tell_what_the_device_does_not_compute():
    target = static_target().ours
    engine = Engine(target, kept_prefixes=0)
    step = measure_step(engine, target, 90, 24)
    assert step["tokens"] == 24
    assert 0 < step["steps"] < 24
    assert 0 < step["beside_device"] < 1
    assert step["device_seconds"] + step["draft_seconds"] < step["seconds"]
    target.disable_graphs()
    assert target.graphs is None
    assert measure_step(Engine(target), target, 60, 24) is None
    prompt, answer = copied_answer(50, 30, 97)
    assert (len(prompt), len(answer)) == (50, 30)


def test_every_length_that_is_attended_to_is_captured_before():
    target, job = static_target(), make_job()
    with count_passes(target.ours.network, target.ours.graphs) as passes:
        capture_passes(target.ours, [job], compile=False)
    assert set(passes.rows_of_each) >= {1, 2, 4, 8, 16, 24, 32, 48, 64}
    long = make_job(prompt_ids=(5,) * 3000)
    found = contexts([job, long], 64)
    assert found == sorted(found)
    assert len(found) >= 3


def test_a_way_that_fails_stands_as_an_error(tmp_path, monkeypatch):
    model, data, _ = write_inputs(tmp_path)
    options = cost.parse_roofline([model, data, "--contexts=40,4000", "--repeats=1", "--steps=8"])

    def fail(*_args):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(cost, "stock_passes", fail)
    document = cost.measure_roofline(options)
    assert list(document["contexts"]) == ["40"]
    figures = document["contexts"]["40"]
    assert figures["state_bytes"] == 40 * 2 * 2 * 2 * 8 * 4
    assert figures["ways"]["transformers"] == {"error": "OutOfMemoryError"}
    assert figures["ways"]["launched"]["share_of_limit"] > 0
    assert "OutOfMemoryError" in roofline_table(document)
    with pytest.raises(ValueError, match="choose shorter"):
        cost.measure_roofline(SimpleNamespace(**{**vars(options), "contexts": "4000"}))
