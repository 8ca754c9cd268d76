"""A tiny LLM that follows a script, and helpers for its calls and tools."""

from __future__ import annotations

import json
import re

from chat_model import TOOLS_TEMPLATE, ScriptedLLM
from tiny_llms import tiny_model, tiny_tokenizer


def scripted_llm(script, template=TOOLS_TEMPLATE):
    """Make an LLM that follows a script."""
    return ScriptedLLM(script, tiny_model(), tiny_tokenizer(template))


def call(name, **arguments):
    """Return the text of a tool call."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tools_in(prompt):
    """Return the names of the tools that a prompt shows."""
    shown = prompt.partition("<tools>")[2].partition("</tools>")[0]
    return re.findall(r'"function": \{"name": "(\w+)"', shown) or re.findall(
        r'"name": "(\w+)", "description"', shown
    )
