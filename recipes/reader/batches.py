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
# Lengths of rows are multiples of it: when every batch had a length of its own, the allocator could
# use few of its blocks again, and its memory grew to 9 GB.
LENGTH_MULTIPLE = 32
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
        question_tokens: [Q], flat indices of the tokens whose successors are the questions' second
            copies.
        answer_tokens: [A], flat indices of the answers' tokens whose successors are copied, or the
            end token.
        sentence_tokens: [W], flat indices of the sentences' tokens.
        matches: [W], 1.0 if the question has the token's word.
    """

    token_ids: Tensor
    start: Tensor
    ends: Tensor
    end_mask: Tensor
    gold: Tensor
    question_tokens: Tensor
    answer_tokens: Tensor
    sentence_tokens: Tensor
    matches: Tensor

    def to(self, device: str) -> Batch:
        """Return the batch on a device."""
        return Batch(*(getattr(self, name).to(device) for name in Batch.__slots__))


def batches_of(
    examples: Sequence[Example],
    padding: int,
    max_tokens: int,
    rng: random.Random,
    copied_share: float = COPIED_SHARE,
) -> list[Batch]:
    """Return examples as batches in random order, each of similar lengths; see ``batched``."""
    some = sorted(examples, key=lambda example: len(example.token_ids))
    groups: list[list[Example]] = []
    while some:
        rows = max(1, BATCH_TOKENS // padded_length(len(some[-1].token_ids), max_tokens))
        groups.append(some[-rows:])
        del some[-rows:]
    if len(groups) > 1 and len(groups[-1]) < MIN_ROWS:
        last = groups.pop()
        groups[-1] += last
    rng.shuffle(groups)
    return [batched(group, padding, max_tokens, rng, copied_share) for group in groups]


def batched(
    examples: Sequence[Example],
    padding: int,
    max_tokens: int,
    rng: random.Random | None = None,
    copied_share: float = COPIED_SHARE,
) -> Batch:
    """Return examples as a batch.

    Args:
        examples: Its rows.
        padding: Id of the padding token.
        max_tokens: The model's maximum, above which no length is rounded.
        rng: Draws the answers that are cut off; without it, none is.
        copied_share: Of examples whose answer is not.
    """
    rows = [
        example.token_ids
        if rng is None or rng.random() < copied_share
        else example.token_ids[: example.answer_start + 1]
        for example in examples
    ]
    length = padded_length(max(map(len, rows)), max_tokens)
    count = max(len(example.sentence_ends) for example in examples)
    question_tokens: list[int] = []
    answer_tokens: list[int] = []
    sentence_tokens: list[int] = []
    matches: list[bool] = []
    for at, (row, example) in enumerate(zip(rows, examples, strict=True)):
        # The question is there twice: without that copy, copying is learned late from few answers.
        of_question = range(example.question_start, example.answer_start)
        of_answer = range(example.answer_start + 1, len(row) - 1)
        question_tokens += [at * length + place for place in of_question]
        answer_tokens += [at * length + place for place in of_answer]
        sentence_tokens += [at * length + place for place in example.matches]
        matches += example.matches.values()
    ends = [e.sentence_ends + [0] * (count - len(e.sentence_ends)) for e in examples]
    return Batch(
        torch.tensor([row + [padding] * (length - len(row)) for row in rows]),
        torch.tensor([example.answer_start for example in examples]),
        torch.tensor(ends),
        torch.tensor([[i < len(e.sentence_ends) for i in range(count)] for e in examples]),
        torch.tensor([example.gold for example in examples]),
        torch.tensor(question_tokens, dtype=torch.long),
        torch.tensor(answer_tokens, dtype=torch.long),
        torch.tensor(sentence_tokens, dtype=torch.long),
        torch.tensor(matches, dtype=torch.float),
    )


def padded_length(length: int, max_tokens: int) -> int:
    """Return a length rounded up to a multiple, but not above the model's maximum."""
    return max(length, min(-(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, max_tokens))
