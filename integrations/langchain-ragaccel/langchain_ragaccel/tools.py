"""Convert tools, tool calls and response formats between LangChain and ragaccel."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, InvalidToolCall
from langchain_core.messages.tool import (
    ToolCall as LangChainCall,
    ToolCallChunk,
    invalid_tool_call,
    tool_call,
    tool_call_chunk,
)
from langchain_core.output_parsers import (
    BaseGenerationOutputParser,
    JsonOutputParser,
    PydanticOutputParser,
)
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.json import parse_json_markdown, parse_partial_json
from langchain_core.utils.json_schema import dereference_refs
from langchain_core.utils.pydantic import is_basemodel_subclass
from ragaccel import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from langchain_core.outputs import Generation
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


class ToolCallParser(BaseGenerationOutputParser[Any]):
    """A parser of an object from a call of one tool that raises an error without such a call.

    LangChain's own parsers return None in that case.
    """

    name: str
    """The tool's name."""
    reader: Any
    """The LangChain parser that builds the object."""
    required: tuple[str, ...] = ()
    """Keys that the object must have, if no class checks them."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """Parse the object.

        Raises:
            OutputParserException: The call is missing or unreadable, or lacks a required key.
            ValidationError: The object does not fit the schema's class.
        """
        message = getattr(result[0], "message", None)
        if not isinstance(message, AIMessage) or not any(
            call["name"] == self.name for call in message.tool_calls
        ):
            raise OutputParserException(
                f"the model made no valid call to {self.name}{_explain_failure(message)}",
                llm_output=result[0].text,
            )
        found = self.reader.parse_result(result, partial=partial)
        return _require_keys(found, self.required, _explain_failure(message))


class RequiredKeysJsonParser(JsonOutputParser):
    """A parser of JSON answers that checks the required keys."""

    required: tuple[str, ...] = ()
    """Keys that the finished object must have."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """Parse the object; with ``partial`` it may be incomplete.

        Raises:
            OutputParserException: The answer is not JSON, or a required key is missing.
        """
        found = super().parse_result(result, partial=partial)
        if partial:
            return found
        message = getattr(result[0], "message", None)
        return _require_keys(found, self.required, _explain_failure(message))


def output_parser_for(schema: Any, *, from_call: bool) -> Runnable[Any, Any]:
    """Return the parser from an answer to a schema's object, or to a dict without a class."""
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    if not from_call:
        if is_class:
            return PydanticOutputParser(pydantic_object=schema)
        return RequiredKeysJsonParser(required=_required_keys(schema))
    name = convert_to_openai_tool(schema)["function"]["name"]
    if is_class:
        reader = PydanticToolsParser(tools=[schema], first_tool_only=True)
        return ToolCallParser(name=name, reader=reader)
    keyed = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    return ToolCallParser(name=name, reader=keyed, required=_required_keys(schema))


def with_parser(
    llm: Runnable[Any, Any], parser: Runnable[Any, Any], *, include_raw: bool
) -> Runnable[Any, Any]:
    """Return a runnable that parses answers.

    With ``include_raw`` it returns a dict of ``raw``, ``parsed`` and ``parsing_error``.
    """
    if not include_raw:
        return llm | parser
    right = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    wrong = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | right.with_fallbacks([wrong], exception_key="parsing_error")


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The required format of an answer's text: a JSON object, optionally of a schema.

    A schema is sent as a tool that the model must call, and the call's arguments become the text.
    Decoding is not constrained: an answer that does not fit raises an error when it is complete.
    """

    tool: dict[str, Any] | None = None
    required: tuple[str, ...] = ()

    def read(
        self, content: str, calls: Sequence[ToolCall], finish_reason: str
    ) -> tuple[str, list[ToolCall]]:
        """Return the object as text, or no text and the calls of other tools if there are any.

        Raises:
            OutputParserException: There is no such object, or it lacks a required key.
        """
        name = self.tool["function"]["name"] if self.tool else None
        others = [call for call in calls if call.name != name]
        if any(call.is_valid for call in others):
            return "", others
        why = _explain([call.error for call in calls], finish_reason)
        if name is None:
            found = _parse_json_object(content, why)
        else:
            own = [call.arguments for call in calls if call.name == name and call.is_valid]
            if not own:
                written = "".join([content, *(call.text for call in calls)])
                raise OutputParserException(
                    f"the answer holds no valid JSON object of the response_format {name}{why}",
                    llm_output=written,
                )
            found = own[0]
        return json.dumps(_require_keys(found, self.required, why), ensure_ascii=False), []


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
        required = function.get("parameters", function).get("required") or ()
        return tuple(required)
    if not isinstance(schema, type):
        return ()
    required = convert_to_openai_tool(schema)["function"]["parameters"].get("required") or ()
    own = getattr(
        schema, "__required_keys__", frozenset(required)
    )  # LangChain lists every key as required
    return tuple(name for name in required if name in own)


def _require_keys(found: Any, required: tuple[str, ...], why: str) -> Any:
    missing = [name for name in required if not isinstance(found, dict) or name not in found]
    if missing:
        raise OutputParserException(
            f"the model's object lacks the required {', '.join(missing)}{why}",
            llm_output=str(found),
        )
    return found


def _explain_failure(message: Any) -> str:
    """Return the parse errors of a message and, if it was cut off, a hint; else an empty text."""
    if not isinstance(message, AIMessage):
        return ""
    errors = [call.get("error") for call in message.invalid_tool_calls]
    return _explain(errors, message.response_metadata.get("finish_reason"))


def _explain(errors: Sequence[str | None], finish_reason: str | None) -> str:
    hint = "; the answer was cut off at its length: increase max_tokens"
    reasons = "".join(f": {error}" for error in errors if error)
    return reasons + (hint if finish_reason == "length" else "")
