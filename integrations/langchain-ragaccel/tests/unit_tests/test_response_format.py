"""``response_format``: the answer's text is a JSON object, which is checked, not enforced."""

import json

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.exceptions import OutputParserException
from ragaccel import ConfigurationError
from scripted_llm import Swell, scripted_llm, tide
from tiny_llm import tiny_llm

from langchain_ragaccel import ChatRagaccel

SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "swell", "schema": Swell.model_json_schema()},
}
ASKED = "How high at 'Gannet Ledge' (3)?"
FOUND = {"metres": 3, "place": "Gannet Ledge"}


def saying(text):
    return ChatRagaccel(llm=scripted_llm(lambda prompt: text))


@pytest.fixture
def chat():
    return ChatRagaccel(llm=scripted_llm())


@pytest.mark.parametrize("given", [SCHEMA, Swell, Swell.model_json_schema()])
async def test_an_answer_is_the_object_of_a_schema(chat, given):
    model = chat.bind(response_format=given)
    for message in (model.invoke(ASKED), await model.ainvoke(ASKED)):
        assert json.loads(message.content) == FOUND
        assert message.tool_calls == []
        assert message.response_metadata["finish_reason"] == "stop"
    assert json.loads("".join(chunk.text for chunk in model.stream(ASKED))) == FOUND
    assert json.loads(chat.invoke(ASKED, format=given).content) == FOUND


def look_up_then_answer(prompt):
    """Call the tool once, then the schema; continue a started answer."""
    if '"name": "tide"' not in prompt:
        return f" {json.dumps(FOUND)}}}\n</tool_call>"
    done = "<turn>tool(tide): " in prompt
    name, values = ("swell", FOUND) if done else ("tide", {"place": "Gannet Ledge"})
    return f'{name}", "arguments": {json.dumps(values)}}}\n</tool_call>'


@pytest.mark.parametrize("tools", [[], [tide]])
def test_an_agent_with_provider_strategy(tools):
    schema = {**Swell.model_json_schema(), "title": "swell"}
    for strategy, found in ((ProviderStrategy(schema), FOUND), (ProviderStrategy(Swell), Swell)):
        script = look_up_then_answer if found is FOUND else _for_class
        chat = ChatRagaccel(llm=scripted_llm(script))
        agent = create_agent(chat, tools, response_format=strategy)
        state = agent.invoke({"messages": [("user", ASKED)]})
        assert state["structured_response"] == (FOUND if found is FOUND else Swell(**FOUND))
        called = [message.name for message in state["messages"] if message.type == "tool"]
        assert called == [one.name for one in tools]


def _for_class(prompt):
    return look_up_then_answer(prompt).replace("swell", "Swell")


@pytest.mark.parametrize("given", ["json", {"type": "json_object"}])
def test_a_json_object_is_requested_by_the_prompt(given):
    for written in ('{"a": [1, 2]}', 'Here it is:\n```json\n{"a": [1, 2]}\n```'):
        model = saying(written).bind(response_format=given)
        assert json.loads(model.invoke("In JSON, please.").content) == {"a": [1, 2]}
        assert json.loads("".join(chunk.text for chunk in model.stream("?"))) == {"a": [1, 2]}


@pytest.mark.parametrize(
    ("written", "given", "why"),
    [
        ("It is three metres.", "json", "is not JSON"),
        ("[1, 2]", "json", "not an object"),
        ("It is three metres.", SCHEMA, "no valid JSON object of the response_format swell"),
        ('3, "place": ', SCHEMA, "no valid JSON object of the response_format swell"),
        (' {"metres": 3}}\n</tool_call>', SCHEMA, "lacks the required place"),
    ],
)
async def test_an_answer_that_is_no_such_object_is_an_error(written, given, why):
    model = saying(written).bind(response_format=given)
    with pytest.raises(OutputParserException, match=why) as told:
        model.invoke(ASKED)
    assert told.value.llm_output
    with pytest.raises(OutputParserException, match=why):
        await model.ainvoke(ASKED)
    with pytest.raises(OutputParserException, match=why):
        list(model.stream(ASKED))


def test_a_truncated_object_says_so(chat):
    with pytest.raises(OutputParserException, match="max_tokens"):
        chat.invoke(ASKED, response_format=SCHEMA, max_tokens=3)


def test_the_text_format_changes_nothing(chat):
    for given in (None, {"type": "text"}):
        assert chat.invoke("Hi", response_format=given).content == "Hello."


def test_an_invalid_response_format_is_refused_before_loading():
    for wrong in ("xml", 3, {"type": "json_schema"}, {"type": "array", "items": {}}):
        with pytest.raises(ConfigurationError, match="response_format must be "):
            ChatRagaccel(model="no/such-model").invoke("x", response_format=wrong)
    with pytest.raises(ConfigurationError, match="does not support tools"):
        ChatRagaccel(llm=tiny_llm()).invoke("x", response_format=SCHEMA)
