"""A tiny random chat model with a byte-level tokenizer: real decoding in milliseconds."""

from __future__ import annotations

from functools import cache

import torch
from ragaccel import LLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<turn>{{ message['role'] }}: "
    "{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<turn>assistant:{% endif %}"
)
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
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<bos>", "<eos>", "<turn>"],
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


def make_tiny_model(name: str = "") -> LlamaForCausalLM:
    """Build a model with random weights, wide enough that choices have clear gaps."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval().to(torch.float64)
    model.config._name_or_path = name
    return model


@cache
def tiny_llm(template: str | None = TEMPLATE, name: str = "tiny") -> LLM:
    """Make an LLM that all tests share; do not change it."""
    return LLM(make_tiny_model(name), tiny_tokenizer(template), keep_costs=False)


@cache
def tiny_folder_of(path: str) -> str:
    """Save the tiny model in a folder, as one downloads it."""
    make_tiny_model().to(torch.float32).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path
