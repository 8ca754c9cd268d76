"""Agents, programs and chat call tools through a chat template that supports them."""

import json
import re

import pytest
from framework_llms import TEMPLATE, RecordingLLM, Say, call, scripted_llm, tiny_llm, tools_in
from hash_embedder import HashEmbedder
from llama_index.core import VectorStoreIndex
from llama_index.core.agent.workflow import AgentStream, AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.base.llms import types
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode
from llama_index.core.tools import FunctionTool, RetrieverTool
from pydantic import BaseModel
from ragaccel import ConfigurationError

from llama_index.embeddings.ragaccel import RagaccelEmbedding
from llama_index.llms.ragaccel import Ragaccel

ASKED = [ChatMessage(content="Who keeps the mole?")]


class Keeper(BaseModel):
    """A keeper of the light."""

    name: str
    age: int


def look_up(light: str) -> str:
    """Look up who keeps a light."""
    return f"{light} is kept by Isobel Tarrant."


def tide(place: str) -> str:
    """Tell the tide at a place."""
    return f"High at {place}."


LOOK_UP, TIDE = (FunctionTool.from_defaults(fn=one) for one in (look_up, tide))
BOTH = "I look.\n" + call("look_up", light="The mole") + "\n" + call("tide", place="Gannet Ledge")


def saying(script, **options):
    return Ragaccel(
        llm=scripted_llm(script if callable(script) else lambda prompt: script), **options
    )


def answer_after_results(prompt):
    results = re.findall(r"<turn>tool\((\w+)\): (.*?)(?=<turn>)", prompt)
    return " ".join(f"{name} said: {text}" for name, text in results) if results else BOTH


def selections(llm, response):
    found = llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
    return [(one.tool_name, one.tool_kwargs) for one in found]


CALLED = [("look_up", {"light": "The mole"}), ("tide", {"place": "Gannet Ledge"})]


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_function_agent_calls_tools_and_reads_their_results(streaming):
    llm = saying(answer_after_results)
    agent = FunctionAgent(tools=[LOOK_UP, TIDE], llm=llm, streaming=streaming)
    handler = agent.run("Who keeps the mole?")
    pieces = [
        event.delta async for event in handler.stream_events() if isinstance(event, AgentStream)
    ]
    response = await handler
    expected = "look_up said: The mole is kept by Isobel Tarrant. tide said: High at Gannet Ledge."
    assert str(response) == expected
    assert tools_in(llm.llm.prompts[-1]) == ["look_up", "tide"]
    assert '{"name": "look_up", "arguments": {"light": "The mole"}}' in llm.llm.prompts[-1]
    if streaming:
        assert "".join(pieces) == "I look." + expected


async def test_a_workflow_of_functions_takes_the_agent_that_the_model_can_be():
    llm = saying(answer_after_results)
    team = AgentWorkflow.from_tools_or_functions([look_up, tide], llm=llm)
    assert isinstance(next(iter(team.agents.values())), FunctionAgent)
    assert str(await team.run("Who?")).startswith("look_up said")
    other = AgentWorkflow.from_tools_or_functions([look_up], llm=Ragaccel(llm=tiny_llm()))
    assert isinstance(next(iter(other.agents.values())), ReActAgent)


def test_metadata_reports_function_calling():
    assert saying(BOTH).metadata.is_function_calling_model
    assert not Ragaccel(llm=tiny_llm(TEMPLATE)).metadata.is_function_calling_model
    assert not Ragaccel(llm=tiny_llm(None)).metadata.is_function_calling_model
    assert not Ragaccel().metadata.is_function_calling_model
    own = saying(BOTH, messages_to_prompt=lambda messages: "text")
    assert not own.metadata.is_function_calling_model


async def test_every_method_reads_tool_calls():
    llm = saying(BOTH)
    given = {"tools": [LOOK_UP, TIDE], "chat_history": ASKED, "allow_parallel_tool_calls": True}
    *_, last = llm.stream_chat_with_tools(**given)
    *_, alast = [piece async for piece in await llm.astream_chat_with_tools(**given)]
    for response in (
        llm.chat_with_tools(**given),
        await llm.achat_with_tools(**given),
        last,
        alast,
    ):
        assert selections(llm, response) == CALLED
        assert response.message.content == "I look."
        assert response.raw["finish_reason"] == "tool_calls"
        assert json.loads(json.dumps(response.message.model_dump(mode="json")))
    one = llm.chat_with_tools(**{**given, "allow_parallel_tool_calls": False})
    assert selections(llm, one) == CALLED[:1]
    dicts = [LOOK_UP.metadata.to_openai_tool(), TIDE.metadata.to_openai_tool()["function"]]
    assert selections(llm, llm.chat(ASKED, tools=dicts)) == CALLED


