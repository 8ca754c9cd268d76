"""A tiny random chat model with a byte-level tokenizer: real decoding in milliseconds."""

from __future__ import annotations

from functools import cache

import torch
from chat_model import TEMPLATE, make_model, make_tokenizer
from ragaccel import LLM
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

ALTERNATING = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] != ('user' if loop.index0 % 2 == 0 else 'assistant') %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "<turn>{{ message['role'] }}: {{ message['content'] }}{% endfor %}<turn>assistant:"
)
TEXT = """The lamp burns rapeseed oil. Its keeper trims the wick at dusk, and again at midnight.
The tide rises four metres at the mole. Who trims the wick? What rises at the mole?
Answer the question from the passages. Quote their words wherever they answer it."""


@cache
def tiny_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Make a byte-level BPE of 400 tokens that can spell anything."""
    return make_tokenizer(TEXT, template)


def make_tiny_model(name: str = "") -> LlamaForCausalLM:
    """Build a model that goes by a name."""
    model = make_model(max_position_embeddings=4096)
    model.config._name_or_path = name
    return model


@cache
def tiny_llm(template: str | None = TEMPLATE, name: str = "tiny") -> LLM:
    """Make an LLM that all tests share; do not change it."""
    return LLM(make_tiny_model(name), tiny_tokenizer(template), save_measurements=False)


@cache
def tiny_folder_of(path: str) -> str:
    """Save the tiny model in a folder, as one downloads it."""
    make_tiny_model().to(torch.float32).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path
