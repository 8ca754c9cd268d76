"""Static passes, by the operations that a CUDA graph captures, run one by one on a CPU."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from decoding import OracleDrafter, decode, run_together
from fakes import RandomDrafter
from plain_kernel import PlainKernel
from static_passes import static_target
from tiny_models import VOCAB, generate, random_prompt, tiny_model

from ragaccel.decoding import DraftTree, NoDrafter, Request, Sampling
from ragaccel.engine import (
    CaptureError,
    Engine,
    KVPool,
    StateLayout,
    causal_rows,
    cuda_graphs as graphs,
    cuda_graphs as static_pass,
    tree_rows,
)
from ragaccel.errors import UnsupportedModelError
from ragaccel.models import HuggingFaceModel, check_model, expected_passes

LENGTHS = (3, 40, 11, 1, 25, 64, 17)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-sliding", "gemma2", "gemma3"])
def test_static_passes_give_the_same_tokens(family):
    target = static_target(family)
    engine = Engine(target, prefill_chunk=16)
    prompt = random_prompt(21)
    expected = generate(tiny_model(family), prompt, 25)
    for drafter in (NoDrafter(), RandomDrafter(1, VOCAB), OracleDrafter(prompt, expected)):
        found = decode(engine, Request(prompt, max_new_tokens=25), drafter)
        assert found == expected
    assert len(target.graphs._passes) > 2


def logits_of_a_tree(target):
    """Logits of a prompt's last row, of a tree after it, and after one of its branches."""
    cache, prompt = target.new_cache(None, 64), random_prompt(23)
    tree = DraftTree((5, 6, 7, 8, 9), (-1, 0, 0, 1, 3), (1.0,) * 5, ((),) * 5)
    with torch.inference_mode():
        found = [target.forward(causal_rows(prompt, cache), 1).clone()]
        cache.keep(range(23))
        found.append(target.forward(tree_rows(tree, cache), 5).clone())
        cache.keep((0, 1, 3))
        found.append(target.forward(causal_rows([3, 4], cache), 2).clone())
    return torch.cat(found)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-sliding", "gemma2", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_static_passes_of_every_type_give_the_logits_of_others(family, dtype):
    model = tiny_model(family, dtype)
    target, plain = static_target(model=model), HuggingFaceModel(model)
    check_model(target, expected_passes(target))
    found, expected = logits_of_a_tree(target), logits_of_a_tree(plain)
    assert found.dtype == expected.dtype == dtype
    assert len(target.graphs._passes) > 1
    share = 32 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=0, atol=share * float(expected.abs().max()))


def test_several_sequences_share_a_static_pass():
    prompts = [random_prompt(length, i) for i, length in enumerate(LENGTHS)]
    expected = [generate(tiny_model("llama"), prompt, 14) for prompt in prompts]
    engine = Engine(static_target(), prefill_chunk=16)
    requests = [Request(prompt, max_new_tokens=14) for prompt in prompts]
    drafters = [
        OracleDrafter(prompt, answer) for prompt, answer in zip(prompts, expected, strict=True)
    ]
    assert run_together(engine, requests, drafters) == expected


@pytest.mark.parametrize("max_moves", [0, 5])
def test_rows_to_be_moved_do_not_keep_a_pass_from_being_static(monkeypatch, max_moves):
    for module in (graphs, static_pass):
        monkeypatch.setattr(module, "MAX_MOVES", max_moves)
    prompts = [random_prompt(length, i) for i, length in enumerate(LENGTHS)]
    expected = [generate(tiny_model("llama"), prompt, 40) for prompt in prompts]
    target = static_target()
    run, moves = target.graphs.run, []

    def watched(rows):
        moves.append(sum(span.cache.num_moves for span in rows.spans))
        return run(rows)

    monkeypatch.setattr(target.graphs, "run", watched)
    supports = target.graphs.supports
    monkeypatch.setattr(
        target.graphs, "supports", lambda rows: supports(rows) or pytest.fail("launched")
    )
    requests = [Request(prompt, max_new_tokens=40) for prompt in prompts]
    drafters = [
        OracleDrafter(prompt, answer) for prompt, answer in zip(prompts, expected, strict=True)
    ]
    assert run_together(Engine(target), requests, drafters) == expected
    assert max(moves) > 5


def test_first_runs_of_a_size_are_not_counted_as_latency():
    target, prompt = static_target(), random_prompt(21)
    engine, expected = Engine(target), generate(tiny_model("llama"), prompt, 40)
    verified, forward = [], target.forward

    def counted(rows, keep):
        verified.append(keep == rows.num_rows)
        return forward(rows, keep)

    target.forward = counted
    request = Request(prompt, max_new_tokens=40)
    for seed in range(3):
        assert decode(engine, request, OracleDrafter(prompt, expected, seed), 12) == expected
    assert target.num_captures == len(target.graphs._passes) > 1
    assert engine.latency_profile.of("greedy").num_passes == sum(verified) - target.num_captures > 0


