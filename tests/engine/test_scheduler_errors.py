"""An error of a callback reaches its owner alone; an interruption reaches the main thread alone."""

import asyncio
import signal
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from itertools import product

import pytest
from decoding import decode, open_session, watch_passes
from fakes import RandomDrafter
from tiny_models import VOCAB, generate, random_prompt, tiny_model

from ragaccel.decoding import NoDrafter, Request
from ragaccel.engine import Engine, EngineVerifier, Scheduler, run_uninterrupted
from ragaccel.models import HuggingFaceModel

pytestmark = pytest.mark.usefixtures("interrupts")

NEW, MOST = 30, 110
START_THREAD = "ragaccel.engine.interrupts.start_new_thread"
PROMPTS = [random_prompt(40, seed) for seed in range(4)]


def make_engine(**settings):
    return Engine(HuggingFaceModel(tiny_model("llama")), prefill_chunk=16, **settings)


def expected(number, new):
    return generate(tiny_model("llama"), PROMPTS[number], new)


def in_main_thread():
    return threading.current_thread() is threading.main_thread()


def in_other_thread():
    """Whether the caller of the other request leads: the main thread accepts in a third one."""
    return threading.current_thread().name == "other"


class Calling(RandomDrafter):
    """Calls something before it drafts, once there are so many tokens."""

    def __init__(self, call, num_tokens=50):
        super().__init__(1, VOCAB)
        self.call, self.num_tokens = call, num_tokens

    def draft(self, context, budget):
        if len(context.token_ids) > self.num_tokens:
            self.call()
        return super().draft(context, budget)


class CallingRule:
    def __init__(self, call):
        self.call = call

    def cut(self, token_ids, start):
        if len(token_ids) > 10:
            self.call()


def calling_processor(call):
    def process(ids, scores):
        if ids.shape[1] > 50:
            call()
        return scores

    return process


def calling(place, call, number=0):
    """Return a request one of whose callbacks calls something after some tokens; its drafter."""
    callbacks = {
        "processor": {"processors": [calling_processor(call)]},
        "rule": {"stop_rules": [CallingRule(call)]},
    }
    request = Request(PROMPTS[number], max_new_tokens=MOST, **callbacks.get(place, {}))
    return request, Calling(call) if place == "drafter" else NoDrafter()


def sound(number, drafter=None, new=MOST):
    return Request(PROMPTS[number], max_new_tokens=new), drafter or NoDrafter()


@contextmanager
def two_threads(engine, here, there, *, main_leads=True):
    """Decode a request in this thread and one in another, which share passes.

    The thread that is not to lead pauses after each of its steps. A request is decoded until it
    has ``NEW`` tokens and the other has ended. Yields the scheduler, the sessions and how both
    ended: an error, or the tokens.
    """
    scheduler, ended = Scheduler(engine), {}
    with ExitStack() as stack:
        sessions = [open_session(engine, *one, stack) for one in (here, there)]

        def read(number):
            try:
                for _ in scheduler.steps(sessions[number]):
                    if in_main_thread() != main_leads:
                        time.sleep(0.002)
                    if len(sessions[number].answer_ids) >= NEW and 1 - number in ended:
                        break
                ended[number] = list(sessions[number].answer_ids)
            except BaseException as error:
                ended[number] = error

        thread = threading.Thread(target=read, args=(1,), name="other", daemon=True)
        thread.start()
        read(0)
        thread.join(60)
        assert not thread.is_alive()
        yield scheduler, sessions, (ended[0], ended[1])
    assert scheduler.is_idle
    assert not engine.prefix_cache._open


def assert_right(tokens, number):
    assert len(tokens) >= NEW
    assert tokens == expected(number, len(tokens))


# Callbacks.


class Unallocatable(RandomDrafter):
    """Fails after some drafts, when rows are allocated to the next."""

    drafts = 0

    @property
    def mask_ids(self):
        if self.drafts > 9:
            raise ZeroDivisionError
        return (3,)

    def draft(self, context, budget):
        self.drafts += 1
        return super().draft(context, budget)


