"""Who waits for whom: streams read in turn, prompts in the order they came, interruptions."""

import threading
import time
from contextlib import ExitStack

from decoding import open_session
from tiny_models import generate, random_prompt, tiny_model

from ragaccel.decode.interfaces import NoDrafter
from ragaccel.decode.request import Request
from ragaccel.engine.engine import Engine
from ragaccel.engine.scheduler import Scheduler
from ragaccel.models.huggingface import HuggingFaceModel

CHUNK = 16


def make_engine(**settings):
    return Engine(HuggingFaceModel(tiny_model("llama")), prefill_chunk=CHUNK, **settings)


def expected(prompt, new):
    return generate(tiny_model("llama"), prompt, new)


# Waiting for sessions of the last pass


def test_two_streams_read_by_one_thread_do_not_wait_for_each_other():
    engine = make_engine()
    scheduler = Scheduler(engine)
    prompts = [random_prompt(9, i) for i in range(2)]
    with ExitStack() as stack:
        sessions = [
            open_session(engine, Request(prompt, max_new_tokens=40), NoDrafter(), stack)
            for prompt in prompts
        ]
        both = [scheduler.steps(session) for session in sessions]
        next(both[0]), next(both[1])
        started = time.perf_counter()
        for _ in range(39):
            for one in both:
                scheduler._pass_seconds = 60.0
                next(one)
        assert time.perf_counter() - started < 78 * 0.02 / 2  # it would be 0.02 each
        found = [session.token_ids for session in sessions]
    assert found == [expected(prompt, 40) for prompt in prompts]


def test_a_session_asked_for_by_thread_after_thread_is_waited_for():
    engine = make_engine()
    scheduler = Scheduler(engine)
    with ExitStack() as stack:
        first, second = (
            open_session(
                engine, Request(random_prompt(9, i), max_new_tokens=30), NoDrafter(), stack
            )
            for i in range(2)
        )
        scheduler.advance([first, second])
        other = threading.Thread(target=scheduler.advance, args=([first, second],))
        other.start()
        other.join(30)
        scheduler._pass_seconds = 60.0
        started = time.perf_counter()
        scheduler.advance([first])
        assert 0.01 < time.perf_counter() - started < 1.0


# Prompts


def test_prompts_are_read_in_the_order_they_came_whoever_keeps_coming():
    engine = make_engine(kept_prefixes=0)
    scheduler = Scheduler(engine)
    texts = [random_prompt(4 * CHUNK + 1, i) for i in range(3)]
    order, read = [], engine.prefill_chunk_of

    def watched(verifier):
        order.append(verifier.request.prompt_ids)
        read(verifier)

    engine.prefill_chunk_of = watched
    with ExitStack() as stack:

        def opened(prompt):
            return open_session(engine, Request(prompt, max_new_tokens=60), NoDrafter(), stack)

        running = opened(random_prompt(1))
        listed = [opened(text) for text in texts]
        scheduler.advance([running])
        for number in range(14):  # every round somebody else's short prompt stands before them
            short = opened(random_prompt(CHUNK + 1, 50 + number))
            scheduler.advance([running, short, *listed])
        first, *others = order[1:]  # after the one that runs
        assert len(first) == CHUNK + 1  # it came in the same round, before them
        assert others[:12] == [tuple(text) for text in texts for _ in range(4)]
