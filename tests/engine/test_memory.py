"""Requests when memory runs out, at every possible place."""

import weakref
from contextlib import closing

import pytest
import torch
from decoding import OracleDrafter, decode
from tiny_models import generate, random_prompt, tiny_model

from ragaccel.decoding import NoDrafter, Request, Session
from ragaccel.engine import (
    Engine,
    KVPool,
    StateLayout,
    engine as engine_module,
    kv_cache,
)
from ragaccel.errors import CapacityError
from ragaccel.models import HuggingFaceModel

CHUNK = 16
PASSAGES = random_prompt(60, 1)
PROMPT = [*PASSAGES, *random_prompt(5, 2)]
NEW = 40
ON_A_CPU = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to")


class Failing:
    """A function that runs out of memory at some of its calls."""

    def __init__(self, function, at, error):
        self.function, self.at, self.error, self.calls = function, set(at), error, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls - 1 in self.at:
            raise self.error
        return self.function(*args)


@pytest.fixture
def engine():
    engine = Engine(HuggingFaceModel(tiny_model("llama"), self_check=False), prefill_chunk=CHUNK)
    for start in (PASSAGES, random_prompt(30, 9)):
        decode(engine, Request([*start, 3], max_new_tokens=1))
    assert engine.prefix_cache.num_idle == 2
    return engine


@pytest.fixture(scope="module")
def expected():
    return generate(tiny_model("llama"), PROMPT, NEW)


def fail(engine, at, error=None):
    found = Failing(engine.model.forward, at, error or torch.OutOfMemoryError("out of memory"))
    engine.model.forward = found
    return found


@pytest.mark.parametrize("error", [None, ON_A_CPU, RuntimeError("MPS backend out of memory")])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_at_the_first_failure_kept_states_are_dropped_and_the_pass_repeated(
    engine, expected, at, error
):
    forward = fail(engine, [at], error)
    request = Request(PROMPT, max_new_tokens=NEW)
    with closing(engine.open(request)) as verifier:
        session = Session(verifier, OracleDrafter(PROMPT, expected), request, token_budget=6)
        for _ in session:
            assert (engine.prefix_cache.num_idle == 0) == (forward.calls > at)
        assert list(session.result().token_ids) == expected
    assert forward.calls > 7
    fail(engine, [0], RuntimeError("something else"))  # which is the caller's
    with pytest.raises(RuntimeError, match="something else"):
        decode(engine, request)


def test_a_repeated_pass_is_not_counted_as_latency(engine, expected):
    forward, before = fail(engine, [9]), engine.latency_profile.of("greedy").num_passes
    assert decode(engine, Request(PROMPT, max_new_tokens=NEW), NoDrafter()) == expected
    assert forward.calls == 1 + NEW + 1  # what is left of the prompt, the answer, the repeat
    assert engine.latency_profile.of("greedy").num_passes == before + NEW - 1


@pytest.mark.parametrize("at", [0, 1, 5])
def test_at_the_second_failure_the_request_stops_and_may_go_on(engine, expected, at):
    fail(engine, [at, at + 1])
    request = Request(PROMPT, max_new_tokens=NEW)
    with closing(engine.open(request)) as verifier:
        session = Session(verifier, OracleDrafter(PROMPT, expected), request, token_budget=6)
        with pytest.raises(CapacityError, match=r"no memory left on cpu for a pass of \d+ rows"):
            list(session)
        assert expected[: len(session.answer_ids)] == session.answer_ids
        assert engine.prefix_cache.num_idle == 0
        other = decode(engine, request, OracleDrafter(PROMPT, expected))
        list(session)
        assert list(session.result().token_ids) == other == expected


def test_an_error_keeps_no_tensors_of_a_pass_that_did_not_fit(engine):
    made = []

    def forward(rows, keep):
        states = torch.zeros(1000)
        made.append(weakref.ref(states))
        try:
            raise torch.OutOfMemoryError("out of memory")
        except torch.OutOfMemoryError:
            raise RuntimeError("the capture ended early")  # noqa: B904 - as torch does

    engine.model.forward = forward
    with pytest.raises(CapacityError) as told:
        decode(engine, Request(PROMPT, max_new_tokens=NEW))
    assert [state() for state in made] == [None, None]
    assert told.value.__cause__ is not None


@pytest.mark.parametrize("times", [1, 2])
def test_answers_are_right_wherever_memory_runs_out(monkeypatch, expected, times):
    """At every single allocation of states: new caches, copies, growth in the middle of answers."""
    monkeypatch.setattr(kv_cache, "FIRST_CAPACITY", 8)
    monkeypatch.setattr(engine_module, "_MAX_RESERVED_TOKENS", 3)
    target, make = HuggingFaceModel(tiny_model("llama"), self_check=False), kv_cache._buffer
    at, refused, calls = 0, 0, 1
    while at < calls:
        engine = Engine(target, prefill_chunk=CHUNK, max_rows=8)
        others = [*PASSAGES, *random_prompt(150, 3)]
        first = engine.open(Request(others, max_new_tokens=1))
        first.prefill(first.request)
        failing = Failing(make, range(at, at + times), torch.OutOfMemoryError("out of memory"))
        monkeypatch.setattr(kv_cache, "_buffer", failing)
        request = Request(PROMPT, max_new_tokens=NEW)
        with closing(engine.open(request)) as verifier:
            session = Session(verifier, OracleDrafter(PROMPT, expected), request, token_budget=6)
            try:
                list(session)
            except CapacityError:
                refused += 1
                list(session)
        assert list(session.result().token_ids) == expected
        assert [entry.cache for entry in engine.prefix_cache._open] == [first.cache]
        at, calls = at + 1, failing.calls
        monkeypatch.setattr(kv_cache, "_buffer", make)
    assert at > 8
    assert (refused > 0) == (times == 2)


@pytest.mark.parametrize("in_pool", [False, True])
@torch.inference_mode()
def test_failed_moves_are_done_later(monkeypatch, in_pool):
    layout = StateLayout(2, 1, 1, torch.float64, torch.device("cpu"))
    cache = KVPool(layout, 64).new_cache() if in_pool else kv_cache.KVCache()
    rows = torch.arange(9.0, dtype=torch.float64)[None, None, :, None]
    cache.begin(9)
    for layer in range(2):
        cache.write(layer, rows, -rows)
    cache.keep([0, 2, 4, 5])
    failing = Failing(torch.Tensor.index_select, [0 if in_pool else 1], torch.OutOfMemoryError())
    monkeypatch.setattr(torch.Tensor, "index_select", lambda *args: failing(*args))
    with pytest.raises(torch.OutOfMemoryError):
        cache.flush_moves()
    cache.flush_moves()
    keys = cache.buffers[2][0, 0, :4, 0]
    assert keys.tolist() == [0, 2, 4, 5]
    assert (-cache.buffers[1][0, 0, :4, 0]).tolist() == [0, 2, 4, 5]
