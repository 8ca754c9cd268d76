"""Structured output: what a schema's answers are read by."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import (
    BaseGenerationOutputParser,
    JsonOutputParser,
    PydanticOutputParser,
)
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

if TYPE_CHECKING:
    from langchain_core.outputs import Generation
    from langchain_core.runnables import Runnable

_LENGTHEN = "; the answer was cut off at its length: give it more max_tokens"


class CallParser(BaseGenerationOutputParser[Any]):
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
                f"the model called no {self.name}{_why(message)}", llm_output=result[0].text
            )
        found = self.reader.parse_result(result, partial=partial)
        return _whole(found, self.required, message)


class KeyedJsonParser(JsonOutputParser):
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
        return _whole(found, self.required, getattr(result[0], "message", None))


def parser_of(schema: Any, *, from_call: bool) -> Runnable[Any, Any]:
    """What turns an answer into the schema's object; a dict where the schema is no class."""
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    if not from_call:
        if is_class:
            return PydanticOutputParser(pydantic_object=schema)
        return KeyedJsonParser(required=_required(schema))
    name = convert_to_openai_tool(schema)["function"]["name"]
    if is_class:
        reader = PydanticToolsParser(tools=[schema], first_tool_only=True)
        return CallParser(name=name, reader=reader)
    keyed = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    return CallParser(name=name, reader=keyed, required=_required(schema))


def parsed(
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


def _required(schema: Any) -> tuple[str, ...]:
    """The keys that an object of a schema must have."""
    if isinstance(schema, dict):
        function = schema.get("function", schema)
        told = function.get("parameters", function).get("required") or ()
        return tuple(told)
    if not isinstance(schema, type):
        return ()
    told = convert_to_openai_tool(schema)["function"]["parameters"].get("required") or ()
    own = getattr(schema, "__required_keys__", frozenset(told))  # LangChain takes all of them
    return tuple(name for name in told if name in own)


def _whole(found: Any, required: tuple[str, ...], message: Any) -> Any:
    missing = [name for name in required if not isinstance(found, dict) or name not in found]
    if missing:
        raise OutputParserException(
            f"the model's object lacks {', '.join(missing)}{_why(message)}", llm_output=str(found)
        )
    return found


def _why(message: Any) -> str:
    """What an answer that was no good tells of itself."""
    if not isinstance(message, AIMessage):
        return ""
    errors = [call.get("error") for call in message.invalid_tool_calls]
    told = "".join(f": {error}" for error in errors if error)
    is_cut = message.response_metadata.get("finish_reason") == "length"
    return told + (_LENGTHEN if is_cut else "")
