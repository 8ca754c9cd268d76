"""Training data: samples, the model's own answers, and packed rows with mask tokens.

Drafts must match what the model itself would generate, so mask tokens learn best from the model's
own answers.

A cut is the position c of a real token that a group of K mask tokens follows. Mask token i (1 to K)
has position c + i and predicts the token at position c + i + 1. It attends to the real tokens up to
c and to the mask tokens of its group up to itself, as in decoding. The paper (arXiv 2402.11809,
Figure 2) lays out k + 1 mask tokens, of which the last predicts nothing; that one is left out here.

Shapes: N tokens of a row, all real ones first; K mask tokens of a group.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any

import torch

from ragaccel.errors import ConfigurationError
from ragaccel.paths import atomic_write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from ragaccel.llm import LLM
    from ragaccel.models.tokenizer import Tokenizer
    from ragaccel.training.config import Recipe


MIN_ANSWER_TOKENS = 2  # the label of the first mask token is the answer's second token
_KINDS = '{"prompt": …, "answer": …}, {"messages": […]} or {"prompt_ids": […], "answer_ids": […]}'


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and the answer to learn, as token ids; the answer includes its end token."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the prompt's ids followed by the answer's."""
        return self.prompt_ids + self.answer_ids

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a file, and how many were cut or left out.

    Attributes:
        rows: The samples.
        num_cut: Number of answers that were cut to fit.
        num_skipped: Number of samples that were left out: the prompt is too long or the answer has
            fewer than two tokens.
    """

    rows: tuple[Sample, ...]
    num_cut: int = 0
    num_skipped: int = 0

    @property
    def digest(self) -> str:
        """Return a hash of the samples' token ids, which depends on the samples' order."""
        digest = hashlib.sha256()
        for sample in self.rows:
            digest.update(f"{sample.prompt_ids} {sample.answer_ids}\n".encode())
        return digest.hexdigest()[:16]


def read_samples(
    path: Path, tokenizer: Tokenizer, *, vocab_size: int, max_tokens: int | None = None
) -> Samples:
    """Read a file of JSON lines, each a prompt and its answer.

    A line has the keys ``prompt`` and ``answer``, texts, and the answer gets an end token;
    ``messages``, a chat in which each turn of the assistant answers all turns before it; or
    ``prompt_ids`` and ``answer_ids``, which are used unchanged. Other keys are ignored.

    Args:
        path: The file.
        tokenizer: Encodes the texts.
        vocab_size: Rows of the model's embedding; larger ids are refused.
        max_tokens: Maximum length of a sample; longer answers are cut.

    Raises:
        ConfigurationError: The file cannot be read or holds no samples, or a line is not a sample;
            the message names the line.
    """
    try:
        # Not splitlines: a JSON text may hold a Unicode line separator unescaped.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"there is no file {str(path)!r}: name one with samples"
        ) from error
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} cannot be read: it is not UTF-8 text") from error
    found: list[Sample] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found += _check_samples(_parse_row(json.loads(line), tokenizer), vocab_size)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigurationError(f"{path}, line {number}: {_error_text(error)}") from error
    if not found:
        raise ConfigurationError(f"{path} holds no samples: each line must be {_KINDS}")
    return truncate_samples(found, max_tokens)


def truncate_samples(samples: Iterable[Sample], max_tokens: int | None = None) -> Samples:
    """Cut answers to ``max_tokens`` per sample; leave out samples with fewer than two left."""
    kept, num_cut, num_skipped = [], 0, 0
    for sample in samples:
        over = len(sample) - max_tokens if max_tokens is not None else 0
        short = sample
        if over > 0:
            room = max(0, len(sample.answer_ids) - over)
            short = replace(sample, answer_ids=sample.answer_ids[:room])
        if len(short.answer_ids) < MIN_ANSWER_TOKENS:
            num_skipped += 1
            continue
        num_cut += over > 0
        kept.append(short)
    return Samples(tuple(kept), num_cut, num_skipped)


def split_held_out(samples: Samples, share: float) -> tuple[Samples, Samples]:
    """Split samples into those to train on and a held-out share; return both in this order.

    A prompt's hash decides, so every run holds out the same. At least one prompt is held out,
    unless the share is 0.

    Raises:
        ConfigurationError: One of the two sets would be empty.
    """
    fractions = [_hash_fraction(sample.prompt_ids) for sample in samples.rows]
    first = min(fractions, default=1.0)
    parts: dict[bool, list[Sample]] = {False: [], True: []}
    for sample, fraction in zip(samples.rows, fractions, strict=True):
        parts[fraction < share or (share > 0 and fraction == first)].append(sample)
    kept, held_out = tuple(parts[False]), tuple(parts[True])
    if not kept or (share > 0 and not held_out):
        raise ConfigurationError(
            f"holding out a share of {share} of {len(samples.rows)} samples leaves {len(kept)} to "
            f"train on and {len(held_out)} to evaluate: change the share, or give a held-out file"
        )
    return replace(samples, rows=kept), Samples(held_out)


def write_samples(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as JSON lines, atomically; return their number."""
    written = 0
    with atomic_write(path) as file:
        for row in rows:
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
            written += 1
    return written


