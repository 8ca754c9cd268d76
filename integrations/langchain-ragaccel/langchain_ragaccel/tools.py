"""Convert tools, tool calls and response formats between LangChain and ragaccel."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import InvalidToolCall
from langchain_core.messages.tool import (
    ToolCall as LangChainCall,
    ToolCallChunk,
    invalid_tool_call,
    tool_call,
    tool_call_chunk,
)
from langchain_core.runnables import RunnableLambda, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.json import parse_json_markdown, parse_partial_json
from langchain_core.utils.json_schema import dereference_refs
from langchain_core.utils.pydantic import is_basemodel_subclass
from ragaccel import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from langchain_core.messages import AIMessage
    from langchain_core.runnables import Runnable
    from ragaccel.models import ToolCall


def as_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Convert tools (functions, classes, LangChain tools, dicts) to the chat templates' format.

    Raises:
        ConfigurationError: A tool is not a function, such as a search that a provider runs.
    """
    made = [convert_to_openai_tool(tool) for tool in tools]
    for tool in made:
        if not isinstance(tool.get("function"), dict) or "name" not in tool["function"]:
            raise ConfigurationError(
                f"a tool must be a function with a name, not {tool!r}: "
                "tools that a provider runs are not supported"
            )
    return made


def as_tool_calls(calls: Sequence[ToolCall]) -> tuple[list[LangChainCall], list[InvalidToolCall]]:
    """Return a message's ``tool_calls`` and ``invalid_tool_calls``."""
    valid = [
        tool_call(name=call.name, args=call.arguments, id=_id(call))
        for call in calls
        if call.is_valid
    ]
    invalid = [
        invalid_tool_call(name=call.name, args=call.text, id=_id(call), error=call.error)
        for call in calls
        if not call.is_valid
    ]
    return valid, invalid


def as_tool_call_chunks(calls: Sequence[ToolCall]) -> list[ToolCallChunk]:
    """Return tool calls as chunks of a stream, which have no field for errors."""
    return [
        tool_call_chunk(
            name=call.name,
            args=_arguments_text(call),
            id=_id(call),
            index=index,
        )
        for index, call in enumerate(calls)
    ]


def _arguments_text(call: ToolCall) -> str:
    """Return a call's arguments as JSON, or its text if it could not be parsed.

    Quote text that LangChain would repair: it completes truncated JSON, and would make a call that
    the model never made.
    """
    if call.is_valid:
        return json.dumps(call.arguments, ensure_ascii=False)
    try:
        repaired = parse_partial_json(call.text)
    except ValueError:
        return call.text
    return json.dumps(call.text, ensure_ascii=False) if isinstance(repaired, dict) else call.text


