"""The scheduler's waiting, order of prompts, interruptions and cancellation."""

import signal
import threading
import weakref
from contextlib import ExitStack

import pytest
from decoding import open_session
from fakes import RandomDrafter
from tiny_models import VOCAB, generate, random_prompt, tiny_model

from ragaccel.decoding import Cancellation, Cancelled, NoDrafter, Request
from ragaccel.engine import Engine, Scheduler
from ragaccel.models import HuggingFaceModel

pytestmark = pytest.mark.usefixtures("interrupts")

CHUNK = 16


def make_engine(**settings):
    return Engine(HuggingFaceModel(tiny_model("llama")), prefill_chunk=CHUNK, **settings)


def expected(prompt, new):
    return generate(tiny_model("llama"), prompt, new)


def two_sessions(engine, stack):
    requests = [Request(random_prompt(9, i), max_new_tokens=30) for i in range(2)]
    return [open_session(engine, request, NoDrafter(), stack) for request in requests]


def waited_for(scheduler):
    """Record each wait of a leader, in seconds, from now on."""
    waits, wait = [], scheduler._changed.wait

    def watched(timeout=None):
        if timeout is not None:
            waits.append(timeout)
        return wait(timeout)

    scheduler._changed.wait = watched
    return waits


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
        waits = waited_for(scheduler)
        for _ in range(39):
            for one in both:
                scheduler._pass_seconds = 60.0
                next(one)
        assert not waits
        found = [session.answer_ids for session in sessions]
    assert found == [expected(prompt, 40) for prompt in prompts]


def test_a_session_shared_by_threads_is_waited_for():
    engine = make_engine()
    scheduler = Scheduler(engine)
    with ExitStack() as stack:
        first, second = two_sessions(engine, stack)
        scheduler.advance([first, second])
        other = threading.Thread(target=scheduler.advance, args=([first, second],))
        other.start()
        other.join(30)
        scheduler._pass_seconds = 60.0
        waits = waited_for(scheduler)
        scheduler.advance([first])
        assert waits
        assert all(0.0 < wait <= 0.02 for wait in waits)


def test_a_session_that_its_owner_left_is_not_waited_for():
    engine = make_engine()
    scheduler = Scheduler(engine)
    with ExitStack() as stack:
        first, second = two_sessions(engine, stack)
        other = threading.Thread(target=scheduler.advance, args=([first, second],))
        other.start()
        other.join(30)
        scheduler.discard(second)
        scheduler._pass_seconds = 60.0
        waits = waited_for(scheduler)
        scheduler.advance([first])
        assert not waits
        left = weakref.ref(second)
        stack.close()
        del second
        assert left() is None


class Breaking(RandomDrafter):
    """A drafter whose mask_ids raises once it is broken."""

    is_broken = False

    @property
    def mask_ids(self):
        if self.is_broken:
            raise ZeroDivisionError("a drafter's own")
        return (3,)


def test_an_error_during_allocation_reaches_its_owner_alone():
    engine = make_engine()
    scheduler = Scheduler(engine)
    prompt = random_prompt(9, 3)
    with ExitStack() as stack:
        failing, sound = (
            open_session(engine, Request(prompt, max_new_tokens=30), drafter, stack)
            for drafter in (Breaking(1, VOCAB), NoDrafter())
        )
        for _ in range(3):
            scheduler.advance([failing, sound])
        before = len(sound.answer_ids)
        failing.drafter.is_broken = True
        with pytest.raises(ZeroDivisionError):
            scheduler.advance([failing, sound])
        assert len(sound.answer_ids) == before + 1
        list(scheduler.steps(sound))
        assert sound.answer_ids == expected(prompt, 30)


# Prompts


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

        def opened(prompt):
            return open_session(engine, Request(prompt, max_new_tokens=60), NoDrafter(), stack)

        running = opened(random_prompt(1))
        listed = [opened(text) for text in texts]
        scheduler.advance([running])
        for number in range(14):  # a new short prompt arrives in every iteration
            short = opened(random_prompt(CHUNK + 1, 50 + number))
            scheduler.advance([running, short, *listed])
        first, *others = order[1:]  # after the one that runs
        assert len(first) == CHUNK + 1  # it came in the same iteration, before them
        assert others[:12] == [tuple(text) for text in texts for _ in range(4)]


# Interruptions


class Interrupting(RandomDrafter):
    """A drafter that is interrupted once, when a request has so many tokens."""

    def __init__(self, seed, at):
        super().__init__(seed, VOCAB)
        self.at = at

    def draft(self, context, budget):
        if self.at is not None and len(context.token_ids) >= self.at:
            self.at = None
            signal.raise_signal(signal.SIGINT)
        return super().draft(context, budget)


