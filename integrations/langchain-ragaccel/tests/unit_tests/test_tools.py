import json
from typing import Annotated

import pytest
from chat_model import TOOLS_TEMPLATE
from framework_llms import RecordingLLM, scripted_llm, tiny_llm
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.documents import Document
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from ragaccel import ConfigurationError
from scripted_tools import Swell, tide, tool_calling_llm
from typing_extensions import TypedDict

from langchain_ragaccel import ChatRagaccel


@tool
def wind(place: str) -> str:
    """Tell the wind at a place."""
    return f"calm at {place}"


def saying(text):
    return ChatRagaccel(llm=scripted_llm(lambda prompt: text))


def calls(message):
    return [(call["name"], call["args"]) for call in message.tool_calls]


def streamed(model, question):
    first, *others = model.stream(question)
    return sum(others, first)


async def astreamed(model):
    """Return the sum of the chunks that a model streams under asyncio."""
    first, *others = [chunk async for chunk in model.astream("What of both?")]
    return sum(others, first)


@pytest.fixture
def chat():
    return ChatRagaccel(llm=tool_calling_llm())


def test_tools_of_every_kind_are_called(chat):
    def depth(place: str) -> int:
        """Tell the depth."""
        return 3

    as_dict = {
        "name": "weather",
        "description": "Tell.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    }
    for some, name in ((tide, "tide"), (depth, "depth"), (Swell, "Swell"), (as_dict, "weather")):
        message = chat.bind_tools([some]).invoke("What of 'Gannet Ledge' (3)?")
        ((called, arguments),) = calls(message)
        assert called == name
        assert arguments["place"] == "Gannet Ledge"
        assert message.content == ""
        assert message.response_metadata["finish_reason"] == "tool_calls"
        assert message.tool_calls[0]["id"]


@pytest.mark.parametrize(
    ("choice", "called"),
    [
        (None, "tide"),
        ("auto", "tide"),
        ("any", "tide"),
        ("required", "tide"),
        (True, "tide"),
        ("wind", "wind"),
        ({"type": "function", "function": {"name": "wind"}}, "wind"),
        ("none", None),
    ],
)
def test_a_choice_is_kept(chat, choice, called):
    model = chat.bind_tools([tide, wind], tool_choice=choice)
    expected = [(called, {"place": "mole"})] if called else []
    assert calls(model.invoke("What of 'mole'?")) == expected
    assert calls(streamed(model, "What of 'mole'?")) == expected


def test_a_forced_call_is_made():
    silent = ChatRagaccel(llm=scripted_llm(lambda prompt: ' {"place": "mole"}}\n</tool_call>'))
    message = silent.bind_tools([tide, wind], tool_choice="wind").invoke("Hello!")
    assert calls(message) == [("wind", {"place": "mole"})]
    with pytest.raises(
        ConfigurationError, match="is not one of the tools: choose one of tide, wind"
    ):
        silent.bind_tools([tide, wind], tool_choice="storm")


async def test_content_next_to_tool_calls_is_streamed_without_them():
    text = (
        "I look at both.\n<tool_call>\n"
        '{"name": "tide", "arguments": {"place": "mole"}}\n</tool_call>\n<tool_call>\n'
        '{"name": "wind", "arguments": {"place": "çatı"}}\n</tool_call>'
    )
    model = saying(text).bind_tools([tide, wind])
    message = model.invoke("What of both?")
    chunks = list(model.stream("What of both?"))
    assert message.content == "".join(chunk.text for chunk in chunks) == "I look at both."
    assert not any("tool_call" in chunk.text for chunk in chunks)
    whole = streamed(model, "What of both?")
    expected = [("tide", {"place": "mole"}), ("wind", {"place": "çatı"})]
    assert calls(message) == calls(whole) == expected
    assert calls(await astreamed(model)) == expected
    one = saying(text).bind_tools([tide, wind], parallel_tool_calls=False)
    assert calls(one.invoke("What of both?")) == expected[:1]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "tide", "arguments": {"place": "mo',
        '<tool_call>\n{"name": "tide", "arguments": {"place": mole}}\n</tool_call>',
    ],
)
def test_an_unreadable_call_is_invalid_and_never_repaired(text):
    model = saying(text).bind_tools([tide])
    for message in (model.invoke("What?"), streamed(model, "What?")):
        assert message.tool_calls == []
        (broken,) = message.invalid_tool_calls
        assert broken["name"] == "tide"
        assert "mo" in broken["args"]
    whole, pieced = [
        one.invalid_tool_calls[0] for one in (model.invoke("What?"), streamed(model, "What?"))
    ]
    assert whole["error"]
    assert pieced["args"] in (whole["args"], json.dumps(whole["args"]))
    assert model.invoke("What?").response_metadata["finish_reason"] == "stop"


