"""Static passes, by the operations that a CUDA graph captures, run one by one on a CPU.

Some tests simulate CUDA graphs, to see what is done with them and when they run out of memory.
"""

import gc
import weakref
from contextlib import closing, nullcontext
from unittest.mock import patch

import pytest
import torch
from decoding import OracleDrafter, decode, run_together
from fakes import RandomDrafter
from static_passes import PlainKernel, static_target
from tiny_models import VOCAB, generate, make_tiny_model, random_prompt, tiny_model

from ragaccel.decoding import Drafter, DraftTree, NoDrafter, Request, Sampling, Session
from ragaccel.engine import (
    CaptureError,
    Engine,
    KVPool,
    Sampler,
    StateLayout,
    StaticPass,
    StepGraphs,
    causal_rows,
    cuda_graphs,
    first_slots,
    num_splits,
    tree_rows,
)
from ragaccel.errors import CapacityError, UnsupportedModelError
from ragaccel.models import HuggingFaceModel, check_model, expected_passes

FAMILIES = ["llama", "mistral", "qwen2-sliding", "gemma2", "gemma3"]
LENGTHS = (3, 40, 11, 1, 25, 64, 17)
PROMPTS = [random_prompt(length, i) for i, length in enumerate(LENGTHS)]
PROMPT, NEW = random_prompt(21), 40
REQUEST = Request(PROMPT, max_new_tokens=NEW)


@pytest.fixture(scope="module")
def expected():
    return generate(tiny_model("llama"), PROMPT, NEW)


@pytest.fixture
def target():
    return static_target()


def answers(engine, new=14):
    """Decode all prompts together; return their answers and those of ``generate``."""
    wanted = [generate(tiny_model("llama"), prompt, new) for prompt in PROMPTS]
    requests = [Request(prompt, max_new_tokens=new) for prompt in PROMPTS]
    drafters = [OracleDrafter(*known) for known in zip(PROMPTS, wanted, strict=True)]
    return run_together(engine, requests, drafters), wanted


# Static passes give what others give.


@pytest.mark.parametrize("family", FAMILIES)
def test_static_passes_give_the_same_tokens(family):
    target = static_target(family)
    engine = Engine(target, prefill_chunk=16)
    wanted = generate(tiny_model(family), PROMPT, 25)
    for drafter in (NoDrafter(), RandomDrafter(1, VOCAB), OracleDrafter(PROMPT, wanted)):
        assert decode(engine, Request(PROMPT, max_new_tokens=25), drafter) == wanted
    assert target.num_captures > 2


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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_static_passes_of_every_type_give_the_logits_of_others(family, dtype):
    model = tiny_model(family, dtype)
    target, plain = static_target(model=model), HuggingFaceModel(model)
    check_model(target, expected_passes(target))
    found, wanted = logits_of_a_tree(target), logits_of_a_tree(plain)
    assert found.dtype == wanted.dtype == dtype
    assert target.num_captures > 1
    share = 32 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, wanted, rtol=0, atol=share * float(wanted.abs().max()))


def test_static_passes_are_checked_as_others_are(monkeypatch, target):
    wanted = expected_passes(target)
    check_model(target, wanted)
    monkeypatch.setattr(PlainKernel, "__call__", lambda _, q, *_args, **_settings: q * 0.0)
    target.graphs.clear()
    with pytest.raises(UnsupportedModelError, match="deviates from plain decoding"):
        check_model(target, wanted)


def test_sampling_reads_the_logits_of_a_static_pass(target):
    sampling = Sampling(1.0, seed=3)
    request = Request(PROMPT, max_new_tokens=20, sampling=sampling, repetition_penalty=1.3)
    plain = decode(Engine(HuggingFaceModel(tiny_model("llama"))), request, NoDrafter())
    assert decode(Engine(target), request, RandomDrafter(2, VOCAB)) == plain


@pytest.mark.parametrize("max_moves", [0, 5, 64])
def test_several_sequences_share_a_static_pass_whatever_rows_are_to_be_moved(
    monkeypatch, target, max_moves
):
    monkeypatch.setattr(cuda_graphs, "MAX_MOVES", max_moves)
    run, supports, moves = target.graphs.run, target.graphs.supports, []

    def watched(rows):
        moves.append(sum(span.cache.num_moves for span in rows.spans))
        return run(rows)

    monkeypatch.setattr(target.graphs, "run", watched)
    monkeypatch.setattr(
        target.graphs, "supports", lambda rows: supports(rows) or pytest.fail("launched")
    )
    found, wanted = answers(Engine(target, prefill_chunk=16), new=40)
    assert found == wanted
    assert max(moves) > 5