@pytest.mark.parametrize(
    ("choice", "written", "called"),
    [
        (None, "None is needed.", []),
        ("auto", BOTH, ["look_up", "tide"]),
        ("any", 'tide", "arguments": {"place": "mole"}}\n</tool_call>', ["tide"]),
        ("tide", ' {"place": "mole"}}\n</tool_call>', ["tide"]),
        ({"type": "function", "function": {"name": "tide"}}, ' {"place": "mole"}}', ["tide"]),
        ("none", "I may not.", []),
    ],
)
def test_a_choice_is_kept(choice, written, called):
    llm = saying(written)
    for response in (
        llm.chat(ASKED, tools=[LOOK_UP, TIDE], tool_choice=choice),
        list(llm.stream_chat(ASKED, tools=[LOOK_UP, TIDE], tool_choice=choice))[-1],
    ):
        assert [name for name, _ in selections(llm, response)] == called
    assert bool(tools_in(llm.llm.prompts[-1])) == (choice != "none")


def test_a_tool_that_is_required_is_called():
    llm = saying(' {"place": "mole"}}\n</tool_call>')
    response = llm.chat_with_tools([TIDE], user_msg="Hello!", tool_required=True)
    assert selections(llm, response) == [("tide", {"place": "mole"})]
    with pytest.raises(ConfigurationError, match="is not one of the tools: choose one of tide"):
        llm.chat_with_tools([TIDE], user_msg="Hello!", tool_choice="storm")
    with pytest.raises(ConfigurationError, match="a tool must be a LlamaIndex tool"):
        llm.chat(ASKED, tools=["tide"])


@pytest.mark.parametrize("written", [' {"name": "Isobel", "age": 29}}\n</tool_call>'])
async def test_objects_of_a_class_are_calls(written):
    llm = saying(written)
    prompt, expected = PromptTemplate("Who keeps {light}?"), Keeper(name="Isobel", age=29)
    assert llm.structured_predict(Keeper, prompt, light="it") == expected
    assert await llm.astructured_predict(Keeper, prompt, light="it") == expected
    assert list(llm.stream_structured_predict(Keeper, prompt, light="it"))[-1] == expected
    stream = await llm.astream_structured_predict(Keeper, prompt, light="it")
    assert [one async for one in stream][-1] == expected
    structured = llm.as_structured_llm(Keeper)
    assert structured.chat(ASKED).raw == expected
    assert list(structured.stream_chat(ASKED))[-1].raw == expected


def test_an_incomplete_object_is_an_error_with_a_reason():
    prompt = PromptTemplate("Who?")
    with pytest.raises(ValueError, match=r"called no tool: Keeper cannot be read.*max_new_tokens"):
        saying(' {"name": "Isobel", "age": 29}}', max_new_tokens=3).structured_predict(
            Keeper, prompt
        )


def test_a_call_that_cannot_be_read_stays_in_the_text():
    llm = saying('So:\n<tool_call>\n{"name": "tide", "arguments": {"place": \n</tool_call>')
    for response in (
        llm.chat(ASKED, tools=[TIDE]),
        list(llm.stream_chat(ASKED, tools=[TIDE]))[-1],
    ):
        assert selections(llm, response) == []
        assert response.message.content.startswith('So:\n{"name": "tide"')
        assert response.message.additional_kwargs["invalid_tool_calls"][0]["error"]
        with pytest.raises(ValueError, match="tide cannot be read"):
            llm.get_tool_calls_from_response(response)


def test_streams_hold_all_text_and_no_call():
    llm = saying(BOTH + "\n")
    pieces = list(llm.stream_chat(ASKED, tools=[LOOK_UP, TIDE]))
    assert "".join(piece.delta for piece in pieces) == "I look."
    assert all("<" not in piece.message.content for piece in pieces)
    assert all(not selections(llm, piece) for piece in pieces[:-1])
    assert selections(llm, pieces[-1]) == CALLED


HISTORY = [
    ChatMessage(content="Who?"),
    ChatMessage(
        role="assistant",
        content="",
        additional_kwargs={
            "tool_calls": [
                {
                    "id": "a1",
                    "type": "function",
                    "function": {"name": "look_up", "arguments": '{"light": "It"}'},
                }
            ]
        },
    ),
    ChatMessage(role="tool", content="Isobel.", additional_kwargs={"tool_call_id": "a1"}),
]


