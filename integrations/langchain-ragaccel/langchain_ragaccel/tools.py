"""Tools: how a model is told of them, and its calls as LangChain's messages hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, InvalidToolCall
from langchain_core.messages.tool import ToolCall as LangChainCall
from langchain_core.messages.tool import (
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


def as_tool_calls(calls: Sequence[ToolCall]) -> tuple[list[LangChainCall], list[InvalidToolCall]]:
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


def as_tool_call_chunks(calls: Sequence[ToolCall]) -> list[ToolCallChunk]:
    """Calls as the chunks of a stream hold them.

    A chunk has no place for an error.
    """
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
    """A call's arguments; its text if it could not be read, in quotes if LangChain would mend it.

    It mends JSON that was cut off, and would make a call of it that the model never made.
    """
    if call.is_valid:
        return json.dumps(call.arguments, ensure_ascii=False)
    try:
        repaired = parse_partial_json(call.text)
    except ValueError:
        return call.text
    return json.dumps(call.text, ensure_ascii=False) if isinstance(repaired, dict) else call.text


def _id(call: ToolCall) -> str:
    """The id that the model gave, or a new one: of nine letters, which is all that some take."""
    return call.call_id or uuid4().hex[:9]


_TRUNCATION_HINT = "; the answer was cut off at its length: give it more max_tokens"


class ToolCallParser(BaseGenerationOutputParser[Any]):
    """Reads the object out of the call of one tool, and says why where there is none.

    LangChain's own parsers answer None where no call could be read.
    """

    name: str
    """The tool's."""
    reader: Any
    """LangChain's parser, which makes the object."""
    required: tuple[str, ...] = ()
    """The keys that it must have, where no class sees to that."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """Read the object.

        Raises:
            OutputParserException: no such call, or one that cannot be read or lacks something.
            ValidationError: it does not fit the schema's class.
        """
        message = getattr(result[0], "message", None)
        if not isinstance(message, AIMessage) or not any(
            call["name"] == self.name for call in message.tool_calls
        ):
            raise OutputParserException(
                f"the model called no {self.name}{_explain_failure(message)}",
                llm_output=result[0].text,
            )
        found = self.reader.parse_result(result, partial=partial)
        return _require_keys(found, self.required, message)


class RequiredKeysJsonParser(JsonOutputParser):
    """Reads an answer as JSON, of which some keys are required at the end."""

    required: tuple[str, ...] = ()
    """The keys that it must have."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """Read the object; while it is being written (``partial``) it may lack anything.

        Raises:
            OutputParserException: no JSON, or a required key is not there.
        """
        found = super().parse_result(result, partial=partial)
        if partial:
            return found
        return _require_keys(found, self.required, getattr(result[0], "message", None))


def output_parser_for(schema: Any, *, from_call: bool) -> Runnable[Any, Any]:
    """What turns an answer into the schema's object; a dict where the schema is no class."""
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
    """Answers as objects; or as ``raw``, ``parsed`` and ``parsing_error`` beside one another."""
    if not include_raw:
        return llm | parser
    right = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    wrong = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | right.with_fallbacks([wrong], exception_key="parsing_error")


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What the text of an answer has to be: a JSON object, perhaps of a schema.

    A schema is a tool that the model is made to call; its arguments become the text. Nothing
    constrains decoding: what does not fit is an error once the answer is there.
    """

    tool: dict[str, Any] | None = None
    required: tuple[str, ...] = ()

    def read(
        self, content: str, calls: Sequence[ToolCall], finish_reason: str
    ) -> tuple[str, list[ToolCall]]:
        """Return the object as text; or the calls of other tools, if the answer makes any.

        Raises:
            OutputParserException: no such object, or one that lacks something.
        """
        name = self.tool["function"]["name"] if self.tool else None
        others = [call for call in calls if call.name != name]
        if any(call.is_valid for call in others):
            return "", others
        errors = "".join(f": {call.error}" for call in calls if call.error)
        why = errors + (_TRUNCATION_HINT if finish_reason == "length" else "")
        if name is None:
            found = _parse_json_object(content, why)
        else:
            own = [call.arguments for call in calls if call.name == name and call.is_valid]
            if not own:
                written = "".join([content, *(call.text for call in calls)])
                raise OutputParserException(
                    f"the model wrote no {name}, the response_format{why}", llm_output=written
                )
            found = own[0]
        missing = [key for key in self.required if key not in found]
        if missing:
            raise OutputParserException(
                f"the model's object lacks {', '.join(missing)}{why}", llm_output=str(found)
            )
        return json.dumps(found, ensure_ascii=False), []


def parse_response_format(value: Any) -> ResponseFormat | None:
    """Read ``response_format``; None where any text will do.

    It is ``{"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}``, a schema or a
    class; ``{"type": "json_object"}`` or ``"json"``; ``{"type": "text"}`` or None.

    Raises:
        ConfigurationError: it is none of these, or a schema of something else than an object.
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
            'response_format is {"type": "json_schema", "json_schema": {"name": ..., "schema": '
            '{"type": "object", ...}}} or {"type": "json_object"}, not '
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
            f"the model wrote no JSON{why}: nothing makes it, so the prompt has to ask for it",
            llm_output=content,
        ) from error
    if not isinstance(found, dict):
        raise OutputParserException(
            f"the model wrote JSON that is no object{why}", llm_output=content
        )
    return found


def _required_keys(schema: Any) -> tuple[str, ...]:
    """The keys that an object of a schema must have."""
    if isinstance(schema, dict):
        function = schema.get("function", schema)
        required = function.get("parameters", function).get("required") or ()
        return tuple(required)
    if not isinstance(schema, type):
        return ()
    required = convert_to_openai_tool(schema)["function"]["parameters"].get("required") or ()
    own = getattr(schema, "__required_keys__", frozenset(required))  # LangChain takes all of them
    return tuple(name for name in required if name in own)


def _require_keys(found: Any, required: tuple[str, ...], message: Any) -> Any:
    missing = [name for name in required if not isinstance(found, dict) or name not in found]
    if missing:
        raise OutputParserException(
            f"the model's object lacks {', '.join(missing)}{_explain_failure(message)}",
            llm_output=str(found),
        )
    return found


def _explain_failure(message: Any) -> str:
    """What an answer that was no good tells of itself."""
    if not isinstance(message, AIMessage):
        return ""
    errors = [call.get("error") for call in message.invalid_tool_calls]
    reasons = "".join(f": {error}" for error in errors if error)
    is_cut = message.response_metadata.get("finish_reason") == "length"
    return reasons + (_TRUNCATION_HINT if is_cut else "")
