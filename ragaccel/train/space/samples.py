"""Samples: prompts with their answers, read from JSON lines and turned into token ids."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ragaccel.errors import ConfigurationError
from ragaccel.replacing import replacing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ragaccel.models.tokenizer import Tokenizer

LEAST_ANSWER = 2  # tokens; the first mask token's label is the second of them
_KINDS = '{"prompt": …, "answer": …}, {"messages": […]} or {"prompt_ids": […], "answer_ids": […]}'


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and the answer that is learned, the token that ends it included."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Both, one after the other."""
        return self.prompt_ids + self.answer_ids

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


@dataclass(frozen=True, slots=True)
class Samples:
    """What a file holds. ``num_cut`` answers lost their ends, ``num_skipped`` samples had no room.

    Too short an answer has nothing to guess, and counts as skipped too.
    """

    rows: tuple[Sample, ...]
    num_cut: int = 0
    num_skipped: int = 0

    @property
    def digest(self) -> str:
        """Tells these samples, in their order, from others."""
        lines = (f"{s.prompt_ids} {s.answer_ids}\n".encode() for s in self.rows)
        digest = hashlib.sha256()
        for line in lines:
            digest.update(line)
        return digest.hexdigest()[:16]


def read_samples(
    path: Path, tokenizer: Tokenizer, *, vocab_size: int, max_tokens: int | None = None
) -> Samples:
    """Read a file of JSON lines, each a prompt and its answer.

    A line is ``{"prompt", "answer"}``, texts of which the answer gets an end token;
    ``{"messages"}`` of a chat, where each turn of the assistant is an answer to all before it; or
    ``{"prompt_ids", "answer_ids"}``, taken as they are. Other keys are left alone.

    Args:
        path: the file.
        tokenizer: reads the texts.
        vocab_size: rows of the model's embedding; ids beyond it are refused.
        max_tokens: longest sample; longer answers lose their ends.

    Raises:
        ConfigurationError: no such file, nothing in it, or a line that is none of these; names it.
    """
    try:
        # Not splitlines: a text in JSON may hold a line separator of Unicode as it is.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read as text: {error}") from error
    found: list[Sample] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found += _checked(_of_row(json.loads(line), tokenizer), vocab_size)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigurationError(f"{path}, line {number}: {_told(error)}") from error
    if not found:
        raise ConfigurationError(f"{path} holds no samples: write a line of {_KINDS} for each")
    return fitted(found, max_tokens)


def fitted(samples: Iterable[Sample], max_tokens: int | None = None) -> Samples:
    """Cut the ends of answers that are too long; leave out what then has nothing to guess."""
    kept, num_cut, num_skipped = [], 0, 0
    for sample in samples:
        over = len(sample) - max_tokens if max_tokens is not None else 0
        short = sample
        if over > 0:
            room = max(0, len(sample.answer_ids) - over)
            short = replace(sample, answer_ids=sample.answer_ids[:room])
        if len(short.answer_ids) < LEAST_ANSWER:
            num_skipped += 1
            continue
        num_cut += over > 0
        kept.append(short)
    return Samples(tuple(kept), num_cut, num_skipped)


def split_held_out(samples: Samples, share: float) -> tuple[Samples, Samples]:
    """Hold a share of the prompts out, chosen by their hash: the same ones at every start.

    Where the share is less than one of a few prompts, it is one.

    Raises:
        ConfigurationError: nothing is left on one of the sides.
    """
    places = [_place(sample.prompt_ids) for sample in samples.rows]
    first = min(places, default=1.0)
    is_out = [place < share or (share > 0 and place == first) for place in places]
    kept = tuple(s for s, out in zip(samples.rows, is_out, strict=True) if not out)
    held_out = tuple(s for s, out in zip(samples.rows, is_out, strict=True) if out)
    if not kept or (share > 0 and not held_out):
        raise ConfigurationError(
            f"a share of {share} held out of {len(samples.rows)} samples leaves {len(kept)} to "
            f"train on and {len(held_out)} to evaluate: change the share, or give a held-out file"
        )
    return replace(samples, rows=kept), Samples(held_out)