@pytest.mark.parametrize(
    ("place", "exact"),
    [*product(["drafter", "processor", "rule"], [False, True]), ("allocation", False)],
)
def test_of_a_batch_the_owner_alone_fails(place, exact):
    def fail():
        raise ZeroDivisionError

    engine = make_engine(exact=exact)
    scheduler, broken = Scheduler(engine), calling(place, fail, 1)
    if place == "allocation":
        broken = sound(1, Unallocatable(1, VOCAB))
    with ExitStack() as stack:
        session = open_session(engine, *broken, stack, token_budget=4)  # whatever drafts cost
        others = [open_session(engine, *sound(i, new=60), stack) for i in (0, 2, 3)]
        before = []

        def advance():
            before[:] = [len(one.answer_ids) for one in others]
            return scheduler.advance([others[0], session, *others[1:]])

        with pytest.raises(ZeroDivisionError):
            list(iter(advance, None))
        for one, length in zip(others, before, strict=True):
            assert len(one.answer_ids) > length, "the others made their step"
        assert session.answer_ids == expected(1, len(session.answer_ids)) != []
        for one, number in zip(others, (0, 2, 3), strict=True):
            list(scheduler.steps(one))
            assert one.answer_ids == expected(number, 60)


@pytest.mark.parametrize(
    ("kind", "main_fails", "main_leads"),
    [
        *product([ValueError, KeyboardInterrupt], [False, True], [False, True]),
        *((kind, False, True) for kind in (SystemExit, GeneratorExit, asyncio.CancelledError)),
        (sys.exit, False, True),  # raised in C
    ],
)
@pytest.mark.parametrize("place", ["drafter", "processor", "rule"])
def test_a_callbacks_error_reaches_its_owner_alone(kind, place, main_fails, main_leads):
    raised = SystemExit if kind is sys.exit else kind("mine")

    def fail():
        if in_other_thread() != main_leads:
            if kind is sys.exit:
                sys.exit(3)
            raise raised

    both = [calling(place, fail), sound(1)]
    order = both if main_fails else both[::-1]
    with two_threads(make_engine(), *order, main_leads=main_leads) as (_, _, ended):
        error, tokens = ended if main_fails else ended[::-1]
        assert error is raised or (kind is sys.exit and isinstance(error, SystemExit))
        assert_right(tokens, 1)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_callback_of_an_awaited_request_does_not_end_the_event_loop(kind):
    from tiny_llm import tiny_llm

    llm = tiny_llm()
    settings = {"max_new_tokens": NEW, "remember": False}
    wanted = llm.generate("Who trims?", **settings).text

    def fail(ids, scores):
        raise kind("mine")

    async def both():
        return await asyncio.gather(
            llm.agenerate("lamp", logits_processors=[fail], remember=False),
            llm.agenerate("Who trims?", **settings),
            return_exceptions=True,
        )

    error, answer = asyncio.run(both())
    assert isinstance(error, RuntimeError)
    assert isinstance(error.__cause__, kind)
    assert answer.text == wanted


# Signals: the main thread decodes request 0, another one request 1.


@pytest.mark.parametrize("main_leads", [True, False])
def test_a_callback_cannot_ask_the_model_that_waits_for_it(main_leads, monkeypatch):
    engine, made, right = make_engine(), [], Scheduler

    def make_scheduler(engine):
        made.append(right(engine))
        return made[-1]

    def ask():
        if in_other_thread() != main_leads:
            with ExitStack() as stack:
                list(made[0].steps(open_session(engine, *sound(2), stack)))

    monkeypatch.setattr(sys.modules[__name__], "Scheduler", make_scheduler)
    decoding = two_threads(engine, sound(0), calling("rule", ask, 1), main_leads=main_leads)
    with decoding as (_, _, (mine, others)):
        assert_right(mine, 0)
        assert "cannot ask the model that waits for it" in str(others)


class Terminated(BaseException):
    pass


class TimeoutByAlarmError(Exception):
    pass


def raise_once(number=signal.SIGINT):
    """Return a callback that raises a signal, the first time that the main thread leads."""
    raised = []

    def call():
        if not in_other_thread() and not raised:
            raised.append(1)
            signal.raise_signal(number)

    return call


def assert_goes_on(engine, scheduler, sessions, ended):
    """Assert that the other request has its tokens, and that the interrupted one continues."""
    assert_right(ended[1], 1)
    before = list(sessions[0].answer_ids)
    list(scheduler.steps(sessions[0]))
    assert sessions[0].answer_ids[: len(before)] == before
    assert sessions[0].answer_ids == expected(0, MOST)
    for number in (0, 1):  # what is kept of them is right
        assert decode(engine, sound(number, new=NEW)[0], NoDrafter()) == expected(number, NEW)


@pytest.mark.parametrize("place", ["drafter", "processor", "rule"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, Terminated, TimeoutByAlarmError])
def test_a_signal_during_anothers_callback_reaches_the_main_thread_alone(place, kind):
    def handle(number, frame):
        raise kind

    number = signal.SIGINT if kind is KeyboardInterrupt else signal.SIGTERM
    before, engine = signal.signal(signal.SIGTERM, handle), make_engine()
    try:
        with two_threads(engine, sound(0), calling(place, raise_once(number), 1)) as decoded:
            assert isinstance(decoded[2][0], kind)
            assert_goes_on(engine, *decoded)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("moment", ["own drafter", "first pass", "third pass", "shared pass"])
