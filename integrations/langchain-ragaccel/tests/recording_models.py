"""Models that answer at once and record the references of each prompt."""

from __future__ import annotations

from chat_model import TOOLS_TEMPLATE
from framework_llms import RecordingLLM
from ragaccel import Passage, Reference
from scripted_tools import call_a_tool

from langchain_ragaccel import ChatRagaccel, RagaccelLLM


def recording(given):
    """Return an LLM that records the references of each prompt."""

    def note(text, references):
        named = [one.passage_id for one in references if isinstance(one, Passage)]
        beside = [one.passage_id for one in references if isinstance(one, Reference)]
        given.note(text, named, beside)

    def say(text):
        return call_a_tool(text) if "<tools>" in text else "The keeper trims it."

    return RecordingLLM(TOOLS_TEMPLATE, say, note=note)


def recording_llm(given, **options):
    """Return a LangChain LLM over a recording LLM."""
    return RagaccelLLM(llm=recording(given), **options)


def recording_chat_model(given, **options):
    """Return a LangChain chat model over a recording LLM."""
    return ChatRagaccel(llm=recording(given), **options)
