"""A tiny LLM that says what a script says, token by token, through the real decoder.

A logits processor leaves the model no choice, so everything else is what happens with a model that
was trained to call tools: its chat template, the engine, stopping, streaming, and reading calls.
"""

from __future__ import annotations

import json
import re

import torch
from ragaccel import LLM
from tiny_llms import tiny_model, tiny_tokenizer

TOOLS_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '<turn>system: <tools>' }}{% for tool in tools %}"
    "{{ '\n' + tool | tojson }}{% endfor %}{{ '\n</tools>' }}{% endif %}"
    "{% for message in messages %}{{ '<turn>' + message.role }}"
    "{% if message.role == 'tool' %}{{ '(' + message.name + ')' }}{% endif %}"
    "{{ ': ' + message.content }}"
    "{% for call in message.tool_calls or [] %}{% set call = call.function %}"
    "{{ '\n<tool_call>\n' }}"
    '{{ \'{"name": "\' + call.name + \'", "arguments": \' + call.arguments | tojson + "}" }}'
    "{{ '\n</tool_call>' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>assistant: ' }}{% endif %}"
)


class _Say:
    """A logits processor, pure in (ids, scores), that makes a model say given tokens."""

    def __init__(self, num_prompt_tokens, token_ids):
        self.num_prompt_tokens, self.token_ids = num_prompt_tokens, token_ids

    def __call__(self, ids, scores):
        said = ids.shape[1] - self.num_prompt_tokens
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.token_ids[min(said, len(self.token_ids) - 1)]] = 0.0
        return forced


class ScriptedLLM(LLM):
    """Answers every prompt with what ``script`` makes of its text; keeps the prompts."""

    script = None

    def _plan(self, prompt, references, settings):
        ids = super()._plan(prompt, references, settings).request.prompt_ids
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        self.prompts.append(text)
        self.references.append(list(references))
        said = [*self.tokenizer.encode(self.script(text)), *self.tokenizer.eos_ids]
        forced = {**settings, "logits_processors": [_Say(len(ids), said)]}
        return super()._plan(prompt, references, forced)


def scripted_llm(script, template=TOOLS_TEMPLATE):
    """Make an LLM that follows a script."""
    llm = ScriptedLLM(tiny_model(), tiny_tokenizer(template), keep_costs=False)
    llm.script, llm.prompts, llm.references = script, [], []
    return llm


def call(name, **arguments):
    """Spell a call."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tools_in(prompt):
    """Return the names of the tools that a prompt shows."""
    shown = prompt.partition("<tools>")[2].partition("</tools>")[0]
    return re.findall(r'"function": \{"name": "(\w+)"', shown) or re.findall(
        r'"name": "(\w+)", "description"', shown
    )
