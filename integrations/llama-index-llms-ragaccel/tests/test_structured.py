"""Structured answers and agents on a scripted model."""

import asyncio
import json

import pytest
from framework_llms import RecordingLLM, Say, tiny_llm
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from llama_index.llms.ragaccel import Ragaccel


class Keeper(BaseModel):
    """A keeper of the light."""

    name: str
    age: int


KEEPER = {"name": "Isobel", "age": 29}
PROMPT = PromptTemplate("Name the keeper of {light}.")


@pytest.fixture
def llm():
    forced = Say(json.dumps(KEEPER))
    return Ragaccel(llm=tiny_llm(), generate_kwargs={"logits_processors": [forced]})


def test_structured_predictions(llm):
    assert llm.structured_predict(Keeper, PROMPT, light="the mole") == Keeper(**KEEPER)
    found = asyncio.run(llm.astructured_predict(Keeper, PROMPT, light="the mole"))
    assert found == Keeper(**KEEPER)


def test_a_structured_llm(llm):
    structured = llm.as_structured_llm(Keeper)
    assert structured.complete("Name the keeper.").raw == Keeper(**KEEPER)
    assert structured.chat([ChatMessage(content="Name the keeper.")]).raw == Keeper(**KEEPER)


def test_settings_of_one_structured_call(llm):
    given = {"max_new_tokens": 3}
    with pytest.raises(ValueError, match="json"):
        llm.structured_predict(Keeper, PROMPT, llm_kwargs=given, light="the mole")
    with pytest.raises(TypeError, match="takes no format"):
        llm.structured_predict(Keeper, PROMPT, llm_kwargs={"format": "json"}, light="the mole")


def look_up(light: str) -> str:
    """Look up who keeps a light."""
    return f"{light} is kept by Isobel Tarrant."


def say(text):
    if "is kept by Isobel Tarrant" in text.rpartition("Current Conversation")[2]:
        return "Thought: I can answer without using any more tools.\nAnswer: Isobel Tarrant."
    return 'Thought: I need to use a tool.\nAction: look_up\nAction Input: {"light": "The mole"}'


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_react_agent_calls_its_tools(streaming):
    double = RecordingLLM(say=say)
    agent = ReActAgent(
        tools=[FunctionTool.from_defaults(fn=look_up)],
        llm=Ragaccel(llm=double),
        streaming=streaming,
    )
    response = await agent.run("Who keeps the mole?")
    assert str(response) == "Isobel Tarrant."
    assert len(double.asked) == 2
    assert "Observation: The mole is kept by Isobel Tarrant." in double.asked[1][0]