def write_samples(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as JSON lines, all or none; return how many."""
    count = 0
    with replacing(path) as file:
        for count, row in enumerate(rows, start=1):  # noqa: B007
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
    return count


def _of_row(row: Any, tokenizer: Tokenizer) -> Iterator[Sample]:
    if not isinstance(row, dict):
        raise TypeError(f"a JSON object is wanted: {_KINDS}")
    if "prompt_ids" in row and "answer_ids" in row:
        yield Sample(_ids(row["prompt_ids"]), _ids(row["answer_ids"]))
    elif "messages" in row:
        yield from _of_messages(row["messages"], tokenizer)
    elif "prompt" in row and "answer" in row:
        prompt, answer = row["prompt"], row["answer"]
        if not isinstance(prompt, str) or not isinstance(answer, str):
            raise TypeError("prompt and answer are texts")
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=True)
        whole = tokenizer.encode(prompt + answer, add_special_tokens=True)
        answer_ids = _behind(prompt_ids, whole)
        answer_ids = tokenizer.encode(answer) if answer_ids is None else answer_ids
        yield Sample(tuple(prompt_ids), (*answer_ids, *_end(tokenizer)))
    else:
        raise KeyError(f"a sample is {_KINDS}, and this has {', '.join(row) or 'nothing'}")


def _of_messages(messages: Any, tokenizer: Tokenizer) -> Iterator[Sample]:
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in messages
    ):
        raise TypeError('messages are a list of {"role": …, "content": …}')
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    if not turns:
        raise ValueError("no turn of the assistant follows another: there is no answer to learn")
    for turn in turns:
        before, content = messages[:turn], messages[turn]["content"]
        if not isinstance(content, str):
            raise TypeError("the assistant's content is a text")
        yield Sample(tuple(tokenizer.chat(before)), _turn(messages[: turn + 1], tokenizer))


def _turn(messages: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> tuple[int, ...]:
    """An assistant's turn as its model would write it: to the first token that ends it."""
    hidden = [tokenizer.shield.hide_in(message) for message in messages]
    before, text = tokenizer.chat_text(hidden[:-1]), tokenizer.chat_text(hidden, None, False)
    if text.startswith(before):
        written = _behind(tokenizer.encode(before), tokenizer.encode(text))
        if written is None:
            written = tokenizer.encode(text[len(before) :])
        for place, token in enumerate(written):
            if token in tokenizer.eos_ids:
                return tuple(written[: place + 1])
    content = tokenizer.shield.hide(messages[-1]["content"])
    return (*tokenizer.encode(content), *_end(tokenizer))


def _behind(before: list[int], whole: list[int]) -> list[int] | None:
    """What follows a text in a longer one; None where a token reaches over its end.

    A text tokenized for itself may begin with a space that is none of its own.
    """
    return whole[len(before) :] if whole[: len(before)] == before else None


def _end(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token that ends an answer, if there is one: the tokenizer's own where it has several."""
    own = getattr(tokenizer.tokenizer, "eos_token_id", None)
    if own in tokenizer.eos_ids:
        return (int(own),)
    return tuple(sorted(tokenizer.eos_ids)[:1])


def _ids(given: Any) -> tuple[int, ...]:
    if not isinstance(given, list) or not all(type(token) is int for token in given):
        raise TypeError("prompt_ids and answer_ids are lists of whole numbers")
    return tuple(given)


def _checked(samples: Iterable[Sample], vocab_size: int) -> Iterator[Sample]:
    for sample in samples:
        if not sample.prompt_ids:
            raise ValueError("the prompt is empty")
        outside = [token for token in sample.token_ids if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(
                f"token {outside[0]} is not in the model's vocabulary of {vocab_size:,}: were the "
                "ids made for another model?"
            )
        yield sample


def _told(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON ({error.msg} at column {error.colno}): a line is {_KINDS}"
    return str(error.args[0] if error.args else error)


def _place(prompt_ids: tuple[int, ...]) -> float:
    digest = hashlib.sha256(repr(prompt_ids).encode()).digest()
    return float(int.from_bytes(digest[:8], "big") / 2**64)
