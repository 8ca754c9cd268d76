"""Token counters, callbacks and instrumentation see every call exactly once."""

import asyncio

import pytest
from framework_llms import RecordingLLM, tiny_llm
from llama_index.core.callbacks import (
    CallbackManager,
    CBEventType,
    EventPayload,
    LlamaDebugHandler,
    TokenCountingHandler,
)
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import ChatMessage

from llama_index.llms.ragaccel import Ragaccel

TEXT = "Who trims the wick?"
MESSAGES = [ChatMessage(content=TEXT)]
METHODS = [
    prefix + kind for kind in ("complete", "chat") for prefix in ("", "stream_", "a", "astream_")
]


def run(llm, method):
    given = MESSAGES if method.endswith("chat") else TEXT
    call = getattr(llm, method)

    async def awaited():
        response = await call(given)
        return [one async for one in response][-1] if method.startswith("astream") else response

    if method.startswith("a"):
        return asyncio.run(awaited())
    return list(call(given))[-1] if method.startswith("stream") else call(given)


@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_counted_once_and_exactly(method):
    counter = TokenCountingHandler(tokenizer=lambda text: pytest.fail("estimated"))
    llm = Ragaccel(llm=tiny_llm(), max_new_tokens=9, callback_manager=CallbackManager([counter]))
    response = run(llm, method)
    usage = tiny_llm().generate([{"role": "user", "content": TEXT}], max_new_tokens=9).usage
    (counted,) = counter.llm_token_counts
    assert counted.prompt_token_count == usage.prompt_tokens
    assert counted.completion_token_count == usage.completion_tokens == 9
    assert response.raw["usage"]["total_tokens"] == counted.total_token_count


@pytest.mark.parametrize("method", METHODS)
def test_callbacks_see_one_call(method):
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm = Ragaccel(llm=RecordingLLM(), callback_manager=CallbackManager([debug]))
    run(llm, method)
    ((start, end),) = debug.get_event_pairs(CBEventType.LLM)
    assert start.payload[EventPayload.SERIALIZED]["class_name"] == "Ragaccel"
    what = EventPayload.RESPONSE if method.endswith("chat") else EventPayload.COMPLETION
    assert "Noted, and thank you." in str(end.payload[what])


class Seen(BaseEventHandler):
    names: list

    @classmethod
    def class_name(cls):
        return "Seen"

    def handle(self, event, **_):
        self.names.append(event.class_name())


@pytest.fixture
def seen():
    handler = Seen(names=[])
    handlers = get_dispatcher().event_handlers
    handlers.append(handler)
    yield handler.names
    handlers.remove(handler)


@pytest.mark.parametrize("method", METHODS)
def test_instrumentation_sees_one_call(method, seen):
    run(Ragaccel(llm=RecordingLLM()), method)
    kind = "LLMChat" if method.endswith("chat") else "LLMCompletion"
    assert seen[0] == f"{kind}StartEvent"
    assert seen[-1] == f"{kind}EndEvent"
    between = set(seen[1:-1])
    assert between == ({f"{kind}InProgressEvent"} if "stream" in method else set())


@pytest.mark.parametrize("method", METHODS)
def test_a_failed_call_is_reported(method):
    class Broken(RecordingLLM):
        def _said(self, answer, text, passages):
            yield "The "
            raise RuntimeError("the machine is gone")

    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm = Ragaccel(llm=Broken(), callback_manager=CallbackManager([debug]))
    with pytest.raises(RuntimeError, match="machine is gone"):
        run(llm, method)
    ((_, end),) = debug.get_event_pairs(CBEventType.LLM)
    assert isinstance(end.payload[EventPayload.EXCEPTION], RuntimeError)
