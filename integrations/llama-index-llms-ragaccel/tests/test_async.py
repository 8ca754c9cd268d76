"""Async calls do not block the event loop, and cancelled ones end their requests."""

import asyncio
import threading

import pytest
from framework_llms import RecordingLLM, tiny_llm, tiny_model, tiny_tokenizer
from methods import ASYNC_METHODS, TURNS, aread, call, text_of
from ragaccel import LLM

from llama_index.llms.ragaccel import Ragaccel

METHODS = pytest.mark.parametrize("method", ASYNC_METHODS)


def read_while_ticking(llm, method, ticked):
    """Return the answer of a call, of which a part waits until the event loop has run."""

    async def ask():
        answer = asyncio.create_task(aread(llm, method))
        for _ in range(20):
            await asyncio.sleep(0.001)
        ticked.set()
        return text_of(await answer)

    return asyncio.run(ask())


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
@METHODS
def test_the_event_loop_is_not_blocked(method, where):
    held = LoopWaitingLLM(where)
    assert read_while_ticking(Ragaccel(llm=held), method, held.ticked) == "Its keeper does."


@METHODS
def test_a_model_is_loaded_off_the_event_loop(method, monkeypatch):
    ticked = threading.Event()

    def load(name, **options):
        assert ticked.wait(20), "the event loop stood still"
        return RecordingLLM()

    monkeypatch.setattr(LLM, "load", load)
    monkeypatch.setattr(
        "ragaccel.models.load.read_model_info", lambda *_, **__: pytest.fail("read on the loop")
    )
    llm = Ragaccel(f"a/model-for-{method}")
    assert read_while_ticking(llm, method, ticked) == "Noted, and thank you."


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


def held_llm():
    """Return an LLM whose passes can be held, and the events of a pass and of its release."""
    llm = LLM(tiny_model(), tiny_tokenizer(), save_measurements=False)
    there, go_on, forward = threading.Event(), threading.Event(), llm.model.forward

    def held(*given, **named):
        there.set()
        assert go_on.wait(20)
        return forward(*given, **named)

    llm.model.forward = held
    return llm, there, go_on


@METHODS
def test_a_cancelled_task_frees_its_request_for_the_next(method):
    held, there, go_on = held_llm()
    llm = Ragaccel(llm=held)

    async def ask():
        task = asyncio.create_task(aread(llm, method, max_new_tokens=4000))
        await asyncio.to_thread(there.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        for _ in range(10_000):
            if not held.engine.prefix_cache._open:
                break
            await asyncio.sleep(0.001)
        assert not held.engine.prefix_cache._open
        return text_of(await aread(llm, method, max_new_tokens=20))

    assert asyncio.run(ask()) == tiny_llm().generate(TURNS, max_new_tokens=20).text


@pytest.mark.parametrize("method", ["stream_complete", "stream_chat"])
def test_leaving_a_stream_frees_its_request(method):
    held, _, go_on = held_llm()
    go_on.set()
    pieces = call(Ragaccel(llm=held), method, max_new_tokens=4000)
    next(pieces)
    assert held.engine.prefix_cache._open
    pieces.close()
    del pieces
    assert not held.engine.prefix_cache._open