def test_a_pass_that_the_device_has_not_read_yet_is_not_overwritten(target):
    engine = Engine(target, prefill_chunk=1)  # passes of one row that nobody waits for
    read, waited = [], []

    class Copied:
        def __init__(self, static):
            self.static = static

        def record(self, stream):
            read.append(self.static._host.clone())

        def synchronize(self):
            waited.append(not read or torch.equal(self.static._host, read[-1]))

    decode(engine, Request(random_prompt(9), max_new_tokens=3), NoDrafter())
    for static in target.graphs._passes.values():
        static._copied = Copied(static)
    with patch("torch.cuda.current_stream"):
        decode(engine, Request(random_prompt(9, 1), max_new_tokens=3), NoDrafter())
    assert waited == [True] * 11


@pytest.mark.parametrize("num_rows", [1, 3, 64, 96])
def test_inputs_are_one_buffer_whose_parts_are_aligned(target, num_rows):
    """Triton compiles another kernel for pointers that are no multiples of 16 bytes."""
    with torch.inference_mode():
        target.forward(causal_rows(range(num_rows), target.new_cache(None, None)), num_rows)
    (static,) = target.graphs._passes.values()
    blocks, whole = static._blocks, static._inputs
    parts = [blocks.table, blocks.positions, blocks.stops, blocks.sees, static._num_moves]
    parts += [static.token_ids, static.positions, static._slots, static._sources, static._targets]
    begins = sorted((part.data_ptr() - whole.data_ptr(), part.nbytes) for part in parts)
    assert not any(begin % 16 for begin, _ in begins)
    ends = [begin + size for begin, size in begins]
    assert all(end <= begin for end, (begin, _) in zip(ends, begins[1:], strict=False))
    assert ends[-1] == whole.nbytes
    assert torch.equal(whole, static._host)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_greedy_tokens_come_with_the_logits_and_the_first_of_equals_wins(dtype):
    logits = torch.zeros(1, 97, dtype=dtype)
    logits[0, [5, 9, 40]] = 1.0
    logits[0, 40] += 1e-12  # equal in float32, as ``generate`` compares
    target = static_target()
    target.graphs._compute = lambda static: logits.repeat(static.size.rows, 1)
    found = target.forward(causal_rows(range(3), target.new_cache(None, None)), 3)
    assert target.greedy_ids(found).tolist() == [[5]] * 3
    assert (
        Sampler.of(Request((0,))).sample(found, DraftTree.chain([1, 2, 3]), 0).tolist() == [[5]] * 3
    )
    assert target.greedy_ids(found[:]) is None, "its numbers may be others now"
    target.graphs.clear()
    assert target.greedy_ids(found) is None


def test_only_greedy_rows_without_processing_are_taken_from_the_pass(monkeypatch, captured):
    """Logits that are not those of the pass are read, too."""
    sampled, sample = [], Sampler.sample

    def watched(self, logits, tree, *rest):
        sampled.append(len(tree))
        return sample(self, logits, tree, *rest)

    monkeypatch.setattr(Sampler, "sample", watched)
    for settings, is_read in (
        ({}, False),
        ({"repetition_penalty": 1.2}, True),
        ({"sampling": Sampling(temperature=1.0, seed=3)}, True),
        ({"min_new_tokens": 2, "eos_ids": frozenset([4])}, True),
        ({"processors": (lambda _ids, scores: scores,)}, True),
    ):
        request = Request(PROMPT, max_new_tokens=12, **settings)
        wanted = decode(Engine(HuggingFaceModel(captured.model)), request, NoDrafter())
        sampled.clear()
        engine = Engine(captured)
        assert decode(engine, request, OracleDrafter(PROMPT, wanted), 5) == wanted
        assert bool(sampled) == is_read
    forward = captured.forward
    captured.forward = lambda rows, keep: -forward(rows, keep)
    sampled.clear()
    decode(Engine(captured), Request(PROMPT, max_new_tokens=3), NoDrafter())
    assert len(sampled) == 3


