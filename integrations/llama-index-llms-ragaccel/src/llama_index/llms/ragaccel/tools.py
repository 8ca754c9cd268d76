"""Tools: what one call of the framework may call, and calls as its messages hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from llama_index.core.llms.llm import ToolSelection

from ragaccel import ConfigurationError, choose_tool, tool_calling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_index.core.llms import ChatMessage

    from ragaccel import LLM, ToolCall, ToolCalling

CALLS, BROKEN = "tool_calls", "invalid_tool_calls"
"""Where a message holds the calls it makes, and those that could not be read."""

TOOL_NAMES = ("tools", "tool_choice", "parallel_tool_calls")


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one call of the framework, as chat templates read them, and which to call."""

    tools: list[dict[str, Any]]
    choice: str | None = None
    parallel: bool = True

    def calling(self, llm: LLM, stop: Sequence[str] | str | None) -> ToolCalling:
        """Prepare an answer; ConfigurationError if the model's template takes no tools."""
        stops = [stop] if isinstance(stop, str) else stop
        return tool_calling(
            llm.tokenizer, self.tools, self.choice, stop=stops, parallel=self.parallel
        )


def toolbox_of(given: dict[str, Any]) -> Toolbox | None:
    """Take the tools out of what a call was given; None where there are none to call.

    Raises:
        ConfigurationError: something is no tool, or the choice names none.
    """
    tools, choice, parallel = (given.pop(name, None) for name in TOOL_NAMES)
    made = [as_tool(tool) for tool in tools or ()]
    if not made:
        return None
    chosen = choose_tool(made, choice)
    return None if chosen == "none" else Toolbox(made, chosen, parallel is not False)


def calls_of(message: ChatMessage) -> list[ToolSelection]:
    """Read the calls that a message makes, by whichever model it was written."""
    written = message.additional_kwargs.get(CALLS)
    if isinstance(written, list) and written:
        return [_selection(call) for call in written]
    blocks = [block for block in message.blocks if block.block_type == "tool_call"]
    return [
        ToolSelection(
            tool_id=block.tool_call_id or _new_id(),
            tool_name=block.tool_name,
            tool_kwargs=_as_object(block.tool_kwargs),
        )
        for block in blocks
    ]


def as_kwargs(calls: Sequence[ToolCall]) -> dict[str, Any]:
    """What is put beside the text of a message that makes calls; nothing beside any other."""
    whole = [
        {
            "id": call.call_id or _new_id(),
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False),
            },
        }
        for call in calls
        if call.is_valid
    ]
    broken = [
        {"name": call.name, "text": call.text, "error": call.error}
        for call in calls
        if not call.is_valid
    ]
    return {**({CALLS: whole} if whole else {}), **({BROKEN: broken} if broken else {})}


def with_broken(content: str, calls: Sequence[ToolCall]) -> str:
    """Put behind an answer's text the calls that could not be read, so that none is lost."""
    return "\n".join(filter(None, (content, *(call.text for call in calls if not call.is_valid))))


def why_none(message: ChatMessage, finish_reason: str) -> str:
    """Say why an answer that should call a tool calls none."""
    broken = message.additional_kwargs.get(BROKEN) or []
    told = "; ".join(
        f"{call['name'] or 'a call'} cannot be read: {call['error']}" for call in broken
    )
    length = "the answer was cut off at its length, so give it more max_new_tokens"
    reasons = [told, length if finish_reason == "length" else ""]
    return "the model called no tool" + "".join(f": {one}" for one in reasons if one)


def as_tool(tool: Any) -> dict[str, Any]:
    """A tool of LlamaIndex's or a dict as chat templates read it; ConfigurationError for others."""
    metadata = getattr(tool, "metadata", None)
    made = tool if metadata is None else metadata.to_openai_tool(skip_length_check=True)
    if not isinstance(made, Mapping) or "name" not in (made.get("function") or made):
        raise ConfigurationError(
            f"a tool is one of LlamaIndex's, such as FunctionTool.from_defaults(fn), or a dict of "
            f"its name, description and parameters, not {tool!r}"
        )
    return dict(made) if "function" in made else {"type": "function", "function": dict(made)}


def _selection(call: Any) -> ToolSelection:
    """Read one call, a dict or an object, in the shape of OpenAI's interface."""
    function = _part(call, "function")
    return ToolSelection(
        tool_id=str(_part(call, "id") or _new_id()),
        tool_name=str(_part(function, "name") or ""),
        tool_kwargs=_as_object(_part(function, "arguments")),
    )


def _part(whole: Any, name: str) -> Any:
    return whole.get(name) if isinstance(whole, Mapping) else getattr(whole, name, None)


def _as_object(arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = None
    return dict(arguments) if isinstance(arguments, Mapping) else {}


def _new_id() -> str:
    return uuid4().hex[:9]  # nine letters: some templates take no others