def both_in_one_round(engine, drafters, interrupt=lambda session: None, **settings):
    """Decode one request here, interrupted, and one in a thread; return what the thread found.

    A round begins only when both wait, until the interruption.
    """
    scheduler = Scheduler(engine)
    requests = [Request(random_prompt(40, i), max_new_tokens=30, **settings) for i in range(2)]
    found, raised, collect = [], [], scheduler._collect

    def waits_for_both():
        with scheduler._changed:
            scheduler._changed.wait_for(lambda: len(scheduler._queue) > 1 or raised, 20)
        leads_here = threading.current_thread() is threading.main_thread()
        if raised or leads_here:
            return collect()
        return []  # the other thread's iteration is empty: this thread leads

    scheduler._collect = waits_for_both
    with ExitStack() as stack:
        mine, other = (
            open_session(engine, request, drafter, stack)
            for request, drafter in zip(requests, drafters, strict=True)
        )
        interrupt(mine)

        def read():
            try:
                for step in scheduler.steps(other):
                    found.extend(step.token_ids)
            except RuntimeError as error:
                found.append(str(error))

        thread = threading.Thread(target=read)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            list(scheduler.steps(mine))
        raised.append(True)
        with scheduler._changed:
            scheduler._changed.notify_all()
        thread.join(60)
        assert not thread.is_alive()
        before = list(mine.answer_ids)
        list(scheduler.steps(mine))  # the interrupted request can continue, too
        assert mine.answer_ids[: len(before)] == before
        assert mine.answer_ids == expected(requests[0].prompt_ids, 30)
    assert scheduler.is_idle
    assert not engine.prefix_cache._open
    again = Scheduler(engine)
    for request in requests:  # what is kept of them is right
        with ExitStack() as stack:
            session = open_session(engine, request, NoDrafter(), stack)
            list(again.steps(session))
            assert session.answer_ids == expected(request.prompt_ids, 30)
    return found


@pytest.mark.parametrize("at", [0, 1])
def test_a_leader_interrupted_while_drafting_leaves_the_other_its_tokens(at):
    drafters = [RandomDrafter(i, VOCAB) for i in range(2)]
    drafters[at] = Interrupting(at, 52)  # the other's drafter too runs in the leading thread
    found = both_in_one_round(make_engine(), drafters)
    assert found == expected(random_prompt(40, 1), 30)


@pytest.mark.parametrize("nth", [1, 3, 9])
def test_a_leader_interrupted_during_a_pass_leaves_the_other_its_tokens(nth):
    engine = make_engine()
    layer = engine.model.network.model.layers[1]
    seen = []

    def interrupt(session):
        def fail(module, args):
            seen.append(1)
            if len(seen) == nth:
                signal.raise_signal(signal.SIGINT)

        engine.handle = layer.register_forward_pre_hook(fail)

    drafters = [RandomDrafter(i, VOCAB) for i in range(2)]
    found = both_in_one_round(engine, drafters, interrupt)
    engine.handle.remove()
    assert found == expected(random_prompt(40, 1), 30)


def test_states_that_were_half_moved_are_computed_again():
    engine = make_engine()

    def interrupt(session):
        accept, count = session.accept, []

        def then_move(sampled):
            step = accept(sampled)
            count.append(1)
            if len(count) == 4:
                spoil(session.verifier.cache)
            return step

        session.accept = then_move

    def spoil(cache):
        forward = engine.model.forward

        def fails(rows, keep):
            engine.model.forward = forward
            for span in rows.spans:
                for buffer in span.cache.buffers:
                    buffer[:, :, : span.cache.length] = 7.0
            signal.raise_signal(signal.SIGINT)

        engine.model.forward = fails

    found = both_in_one_round(engine, [RandomDrafter(i, VOCAB) for i in range(2)], interrupt)
    assert found == expected(random_prompt(40, 1), 30)


@pytest.mark.parametrize(("nth", "goes_on"), [(2, True), (6, False)])
def test_an_interrupted_deterministic_request_continues_exactly_or_fails(nth, goes_on):
    engine = make_engine(exact=True, kept_prefixes=0)
    scheduler = Scheduler(engine)
    request = Request(random_prompt(40), max_new_tokens=30)
    seen = []

    def fail(module, args):
        seen.append(1)
        if len(seen) == nth:
            signal.raise_signal(signal.SIGINT)

    def decoded(drafter):
        with ExitStack() as stack:
            session = open_session(engine, request, drafter, stack)
            list(scheduler.steps(session))
            return session.answer_ids

    plain = decoded(NoDrafter())
    handle = engine.model.network.model.layers[1].register_forward_pre_hook(fail)
    with ExitStack() as stack:
        session = open_session(engine, request, RandomDrafter(1, VOCAB), stack)
        with pytest.raises(KeyboardInterrupt):
            list(scheduler.steps(session))
        handle.remove()
        if goes_on:  # it was reading the prompt
            list(scheduler.steps(session))
            assert session.answer_ids == plain
        else:
            with pytest.raises(RuntimeError, match="closed"):
                list(scheduler.steps(session))
    assert decoded(RandomDrafter(2, VOCAB)) == plain


# Cancelling


def test_a_request_cancelled_before_its_first_step_computes_nothing():
    engine, cancellation = make_engine(), Cancellation()
    scheduler = Scheduler(engine)
    cancellation.cancel()
    with ExitStack() as stack:
        session = open_session(engine, Request([5, 6], max_new_tokens=9), NoDrafter(), stack)
        with pytest.raises(Cancelled):
            scheduler.advance([session], cancellation)
        assert scheduler.is_idle
        assert session.stats.verify_passes == 0
        list(scheduler.steps(session))
        assert session.answer_ids == expected([5, 6], 9)


def test_a_session_that_two_threads_decode_ends_for_both():
    scheduler, ended = Scheduler(make_engine()), []
    prompt = random_prompt(9, 3)

    def decode():
        try:
            for _ in scheduler.steps(session):
                pass
        except RuntimeError as error:
            ended.append(str(error))

    with ExitStack() as stack:
        request = Request(prompt, max_new_tokens=30)
        session = open_session(scheduler.engine, request, NoDrafter(), stack)
        threads = [threading.Thread(target=decode, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert len(ended) < 2
        assert all("one thread at a time" in error or "has ended" in error for error in ended)
        assert session.answer_ids == expected(prompt, 30)
