"""Batches of training examples of similar length, with the positions of their losses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.reader.examples import Example

BATCH_TOKENS = 6144
MIN_ROWS = 8  # fewer are put with others
COPIED_SHARE = 0.3  # of the examples with their answer; the others end where it is chosen


@dataclass(slots=True)
class Batch:
    """Examples as tensors, right-padded. Shapes: B rows, T tokens, S sentences and the refusal.

    Attributes:
        token_ids: [B, T].
        start: [B], where the answer is chosen.
        ends: [B, S], the closing markers; padded with 0.
        end_mask: [B, S], false where padded.
        gold: [B], which of them is right.
        copied: [C], flat indices of the tokens of answers and of the questions' second copies whose
            successor is ``copies``.
        copies: [C].
        sentence_tokens: [W], flat indices of the sentences' tokens.
        matches: [W], 1.0 if the question has the token's word.
    """

    token_ids: Tensor
    start: Tensor
    ends: Tensor
    end_mask: Tensor
    gold: Tensor
    copied: Tensor
    copies: Tensor
    sentence_tokens: Tensor
    matches: Tensor

    def to(self, device: str) -> Batch:
        """Return the batch on a device."""
        return Batch(*(getattr(self, name).to(device) for name in Batch.__slots__))


def batches_of(examples: Sequence[Example], padding: int, rng: random.Random) -> list[Batch]:
    """Return examples as batches in random order, each of similar lengths."""
    some = sorted(examples, key=lambda example: len(example.token_ids))
    groups: list[list[Example]] = []
    while some:
        rows = max(1, BATCH_TOKENS // len(some[-1].token_ids))
        groups.append(some[-rows:])
        del some[-rows:]
    if len(groups) > 1 and len(groups[-1]) < MIN_ROWS:
        last = groups.pop()
        groups[-1] += last
    rng.shuffle(groups)
    return [batched(group, padding, rng) for group in groups]


def batched(examples: Sequence[Example], padding: int, rng: random.Random | None = None) -> Batch:
    """Return a batch; with ``rng``, a share of the answers is cut off."""
    rows = [
        example.token_ids
        if rng is None or rng.random() < COPIED_SHARE
        else example.token_ids[: example.answer_start + 1]
        for example in examples
    ]
    length = max(map(len, rows))
    count = max(len(example.sentence_ends) for example in examples)
    copied: list[int] = []
    copies: list[int] = []
    sentence_tokens: list[int] = []
    matches: list[bool] = []
    for at, (row, example) in enumerate(zip(rows, examples, strict=True)):
        # The question is there twice: without that copy, copying is learned late from few answers.
        of_question = range(example.question_start, example.answer_start)
        for place in (*of_question, *range(example.answer_start + 1, len(row) - 1)):
            copied.append(at * length + place)
            copies.append(row[place + 1])
        sentence_tokens += [at * length + place for place in example.matches]
        matches += example.matches.values()
    ends = [e.sentence_ends + [0] * (count - len(e.sentence_ends)) for e in examples]
    return Batch(
        torch.tensor([row + [padding] * (length - len(row)) for row in rows]),
        torch.tensor([example.answer_start for example in examples]),
        torch.tensor(ends),
        torch.tensor([[i < len(e.sentence_ends) for i in range(count)] for e in examples]),
        torch.tensor([example.gold for example in examples]),
        torch.tensor(copied, dtype=torch.long),
        torch.tensor(copies, dtype=torch.long),
        torch.tensor(sentence_tokens, dtype=torch.long),
        torch.tensor(matches, dtype=torch.float),
    )
