"""A script that calls tools, and the tools it calls."""

from __future__ import annotations

import json
import re
from functools import cache

from framework_llms import scripted_llm
from langchain_core.tools import tool
from pydantic import BaseModel

_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_OPENED = re.compile(r'<tool_call>\s*\{"name": "(?:(\w+)"(?:, "arguments":)?)?\s*\Z')
_QUOTED = re.compile(r"'([^']+)'")


class Swell(BaseModel):
    """How high the swell is."""

    metres: int
    place: str


@tool
def tide(place: str) -> str:
    """Tell the tide at a place."""
    return f"high at {place}"


@cache
def tool_calling_llm():
    """Return an LLM that calls the first tool, or else writes text."""
    return scripted_llm(call_a_tool)


def call_a_tool(prompt):
    """Complete a started tool call, or call the first tool; without tools, write text."""
    *_, last = prompt.split("<turn>")
    *_, asked = re.findall(r"<turn>user: (.*?)(?=<turn>|\Z)", prompt, re.DOTALL)
    tools = [json.loads(line)["function"] for line in _tools(prompt)]
    opened = _OPENED.search(last)
    after_result = prompt.rstrip().split("<turn>")[-2].startswith("tool")
    if not tools or (after_result and not opened):
        return json.dumps(_values(["setup", "punchline"], asked)) if "JSON" in asked else "Hello."
    named = opened and opened.group(1)
    tool = next((tool for tool in tools if tool["name"] == named), tools[0])
    whole = "<tool_call>\n" + json.dumps(_call(tool, asked), ensure_ascii=False) + "\n</tool_call>"
    return whole[len(opened.group().rstrip()) if opened else 0 :]


def _tools(prompt):
    found = _TOOLS.search(prompt)
    return found.group(1).splitlines() if found else []


def _call(tool, asked):
    properties = (tool.get("parameters") or {}).get("properties") or {}
    return {
        "name": tool["name"],
        "arguments": {name: _value(schema, asked) for name, schema in properties.items()},
    }


def _values(names, asked):
    return {name: _value({"type": "string"}, asked) for name in names}


def _value(schema, asked):
    if schema.get("type") == "integer":
        return int(next(iter(re.findall(r"\((\d+)\)", asked)), 1))
    return next(iter(_QUOTED.findall(asked)), "a cat")
