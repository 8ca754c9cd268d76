"""A tiny random chat model with a byte-level tokenizer, and a way to make it say something."""

from __future__ import annotations

from functools import cache

import torch
from tiny_models import make_tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ragaccel.llm import LLM

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<turn>{{ message['role'] }}: "
    "{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<turn>assistant:{% endif %}"
)
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
    """Make a byte-level BPE of 400 tokens that can spell anything."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=["<bos>", "<eos>", "<turn>", *(f"<s{i}>" for i in range(1, 9))],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<turn>"],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = template
    return wrapped


@cache
def tiny_llm(template: str | None = TEMPLATE, max_positions: int = 2048, **options) -> LLM:
    """Make an LLM with random weights in float64; do not change it."""
    model = make_tiny_model("llama", vocab_size=380, max_position_embeddings=max_positions)
    model.generation_config.eos_token_id = 1
    return LLM(model, tiny_tokenizer(template), **options)


class Say:
    """A logits processor, pure in (ids, scores), that makes a model say given tokens."""

    def __init__(self, num_prompt_tokens: int, token_ids: list[int]) -> None:
        self.num_prompt_tokens, self.token_ids = num_prompt_tokens, token_ids

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        said = ids.shape[1] - self.num_prompt_tokens
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.token_ids[min(said, len(self.token_ids) - 1)]] = 0.0
        return forced


def say(llm: LLM, prompt, text: str) -> Say:
    """Make ``llm`` answer ``text``, and end there, when it completes ``prompt``."""
    if isinstance(prompt, str):
        num_prompt_tokens = len(llm.tokenizer.encode(prompt, add_special_tokens=True))
    else:
        num_prompt_tokens = len(prompt.token_ids)
    return Say(num_prompt_tokens, [*llm.tokenizer.encode(text), 1])