def _parse_row(row: Any, tokenizer: Tokenizer) -> Iterator[Sample]:
    if not isinstance(row, dict):
        raise TypeError(f"a line must be a JSON object: {_KINDS}")
    if "prompt_ids" in row and "answer_ids" in row:
        yield Sample(_as_token_ids(row["prompt_ids"]), _as_token_ids(row["answer_ids"]))
    elif "messages" in row:
        yield from _parse_messages(row["messages"], tokenizer)
    elif "prompt" in row and "answer" in row:
        prompt, answer = row["prompt"], row["answer"]
        if not isinstance(prompt, str) or not isinstance(answer, str):
            raise TypeError("prompt and answer must be texts")
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=True)
        whole = tokenizer.encode(prompt + answer, add_special_tokens=True)
        answer_ids = _strip_prefix(prompt_ids, whole)
        answer_ids = tokenizer.encode(answer) if answer_ids is None else answer_ids
        yield Sample(tuple(prompt_ids), (*answer_ids, *_end_token(tokenizer)))
    else:
        raise KeyError(f"a sample must be {_KINDS}, but this one has {', '.join(row) or 'no keys'}")


def _parse_messages(messages: Any, tokenizer: Tokenizer) -> Iterator[Sample]:
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in messages
    ):
        raise TypeError('messages must be a list of {"role": …, "content": …}')
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    if not turns:
        raise ValueError(
            "no message of the assistant follows another message: there is no answer to learn"
        )
    for turn in turns:
        before, content = messages[:turn], messages[turn]["content"]
        if not isinstance(content, str):
            raise TypeError("the content of the assistant's messages must be text")
        yield Sample(tuple(tokenizer.chat(before)), _assistant_ids(messages[: turn + 1], tokenizer))


