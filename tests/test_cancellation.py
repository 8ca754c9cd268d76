"""A cancelled request ends after its current step and changes no other request."""

import asyncio
import threading
from contextlib import suppress

import pytest
from tiny_llm import tiny_llm, tiny_tokenizer

from ragaccel.decoding import NoDrafter
from ragaccel.llm import LLM
from ragaccel.passage import Passage
from ragaccel.rag import RAG

LONG = [5 + i % 300 for i in range(1600)]
OTHER = "Who trims the wick?"
CHUNK = 32


@pytest.fixture
def llm():
    return LLM(
        tiny_llm().model.model, tiny_tokenizer(), drafter=NoDrafter(), save_measurements=False
    )


class Passes:
    """Counts passes, and lets none begin after the n-th until it is told to go on."""

    def __init__(self, llm, stop_at):
        self.count, self.stop_at, self.forward = 0, stop_at, llm.model.forward
        self.is_there, self.go_on = threading.Event(), threading.Event()
        llm.engine.prefill_chunk = CHUNK
        llm.model.forward = self
        self.llm = llm

    def __call__(self, rows, keep):
        self.count += 1
        if self.count == self.stop_at:
            self.is_there.set()
            assert self.go_on.wait(30)
        return self.forward(rows, keep)

    async def until_there(self):
        assert await asyncio.to_thread(self.is_there.wait, 30)

    async def until_idle(self):
        """Wait until nobody computes, and say how many passes there were."""
        for _ in range(3000):
            if self.llm.scheduler.is_idle and not self.llm.engine.prefix_cache._open:
                return self.count
            await asyncio.sleep(0.01)
        raise TimeoutError


async def cancelled_at(passes, awaitable):
    task = asyncio.create_task(awaitable)
    await passes.until_there()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    passes.go_on.set()
    return await passes.until_idle()


@pytest.mark.parametrize("stop_at", [1, 7, 60])  # two while prompts are read, one while answering
@pytest.mark.parametrize("what", ["one", "list", "stream"])
def test_a_cancelled_task_ends_after_its_step(llm, what, stop_at):
    passes = Passes(llm, stop_at)

    async def read():
        async for _ in llm.astream(LONG, max_new_tokens=300):
            pass

    async def ask():
        if what == "stream":
            return await cancelled_at(passes, read())
        prompt = LONG if what == "one" else [LONG, LONG[300:], LONG[600:1300]]
        return await cancelled_at(passes, llm.agenerate(prompt, max_new_tokens=300))

    assert asyncio.run(ask()) <= stop_at + 1  # the pass of the round whose prompt was read
    llm.model.forward = passes.forward
    plain = tiny_llm(drafter=NoDrafter())
    for prompt in (OTHER, LONG):  # what is kept of it is right
        found = llm.generate(prompt, max_new_tokens=20).token_ids
        assert found == plain.generate(prompt, max_new_tokens=20).token_ids


def test_others_in_the_same_passes_get_their_own_tokens(llm):
    prompts = [f"{OTHER} {i}" for i in range(6)]
    plain = tiny_llm(drafter=NoDrafter())
    alone = [plain.generate(prompt, max_new_tokens=60).token_ids for prompt in prompts]
    passes = Passes(llm, 20)

    async def ask():
        kept = [asyncio.create_task(llm.agenerate(p, max_new_tokens=60)) for p in prompts]
        gone = [
            asyncio.create_task(llm.agenerate([LONG, LONG[900:]], max_new_tokens=300)),
            asyncio.create_task(llm.agenerate(LONG[400:], max_new_tokens=300)),
        ]
        await passes.until_there()
        for task in gone:
            task.cancel()
        passes.go_on.set()
        ended = await asyncio.gather(*gone, return_exceptions=True)
        assert {type(each) for each in ended} == {asyncio.CancelledError}
        return [answer.token_ids for answer in await asyncio.gather(*kept)]

    assert asyncio.run(ask()) == alone
    assert not llm.engine.prefix_cache._open


class Found:
    def search(self, query, k=6):
        return [Passage("a", "The keeper trims the wick at dusk. " * 40)]


@pytest.mark.parametrize("answers", [False, True])
def test_a_stream_closed_by_another_thread_stops_reading_its_prompt(llm, answers):
    passes, seen = Passes(llm, 3), []

    class Remembered:
        def similar(self, question, namespace):
            return []

        def add(self, *_):
            seen.append("added")

    rag = RAG(llm, Found(), answers=Remembered() if answers else None, max_new_tokens=64)
    stream = rag.stream(OTHER)
    reader = threading.Thread(target=lambda: seen.extend(stream))
    reader.start()
    assert passes.is_there.wait(30)
    stream.close()
    passes.go_on.set()
    reader.join(30)
    assert not reader.is_alive()
    assert (passes.count, seen) == (3, [])
    assert not llm.engine.prefix_cache._open
    with suppress(StopIteration):
        next(stream)
    with pytest.raises(RuntimeError, match="closed before its end"):
        _ = stream.answer
