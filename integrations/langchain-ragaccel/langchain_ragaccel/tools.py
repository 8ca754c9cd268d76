"""Tools: how a model is told of them, and its calls as LangChain's messages hold them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from langchain_core.messages import InvalidToolCall
from langchain_core.messages.tool import ToolCall as LangChainCall
from langchain_core.messages.tool import (
    ToolCallChunk,
    invalid_tool_call,
    tool_call,
    tool_call_chunk,
)
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.json import parse_partial_json
from ragaccel import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel import ToolCall


def as_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Tools of any kind (functions, classes, LangChain's, dicts) as chat templates read them.

    Raises:
        ConfigurationError: a tool that is no function, such as a search that a provider runs.
    """
    made = [convert_to_openai_tool(tool) for tool in tools]
    for tool in made:
        if not isinstance(tool.get("function"), dict) or "name" not in tool["function"]:
            raise ConfigurationError(
                f"a tool is a function with a name, not {tool!r}: nobody runs others here"
            )
    return made


def as_calls(calls: Sequence[ToolCall]) -> tuple[list[LangChainCall], list[InvalidToolCall]]:
    """Calls as LangChain's messages hold them: those that could be read, and the others."""
    whole = [
        tool_call(name=call.name, args=call.arguments, id=_id(call))
        for call in calls
        if call.is_valid
    ]
    broken = [
        invalid_tool_call(name=call.name, args=call.text, id=_id(call), error=call.error)
        for call in calls
        if not call.is_valid
    ]
    return whole, broken


def as_chunks(calls: Sequence[ToolCall]) -> list[ToolCallChunk]:
    """Calls as the chunks of a stream hold them.

    A chunk has no place for an error.
    """
    return [
        tool_call_chunk(
            name=call.name,
            args=_written(call),
            id=_id(call),
            index=index,
        )
        for index, call in enumerate(calls)
    ]


def _written(call: ToolCall) -> str:
    """A call's arguments; its text if it could not be read, in quotes if LangChain would mend it.

    It mends JSON that was cut off, and would make a call of it that the model never made.
    """
    if call.is_valid:
        return json.dumps(call.arguments, ensure_ascii=False)
    try:
        mended = parse_partial_json(call.text)
    except ValueError:
        return call.text
    return json.dumps(call.text, ensure_ascii=False) if isinstance(mended, dict) else call.text


def _id(call: ToolCall) -> str:
    """The id that the model gave, or a new one: of nine letters, which is all that some take."""
    return call.call_id or uuid4().hex[:9]