def test_a_stop_string_cuts_before_calls_are_read():
    text = 'Wait. STOP\n<tool_call>\n{"name": "tide", "arguments": {"place": "mole"}}\n</tool_call>'
    model = saying(text).bind_tools([tide])
    message = model.invoke("What?", stop=["STOP"])
    assert message.content == streamed(model.bind(stop=["STOP"]), "What?").content == "Wait. "
    assert message.tool_calls == []


def test_a_template_without_tools_is_an_error():
    chat = ChatRagaccel(llm=tiny_llm())
    for model in (chat.bind_tools([tide]), chat.with_structured_output(Swell)):
        with pytest.raises(ConfigurationError, match="does not support tools"):
            model.invoke("What of 'mole'?")


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_schemas_are_answered_as_objects(chat, method):
    model = chat.with_structured_output(Swell, method=method)
    assert model.invoke("How high at 'mole' (3)?") == Swell(metres=3, place="mole")
    as_dict = chat.with_structured_output(Swell.model_json_schema(), method=method)
    assert as_dict.invoke("How high at 'mole' (3)?") == {"metres": 3, "place": "mole"}
    raw = chat.with_structured_output(Swell, method=method, include_raw=True)
    found = raw.invoke("How high at 'mole' (3)?")
    assert found["parsed"] == Swell(metres=3, place="mole")
    assert found["parsing_error"] is None
    assert isinstance(found["raw"], AIMessage)


def test_an_object_that_does_not_fit_the_schema_is_an_error():
    chat = ChatRagaccel(llm=scripted_llm(lambda prompt: ' {"metres": "high"}}\n</tool_call>'))
    with pytest.raises(ValueError, match="valid integer"):
        chat.with_structured_output(Swell).invoke("How high?")
    found = chat.with_structured_output(Swell, include_raw=True).invoke("How high?")
    assert found["parsed"] is None
    assert found["parsing_error"] is not None
    with pytest.raises(ConfigurationError, match="json_mode"):
        chat.with_structured_output(Swell, method="yaml")


class Joke(TypedDict):
    """A joke."""

    setup: Annotated[str, ..., "How it begins."]
    rating: Annotated[int, None, "How good it is."]


@pytest.mark.parametrize("schema", [Swell, Joke, Swell.model_json_schema()])
def test_an_unreadable_call_raises_a_parsing_error(schema):
    cut = saying(' {"place": "Gannet')
    with pytest.raises(OutputParserException, match=r"of the schema (Swell|Joke): it is not JSON"):
        cut.with_structured_output(schema).invoke("How high?")
    found = cut.with_structured_output(schema, include_raw=True).invoke("How high?")
    assert found["parsed"] is None
    assert isinstance(found["parsing_error"], OutputParserException)
    with pytest.raises(OutputParserException, match="no valid JSON object"):
        list(cut.with_structured_output(schema).stream("How high?"))
    short = ChatRagaccel(llm=cut.llm, max_tokens=4).with_structured_output(schema)
    with pytest.raises(OutputParserException, match="increase max_tokens"):
        short.invoke("How high?")


def test_required_keys_of_a_plain_schema_are_checked():
    model = saying(' {"rating": 3}}\n</tool_call>')
    for schema in (Joke, {"title": "Joke", "properties": {"setup": {}}, "required": ["setup"]}):
        with pytest.raises(
            OutputParserException, match="the model's object lacks the required setup"
        ):
            model.with_structured_output(schema).invoke("Tell.")
    as_json = saying('{"rating": 3}').with_structured_output(Joke, method="json_mode")
    with pytest.raises(OutputParserException, match="lacks the required setup"):
        as_json.invoke("Tell.")
    whole = saying(' {"setup": "a"}}\n</tool_call>').with_structured_output(Joke)
    assert whole.invoke("Tell.") == {"setup": "a"}


