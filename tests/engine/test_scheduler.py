"""Passes that several engines or threads share: who waits, and in which order."""

import threading
import time
import weakref
from contextlib import ExitStack

import pytest
import torch
from decoding import decode, open_session, run_together, watch_passes
from fakes import RandomDrafter
from tiny_models import VOCAB, generate, random_prompt, tiny_model

from ragaccel.decoding import Cancellation, Cancelled, NoDrafter, Request
from ragaccel.engine import Engine, Scheduler
from ragaccel.errors import CapacityError
from ragaccel.models import HuggingFaceModel

CHUNK = 16
LENGTHS = (3, 40, 11, 1, 25, 64, 17)
PROMPTS = [random_prompt(length, i) for i, length in enumerate(LENGTHS)]


def make_engine(**settings):
    return Engine(HuggingFaceModel(tiny_model("llama")), prefill_chunk=CHUNK, **settings)


def opened(engine, stack, prompt, new=30, drafter=None):
    request = Request(prompt, max_new_tokens=new)
    return open_session(engine, request, drafter or NoDrafter(), stack)


def test_a_batch_that_does_not_fit_is_verified_one_by_one():
    engine = make_engine()
    most = 1

    def runs_out(rows):
        if len(rows.spans) > most:
            raise torch.OutOfMemoryError("out of memory")

    watch_passes(engine, runs_out)
    requests = [Request(prompt, max_new_tokens=8) for prompt in PROMPTS[:3]]
    found = run_together(engine, requests, [RandomDrafter(i, VOCAB) for i in range(3)])
    assert found == [generate(tiny_model("llama"), prompt, 8) for prompt in PROMPTS[:3]]
    most = 0
    with pytest.raises(CapacityError, match="no memory left on cpu for a pass of"):
        run_together(engine, requests[1:2], [NoDrafter()])
    most = 1
    assert run_together(engine, requests[1:2], [NoDrafter()]) == found[1:2]  # whose prompt is kept


def test_engines_over_one_model_wait_for_one_another():
    target = HuggingFaceModel(tiny_model("llama"))
    first, second = Engine(target), Engine(target)
    inside, overlaps, found, forward = [], [], [None, None], target.forward

    def watched(rows, keep):
        overlaps.append(len(inside))
        inside.append(1)
        time.sleep(0.001)
        logits = forward(rows, keep)
        inside.pop()
        return logits

    target.forward = watched

    def work(i, engine):
        found[i] = decode(engine, Request(PROMPTS[i], max_new_tokens=20), NoDrafter())

    threads = [threading.Thread(target=work, args=each) for each in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(overlaps) == {0}
    assert found == [generate(tiny_model("llama"), prompt, 20) for prompt in PROMPTS[:2]]


# Waiting for the sessions of the last pass.


def in_a_thread(function, *args):
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("last_passes", "left", "exact", "pass_seconds", "waits"),
    [
        (["other"], False, False, 0.1, True),
        (["here", "other"], False, False, 0.1, True),  # by several threads in turn
        (["here"], False, False, 0.1, False),  # who reads two streams cannot ask for both
        (["other"], True, False, 0.1, False),
        (["other"], False, True, 0.1, False),  # passes are not shared
        (["other"], False, False, 0.0, False),  # a short pass is not worth the wait
    ],
)
def test_a_pass_waits_once_and_briefly_for_another_threads_session(
    last_passes, left, exact, pass_seconds, waits
):
    seconds = []
    for _ in range(3):  # a busy machine makes some of them longer
        engine = make_engine(exact=exact)
        scheduler, begun = Scheduler(engine), []

        def compute(rows, begun=begun):
            begun.append(time.perf_counter())
            time.sleep(pass_seconds)

        watch_passes(engine, compute)
        with ExitStack() as stack:
            both = first, second = [opened(engine, stack, prompt) for prompt in PROMPTS[3:1:-1]]
            for session in both:
                session.verifier.prefill(session.request)
            for where in last_passes:
                run = in_a_thread if where == "other" else lambda step, *args: step(*args)
                run(scheduler.advance, both)
            if left:
                scheduler.discard(second)
            for asks in range(2):
                begun.clear()
                asked = time.perf_counter()
                scheduler.advance([first])
                assert asks == 0 or begun[0] - asked < 0.5
                seconds += [begun[0] - asked] * (asks == 0)
            gone = weakref.ref(second)
        del both, second, session
        assert not left or gone() is None
    assert min(seconds) >= 0.02 if waits else min(seconds) < 0.02
    assert max(seconds) < 1.0


def test_prompts_are_prefilled_in_the_order_of_arrival():
    engine = make_engine(kept_prefixes=0)
    scheduler = Scheduler(engine)
    texts = [random_prompt(4 * CHUNK + 1, i) for i in range(3)]
    order, read = [], engine.prefill

    def watched(verifier):
        order.append(verifier.request.prompt_ids)
        read(verifier)

    engine.prefill = watched
    with ExitStack() as stack:
        running = opened(engine, stack, random_prompt(1))
        listed = [opened(engine, stack, text) for text in texts]
        scheduler.advance([running])
        for number in range(14):  # a new short prompt arrives in every iteration
            short = opened(engine, stack, random_prompt(CHUNK + 1, 50 + number))
            scheduler.advance([running, short, *listed])
        first, *others = order[1:]  # after the one that runs
        assert len(first) == CHUNK + 1  # it came in the same iteration, before them
        assert others[:12] == [tuple(text) for text in texts for _ in range(4)]


# What cannot be done.


def test_no_sessions_are_refused():
    with pytest.raises(ValueError, match="sessions must not be empty"):
        Scheduler(make_engine()).advance([])


def test_a_request_cancelled_before_its_first_step_computes_nothing():
    engine, cancellation = make_engine(), Cancellation()
    scheduler = Scheduler(engine)
    cancellation.cancel()
    with ExitStack() as stack:
        session = opened(engine, stack, [5, 6], new=9)
        with pytest.raises(Cancelled):
            scheduler.advance([session], cancellation)
        assert scheduler.is_idle
        assert session.stats.verify_passes == 0
        list(scheduler.steps(session))
        assert session.answer_ids == generate(tiny_model("llama"), [5, 6], 9)


def test_a_session_that_two_threads_decode_ends_for_both():
    scheduler, ended = Scheduler(make_engine()), []

    def decode_it():
        try:
            list(scheduler.steps(session))
        except RuntimeError as error:
            ended.append(str(error))

    with ExitStack() as stack:
        session = opened(scheduler.engine, stack, PROMPTS[2])
        threads = [threading.Thread(target=decode_it, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert len(ended) < 2
        assert all("one thread at a time" in error or "has ended" in error for error in ended)
        assert session.answer_ids == generate(tiny_model("llama"), PROMPTS[2], 30)