# The KV pool.


def test_slots_are_freed():
    layout = StateLayout(1, 1, 2, torch.float32, torch.device("cpu"))
    assert KVPool(layout).num_slots == 16_384
    assert StateLayout(32, 32, 128, torch.bfloat16, layout.device).slot_bytes == 512 * 1024
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


def test_slots_are_freed_if_what_they_hold_cannot_be_copied(monkeypatch):
    kv_pool = KVPool(StateLayout(1, 1, 2, torch.float32, torch.device("cpu")), 101)
    cache = kv_pool.new_cache(10)
    cache.begin(4)
    cache.keep(range(4))

    class Full:
        def __getitem__(self, at):
            raise torch.OutOfMemoryError

    monkeypatch.setattr(kv_pool, "states", Full())
    with pytest.raises(torch.OutOfMemoryError):
        cache.reserve(50)
    del cache
    assert kv_pool.num_free == 100


def test_freeing_memory_frees_the_kernels_scratch(target):
    kernels = []

    class Kernel(PlainKernel):
        def __init__(self):
            super().__init__()
            kernels.append(weakref.ref(self))

    target.enable_graphs(Kernel, capture=False)
    prompt = random_prompt(5)
    decode(Engine(target), Request(prompt, max_new_tokens=3))
    target.graphs.clear()
    gc.collect()
    assert [kernel() is None for kernel in kernels] == [True, False]
    expected = generate(tiny_model("llama"), prompt, 3)
    assert decode(Engine(target), Request(prompt, max_new_tokens=3)) == expected


def test_on_a_gpu_the_pool_has_room_for_many_requests_at_once(monkeypatch):
    """It would else grow while requests run, which captures all graphs again."""
    free = 20 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 24 << 30))
    of_7b = StateLayout(32, 32, 128, torch.bfloat16, torch.device("cuda", 0))
    of_1b = StateLayout(16, 8, 64, torch.bfloat16, torch.device("cuda", 0))
    assert first_slots(of_7b) == free // 2 // of_7b.slot_bytes == 20_480
    assert first_slots(of_1b) == 65_536
    assert first_slots(StateLayout(1, 1, 2, torch.float32, torch.device("cpu"))) == 16_384


def test_the_kv_pool_grows_under_running_requests(target):
    target.kv_pool.__dict__.update(KVPool(target.kv_pool.layout, 40).__dict__)
    found, wanted = answers(Engine(target, prefill_chunk=16))
    assert found == wanted
    assert target.kv_pool.version > 0


def test_rows_in_the_wrong_place_survive_a_larger_run_of_slots(monkeypatch, target):
    monkeypatch.setattr("ragaccel.engine.engine._MAX_RESERVED_TOKENS", 0)
    monkeypatch.setattr("ragaccel.engine.kv_cache.FIRST_CAPACITY", 8)
    prompt = random_prompt(5)
    wanted = generate(tiny_model("llama"), prompt, 180)
    request = Request(prompt, max_new_tokens=180)
    engine = Engine(target, max_rows=31)
    assert decode(engine, request, OracleDrafter(prompt, wanted), 30) == wanted


# Simulated graphs: their memory, and what is done when it runs out.


class Replay:
    """Simulate a CUDA graph: run the captured pass into the same tensors."""

    def __init__(self, graphs, static):
        self.run = lambda: graphs._move_and_compute(static)
        self.output = self.run()

    def replay(self):
        for kept, found in zip(self.output, self.run(), strict=True):
            kept.resize_(found.shape).copy_(found)