def _id(call: ToolCall) -> str:
    """Return the call's id, or a new one of nine letters, which every chat template accepts."""
    return call.call_id or uuid4().hex[:9]


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The required format of an answer: a JSON object, optionally of a schema.

    A schema is sent as a tool that the model must call. Decoding is not constrained: an answer that
    does not fit raises an error when it is complete.

    Attributes:
        tool: The tool of the schema, or None for an object in the answer's text.
        required: The keys that the object must have.
        result_class: The class that the object is converted to, or None for a dict.
    """

    tool: dict[str, Any] | None = None
    required: tuple[str, ...] = ()
    result_class: Any = None

    @classmethod
    def of_schema(cls, schema: Any, *, from_call: bool) -> ResponseFormat:
        """Return the format of a schema, whose own class checks the keys if it has one."""
        is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
        return cls(
            convert_to_openai_tool(schema) if from_call else None,
            () if is_class else _required_keys(schema),
            schema if is_class else None,
        )

    def read(
        self, content: str, calls: Sequence[ToolCall], finish_reason: str
    ) -> tuple[str, list[ToolCall]]:
        """Return the object as text, or no text and the calls of other tools if there are any.

        Raises:
            OutputParserException: There is no such object, or it lacks a required key.
        """
        others = [call for call in calls if call.name != self._name]
        if any(call.is_valid for call in others):
            return "", others
        valid, invalid = as_tool_calls(calls)
        found = self._object(content, valid, invalid, finish_reason)
        return json.dumps(found, ensure_ascii=False), []

    def parse(self, message: AIMessage) -> Any:
        """Return the object of a message.

        Raises:
            OutputParserException: There is no such object, or it lacks a required key.
            ValidationError: The object does not fit the schema's class.
        """
        found = self._object(
            message.text,
            message.tool_calls,
            message.invalid_tool_calls,
            message.response_metadata.get("finish_reason"),
        )
        return found if self.result_class is None else self.result_class(**found)

    @property
    def _name(self) -> str | None:
        return self.tool["function"]["name"] if self.tool else None

    def _object(
        self,
        content: str,
        calls: Sequence[LangChainCall],
        invalid: Sequence[InvalidToolCall],
        finish_reason: str | None,
    ) -> dict[str, Any]:
        name = self._name
        why = "".join(f": {call['error']}" for call in invalid if call["error"])
        if finish_reason == "length":
            why += "; the answer was cut off at its length: increase max_tokens"
        if name is None:
            found = _parse_json_object(content, why)
        else:
            own = [call["args"] for call in calls if call["name"] == name]
            if not own:
                raise OutputParserException(
                    f"the answer holds no valid JSON object of the schema {name}{why}",
                    llm_output="".join([content, *(str(call["args"]) for call in invalid)]),
                )
            found = own[0]
        if missing := [key for key in self.required if key not in found]:
            raise OutputParserException(
                f"the model's object lacks the required {', '.join(missing)}{why}",
                llm_output=str(found),
            )
        return found


def with_parser(
    llm: Runnable[Any, Any], response_format: ResponseFormat, *, include_raw: bool
) -> Runnable[Any, Any]:
    """Return a runnable that parses answers.

    With ``include_raw`` it returns a dict of ``raw``, ``parsed`` and ``parsing_error``.
    """
    parser = RunnableLambda(response_format.parse)
    if not include_raw:
        return llm | parser
    right = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    wrong = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | right.with_fallbacks([wrong], exception_key="parsing_error")


def parse_response_format(value: Any) -> ResponseFormat | None:
    """Parse a ``response_format``; return None for plain text.

    Accept ``{"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}``, a schema or a
    class; ``{"type": "json_object"}`` or ``"json"``; ``{"type": "text"}`` or None.

    Raises:
        ConfigurationError: The value is none of these, or the schema is not one of an object.
    """
    if value in (None, "", "text") or value == {"type": "text"}:
        return None
    if value in ("json", "json_object") or value == {"type": "json_object"}:
        return ResponseFormat()
    if isinstance(value, type):
        return ResponseFormat(convert_to_openai_tool(value), _required_keys(value))
    named = value.get("json_schema", value) if isinstance(value, Mapping) else None
    schema = named.get("schema", named) if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        raise ConfigurationError(
            'response_format must be {"type": "json_schema", "json_schema": {"name": ..., '
            '"schema": {"type": "object", ...}}} or {"type": "json_object"}, not '
            f"{value!r}"
        )
    assert isinstance(named, Mapping)
    function = {
        "name": str(named.get("name") or schema.get("title") or "answer"),
        "description": str(named.get("description") or schema.get("description") or "The answer."),
        "parameters": dereference_refs(dict(schema)),
    }
    tool = {"type": "function", "function": function}
    return ResponseFormat(tool, tuple(schema.get("required") or ()))


def _parse_json_object(content: str, why: str) -> dict[str, Any]:
    try:
        found = parse_json_markdown(content)
    except ValueError as error:
        raise OutputParserException(
            f"the answer is not JSON{why}: ask for JSON in the prompt, since nothing enforces it",
            llm_output=content,
        ) from error
    if not isinstance(found, dict):
        raise OutputParserException(
            f"the answer is JSON but not an object{why}", llm_output=content
        )
    return found


def _required_keys(schema: Any) -> tuple[str, ...]:
    """Return the keys that a schema requires."""
    if isinstance(schema, dict):
        function = schema.get("function", schema)
        return tuple(function.get("parameters", function).get("required") or ())
    if not isinstance(schema, type):
        return ()
    required = convert_to_openai_tool(schema)["function"]["parameters"].get("required") or ()
    # LangChain lists every key of a TypedDict as required.
    own = getattr(schema, "__required_keys__", frozenset(required))
    return tuple(name for name in required if name in own)
