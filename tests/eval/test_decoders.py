"""Every decoder follows a recording exactly, and is charged for its time."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from fakes import RandomDrafter
from recorded import ANSWER, make_job, make_target
from static_passes import PlainKernel
from tiny_models import make_tiny_model
from torch.nn.modules.module import register_module_forward_pre_hook

from eval.decoders import DEFAULT, ForcedTokens, Ours, capture_passes, make_decoder
from eval.experiments import cost, generation
from eval.experiments.batch import BATCH_DECODERS, run as run_group
from eval.experiments.cost import copied_answer, measure_step
from eval.measure import FORCED_LOGIT, count_passes, forget_peak, teacher_forced
from eval.models import Target
from ragaccel.decoding import DraftTree
from ragaccel.engine import Engine, KVCache, causal_rows, tree_rows
from ragaccel.models import HuggingFaceModel

FAMILIES = ["llama", "mistral", "qwen2-sliding", "gemma3", "gpt2", "opt"]


MODES = ["ours_exact", "ours_exact_plain", "ours_tree", "ours_full"]


@pytest.mark.parametrize("name", [*DEFAULT, *MODES])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_decoder_gives_exactly_the_recording(family, name):
    target, job = make_target(family), make_job()
    decoder = make_decoder(name, target)
    with decoder.teacher_forced(job) as forcing:
        run = decoder.run(job)
    assert run.token_ids == ANSWER
    assert forcing.passes >= run.passes


@pytest.mark.parametrize("name", ["ours_plain", "ours_tree", "ours_full"])
def test_fused_passes_give_exactly_the_recording(name):
    model = make_tiny_model("llama", torch.float32, hidden_size=256, intermediate_size=512)
    target = Target(model, HuggingFaceModel(model, pack=True), None, True)
    assert target.ours.is_fused
    job, decoder = make_job(), make_decoder(name, target)
    with decoder.teacher_forced(job) as forcing:
        run = decoder.run(job)
    assert run.token_ids == ANSWER
    assert forcing.passes >= run.passes
    assert run.rows >= len(ANSWER)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_trees_of_nonsense_give_the_recording_too(family, seed):
    target, job = make_target(family), make_job()
    decoder = Ours("nonsense", target, lambda: RandomDrafter(seed, 97), token_budget=12)
    with decoder.teacher_forced(job):
        assert decoder.run(job).token_ids == ANSWER


def test_passes_and_rows_are_those_of_the_decoder():
    target, job = make_target(), make_job()
    runs = {}
    for name in DEFAULT:
        decoder = make_decoder(name, target)
        with decoder.teacher_forced(job):
            runs[name] = decoder.run(job)
    for plain in ("ours_plain", "generate"):
        assert (runs[plain].passes, runs[plain].rows) == (len(ANSWER), len(ANSWER))
        assert runs[plain].tokens_of_each == (1,) * len(ANSWER)
    for run in runs.values():
        assert sum(run.tokens_of_each) == len(ANSWER)
        assert len(run.tokens_of_each) == run.passes
        assert all(
            0 < n <= rows for n, rows in zip(run.tokens_of_each, run.rows_of_each, strict=True)
        )
        assert 0 < run.first_token_seconds <= run.prefill_seconds + run.decode_seconds
    for copying in ("ours_paper", "generate_lookup"):
        run = runs[copying]
        assert run.passes < len(ANSWER)
        assert run.passes + run.accepted_tokens == len(ANSWER)
        assert run.rows == run.passes + run.draft_tokens


def test_rows_off_the_recording_keep_the_models_own_logits():
    target, job = make_target(), make_job()
    start = job.prompt_ids[:-1]
    root, first, second = job.prompt_ids[-1], *ANSWER[:2]
    # Nodes: the root, its recorded child, a wrong one; a recorded token below each.
    tree = DraftTree((root, first, 90, second, second), (-1, 0, 0, 1, 2), (1.0,) * 5, ((),) * 5)
    forced, own = (_verify(target, job, start, tree, follow) for follow in (True, False))
    wanted = [ANSWER[0], ANSWER[1], None, ANSWER[2], None]
    for row, token in enumerate(wanted):
        changed = (forced[row] != own[row]).nonzero().flatten().tolist()
        assert changed == ([] if token is None else [token])
        if token is not None:
            assert forced[row, token] == FORCED_LOGIT


@torch.inference_mode()
def _verify(target, job, start, tree, follow):
    cache, device = KVCache(), target.model.device

    def verify():
        target.ours.forward(causal_rows(start, cache, device), 1)
        cache.keep(range(len(start)))
        return target.ours.forward(tree_rows(tree, cache, device), len(tree))

    if not follow:
        return verify()
    with teacher_forced(target.ours.network, job.prompt_ids, job.answer_ids):
        return verify()


def test_past_the_recording_the_model_chooses_for_itself():
    target, job = make_target(), make_job(ANSWER[:6], max_new_tokens=9, eos_ids=frozenset())
    with teacher_forced(target.model, job.prompt_ids, job.answer_ids):
        run = make_decoder("generate", target).run(job)
    ids = torch.tensor([[*job.prompt_ids, *run.token_ids[:6]]])
    with torch.no_grad():
        choice = int(target.model(ids).logits[0, -1].argmax())
    assert run.token_ids[:6] == ANSWER[:6]
    assert run.token_ids[6] == choice


def test_what_cannot_be_followed_is_refused():
    model = make_target().model
    with pytest.raises(ValueError, match="at least one token"), teacher_forced(model, [1], []):
        pass
    with pytest.raises(ValueError, match="tokenizer that fits"), teacher_forced(model, [1], [97]):
        pass
    with (
        teacher_forced(model, [1, 2], [3]),
        torch.no_grad(),
        pytest.raises(ValueError, match="batch"),
    ):
        model(torch.tensor([[1, 2], [1, 2]]))


def test_each_decoder_runs_its_own_network():
    target, job = make_target(), make_job()
    stock, copy = target.model, target.ours.network
    assert stock is not copy
    ran = []
    handle = register_module_forward_pre_hook(lambda module, _args: ran.append(module))
    try:
        for name in DEFAULT:
            ran.clear()
            make_decoder(name, target).run(job)
            used, unused = (copy, stock) if name.startswith("ours") else (stock, copy)
            assert used in ran
            assert unused not in ran
    finally:
        handle.remove()


def test_a_prompt_is_read_again_each_time():
    target, job = make_target(), make_job(eos_ids=frozenset())
    decoder = make_decoder("ours_plain", target)
    for _ in range(3):
        decoder.run(job)
    assert decoder._engine.prefilled_rows == 3 * (len(job.prompt_ids) - 1)


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


def static_target(family="llama"):
    target = make_target(family)
    target.ours.enable_graphs(PlainKernel, capture=False)
    assert target.ours.graphs is not None
    return target


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


def test_every_way_of_a_pass_on_a_gpu_is_measured(monkeypatch):
    """Captured ones by the operations of a capture, one by one."""

    def make_ours(model, way):
        ours = HuggingFaceModel(model, self_check=False)
        if way != "launched":
            ours.enable_graphs(PlainKernel, capture=False)
            assert ours.graphs is not None
        if way == "compiled":
            ours.compile()
        return ours

    monkeypatch.setattr(torch, "compile", lambda network, dynamic: partial(network))
    monkeypatch.setattr(cost, "make_ours", make_ours)
    options = cost.run_roofline.parse(
        ["--rows=1,4", "--ways=launched,graphs,compiled,transformers", "--repeats=1", "--steps=8"]
    )
    options.rows = [1, 4]
    found = cost.measure_context(make_target(), 32, options, 1e9, 1000)["ways"]
    assert [len(one["milliseconds"]) for one in found.values()] == [2] * 4
    assert all(one["share_of_limit"] > 0 for one in found.values())
    steps = {way: one.get("step") for way, one in found.items()}
    assert steps["launched"] is steps["transformers"] is None
    assert steps["graphs"]["tokens"] == steps["compiled"]["tokens"] == 8


def test_every_length_that_is_attended_to_is_captured_before():
    target, job = static_target(), make_job()
    with count_passes(target.ours.network, target.ours.graphs) as passes:
        capture_passes(target.ours, [job], compile=False)
    assert set(passes.rows_of_each) >= {1, 2, 4, 8, 16, 24, 32, 48, 64}
    captured = target.ours.num_captures
    make_decoder("ours_tree", target).run(job)
    assert target.ours.num_captures == captured


SHORT = (*ANSWER[:9], ANSWER[-1])


def test_tokens_and_passes_are_those_that_were_timed(monkeypatch):
    target = make_target()
    group = [make_job(job_id="a"), make_job(SHORT, job_id="b", prompt_ids=(0, 5, 6, 23))]
    engine = Engine(target.ours, kept_prefixes=0)
    # Else a busy machine may find draft tokens too dear, for one of the two ways alone.
    monkeypatch.setattr(
        type(engine.latency_profile.of("greedy")), "seconds", lambda _, rows: 1 + rows / 99
    )
    found = {name: run_group(name, target, engine, group) for name in BATCH_DECODERS}
    both = len(ANSWER) + len(SHORT)
    assert [found[name].tokens for name in BATCH_DECODERS] == [both, both, both, both - 2]
    assert found["together_plain"].passes == len(ANSWER)
    assert found["generate"].passes == len(ANSWER) - 1
    assert found["together"].passes < found["one_by_one"].passes < both


def test_groups_follow_their_recordings_over_static_passes():
    """Which compute greedy tokens themselves, those that are not recorded."""
    target = static_target()
    engine = Engine(target.ours, kept_prefixes=0)
    group = [make_job(), make_job(SHORT, job_id="2")]
    for name in ("together", "one_by_one", "together_plain"):
        assert run_group(name, target, engine, group).tokens == len(ANSWER) + len(SHORT)
    assert target.ours.num_captures > 0


def test_finished_rows_choose_for_themselves():
    follow = ForcedTokens([(3, 4), (2,)], torch.device("cpu"))
    scores = torch.zeros(2, 6)
    scores[:, 5] = 1.0
    assert follow(None, scores).argmax(-1).tolist() == [3, 2]
    assert follow(None, scores).argmax(-1).tolist() == [4, 5]
    assert follow(None, scores).argmax(-1).tolist() == [5, 5]
    assert follow.calls == 3


def test_a_first_difference_has_its_gap():
    target = make_target()
    job = make_job(eos_ids=frozenset(), max_new_tokens=6)
    wanted = make_decoder("generate", target).run(job).token_ids
    other = (*wanted[:3], (wanted[3] + 1) % 97, *wanted[4:])
    difference = generation.first_difference(target, job, other, wanted)
    assert (difference["place"], difference["wanted"]) == (3, wanted[3])
    assert difference["gap"] >= difference["top_2_gap"] > 0
    assert generation.first_difference(target, job, wanted[:2], wanted)["gap"] is None


ROOT = Path(__file__).parents[2]


PEAK = """
import numpy as np
from eval.measure import forget_peak, process_bytes

forget_peak()
before = process_bytes("VmRSS")
block = np.ones(64 << 20, dtype=np.uint8)  # touched, or it is not resident
del block
grown = process_bytes("VmHWM") - before
forget_peak()
print(grown, process_bytes("VmHWM") - before)
"""


@pytest.mark.skipif(not forget_peak(), reason="only Linux forgets its peak")
def test_a_peak_is_seen_when_it_has_passed_and_then_forgotten():
    # In a process of its own: here, what other tests leave is freed at any moment.
    done = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, cwd=ROOT
    )
    grown, after = map(int, done.stdout.split())
    assert grown > 60e6
    assert after < 30e6