@pytest.fixture
def captured(target, monkeypatch):
    """A target whose passes are captured by simulated CUDA graphs."""

    def record(graphs, static):
        graph = Replay(graphs, static)
        return graph, graph.output

    monkeypatch.setattr(target.graphs, "_capture", True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(StepGraphs, "_capture_graph", record)
    return target


@pytest.mark.parametrize("limit", [{"_max_passes": 2}, {"_max_bytes": 40_000}, {"_max_bytes": 0}])
def test_the_least_recently_used_passes_are_freed(monkeypatch, captured, expected, limit):
    graphs, make, made = captured.graphs, StaticPass.__init__, []
    graphs.__dict__.update(limit)

    def watched(self, *args):
        make(self, *args)
        made.append(weakref.ref(self))

    monkeypatch.setattr(StaticPass, "__init__", watched)
    for drafter in (NoDrafter(), RandomDrafter(1, VOCAB), OracleDrafter(PROMPT, expected)):
        assert decode(Engine(captured), REQUEST, drafter, 40) == expected
        kept = len(graphs._passes)
        assert kept == 1 or graphs.num_bytes <= graphs._max_bytes
        assert kept <= graphs._max_passes
    gc.collect()
    assert kept == sum(static() is not None for static in made) < len(made)
    assert captured.num_captures == len(made)


@torch.inference_mode()
def test_the_last_used_passes_stay_and_their_memory_is_counted(monkeypatch, captured):
    monkeypatch.setattr(PlainKernel, "buffers", (torch.zeros(1000),))
    graphs, cache = captured.graphs, captured.new_cache(None, None)
    graphs._max_passes = 2
    for number in (1, 8, 1, 20):
        captured.forward(causal_rows(range(number), cache), number)
        cache.keep(())
    assert [size.rows for size in graphs._passes] == [1, 24]
    own = sum(static.num_bytes for static in graphs._passes.values())
    assert own > sum(static.recorded[1].logits.nbytes for static in graphs._passes.values())
    assert graphs.num_bytes == own + 4000, "the kernel's memory is shared"
    graphs.clear()
    assert graphs.num_bytes == 0


class Beside(Drafter):
    """Draft the known answer next to a wrong token, so that accepted rows move by one."""

    def __init__(self, answer):
        self.text = [*PROMPT, *answer]

    def draft(self, context, budget):
        at = len(context.token_ids)
        right = self.text[at : at + budget - 1]
        if len(right) < 2:
            return DraftTree.chain(context.token_ids[-1:])
        tokens = (context.token_ids[-1], (right[0] + 1) % VOCAB, *right)
        parents = (-1, 0, 0, *range(2, len(tokens) - 1))
        return DraftTree(tokens, parents, (1.0,) * len(tokens), ((),) * len(tokens))


PLACES = {
    "a replay": (Replay, "replay"),
    "moves": (StaticPass, "move"),
    "attention": (PlainKernel, "__call__"),
    "a capture": (StepGraphs, "_capture_graph"),
}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_no_answer_changes_wherever_memory_runs_out(
    request, monkeypatch, target, expected, place, times
):
    if place in ("a replay", "a capture"):
        request.getfixturevalue("captured")
    (owner, name), calls = PLACES[place], []
    function, clear, freed = getattr(owner, name), target.graphs.clear, []

    def failing(*args, **settings):
        calls.append(1)
        if not at <= len(calls) < at + times:
            return function(*args, **settings)
        if place != "a capture":
            raise torch.OutOfMemoryError("out of memory")
        try:
            raise RuntimeError("CUDA error: out of memory")
        except RuntimeError:
            raise RuntimeError("the capture ended early")  # noqa: B904 - as torch does

    monkeypatch.setattr(owner, name, failing)
    monkeypatch.setattr(target.graphs, "clear", lambda: freed.append(clear()))

    def answer(engine):
        if place == "a capture":  # passes of several sizes
            return decode(engine, REQUEST, OracleDrafter(PROMPT, expected), 20)
        return decode(engine, REQUEST, Beside(expected), 5)

    for at in range(1, 4 if place == "a capture" else 8):
        clear()
        engine = Engine(target)
        freed[:], calls[:] = [], []
        if times == 2:
            with pytest.raises(
                CapacityError, match=r"no memory left on cpu for a pass of \d+ rows"
            ):
                answer(engine)
            assert not target.graphs._passes
        assert answer(engine) == expected
        assert len(freed) == times
        assert len(calls) > at
        assert target.graphs is not None


def test_captured_passes_are_freed_with_everything_else_that_is_kept(captured, expected):
    engine = Engine(captured)
    decode(engine, REQUEST, OracleDrafter(PROMPT, expected))
    assert captured.graphs._passes
    assert engine.prefix_cache.num_idle
    engine.free_memory()
    assert not captured.graphs._passes
    assert not engine.prefix_cache.num_idle
    assert decode(engine, REQUEST, OracleDrafter(PROMPT, expected)) == expected


def test_first_runs_of_a_size_are_not_counted_as_latency(target, expected):
    engine, verified, forward = Engine(target), [], target.forward

    def counted(rows, keep):
        verified.append(keep == rows.num_rows)
        return forward(rows, keep)

    target.forward = counted
    for seed in range(3):
        assert decode(engine, REQUEST, OracleDrafter(PROMPT, expected, seed), 12) == expected
    assert target.num_captures == len(target.graphs._passes) > 1
    assert engine.latency_profile.of("greedy").num_passes == sum(verified) - target.num_captures > 0


def test_a_pass_that_cannot_be_captured_is_launched_and_so_are_all_later_ones(
    monkeypatch, captured, caplog
):
    calls = []

    def refused(graphs, static):
        calls.append(static)
        raise ValueError("it waits for the device")

    monkeypatch.setattr(StepGraphs, "_capture_graph", refused)
    engine = Engine(captured)
    found = decode(engine, Request(PROMPT, max_new_tokens=9), NoDrafter())
    assert found == generate(tiny_model("llama"), PROMPT, 9)
    assert (captured.graphs, captured.num_captures, len(calls)) == (None, 1, 1)
    assert engine.latency_profile.of("greedy").num_passes == 8, "a failed capture is not counted"
    assert [record.message for record in caplog.records] == [
        "CUDA graphs are not used, so answers come more slowly: it waits for the device"
    ]
    assert captured.graphs_status == "off: it waits for the device"
    assert decode_stats(engine).graphs == captured.graphs_status
    assert issubclass(CaptureError, RuntimeError)


def decode_stats(engine):
    with closing(engine.open(REQUEST)) as verifier:
        return Session(verifier, NoDrafter(), REQUEST).stats


# A warm-up captures everything.


def long_target():
    changes = {"max_position_embeddings": 8192, "num_hidden_layers": 1}
    return static_target(model=make_tiny_model("llama", torch.float32, **changes))


def test_a_warm_up_leaves_nothing_to_capture(monkeypatch):
    monkeypatch.setattr(PlainKernel, "__call__", lambda _, q, *_args, **_settings: q * 0.0)
    target = long_target()
    engine = Engine(target)
    engine.capture_passes(4096, 4)
    captured = target.num_captures
    assert captured == len(target.graphs._passes) > 20
    for length in (5, 3000, 4000):
        request = Request(random_prompt(length), max_new_tokens=30)
        decode(engine, request, RandomDrafter(1, VOCAB))
    requests = [Request(random_prompt(length), max_new_tokens=20) for length in (9, 3000, 70, 1)]
    run_together(engine, requests, [RandomDrafter(seed, VOCAB) for seed in range(4)])
    assert target.num_captures == captured
    engine.capture_passes(4096, 4)
    assert target.num_captures == captured


def test_a_server_needs_few_sizes():
    """Requests of up to 32,000 tokens, sixteen at a time."""
    graphs = static_target().graphs
    sizes = graphs.sizes(32_768, 64, 16)
    assert len(sizes) == 84
    assert len(sizes) <= graphs._max_passes
    assert len(graphs.sizes(2048, 64, 1)) == 18
    assert len(graphs.sizes(2048, 64, 1, has_masks=True)) == 36
    assert max(size.blocks for size in graphs.sizes(1024, 64, 1)) == 4
    assert max(size.splits for size in sizes) == num_splits(65_536)
    assert len(graphs.sizes(1024, 64, 20)) > len(graphs.sizes(1024, 64, 16))


def test_the_largest_passes_are_captured_first_and_no_more_than_are_kept(monkeypatch):
    graphs = long_target().graphs
    with torch.inference_mode():
        graphs.capture_all(1024, num_rows=64, num_sequences=1)
    assert [size.rows for size in graphs._passes] == [64, 48, 32, 24, 16, 8, 4, 2, 1]
    graphs.clear()
    monkeypatch.setattr(graphs, "_max_bytes", 0)
    with torch.inference_mode():
        graphs.capture_all(1024, num_rows=64, num_sequences=1)
    assert len(graphs._passes) == 1


def test_a_warm_up_that_cannot_capture_turns_graphs_off(monkeypatch, captured):
    def refused(graphs, static):
        raise ValueError("it waits for the device")

    monkeypatch.setattr(StepGraphs, "_capture_graph", refused)
    Engine(captured).capture_passes(100, 1)
    assert captured.graphs is None
    assert captured.graphs_status == "off: it waits for the device"