def test_an_agent_calls_its_tool_and_answers_from_the_result(chat):
    agent = create_agent(chat, [tide])
    messages = agent.invoke({"messages": [("user", "What of 'mole'?")]})["messages"]
    kinds = [message.type for message in messages]
    assert kinds == ["human", "ai", "tool", "ai"]
    assert messages[2].content == "high at mole"
    assert messages[3].content == "Hello."


def test_documents_that_a_tool_gave_back_are_references(chat):
    document = Document(page_content="The keeper trims the wick at dusk.", id="wick")
    said = []
    llm = scripted_llm(lambda prompt: document.page_content)
    chat = ChatRagaccel(llm=llm)
    told = [
        HumanMessage("Who?"),
        AIMessage("", tool_calls=[{"name": "tide", "args": {}, "id": "a"}]),
        ToolMessage("see the artifact", tool_call_id="a", artifact=[document, object()]),
    ]
    for messages in (told, [HumanMessage("?", additional_kwargs={"references": [document]})]):
        report = chat.invoke(messages).response_metadata["ragaccel"]
        said += [span["passage_id"] for span in report["copied_spans"]]
    assert said == ["wick", "wick"]


def test_tool_documents_obey_max_reference_tokens_and_auto_references():
    wick, llm = "The keeper trims the wick at dusk.", RecordingLLM(TOOLS_TEMPLATE)
    documents = [Document(f"{wick} {n}", id=str(n)) for n in range(40)]
    called = {"name": "tide", "args": {}}
    told = [HumanMessage("Who?")]
    for number in range(2):
        told += [
            AIMessage("", tool_calls=[{**called, "id": str(number)}]),
            ToolMessage("", tool_call_id=str(number), artifact=documents[number * 20 :][:20]),
        ]
    ChatRagaccel(llm=llm, max_reference_tokens=32).invoke(told)
    ChatRagaccel(llm=llm, auto_references=False).invoke(told)
    own = HumanMessage("?", additional_kwargs={"references": documents[:9]})
    ChatRagaccel(llm=llm, auto_references=False, max_reference_tokens=0).invoke([own])
    seen = [[one.passage_id for one in references] for _, references, _ in llm.asked]
    assert seen == [["20", "21", "22"], [], [str(n) for n in range(9)]]


def test_tools_are_counted(chat):
    alone = chat.get_num_tokens_from_messages([HumanMessage("What?")])
    assert chat.get_num_tokens_from_messages([HumanMessage("What?")], tools=[tide]) > alone + 40


@pytest.mark.parametrize("choice", [None, "any", "search"])
@pytest.mark.parametrize("tool", [{"type": "web_search_preview"}, {"type": "function"}])
def test_tools_that_a_provider_runs_are_refused_when_bound(choice, tool):
    with pytest.raises(ConfigurationError, match="must be a function with a name"):
        ChatRagaccel(llm=tool_calling_llm()).bind_tools([tool], tool_choice=choice)


# response_format: the answer's text is a JSON object, which is checked, not enforced


SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "swell", "schema": Swell.model_json_schema()},
}
ASKED = "How high at 'Gannet Ledge' (3)?"
FOUND = {"metres": 3, "place": "Gannet Ledge"}


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
        ("It is three metres.", SCHEMA, "no valid JSON object of the schema swell"),
        ('3, "place": ', SCHEMA, "no valid JSON object of the schema swell"),
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


def test_an_invalid_response_format_is_refused_before_loading():
    for wrong in ("xml", 3, {"type": "json_schema"}, {"type": "array", "items": {}}):
        with pytest.raises(ConfigurationError, match="response_format must be "):
            ChatRagaccel(model="no/such-model").invoke("x", response_format=wrong)
    with pytest.raises(ConfigurationError, match="does not support tools"):
        ChatRagaccel(llm=tiny_llm()).invoke("x", response_format=SCHEMA)
