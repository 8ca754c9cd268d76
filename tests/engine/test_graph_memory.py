"""Memory of static passes: what they keep, its limit, and recovery when memory runs out."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from decoding import OracleDrafter, decode, run_together
from fakes import RandomDrafter
from plain_kernel import PlainKernel
from static_passes import static_target
from tiny_models import VOCAB, generate, random_prompt, tiny_model

from ragaccel.decoding import Drafter, DraftTree, NoDrafter, Request
from ragaccel.engine import Engine, StaticPass, StepGraphs, causal_rows
from ragaccel.errors import CapacityError

PROMPT, NEW = random_prompt(21), 40
FULL = torch.OutOfMemoryError("out of memory")


@pytest.fixture(scope="module")
def expected():
    return generate(tiny_model("llama"), PROMPT, NEW)


@pytest.fixture
def target():
    return static_target()


class Replay:
    """Simulate a CUDA graph: run the captured pass into the same logits; sometimes fail."""

    fails = frozenset()
    count = 0

    def __init__(self, graphs, static):
        self.graphs, self.static, self.logits = graphs, static, torch.empty(0)

    def replay(self):
        Replay.count += 1
        if Replay.count in Replay.fails:
            raise RuntimeError("CUDA error: out of memory")
        found = self.graphs._move_and_compute(self.static)
        self.logits.resize_(found.shape).copy_(found)


@pytest.fixture
def captured(target, monkeypatch):
    """A target whose passes are captured by simulated CUDA graphs."""

    def record(graphs, static):
        graph = Replay(graphs, static)
        graph.logits = graphs._move_and_compute(static)
        return graph, graph.logits

    monkeypatch.setattr(target.graphs, "_capture", True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(StepGraphs, "_capture_graph", record)
    monkeypatch.setattr(Replay, "count", 0)
    return target


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


def drafters(expected):
    return NoDrafter(), RandomDrafter(1, VOCAB), OracleDrafter(PROMPT, expected)


def sizes_run(monkeypatch):
    """List the sizes of static passes made from now on."""
    made, make = [], StaticPass.__init__

    def watched(self, *args):
        make(self, *args)
        made.append(weakref.ref(self))

    monkeypatch.setattr(StaticPass, "__init__", watched)
    return made


@pytest.mark.parametrize("bound", [{"_max_passes": 2}, {"_max_bytes": 40_000}, {"_max_bytes": 0}])
def test_the_least_recently_used_passes_are_freed(monkeypatch, captured, expected, bound):
    graphs = captured.graphs
    graphs.__dict__.update(bound)
    made, kept = sizes_run(monkeypatch), []
    for drafter in drafters(expected):
        request = Request(PROMPT, max_new_tokens=NEW)
        assert decode(Engine(captured), request, drafter, 40) == expected
        kept.append(len(graphs._passes))
        assert kept[-1] == 1 or graphs.num_bytes <= graphs._max_bytes
    gc.collect()
    assert kept[-1] == sum(static() is not None for static in made) < len(made)
    assert max(kept) <= bound.get("_max_passes", len(made) - 1)
    assert captured.num_captures == len(made)


@torch.inference_mode()
def test_the_last_used_passes_stay(captured):
    graphs, cache = captured.graphs, captured.new_cache(None, None)
    graphs._max_passes = 2
    for number in (1, 8, 1, 20):
        captured.forward(causal_rows(range(number), cache), number)
        cache.keep(())
    assert [size.rows for size in graphs._passes] == [1, 24]


def test_kept_memory_is_counted(monkeypatch, captured, expected):
    monkeypatch.setattr(PlainKernel, "num_bytes", 1000)
    graphs = captured.graphs
    decode(Engine(captured), Request(PROMPT, max_new_tokens=NEW), OracleDrafter(PROMPT, expected))
    logits = sum(static.recorded[1].nbytes for static in graphs._passes.values())
    assert graphs.num_bytes > logits + 1000 * len(graphs._passes)
    graphs.clear()
    assert graphs.num_bytes == 0


@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize("times", [1, 2])
def test_a_replay_that_finds_no_memory_loses_no_move(monkeypatch, captured, expected, at, times):
    monkeypatch.setattr(Replay, "fails", frozenset(range(at, at + times)))
    engine, request = Engine(captured), Request(PROMPT, max_new_tokens=NEW)
    drafter = Beside(expected)
    freed, clear = [], captured.graphs.clear
    monkeypatch.setattr(captured.graphs, "clear", lambda: freed.append(clear()))
    if times == 1:
        assert decode(engine, request, drafter, 5) == expected
    else:
        with pytest.raises(CapacityError, match=r"no memory left on cpu for a pass of \d+ rows"):
            decode(engine, request, drafter, 5)
        assert not captured.graphs._passes
        assert decode(engine, request, drafter, 5) == expected
    assert len(freed) == times
    assert captured.graphs is not None


@pytest.mark.parametrize("at", range(1, 8))
def test_moves_that_find_no_memory_are_done_later(monkeypatch, target, expected, at):
    move, calls = StaticPass.move, []

    def failing(static):
        calls.append(static)
        if len(calls) == at:
            raise FULL
        move(static)

    monkeypatch.setattr(StaticPass, "move", failing)
    request = Request(PROMPT, max_new_tokens=NEW)
    assert decode(Engine(target), request, Beside(expected), 5) == expected
    assert len(calls) > at


@pytest.mark.parametrize("at", range(1, 8))
def test_passes_that_find_no_memory_do_no_move_twice(monkeypatch, target, expected, at):
    compute, calls = target.graphs._compute, []

    def failing(static):
        calls.append(static)
        if len(calls) == at:
            raise FULL
        return compute(static)

    monkeypatch.setattr(target.graphs, "_compute", failing)
    request = Request(PROMPT, max_new_tokens=NEW)
    assert decode(Engine(target), request, Beside(expected), 5) == expected
    assert len(calls) > at


@pytest.mark.parametrize("error", [FULL, RuntimeError("CUDA error: out of memory")])
def test_a_capture_that_finds_no_memory_is_tried_again(monkeypatch, captured, expected, error):
    record, calls = StepGraphs._capture_graph, []

    def failing(graphs, static):
        calls.append(static)
        if len(calls) != 2:
            return record(graphs, static)
        try:
            raise error
        except RuntimeError:
            raise RuntimeError("the capture ended early")  # noqa: B904

    monkeypatch.setattr(StepGraphs, "_capture_graph", failing)
    requests = [Request(PROMPT, max_new_tokens=NEW), Request(PROMPT[3:], max_new_tokens=9)]
    other = generate(tiny_model("llama"), PROMPT[3:], 9)
    found = run_together(Engine(captured), requests, [OracleDrafter(PROMPT, expected), NoDrafter()])
    assert found == [expected, other]
    assert len(calls) > 2
    assert captured.graphs is not None


def test_captured_passes_are_freed_when_memory_runs_out(captured, expected):
    engine, request = Engine(captured), Request(PROMPT, max_new_tokens=NEW)
    decode(engine, request, OracleDrafter(PROMPT, expected))
    assert captured.graphs._passes
    assert engine.prefix_cache.num_idle
    engine.free_memory()
    assert not captured.graphs._passes
    assert not engine.prefix_cache.num_idle
    assert decode(engine, request, OracleDrafter(PROMPT, expected)) == expected