def test_a_call_history_uses_the_templates_tool_fields():
    llm = saying("Isobel keeps it.")
    assert llm.chat(HISTORY).message.content == "Isobel keeps it."
    (prompt,) = llm.llm.prompts
    assert '<tool_call>\n{"name": "look_up", "arguments": {"light": "It"}}' in prompt
    assert "<turn>tool(look_up): Isobel." in prompt


@pytest.mark.skipif(not hasattr(types, "ToolCallBlock"), reason="this llama-index-core has none")
def test_a_call_history_of_blocks_uses_the_templates_tool_fields():
    block = types.ToolCallBlock(tool_call_id="a1", tool_name="look_up", tool_kwargs={"light": "It"})
    llm = saying("Isobel keeps it.")
    llm.chat([HISTORY[0], ChatMessage(role="assistant", blocks=[block]), HISTORY[2]])
    assert "<turn>tool(look_up): Isobel." in llm.llm.prompts[0]


def test_a_call_history_becomes_text_without_template_support():
    plain = Ragaccel(llm=tiny_llm(), max_new_tokens=2)
    response = plain.chat(HISTORY)
    turns = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": 'look_up({"light": "It"})'},
        {"role": "user", "content": "Isobel."},
    ]
    expected = tiny_llm().generate(turns, max_new_tokens=2)
    assert response.message.content == expected.text
    assert response.raw["usage"]["prompt_tokens"] == expected.usage.prompt_tokens


def test_tools_are_refused_without_template_support():
    with pytest.raises(ConfigurationError, match="does not support tools"):
        Ragaccel(llm=tiny_llm()).chat(ASKED, tools=[TIDE])
    with pytest.raises(ConfigurationError, match="messages_to_prompt"):
        saying(BOTH, messages_to_prompt=lambda messages: "x").chat(ASKED, tools=[TIDE])
    with pytest.raises(TypeError, match="tools: chat"):
        Ragaccel(llm=tiny_llm()).complete("x", tools=[TIDE])


LAMP = "The lamp on Gannet Ledge burns rapeseed oil, nine barrels of it a summer."


async def test_documents_of_an_agents_tool_are_copied_and_cited():
    index = VectorStoreIndex(
        [TextNode(text=LAMP, id_="lamp")], embed_model=RagaccelEmbedding(embedder=HashEmbedder())
    )
    search = RetrieverTool.from_defaults(index.as_retriever(), name="search", description="Find.")
    llm = saying(lambda prompt: LAMP if "<turn>tool" in prompt else call("search", input="lamp"))
    response = await FunctionAgent(tools=[search], llm=llm).run("What does the lamp burn?")
    assert str(response) == LAMP
    assert [cited["passage_id"] for cited in response.raw["ragaccel"]["citations"]] == ["lamp"]
    assert response.raw["ragaccel"]["accepted_tokens"] > 0


# Models whose template has no tools: structured answers by the prompt, and ReAct agents


KEEPER = {"name": "Isobel", "age": 29}
PROMPT = PromptTemplate("Name the keeper of {light}.")


async def test_structured_predictions_without_template_support():
    forced = Say(json.dumps(KEEPER))
    llm = Ragaccel(llm=tiny_llm(), generate_kwargs={"logits_processors": [forced]})
    assert llm.structured_predict(Keeper, PROMPT, light="it") == Keeper(**KEEPER)
    assert await llm.astructured_predict(Keeper, PROMPT, light="it") == Keeper(**KEEPER)
    structured = llm.as_structured_llm(Keeper)
    assert structured.complete("Name the keeper.").raw == Keeper(**KEEPER)
    assert structured.chat(ASKED).raw == Keeper(**KEEPER)
    for given, error, told in (
        ({"max_new_tokens": 3}, ValueError, "json"),
        ({"format": "json"}, TypeError, "takes no format"),
    ):
        with pytest.raises(error, match=told):
            llm.structured_predict(Keeper, PROMPT, llm_kwargs=given, light="it")


def think(text):
    if "is kept by Isobel Tarrant" in text.rpartition("Current Conversation")[2]:
        return "Thought: I can answer without using any more tools.\nAnswer: Isobel Tarrant."
    return 'Thought: I need to use a tool.\nAction: look_up\nAction Input: {"light": "The mole"}'


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_react_agent_calls_its_tools(streaming):
    llm = Ragaccel(llm=RecordingLLM(say=think))
    agent = ReActAgent(tools=[LOOK_UP], llm=llm, streaming=streaming)
    assert str(await agent.run("Who keeps the mole?")) == "Isobel Tarrant."
    assert len(llm.llm.asked) == 2
    assert "Observation: The mole is kept by Isobel Tarrant." in llm.llm.asked[1][0]
