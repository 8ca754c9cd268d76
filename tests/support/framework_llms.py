"""Tiny LLMs for the suites of the integrations: real decoding, a script, or a record of calls."""

from __future__ import annotations

import json
import re
import threading
from functools import cache

import torch
from chat_model import TEMPLATE, TOOLS_TEMPLATE, ScriptedLLM, make_model, make_tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from ragaccel import LLM, Answer, AsyncStream, Passage, Stats, Stream, copied_spans
from ragaccel.answer import Usage

TEXT = """The lamp burns rapeseed oil. Its keeper trims the wick at dusk, and again at midnight.
The tide rises four metres at the mole. Who trims the wick? What rises at the mole?
user: assistant: system: Context information is below. Query: Answer: {"name": "x", "age": 3}"""
CONTEXT = 8192
EOS, TURN = 1, 2


@cache
def tiny_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Make a byte-level BPE of 400 tokens that can spell anything and begins texts with <bos>."""
    return make_tokenizer(TEXT, template)


@cache
def tiny_model(name: str = "tiny") -> LlamaForCausalLM:
    """Build a llama with random weights in float64, which goes by a name."""
    model = make_model(max_position_embeddings=CONTEXT, pad_token_id=EOS)
    model.config._name_or_path = name
    return model


@cache
def tiny_llm(template: str | None = TEMPLATE, name: str = "tiny", **options) -> LLM:
    """Make an LLM of a model that all tests share; do not change it."""
    return LLM(tiny_model(name), tiny_tokenizer(template), save_measurements=False, **options)


@cache
def tiny_folder(path: str) -> str:
    """Save the tiny model in a folder, as one downloads it."""
    make_model(max_position_embeddings=CONTEXT).to(torch.float32).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def scripted_llm(script, template=TOOLS_TEMPLATE) -> ScriptedLLM:
    """Make an LLM that answers what ``script`` makes of the prompt's text."""
    return ScriptedLLM(script, tiny_model("scripted"), tiny_tokenizer(template))


def call(name, **arguments):
    """Return the text of a tool call."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tools_in(prompt):
    """Return the names of the tools that a prompt shows."""
    shown = prompt.partition("<tools>")[2].partition("</tools>")[0]
    return re.findall(r'"function": \{"name": "(\w+)"', shown) or re.findall(
        r'"name": "(\w+)", "description"', shown
    )


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


class RecordingLLM(LLM):
    """Answers ``say(prompt's text)`` at once, without decoding, and records its calls.

    Attributes:
        asked: the text, references and settings of each call.
        streams: the stream of each call.
    """

    context_length = CONTEXT

    def __init__(
        self,
        template=TEMPLATE,
        say=lambda text: "Noted, and thank you.",
        *,
        note=None,
        context_length=100_000,
    ):
        super().__init__(tiny_model(), tiny_tokenizer(template), save_measurements=False)
        self.say, self.asked, self.streams, self._note = say, [], [], note
        self.context_length, self._recording = context_length, threading.Lock()

    def stream(self, prompt, *, references=(), **settings):
        text = self._text_of(prompt)
        passages = tuple(one for one in references if isinstance(one, Passage))
        stream = Stream(self._said(self.say(text), text, passages), passages)
        with self._recording:
            self.asked.append((text, list(references), settings))
            self.streams.append(stream)
        if self._note is not None:
            self._note(text, references)
        return stream

    def astream(self, prompt, **given):
        return AsyncStream(self.stream(prompt, **given))

    def _text_of(self, prompt):
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt[0], int):
            return self.tokenizer.decode(prompt, skip_special_tokens=False)
        return "\n\n".join(message["content"] for message in prompt)

    def _said(self, answer, text, passages):
        for number, word in enumerate(answer.split(" ")):
            yield word if number == 0 else " " + word
        read, wrote = len(text) // 4, len(answer) // 4
        return Answer(
            text=answer,
            token_ids=tuple(self.tokenizer.encode(answer)),
            finish_reason="stop",
            usage=Usage(read, wrote, read + wrote),
            stats=Stats(),
            passages=passages,
            copied_spans=copied_spans(answer, passages),
        )