def test_an_interrupted_leader_leaves_the_other_its_tokens(moment):
    engine, call = make_engine(), raise_once()
    mine, other = sound(0, RandomDrafter(1, VOCAB)), sound(1, RandomDrafter(2, VOCAB))
    if moment == "own drafter":
        with two_threads(engine, calling("drafter", call), other) as decoded:
            assert isinstance(decoded[2][0], KeyboardInterrupt)
            assert_goes_on(engine, *decoded)
        return
    seen, led = [], {"first pass": 1, "third pass": 3, "shared pass": 2}[moment]

    def count(rows):
        if in_main_thread() and (moment != "shared pass" or len(rows.spans) == 2):
            seen.append(1)

    def interrupt(module, args):  # when the first layer has written its states
        if len(seen) >= led:
            call()

    watch_passes(engine, count)
    handle = engine.model.network.model.layers[1].register_forward_pre_hook(interrupt)
    try:
        with two_threads(engine, mine, other) as decoded:
            assert isinstance(decoded[2][0], KeyboardInterrupt)
            handle.remove()
            assert_goes_on(engine, *decoded)
    finally:
        handle.remove()


def test_a_second_interrupt_does_not_keep_the_others_requests_from_being_repeated(monkeypatch):
    engine, call, again = make_engine(), raise_once(), raise_once()
    restart = EngineVerifier.restart

    def interrupted_restart(verifier):
        again()
        return restart(verifier)

    monkeypatch.setattr(EngineVerifier, "restart", interrupted_restart)
    seen = []

    def spoil(rows):
        seen.append(len(rows.spans))
        if in_main_thread() and seen.count(2) == 4:
            for span in rows.spans:
                for buffer in span.cache.buffers:
                    buffer[:, :, : span.cache.length] = 7.0
            call()

    watch_passes(engine, spoil)
    with two_threads(engine, *(sound(i, RandomDrafter(i, VOCAB)) for i in range(2))) as decoded:
        assert isinstance(decoded[2][0], KeyboardInterrupt)
        assert_right(decoded[2][1], 1)


def test_states_that_were_half_moved_are_computed_again():
    engine, call, shared = make_engine(), raise_once(), []

    def spoil(rows):
        if not in_main_thread() or len(rows.spans) < 2:
            return
        shared.append(1)
        if len(shared) == 4:
            for span in rows.spans:
                for buffer in span.cache.buffers:
                    buffer[:, :, : span.cache.length] = 7.0
            call()

    watch_passes(engine, spoil)
    both = [sound(i, RandomDrafter(i, VOCAB)) for i in range(2)]
    with two_threads(engine, *both) as decoded:
        assert isinstance(decoded[2][0], KeyboardInterrupt)
        assert_goes_on(engine, *decoded)


@pytest.mark.parametrize(("nth", "goes_on"), [(2, True), (6, False)])
def test_an_interrupted_deterministic_request_continues_exactly_or_fails(nth, goes_on):
    engine = make_engine(exact=True, kept_prefixes=0)
    scheduler, (request, _) = Scheduler(engine), sound(0, new=NEW)
    plain, seen = decode(engine, request, NoDrafter()), []

    def fail(module, args):
        seen.append(1)
        if len(seen) == nth:
            signal.raise_signal(signal.SIGINT)

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
    assert decode(engine, request, RandomDrafter(2, VOCAB)) == plain


def test_uninterrupted_work_ends_before_a_signal_is_raised():
    done = []

    def work():
        for _ in range(2):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        run_uninterrupted(work)
    assert done


def test_an_error_of_uninterrupted_work_is_raised_to_the_caller():
    with pytest.raises(ZeroDivisionError):
        run_uninterrupted(lambda: 1 // 0)


def test_uninterrupted_work_runs_once_if_a_signal_comes_as_its_thread_starts(monkeypatch):
    done, start = [], threading._start_new_thread

    def start_once(*args):
        monkeypatch.setattr(START_THREAD, refuse)
        start(*args)
        while not done:
            time.sleep(0.001)
        signal.raise_signal(signal.SIGINT)

    def refuse(*args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(START_THREAD, start_once)
    with pytest.raises(KeyboardInterrupt):
        run_uninterrupted(lambda: done.append(1))
    assert done == [1]
