"""A callback's error reaches its owner alone; a signal's error reaches the main thread."""

import asyncio
import signal
import sys
import threading
from contextlib import ExitStack
from itertools import product

import pytest
from decoding import open_session
from fakes import RandomDrafter
from tiny_models import VOCAB, generate, random_prompt, tiny_model

from ragaccel.decoding import NoDrafter, Request
from ragaccel.engine import Engine, Scheduler, run_uninterrupted
from ragaccel.models import HuggingFaceModel

pytestmark = pytest.mark.usefixtures("interrupts")

NEW = 30
PROMPTS = [random_prompt(12, seed) for seed in (1, 2)]


class FailingDrafter(RandomDrafter):
    def __init__(self, fail):
        super().__init__(1, VOCAB)
        self.fail = fail

    def draft(self, context, budget):
        if len(context.token_ids) > 20:
            self.fail()
        return super().draft(context, budget)


class FailingRule:
    def __init__(self, fail):
        self.fail = fail

    def cut(self, token_ids, start):
        if len(token_ids) > 8:
            self.fail()


def failing_processor(fail):
    def process(ids, scores):
        if ids.shape[1] > 20:
            fail()
        return scores

    return process


def failing(place, fail):
    """A request whose callback fails after a few tokens, and its drafter."""
    how = {"max_new_tokens": NEW}
    if place == "drafter":
        return Request(PROMPTS[0], **how), FailingDrafter(fail)
    if place == "processor":
        return Request(PROMPTS[0], processors=[failing_processor(fail)], **how), NoDrafter()
    return Request(PROMPTS[0], stop_rules=[FailingRule(fail)], **how), NoDrafter()


def run_both(place, fail, *, main_fails, led_by_main):
    """Decode a failing request and a sound one in shared passes; return how each of them ended.

    One is decoded in the main thread, the other in another; one of the threads leads all rounds
    that both take part in.
    """
    engine = Engine(HuggingFaceModel(tiny_model("llama")), prefill_chunk=16)
    scheduler = Scheduler(engine)
    ended, collect = {}, scheduler._collect

    def waits_for_both():
        with scheduler._changed:
            scheduler._changed.wait_for(lambda: len(scheduler._queue) > 1 or ended, 20)
        is_main = threading.current_thread() is threading.main_thread()
        return collect() if ended or is_main == led_by_main else []

    scheduler._collect = waits_for_both

    def decode(name, request, drafter):
        try:
            with ExitStack() as stack:
                session = open_session(engine, request, drafter, stack)
                list(scheduler.steps(session))
                ended[name] = session.answer_ids
        except BaseException as error:
            ended[name] = error
        with scheduler._changed:
            scheduler._changed.notify_all()

    work = {
        "failing": ("failing", *failing(place, fail)),
        "sound": ("sound", Request(PROMPTS[1], max_new_tokens=NEW), NoDrafter()),
    }
    mine = work.pop("failing" if main_fails else "sound")
    (other,) = work.values()
    thread = threading.Thread(target=decode, args=other)
    thread.start()
    decode(*mine)
    thread.join(60)
    assert not thread.is_alive()
    assert not engine.prefix_cache._open
    return ended["failing"], ended["sound"]


@pytest.mark.parametrize(
    ("kind", "main_fails", "led_by_main"),
    [
        *product([ValueError, KeyboardInterrupt], [False, True], [False, True]),
        *((kind, False, True) for kind in (SystemExit, GeneratorExit, asyncio.CancelledError)),
    ],
)
@pytest.mark.parametrize("place", ["drafter", "processor", "rule"])
def test_a_callbacks_error_reaches_its_owner_alone(kind, place, main_fails, led_by_main):
    raised = kind("mine")

    def fail():
        raise raised

    error, tokens = run_both(place, fail, main_fails=main_fails, led_by_main=led_by_main)
    assert error is raised
    assert tokens == generate(tiny_model("llama"), PROMPTS[1], NEW)


@pytest.mark.parametrize("place", ["drafter", "processor", "rule"])
def test_an_error_raised_in_c_for_a_callback_is_the_callbacks(place):
    error, tokens = run_both(place, lambda: sys.exit(3), main_fails=False, led_by_main=True)
    assert isinstance(error, SystemExit)
    assert tokens == generate(tiny_model("llama"), PROMPTS[1], NEW)


class Terminated(BaseException):
    pass


class TimeoutByAlarmError(Exception):
    pass


def handler_that_raises(kind):
    def handle(number, frame):
        raise kind

    return handle


@pytest.mark.parametrize("place", ["drafter", "processor", "rule"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, Terminated, TimeoutByAlarmError])
def test_a_signal_during_anothers_callback_reaches_the_main_thread_alone(place, kind):
    once = []

    def fail():
        if not once:
            once.append(1)
            signal.raise_signal(signal.SIGINT if kind is KeyboardInterrupt else signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, handler_that_raises(kind))
    try:
        tokens, error = run_both(place, fail, main_fails=False, led_by_main=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert isinstance(error, kind)
    assert tokens == generate(tiny_model("llama"), PROMPTS[0], NEW)


def test_uninterrupted_work_ends_before_a_signal_is_raised():
    done = []

    def work():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        run_uninterrupted(work)
    assert done


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_callback_of_an_awaited_request_does_not_end_the_event_loop(kind):
    from tiny_llm import tiny_llm

    llm = tiny_llm()
    wanted = llm.generate("Who trims?", max_new_tokens=NEW, remember=False).text

    def fail(ids, scores):
        raise kind("mine")

    async def both():
        return await asyncio.gather(
            llm.agenerate("lamp", logits_processors=[fail], remember=False),
            llm.agenerate("Who trims?", max_new_tokens=NEW, remember=False),
            return_exceptions=True,
        )

    error, sound = asyncio.run(both())
    assert isinstance(error, RuntimeError)
    assert isinstance(error.__cause__, kind)
    assert sound.text == wanted