def _assistant_ids(messages: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of an assistant's turn as the model generates it, up to the end token."""
    escaped = [tokenizer.escaper.escape_message(message) for message in messages]
    before, text = tokenizer.chat_text(escaped[:-1]), tokenizer.chat_text(escaped, None, False)
    if text.startswith(before):
        written = _strip_prefix(tokenizer.encode(before), tokenizer.encode(text))
        if written is None:
            written = tokenizer.encode(text[len(before) :])
        for position, token in enumerate(written):
            if token in tokenizer.eos_ids:
                return tuple(written[: position + 1])
    content = tokenizer.escaper.escape(messages[-1]["content"])
    return (*tokenizer.encode(content), *_end_token(tokenizer))


def _strip_prefix(before: list[int], whole: list[int]) -> list[int] | None:
    """Return the ids of ``whole`` after ``before``, or None if ``whole`` does not start with it.

    Encoding the rest of the text alone could add a space that the text does not have.
    """
    return whole[len(before) :] if whole[: len(before)] == before else None


def _end_token(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return (end token,), or () if there is none; the tokenizer's own is preferred."""
    own = getattr(tokenizer.tokenizer, "eos_token_id", None)
    if own in tokenizer.eos_ids:
        return (int(own),)
    return tuple(sorted(tokenizer.eos_ids)[:1])


def _as_token_ids(given: Any) -> tuple[int, ...]:
    if not isinstance(given, list) or not all(type(token) is int for token in given):
        raise TypeError("prompt_ids and answer_ids must be lists of integers")
    return tuple(given)


def _check_samples(samples: Iterable[Sample], vocab_size: int) -> Iterator[Sample]:
    for sample in samples:
        if not sample.prompt_ids:
            raise ValueError("the prompt is empty")
        outside = [token for token in sample.token_ids if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(
                f"token {outside[0]} is not in the model's vocabulary of {vocab_size:,}: make the "
                "ids with the tokenizer of this model"
            )
        yield sample


def _error_text(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON ({error.msg} at column {error.colno}): a line must be {_KINDS}"
    return str(error.args[0] if error.args else error)


def _hash_fraction(prompt_ids: tuple[int, ...]) -> float:
    digest = hashlib.sha256(repr(prompt_ids).encode()).digest()
    return float(int.from_bytes(digest[:8], "big") / 2**64)


_ANSWER_BATCH_SIZE = 16


def answer_samples(
    llm: LLM,
    samples: Sequence[Sample],
    path: Path,
    *,
    max_new_tokens: int = 256,
    report: Callable[[int, int], None] | None = None,
) -> None:
    """Let the model answer those prompts whose answers the file does not hold yet.

    Each batch is written when it is done; a later call continues after the last one written.

    Args:
        llm: The model.
        samples: The prompts; their answers are not used.
        path: File of the answers, JSON lines in the samples' order.
        max_new_tokens: Maximum length of an answer; less if the model's context is shorter.
        report: A function that is called with the numbers of answers so far and of samples.

    Raises:
        ConfigurationError: The file holds answers to other prompts.
        CapacityError: A prompt leaves no room for an answer.
    """
    notify = report or (lambda *_: None)
    done = len(read_answers(path, samples))
    path.parent.mkdir(parents=True, exist_ok=True)
    notify(done, len(samples))
    with open(path, "ab") as file:
        while done < len(samples):
            batch = samples[done : done + _ANSWER_BATCH_SIZE]
            limit = max_new_tokens
            if llm.context_length is not None:
                longest = max(len(sample.prompt_ids) for sample in batch)
                limit = max(1, min(limit, llm.context_length - longest))
            found = llm.generate([list(s.prompt_ids) for s in batch], max_new_tokens=limit)
            for sample, answer in zip(batch, found, strict=True):
                row = {"prompt_ids": sample.prompt_ids, "answer_ids": answer.token_ids}
                file.write((json.dumps(row) + "\n").encode())
            file.flush()
            done += len(batch)
            notify(done, len(samples))


def read_answers(path: Path, samples: Sequence[Sample]) -> list[Sample]:
    """Return the first samples, as many as the file holds answers to, with these answers.

    An incomplete last line is removed from the file.

    Raises:
        ConfigurationError: The file holds answers to other prompts.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    lines = whole.decode().splitlines()
    answers = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            prompt, answer = tuple(row["prompt_ids"]), tuple(row["answer_ids"])
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigurationError(
                f"{path}, line {number} is not a generated answer: delete the file"
            ) from error
        if number > len(samples) or prompt != samples[number - 1].prompt_ids:
            raise ConfigurationError(f"{path} holds answers to other prompts: delete the file")
        answers.append(replace(samples[number - 1], answer_ids=answer))
    return answers


IGNORED = -100


@dataclass(frozen=True, slots=True)
class Plan:
    """The layout of a sample in a row.

    ``cuts`` are positions of real tokens; a group of mask tokens follows each and attends up to it.
    A ``shortened`` sample ends at its only cut. A sample without cuts has no mask tokens.
    """

    sample: Sample
    cuts: tuple[int, ...] = ()
    shortened: bool = False

    @property
    def num_real(self) -> int:
        """Return the number of real tokens in the row."""
        return self.cuts[0] + 1 if self.shortened else len(self.sample)

    def num_tokens(self, num_masks: int) -> int:
        """Return the number of tokens in the row, mask tokens included."""
        return self.num_real + num_masks * len(self.cuts)


class Collator:
    """A data collator that makes tensors of a packed row, as a batch of one.

    Args:
        num_masks: K.
        vocab_size: Rows of the input embedding, which is the id of the first mask token.
    """

    def __init__(self, num_masks: int, vocab_size: int) -> None:
        self._num_masks, self._vocab_size = num_masks, vocab_size

    def __call__(self, rows: Sequence[Iterable[Plan]]) -> dict[str, Tensor]:
        """Make the tensors of one row.

        Returns:
            ``input_ids`` [1, N], where mask token i has the id vocab_size + i - 1;
            ``position_ids`` [1, N], within the sample; ``attention_mask`` [1, 1, N, N], True where
            a token (row) attends to another (column); ``labels`` [1, N], the next token of an
            answer, or -100 without one; ``teachers`` [1, N], for a mask token with a label the
            index of the real token before that label, or -1 if it is not in the row.
        """
        (plans,) = rows
        real, masks, start = [], [], 0
        for number, plan in enumerate(plans):
            real.append(_real_tokens(plan, number))
            masks.append(_mask_tokens(plan, number, start, self._num_masks, self._vocab_size))
            start += plan.num_real
        columns = torch.cat([*real, *masks], 1)
        ids, positions, samples, visible, labels, teachers = columns
        is_mask = ids >= self._vocab_size
        sees_real = ~is_mask[None] & (positions[None] < visible[:, None])
        same_group = is_mask[None] & is_mask[:, None] & (visible[None] == visible[:, None])
        sees_masks = same_group & (positions[None] <= positions[:, None])
        sees = (samples[None] == samples[:, None]) & (sees_real | sees_masks)
        return {
            "input_ids": ids[None],
            "position_ids": positions[None],
            "attention_mask": sees[None, None],
            "labels": labels[None],
            "teachers": teachers[None],
        }


def _real_tokens(plan: Plan, number: int) -> Tensor:
    """Return the tensor [6, tokens] of a sample's real tokens.

    Its rows are ids, positions, sample number, number of visible real tokens, labels and teachers.
    """
    ids, prompt = torch.tensor(plan.sample.token_ids), len(plan.sample.prompt_ids)
    positions = torch.arange(plan.num_real)
    labels = torch.full_like(positions, IGNORED)
    learned = positions[prompt - 1 : len(ids) - 1]
    labels[learned] = ids[learned + 1]
    samples, teachers = torch.full_like(positions, number), torch.full_like(positions, -1)
    return torch.stack((ids[: len(positions)], positions, samples, positions + 1, labels, teachers))


def _mask_tokens(plan: Plan, number: int, start: int, num_masks: int, vocab_size: int) -> Tensor:
    """Return the tensor of a sample's mask tokens, with the same rows as ``_real_tokens``.

    ``start`` is the index of the sample's first real token in the packed row.
    """
    ids, cuts = torch.tensor(plan.sample.token_ids), torch.tensor(plan.cuts, dtype=torch.long)
    ahead = torch.arange(1, num_masks + 1)
    at = (cuts[:, None] + ahead).flatten()
    next_ids = ids[(at + 1).clamp(max=len(ids) - 1)]
    has_label = at + 1 < len(ids)
    labels = torch.where(has_label, next_ids, IGNORED)
    teachers = torch.where(has_label & (at < plan.num_real), at + start, -1)
    mask_ids = (vocab_size - 1 + ahead).repeat(len(cuts))
    visible = (cuts + 1).repeat_interleave(num_masks)
    return torch.stack((mask_ids, at, torch.full_like(at, number), visible, labels, teachers))


_CUT = 0.5  # the share of samples that get mask tokens in the paper


def plan_rows(
    samples: Sequence[Sample], recipe: Recipe, num_processes: int = 1
) -> list[list[Plan]]:
    """Plan the packed rows of a run, as many as all steps of ``num_processes`` processes take.

    Only the recipe's seed decides them, so a run can be resumed at any step.
    """
    at_once = recipe.accumulate * num_processes
    epochs = (plan_epoch(samples, recipe, epoch) for epoch in count())
    rows = list(chain.from_iterable(islice(epochs, 0 if recipe.steps else recipe.epochs)))
    total = (recipe.steps or math.ceil(len(rows) / at_once)) * at_once
    while len(rows) < total:
        rows += next(epochs)
    return rows[:total]


def plan_epoch(samples: Sequence[Sample], recipe: Recipe, epoch: int) -> list[list[Plan]]:
    """Shuffle the samples, draw new cuts for each and pack them into rows."""
    rng = random.Random(f"{recipe.seed} {epoch}")
    order = list(samples)
    rng.shuffle(order)
    plans = (plan_sample(sample, recipe, rng) for sample in order)
    return pack(plans, recipe.num_masks, recipe.row_tokens)


def plan_sample(sample: Sample, recipe: Recipe, rng: random.Random) -> Plan:
    """Draw the cuts of a sample, after which mask tokens follow; return the sample's layout.

    A gated adapter learns at as many cuts as fit into the row: from the token before the prompt's
    last one, whose mask tokens are read with the prompt, to the last that has a label. The paper
    cuts half of the samples at one position after the prompt, early enough that all mask tokens
    have labels, and drops the rest of the answer.
    """
    prompt, length = len(sample.prompt_ids), len(sample)
    if recipe.is_paper:
        if rng.random() >= _CUT:
            return Plan(sample)
        cuts = range(prompt - 1, max(prompt, length - 1 - recipe.num_masks))
        return Plan(sample, (rng.choice(cuts),), shortened=True)
    cuts = range(max(0, prompt - 2), length - 2)
    room = (recipe.row_tokens - length) // recipe.num_masks
    num_cuts = max(1, min(recipe.num_cuts, len(cuts), room))
    return Plan(sample, tuple(sorted(rng.sample(cuts, num_cuts))))


def pack(plans: Iterable[Plan], num_masks: int, row_tokens: int) -> list[list[Plan]]:
    """Fill rows with samples in their order; a sample longer than a row gets one of its own."""
    rows: list[list[Plan]] = []
    room = 0
    for plan in plans:
        size = plan.num_tokens(num_masks)
        if size > room:
            rows.append([])
            room = row_tokens
        rows[-1].append(plan)
        room -= size
    return rows
