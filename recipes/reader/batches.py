"""Batches of training examples of similar length, with the positions of their losses."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.reader.examples import Example, ExampleMaker
from recipes.reader.passages import Shape

Stage = tuple[tuple[float, Shape], ...]  # (share of the examples, shape)

LENGTHS = (192, 256, 320, 448, 640, 1024)  # few, because the pass is compiled for each
BATCH_TOKENS = 8192


@dataclass(slots=True)
class Batch:
    """A right-padded batch of B examples of T tokens; positions index the flattened [B * T]."""

    token_ids: Tensor  # [B, T]
    positions: Tensor  # [P] positions that predict a next token
    next_ids: Tensor  # [P]
    weights: Tensor  # [P]
    first: Tensor  # [P] bool, whether the marker of the answer is predicted
    ends: Tensor  # [B, S] positions of closing markers, padded with 0
    end_mask: Tensor  # [B, S] bool
    gold: Tensor  # [B] index into S
    sentence_tokens: Tensor  # [W] positions of the sentences' tokens
    matches: Tensor  # [W] 1.0 if the question has the token's word


def collate(examples: list[Example], length: int, pad_id: int) -> Batch:
    """Return a batch of examples, padded to ``length`` with ``pad_id``."""
    tokens = torch.full((len(examples), length), pad_id)
    widest = max(len(e.sentence_ends) for e in examples)
    ends = torch.zeros(len(examples), widest, dtype=torch.long)
    mask = torch.zeros(len(examples), widest, dtype=torch.bool)
    positions, next_ids, weights, first, sentence_tokens = [], [], [], [], []
    matches: list[bool] = []
    for row, example in enumerate(examples):
        ids = example.token_ids
        tokens[row, : len(ids)] = torch.tensor(ids)
        ends[row, : len(example.sentence_ends)] = torch.tensor(example.sentence_ends)
        mask[row, : len(example.sentence_ends)] = True
        for position, weight in example.targets.items():
            positions.append(row * length + position)
            next_ids.append(ids[position + 1])
            weights.append(weight)
            first.append(position == example.answer_start)
        sentence_tokens += [row * length + position for position in example.matches]
        matches += example.matches.values()
    return Batch(
        tokens, torch.tensor(positions), torch.tensor(next_ids), torch.tensor(weights),
        torch.tensor(first), ends, mask, torch.tensor([e.gold_end for e in examples]),
        torch.tensor(sentence_tokens), torch.tensor(matches, dtype=torch.float),
    )  # fmt: skip


class Batches:
    """A source of batches that draws examples and collects them by length."""

    def __init__(self, maker: ExampleMaker, pad_id: int) -> None:
        self.maker, self.pad_id = maker, pad_id
        self._pending: dict[int, list[Example]] = defaultdict(list)

    def draw(self, stage: Stage) -> Batch:
        """Draw examples of a stage's shapes until a batch of one length is full."""
        shapes, shares = [shape for _, shape in stage], [share for share, _ in stage]
        while True:
            example = self.maker.make(self.maker.rng.choices(shapes, shares)[0])
            length = next(n for n in LENGTHS if n >= len(example.token_ids))
            pending = self._pending[length]
            pending.append(example)
            if len(pending) == BATCH_TOKENS // length:
                return collate(self._pending.pop(length), length, self.pad_id)
