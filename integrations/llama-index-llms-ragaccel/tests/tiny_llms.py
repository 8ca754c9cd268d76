"""Tiny models that need no files, and stand-ins that record their calls."""

from __future__ import annotations

import threading
from functools import cache

import torch
from chat_model import TEMPLATE, make_model, make_tokenizer
from ragaccel import LLM, Answer, AsyncStream, Passage, Stats, Stream, copied_spans
from ragaccel.answer import Usage
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

ALTERNATING = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('no system') }}{% endif %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<turn>{{ message['role'] }}: "
    "{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<turn>assistant:{% endif %}"
)
READER_TEMPLATE = (
    "{{ bos_token }}{% for document in documents %}{{ document['text'] }} {% endfor %}"
    "<turn>{{ messages[-1]['content'] }}"
)
TEXT = """The lamp burns rapeseed oil. Its keeper trims the wick at dusk, and again at midnight.
The tide rises four metres at the mole. Who trims the wick? What rises at the mole?
user: assistant: system: Context information is below. Query: Answer: {"name": "x", "age": 3}"""
EOS, TURN = 1, 2


@cache
def tiny_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 400 tokens that can spell anything and begins texts with <bos>."""
    return make_tokenizer(TEXT, template)


@cache
def tiny_model() -> LlamaForCausalLM:
    """A llama with random weights, in float64, so that rounding does not affect answers."""
    return make_model(max_position_embeddings=8192, pad_token_id=EOS)


@cache
def tiny_llm(template: str | None = TEMPLATE) -> LLM:
    """Return an LLM of the tiny model and tokenizer."""
    return LLM(tiny_model(), tiny_tokenizer(template), save_measurements=False)


class Say:
    """A logits processor, pure in (ids, scores), that makes a chat model answer a text and end."""

    def __init__(self, text: str) -> None:
        words = tiny_llm().tokenizer
        self.token_ids = [*words.encode(text), EOS]
        self.header = len(words.encode("assistant:"))

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        for row, one in zip(forced, ids.tolist(), strict=True):
            said = one[::-1].index(TURN) - self.header
            row[self.token_ids[max(0, min(said, len(self.token_ids) - 1))]] = 0.0
        return forced


class RecordingLLM:
    """Stands in for a ``ragaccel.LLM``: records its calls, and answers ``say(text)``."""

    def __init__(self, template=TEMPLATE, say=lambda text: "Noted, and thank you.", **facts):
        self.tokenizer = tiny_llm(template).tokenizer
        self.context_length = facts.get("context_length", 100_000)
        self.say, self.asked, self.streams, self._lock = say, [], [], threading.Lock()

    def stream(self, prompt, *, references=(), **settings):
        text = (
            prompt if isinstance(prompt, str) else "\n\n".join(turn["content"] for turn in prompt)
        )
        with self._lock:
            self.asked.append((text, list(references), settings))
        passages = tuple(one for one in references if isinstance(one, Passage))
        stream = Stream(self._pieces(self.say(text), text, passages), passages)
        self.streams.append(stream)
        return stream

    def astream(self, prompt, **given):
        return AsyncStream(self.stream(prompt, **given))

    def _pieces(self, answer, text, passages):
        for number, word in enumerate(answer.split(" ")):
            yield word if number == 0 else " " + word
        read, wrote = len(text) // 4, len(answer) // 4
        return Answer(
            text=answer,
            token_ids=(),
            finish_reason="stop",
            usage=Usage(read, wrote, read + wrote),
            stats=Stats(),
            passages=passages,
            copied_spans=copied_spans(answer, passages),
        )
