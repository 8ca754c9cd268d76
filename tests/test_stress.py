"""Everything at once: threads, tasks, lists, interleaved streams, failures and cancellations."""

import asyncio
import gc
import random
import signal
import threading
import time

import pytest
import torch
from tiny_llm import tiny_llm, tiny_tokenizer

from ragaccel.decoding import Drafter, DraftTree, NoDrafter
from ragaccel.llm import LLM

PROMPTS = [
    [5 + (7 * i * j) % 300 for j in range(length)]
    for i, length in enumerate((3, 40, 90, 17, 64, 130, 9, 30), start=1)
]
NEW = 14


class Chance(Drafter):
    """Drafts a known answer beside wrong tokens; with ``fails`` it sometimes raises."""

    def __init__(self, alone, seed=0, fails=0.0):
        self.random, self.fails = random.Random(seed), fails
        self.texts = [[*prompt, *alone[i]] for i, prompt in enumerate(PROMPTS)]

    def draft(self, context, budget):
        if self.random.random() < self.fails:
            raise ZeroDivisionError("a drafter's own")
        known = list(context.token_ids)
        text = next((text for text in self.texts if text[: len(known)] == known), known)
        right = text[len(known) : len(known) + self.random.randrange(4)]
        wrong = {self.random.randrange(380) for _ in range(self.random.randrange(3))}
        wrong -= set(right[:1])
        draft_ids = [*wrong, *right][: max(0, budget)]
        parents = [0 if i <= len(wrong) else i for i in range(len(draft_ids))]
        size = 1 + len(draft_ids)
        return DraftTree((known[-1], *draft_ids), (-1, *parents), (1.0,) * size, ((),) * size)


def check(answers, numbers, alone):
    assert [answer.token_ids for answer in answers] == [alone[number] for number in numbers]


def texts_of(llm, alone):
    return [llm.tokenizer.decode(tokens) for tokens in alone]


def streams_in_turn(llm, chance, alone):
    numbers = chance.sample(range(len(PROMPTS)), 3)
    streams = [llm.stream(PROMPTS[number], max_new_tokens=NEW) for number in numbers]
    left = list(streams)
    while left:
        left = [stream for stream in left if next(stream, None) is not None]
    check([stream.answer for stream in streams], numbers, alone)


def a_list(llm, chance, alone):
    numbers = [chance.randrange(len(PROMPTS)) for _ in range(4)]
    check(llm.generate([PROMPTS[i] for i in numbers], max_new_tokens=NEW), numbers, alone)


def one_that_fails(llm, chance, alone):
    number = chance.randrange(len(PROMPTS))
    drafter = Chance(alone, chance.random(), fails=0.2)
    try:
        answer = llm.generate(PROMPTS[number], max_new_tokens=NEW, drafter=drafter)
    except ZeroDivisionError:
        return
    check([answer], [number], alone)


def one_closed_elsewhere(llm, chance, alone):
    number = chance.randrange(len(PROMPTS))
    stream = llm.stream(PROMPTS[number], max_new_tokens=NEW)
    closer = threading.Timer(chance.random() * 0.05, stream.close)
    closer.start()
    text = "".join(stream)
    closer.join()
    assert llm.tokenizer.decode(alone[number]).startswith(text.rstrip("\ufffd"))


def tasks(llm, chance, alone):
    async def ask(number):
        kind = chance.randrange(4)
        if kind == 0:
            answers = await llm.agenerate([PROMPTS[number]] * 2, max_new_tokens=NEW)
            return check(answers, [number] * 2, alone)
        if kind == 1:
            pieces = [piece async for piece in llm.astream(PROMPTS[number], max_new_tokens=NEW)]
            assert "".join(pieces) == texts_of(llm, alone)[number]
            return None
        call = llm.agenerate(PROMPTS[number], max_new_tokens=NEW)
        if kind == 2:
            return check([await call], [number], alone)
        try:
            await asyncio.wait_for(call, chance.random() * 0.05)
        except asyncio.TimeoutError:
            return None

    async def all_of_them():
        await asyncio.gather(*(ask(number) for number in range(len(PROMPTS))))

    asyncio.run(all_of_them())


KINDS = (streams_in_turn, a_list, one_that_fails, one_closed_elsewhere, tasks)


def run(seed, seconds_at_most, turns, **options):
    plain = tiny_llm(drafter=NoDrafter())
    alone = [plain.generate(prompt, max_new_tokens=NEW).token_ids for prompt in PROMPTS]
    llm = LLM(plain.model.model, tiny_tokenizer(), drafter=Chance(alone, seed), **options)
    llm.engine.prefill_chunk = 32
    failures = []

    def work(number):
        chance = random.Random(seed * 100 + number)
        try:
            for turn in range(turns):
                KINDS[(number + turn) % len(KINDS)](llm, chance, alone)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [
        threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(KINDS))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds_at_most)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
    for _ in range(500):  # those cancelled last may still be in their round
        if llm.scheduler.is_idle and not llm.engine.prefix_cache._open:
            break
        threading.Event().wait(0.01)
    assert llm.scheduler.is_idle
    assert not llm.engine.prefix_cache._open
    check(llm.generate(PROMPTS, max_new_tokens=NEW), range(len(PROMPTS)), alone)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_batch": 2, "token_budget": 3}], ids=str)
def test_everything_at_once(options):
    run(1, 60, 3, save_measurements=False, **options)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_any_moment_disturb_nobody_else(interrupts):
    plain = tiny_llm(drafter=NoDrafter())
    alone = [plain.generate(prompt, max_new_tokens=NEW).token_ids for prompt in PROMPTS]
    llm = LLM(plain.model.model, tiny_tokenizer(), drafter=Chance(alone), save_measurements=False)
    llm.engine.prefill_chunk = 32
    stopping, chance, failures, num_interrupts = threading.Event(), random.Random(5), [], 0

    def work():
        while not stopping.is_set():
            try:
                a_list(llm, random.Random(), alone)
            except BaseException as error:  # noqa: PERF203 - go on
                if "ask again" not in str(error):
                    failures.append(error)

    others = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for other in others:
        other.start()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        until = time.monotonic() + 15
        while time.monotonic() < until:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + 0.1 * chance.random() ** 2)
                chance.choice((streams_in_turn, a_list))(llm, chance, alone)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:  # noqa: PERF203 - go on
                num_interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        stopping.set()
    for other in others:
        other.join(60)
    assert not any(other.is_alive() for other in others)
    assert not failures
    assert num_interrupts > 10
    check(llm.generate(PROMPTS, max_new_tokens=NEW), range(len(PROMPTS)), alone)
    gc.collect()
    assert llm.scheduler.is_idle
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert not [*llm.engine.prefix_cache._open]  # its length counts those being freed
