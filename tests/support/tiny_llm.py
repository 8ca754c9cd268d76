"""A tiny random chat model with a byte-level tokenizer, and a way to make it say something."""

from __future__ import annotations

from functools import cache

from chat_model import TEMPLATE, Say, make_tokenizer
from tiny_models import make_tiny_model
from transformers import PreTrainedTokenizerFast

from ragaccel.llm import LLM

DOCUMENTS_TEMPLATE = (
    "{{ bos_token }}{% set count = namespace(value=0) %}{% for document in documents %}"
    "{% set citation = '[' ~ loop.index ~ ']' %}{% for sentence in document['sentences'] %}"
    "{% set count.value = count.value + 1 %}"
    "<s{{ count.value }}> {{ sentence }} {{ citation }}{% endfor %}{% endfor %}"
    "<turn>{{ messages[-1]['content'] }}<turn>assistant:"
)
TEXT = """The lamp burns rapeseed oil. Its keeper trims the wick at dusk, and again at midnight.
The tide rises four metres at the mole. Who trims the wick? What rises at the mole?
Answer the question from the numbered passages. Quote their words wherever they answer it."""


@cache
def tiny_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Make a byte-level BPE of 380 tokens, with marks of sentences."""
    return make_tokenizer(TEXT, template, 380, [f"<s{i}>" for i in range(1, 9)])


@cache
def tiny_llm(template: str | None = TEMPLATE, max_positions: int = 2048, **options) -> LLM:
    """Make an LLM with random weights in float64; do not change it."""
    model = make_tiny_model("llama", vocab_size=380, max_position_embeddings=max_positions)
    model.generation_config.eos_token_id = 1
    return LLM(model, tiny_tokenizer(template), **options)


def say(llm: LLM, prompt, text: str) -> Say:
    """Make ``llm`` answer ``text``, and end there, when it completes ``prompt``."""
    if isinstance(prompt, str):
        num_prompt_tokens = len(llm.tokenizer.encode(prompt, add_special_tokens=True))
    else:
        num_prompt_tokens = len(prompt.token_ids)
    return Say(num_prompt_tokens, [*llm.tokenizer.encode(text), 1])
