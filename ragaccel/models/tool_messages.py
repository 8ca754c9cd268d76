"""Tool messages: tools, calls and their results, in the shape in which chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ragaccel.errors import ConfigurationError

PROBE_TOOL, PROBE_KEY, PROBE_VALUE = "probe_tool_7", "probe_key_7", "probe value 7"
PROBE_ID = "probe0007"  # some templates take ids of nine letters and digits only
PROBE_TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": PROBE_TOOL,
            "description": "Probe.",
            "parameters": {
                "type": "object",
                "properties": {PROBE_KEY: {"type": "string", "description": "Probe."}},
                "required": [PROBE_KEY],
            },
        },
    },
)
PROBE_QUESTION: Mapping[str, Any] = {"role": "user", "content": "?"}
PROBE_CALLING: Mapping[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "id": PROBE_ID,
            "function": {"name": PROBE_TOOL, "arguments": {PROBE_KEY: PROBE_VALUE}},
        }
    ],
}
PROBE_RESULT: Mapping[str, Any] = {
    "role": "tool",
    "name": PROBE_TOOL,
    "tool_call_id": PROBE_ID,
    "content": "probe result 7",
}


def as_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools as chat templates read them: ``{"type": "function", "function": {"name": ...}}``.

    A bare function (``{"name": ..., "parameters": ...}``) is wrapped; no tools are None.

    Raises:
        ConfigurationError: something that is no tool, or two tools of one name.
    """
    made = [_as_tool(tool) for tool in tools or ()]
    names = [tool["function"]["name"] for tool in made]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(f"two tools are named {twice[0]!r}: give each its own name")
    return made or None


def as_messages(
    messages: Sequence[Mapping[str, Any]], *, arguments_as_text: bool = False
) -> list[dict[str, Any]]:
    """Messages as chat templates read them: without what is None, calls with their arguments.

    Arguments become a dict, or their JSON text where a template writes that. What is no JSON
    object stays as it is.
    """
    return [_as_message(message, arguments_as_text) for message in messages]


def calls_tools(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation holds a tool call."""
    return any(message.get("tool_calls") for message in messages)


def holds_results(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation holds a tool's result."""
    return any(message.get("role") == "tool" for message in messages)


def _as_tool(tool: Any) -> dict[str, Any]:
    whole = tool if isinstance(tool, Mapping) and "function" in tool else {"function": tool}
    function = whole["function"]
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigurationError(
            'a tool is a dict like {"type": "function", "function": {"name": ..., "description": '
            f'..., "parameters": {{...}}}}}}, not {tool!r}'
        )
    return {"type": "function", **whole}


def _as_message(message: Mapping[str, Any], arguments_as_text: bool) -> dict[str, Any]:
    made = {key: value for key, value in message.items() if value is not None}
    if made.get("tool_calls"):
        made["tool_calls"] = [_as_call(call, arguments_as_text) for call in made["tool_calls"]]
    else:
        made.pop("tool_calls", None)  # templates ask whether the key is there
    return made


def _as_call(call: Any, arguments_as_text: bool) -> dict[str, Any]:
    whole = call if isinstance(call, Mapping) and "function" in call else {"function": call}
    function = whole["function"]
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigurationError(
            'a tool call is a dict like {"type": "function", "id": ..., "function": {"name": ..., '
            f'"arguments": {{...}}}}}}, not {call!r}'
        )
    arguments = function.get("arguments", {})
    arguments = _as_text(arguments) if arguments_as_text else _as_object(arguments)
    return {"type": "function", **whole, "function": {**function, "arguments": arguments}}


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        read = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    return read if isinstance(read, dict) else arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