def test_a_failed_capture_is_not_counted_as_latency(monkeypatch):
    target, prompt = static_target(), random_prompt(21)
    monkeypatch.setattr(target.graphs, "_capture", True)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)

    def refused(static):
        raise CaptureError("it waits for the device")

    monkeypatch.setattr(target.graphs, "_capture_graph", refused)
    engine = Engine(target)
    found = decode(engine, Request(prompt, max_new_tokens=9), NoDrafter())
    assert found == generate(tiny_model("llama"), prompt, 9)
    assert (target.graphs, target.num_captures) == (None, 1)
    assert engine.latency_profile.of("greedy").num_passes == 8


def test_sampling_reads_the_logits_of_a_static_pass():
    request = Request(
        random_prompt(9), max_new_tokens=20, sampling=Sampling(1.0, seed=3), repetition_penalty=1.3
    )
    plain = decode(Engine(HuggingFaceModel(tiny_model("llama"))), request, NoDrafter())
    assert decode(Engine(static_target()), request, RandomDrafter(2, VOCAB)) == plain


def test_the_kv_pool_grows_under_running_requests():
    target = static_target()
    layout = target.kv_pool.layout
    small = KVPool(layout, 40)
    target.kv_pool.__dict__.update(small.__dict__)
    engine = Engine(target, prefill_chunk=16)
    prompts = [random_prompt(length, i) for i, length in enumerate(LENGTHS)]
    requests = [Request(prompt, max_new_tokens=14) for prompt in prompts]
    found = run_together(engine, requests, [RandomDrafter(i, VOCAB) for i in range(len(prompts))])
    assert found == [generate(tiny_model("llama"), prompt, 14) for prompt in prompts]
    assert target.kv_pool.version > 0


def test_a_pass_that_the_device_has_not_read_yet_is_not_overwritten():
    target = static_target()
    engine = Engine(target, prefill_chunk=1)  # passes of one row that nobody waits for
    read, waited = [], []

    class Copied:
        def __init__(self, static):
            self.static = static

        def record(self, stream):
            read.append(self.static._host.clone())

        def synchronize(self):
            waited.append(not read or torch.equal(self.static._host, read[-1]))

    request = Request(random_prompt(9), max_new_tokens=3)
    decode(engine, request, NoDrafter())
    for static in target.graphs._passes.values():
        static._copied = Copied(static)
    with patch("torch.cuda.current_stream"):
        decode(engine, Request(random_prompt(9, 1), max_new_tokens=3), NoDrafter())
    assert waited == [True] * 11


def test_slots_are_freed():
    layout = StateLayout(1, 1, 2, torch.float32, torch.device("cpu"))
    kv_pool = KVPool(layout, 101)
    caches = [kv_pool.new_cache(limit=25) for _ in range(4)]
    for cache in caches:
        cache.begin(1)
    assert kv_pool.num_free == 0
    assert sorted(cache.base for cache in caches) == [1, 26, 51, 76]
    del caches[1], caches[1], cache
    assert kv_pool.num_free == 50
    again = kv_pool.new_cache(limit=50)
    again.reserve(50)
    again.begin(1)
    assert again.base == 26
    assert kv_pool.version == 0


def test_rows_in_the_wrong_place_survive_a_larger_run_of_slots(monkeypatch):
    monkeypatch.setattr("ragaccel.engine.engine._MAX_RESERVED_TOKENS", 0)
    monkeypatch.setattr("ragaccel.engine.kv_cache.FIRST_CAPACITY", 8)
    target, prompt = static_target(), random_prompt(5)
    expected = generate(tiny_model("llama"), prompt, 180)
    request = Request(prompt, max_new_tokens=180)
    engine = Engine(target, max_rows=31)
    assert decode(engine, request, OracleDrafter(prompt, expected), 30) == expected


def test_a_pass_that_cannot_be_captured_is_launched_and_so_are_all_later_ones(monkeypatch, caplog):
    target, prompt = static_target(), random_prompt(21)
    calls = []

    def refused(rows):
        calls.append(rows)
        raise CaptureError("it waits for the device")

    monkeypatch.setattr(target.graphs, "run", refused)
    expected = generate(tiny_model("llama"), prompt, 25)
    request = Request(prompt, max_new_tokens=25)
    assert decode(Engine(target), request, OracleDrafter(prompt, expected)) == expected
    assert len(calls) == 1
    assert target.graphs is None
    assert [record.message for record in caplog.records] == [
        "CUDA graphs are off for this model: it waits for the device"
    ]


def test_a_kv_pool_takes_a_share_of_the_memory_at_first():
    layout = StateLayout(32, 32, 128, torch.bfloat16, torch.device("cpu"))
    assert layout.slot_bytes == 512 * 1024
    tiny = StateLayout(1, 1, 2, torch.float32, torch.device("cpu"))
    assert KVPool(tiny).num_slots == 16_384


def test_static_passes_are_checked_as_others_are(monkeypatch):
    target = static_target()
    expected = expected_passes(target)
    check_model(target, expected)
    monkeypatch.setattr(PlainKernel, "__call__", lambda _, q, *_args, **_settings: q * 0.0)
    target.graphs.clear()
    with pytest.raises(UnsupportedModelError, match="deviates from plain decoding"):
        check_model(target, expected)
