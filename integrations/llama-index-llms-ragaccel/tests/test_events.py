"""Token counters, callbacks and instrumentation see every call exactly once."""

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
from methods import METHODS, TURNS, read, text_of

from llama_index.llms.ragaccel import Ragaccel


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
def test_a_call_is_seen_once_with_its_tokens(method, seen):
    counter = TokenCountingHandler(tokenizer=lambda text: pytest.fail("estimated"))
    debug = LlamaDebugHandler(print_trace_on_end=False)
    callbacks = CallbackManager([counter, debug])
    response = read(Ragaccel(llm=tiny_llm(), max_new_tokens=9, callback_manager=callbacks), method)
    usage = tiny_llm().generate(TURNS, max_new_tokens=9).usage
    (counted,) = counter.llm_token_counts
    assert counted.prompt_token_count == usage.prompt_tokens
    assert counted.completion_token_count == usage.completion_tokens == 9
    assert response.raw["usage"]["total_tokens"] == counted.total_token_count
    ((start, end),) = debug.get_event_pairs(CBEventType.LLM)
    assert start.payload[EventPayload.SERIALIZED]["class_name"] == "Ragaccel"
    what = EventPayload.RESPONSE if method.endswith("chat") else EventPayload.COMPLETION
    assert text_of(response) in str(end.payload[what])
    kind = "LLMChat" if method.endswith("chat") else "LLMCompletion"
    assert (seen[0], seen[-1]) == (f"{kind}StartEvent", f"{kind}EndEvent")
    assert set(seen[1:-1]) == ({f"{kind}InProgressEvent"} if "stream" in method else set())


@pytest.mark.parametrize("method", METHODS)
def test_a_failed_call_is_reported(method):
    class Broken(RecordingLLM):
        def _said(self, answer, text, passages):
            yield "The "
            raise RuntimeError("the machine is gone")

    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm = Ragaccel(llm=Broken(), callback_manager=CallbackManager([debug]))
    with pytest.raises(RuntimeError, match="machine is gone"):
        read(llm, method)
    ((_, end),) = debug.get_event_pairs(CBEventType.LLM)
    assert isinstance(end.payload[EventPayload.EXCEPTION], RuntimeError)
