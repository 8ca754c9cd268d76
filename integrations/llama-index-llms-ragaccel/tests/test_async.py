"""Async calls do not block the event loop, and cancelled ones end their requests."""

import asyncio
import threading

import pytest
from framework_llms import RecordingLLM, tiny_llm, tiny_model, tiny_tokenizer
from llama_index.core.llms import ChatMessage
from ragaccel import LLM

from llama_index.llms.ragaccel import Ragaccel

MESSAGES = [ChatMessage(content="Who trims the wick?")]
METHODS = ["acomplete", "achat", "astream_complete", "astream_chat"]


def call(llm, method, **settings):
    given = MESSAGES if method.endswith("chat") else MESSAGES[0].content
    return getattr(llm, method)(given, **settings)


async def read(llm, method, **settings):
    response = await call(llm, method, **settings)
    if method.startswith("astream"):
        response = [piece async for piece in response][-1]
    return getattr(response, "text", None) or response.message.content


class LoopWaitingLLM(RecordingLLM):
    """Answers only after the event loop has run other work, so a blocked loop fails."""

    def __init__(self, where):
        super().__init__(say=self._say)
        self.where, self.ticked = where, threading.Event()

    def astream(self, prompt, **given):
        if self.where == "preparing":
            self.wait()
        return super().astream(prompt, **given)

    def _say(self, text):
        if self.where == "answering":
            self.wait()
        return "Its keeper does."

    def wait(self):
        assert self.ticked.wait(20), "the event loop stood still"


@pytest.mark.parametrize("where", ["preparing", "answering"])
@pytest.mark.parametrize("method", METHODS)
def test_the_event_loop_is_not_blocked(method, where):
    held = LoopWaitingLLM(where)

    async def ask():
        answer = asyncio.create_task(read(Ragaccel(llm=held), method))
        for _ in range(20):
            await asyncio.sleep(0.001)
        held.ticked.set()
        return await answer

    assert asyncio.run(ask()) == "Its keeper does."


@pytest.mark.parametrize("method", METHODS)
def test_a_model_is_loaded_off_the_event_loop(method, monkeypatch):
    ticked = threading.Event()

    def load(name, **options):
        assert ticked.wait(20), "the event loop stood still"
        return RecordingLLM()

    monkeypatch.setattr(LLM, "load", load)
    monkeypatch.setattr(
        "ragaccel.models.load.read_model_info", lambda *_, **__: pytest.fail("read on the loop")
    )

    async def ask():
        answer = asyncio.create_task(read(Ragaccel(f"a/model-for-{method}"), method))
        for _ in range(20):
            await asyncio.sleep(0.001)
        ticked.set()
        return await answer

    assert asyncio.run(ask()) == "Noted, and thank you."


def test_calls_on_a_loading_model_do_not_block_others(monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def load(name, **options):
        begun.set()
        assert go_on.wait(20), "another model's answer waited for this one's loading"
        return RecordingLLM()

    monkeypatch.setattr(LLM, "load", load)

    async def ask():
        slow = [asyncio.create_task(Ragaccel("slow/model").acomplete("?")) for _ in range(9)]
        while not begun.is_set():
            await asyncio.sleep(0.001)
        answer = await Ragaccel(llm=RecordingLLM()).acomplete("?")
        go_on.set()
        return [answer, *await asyncio.gather(*slow)]

    assert len(asyncio.run(ask())) == 10


class CountingLLM:
    """An LLM whose passes are counted and can be held."""

    def __init__(self):
        self.llm = LLM(tiny_model(), tiny_tokenizer(), save_measurements=False)
        self.there, self.go_on = threading.Event(), threading.Event()
        forward = self.llm.model.forward

        def held(*given, **named):
            self.there.set()
            assert self.go_on.wait(20)
            return forward(*given, **named)

        self.llm.model.forward = held

    async def until_computing(self):
        while not self.there.is_set():
            await asyncio.sleep(0.001)

    async def until_free(self):
        for _ in range(10_000):
            if not self.llm.engine.prefix_cache._open:
                return
            await asyncio.sleep(0.001)
        pytest.fail("a request is still open")


@pytest.mark.parametrize("method", METHODS)
def test_a_cancelled_task_frees_its_request_for_the_next(method):
    watched = CountingLLM()
    llm = Ragaccel(llm=watched.llm)

    async def ask():
        task = asyncio.create_task(read(llm, method, max_new_tokens=4000))
        await watched.until_computing()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        watched.go_on.set()
        await watched.until_free()
        return await read(llm, method, max_new_tokens=20)

    served = asyncio.run(ask())
    turns = [{"role": "user", "content": MESSAGES[0].content}]
    assert served == tiny_llm().generate(turns, max_new_tokens=20).text


@pytest.mark.parametrize("method", ["stream_complete", "stream_chat"])
def test_leaving_a_stream_frees_its_request(method):
    watched = CountingLLM()
    watched.go_on.set()
    pieces = call(Ragaccel(llm=watched.llm), method, max_new_tokens=4000)
    next(pieces)
    assert watched.llm.engine.prefix_cache._open
    pieces.close()
    del pieces
    assert not watched.llm.engine.prefix_cache._open
