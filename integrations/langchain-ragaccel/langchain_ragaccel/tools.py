"""Tools: how a model is told of them, made to call one, and its calls read back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakKeyDictionary

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
from ragaccel import ConfigurationError, ToolFormat, tool_format

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ragaccel import LLM, Answer, ToolCall

_FORCED = ("any", "required", True)
_FORMATS: WeakKeyDictionary[LLM, ToolFormat] = WeakKeyDictionary()


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


def choose(tools: Sequence[Mapping[str, Any]], choice: Any) -> str | None:
    """Check a choice of tools: None where the model decides, "" for any, "none", or a name.

    A name is given as such or as ``{"type": "function", "function": {"name": ...}}``.

    Raises:
        ConfigurationError: there is no tool of that name.
    """
    if choice in (None, False, "auto"):
        return None
    names = [tool["function"]["name"] for tool in tools]
    if choice == "none":
        return "none"
    if choice in _FORCED:
        return names[0] if len(names) == 1 else ""
    if isinstance(choice, dict):
        choice = choice.get("function", choice).get("name")
    if choice not in names:
        raise ConfigurationError(
            f"tool_choice={choice!r} names no tool: there are {', '.join(names)}, auto, any, none"
        )
    return str(choice)


@dataclass(frozen=True, slots=True)
class Calling:
    """What one answer may call, and how its calls are spelled.

    ``opening`` is what the answer was made to begin with; empty where the model decides.
    """

    llm: LLM
    format: ToolFormat
    tools: list[dict[str, Any]]
    opening: str = ""
    stop: tuple[str, ...] = ()
    parallel: bool = True

    @property
    def opening_ids(self) -> list[int]:
        """The opening as tokens, special ones read as such."""
        return list(self.llm.tokenizer.encode(self.opening)) if self.opening else []

    def settled(self, token_ids: Sequence[int]) -> str:
        """What of an unfinished answer is content for sure, whatever may follow."""
        text = self._text(token_ids)
        begun = [
            size for stop in self.stop for size in range(1, len(stop)) if text.endswith(stop[:size])
        ]
        return self.format.settled(text[: len(text) - max(begun, default=0)])

    def read(self, answer: Answer) -> tuple[str, list[ToolCall]]:
        """The answer's content, and the calls in it."""
        content, calls = self.format.parse(self._text(answer.token_ids), self.tools)
        if not calls:
            return answer.text, []
        return content, list(calls if self.parallel else calls[:1])

    def _text(self, token_ids: Sequence[int]) -> str:
        text = self.llm.tokenizer.decode(token_ids, skip_special_tokens=False)
        ends = [at for stop in self.stop if (at := text.find(stop)) >= 0]
        return self.opening + text[: min(ends, default=len(text))]


def calling(
    llm: LLM,
    tools: list[dict[str, Any]],
    choice: str | None,
    *,
    stop: Sequence[str] | None = None,
    parallel: bool = True,
) -> Calling:
    """Prepare an answer that may call tools.

    Raises:
        ConfigurationError: the model's chat template has no place for tools.
    """
    format_ = _FORMATS.get(llm) or tool_format(llm.tokenizer)
    if format_ is None:
        raise ConfigurationError(
            "this model's chat template has no place for tools: load a model that was trained to "
            "call them; with_structured_output(method='json_mode') needs none"
        )
    _FORMATS[llm] = format_
    opening = "" if choice is None else format_.opening(choice or None)
    return Calling(llm, format_, tools, opening, tuple(stop or ()), parallel)


def read(calls: Calling | None, answer: Answer) -> tuple[str, list[ToolCall]]:
    """An answer's content, and the calls in it if it may hold some."""
    return (answer.text, []) if calls is None else calls.read(answer)


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
