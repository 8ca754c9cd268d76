"""Structured output: what a schema's answers are read by."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

if TYPE_CHECKING:
    from langchain_core.runnables import Runnable


def parser_of(schema: Any, *, from_call: bool) -> Runnable[Any, Any]:
    """What turns an answer into the schema's object; a dict where the schema is no class."""
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    if from_call:
        if is_class:
            return PydanticToolsParser(tools=[schema], first_tool_only=True)
        name = convert_to_openai_tool(schema)["function"]["name"]
        return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    return PydanticOutputParser(pydantic_object=schema) if is_class else JsonOutputParser()


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
