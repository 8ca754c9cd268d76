"""A tiny LLM that says what a script says, token by token, through the real decoder.

A logits processor leaves the model no choice, so everything else is what happens with a model that
was trained to call tools: its chat template, the engine, stopping, streaming, and reading calls.
"""

from __future__ import annotations

import json
import re
from functools import cache

import torch
from ragaccel import LLM
from tiny_llm import make_tiny_model, tiny_tokenizer

TOOLS_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '<turn>system: <tools>' }}{% for tool in tools %}"
    "{{ '\n' + tool | tojson }}{% endfor %}{{ '\n</tools>' }}{% endif %}"
    "{% for message in messages %}{{ '<turn>' + message.role + ': ' + message.content }}"
    "{% for call in message.tool_calls or [] %}{% set call = call.function %}"
    "{{ '\n<tool_call>\n' }}"
    '{{ \'{"name": "\' + call.name + \'", "arguments": \' + call.arguments | tojson + "}" }}'
    "{{ '\n</tool_call>' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>assistant: ' }}{% endif %}"
)
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_OPENED = re.compile(r'<tool_call>\s*\{"name": "(?:(\w+)"(?:, "arguments":)?)?\s*\Z')
_QUOTED = re.compile(r"'([^']+)'")


class Say:
    """A logits processor, pure in (ids, scores), that makes a model say given tokens."""

    def __init__(self, num_prompt_tokens, token_ids):
        self.num_prompt_tokens, self.token_ids = num_prompt_tokens, token_ids

    def __call__(self, ids, scores):
        said = ids.shape[1] - self.num_prompt_tokens
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.token_ids[min(said, len(self.token_ids) - 1)]] = 0.0
        return forced


class ScriptedLLM(LLM):
    """Answers every prompt with what ``script`` makes of its text."""

    script = None

    def _plan(self, prompt, references, settings):
        ids = super()._plan(prompt, references, settings).request.prompt_ids
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        said = [*self.tokenizer.encode(self.script(text)), *self.tokenizer.eos_ids]
        forced = {**settings, "logits_processors": [Say(len(ids), said)]}
        return super()._plan(prompt, references, forced)


@cache
def scripted_llm(script=None, template=TOOLS_TEMPLATE):
    """Make an LLM that follows a script; by default one that calls the first tool it may."""
    llm = ScriptedLLM(make_tiny_model("scripted"), tiny_tokenizer(template), keep_costs=False)
    llm.script = script or call_a_tool
    return llm


def call_a_tool(prompt):
    """Call the tool that the answer has begun to call, or the first; talk where none may be."""
    *_, last = prompt.split("<turn>")
    *_, asked = re.findall(r"<turn>user: (.*?)(?=<turn>|\Z)", prompt, re.DOTALL)
    tools = [json.loads(line)["function"] for line in _tools(prompt)]
    opened = _OPENED.search(last)
    after_result = prompt.rstrip().split("<turn>")[-2].startswith("tool:")
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
