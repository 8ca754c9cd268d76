"""Planning: which places of which samples are guessed at, and what goes into a row together."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from typing import TYPE_CHECKING

from torch.utils.data import Dataset

from ragaccel.train.space.layout import Plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ragaccel.train.space.recipe import Recipe
    from ragaccel.train.space.samples import Sample

_CUT = 0.5  # share of the samples that the paper gives mask tokens


class Rows(Dataset[list[Plan]]):
    """The rows of a run, in an order that the recipe's seed decides and nothing else.

    Each can be asked for by its number, whatever was asked for before, so that a run goes on from a
    step's number alone. They fill all steps of ``num_processes`` processes.
    """

    def __init__(self, samples: Sequence[Sample], recipe: Recipe, num_processes: int = 1) -> None:
        self._samples, self._recipe = samples, recipe
        self._starts = [0]  # the number of the first row of each epoch
        self._epoch, self._rows = -1, list[list[Plan]]()
        at_once = recipe.accumulate * num_processes
        self.steps = recipe.steps or math.ceil(self.first_of(recipe.epochs) / at_once)
        self._count = self.steps * at_once

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> list[Plan]:
        while self._starts[-1] <= number:
            self._load(len(self._starts) - 1)
        epoch = bisect_right(self._starts, number) - 1
        self._load(epoch)
        return self._rows[number - self._starts[epoch]]

    def first_of(self, epoch: int) -> int:
        """Number of the first row of an epoch: how many the epochs before it have."""
        while len(self._starts) <= epoch:
            self._load(len(self._starts) - 1)
        return self._starts[epoch]

    def count_tokens(self) -> int:
        """Count the tokens of all rows, mask tokens included."""
        each = (plan for number in range(len(self)) for plan in self[number])
        return sum(plan.num_tokens(self._recipe.num_masks) for plan in each)

    def _load(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        self._epoch, self._rows = epoch, plan_epoch(self._samples, self._recipe, epoch)
        if len(self._starts) == epoch + 1:
            self._starts.append(self._starts[epoch] + len(self._rows))


def plan_epoch(samples: Sequence[Sample], recipe: Recipe, epoch: int) -> list[list[Plan]]:
    """Shuffle the samples, cut each anew and pack them into rows."""
    rng = random.Random(f"{recipe.seed} {epoch}")
    order = list(samples)
    rng.shuffle(order)
    plans = (plan_sample(sample, recipe, rng) for sample in order)
    return pack(plans, recipe.num_masks, recipe.row_tokens)


def plan_sample(sample: Sample, recipe: Recipe, rng: random.Random) -> Plan:
    """Draw where a sample is cut.

    A gated adapter learns at as many places as there are and the row has room for: from the one
    before the prompt's last token, where mask tokens are read with the prompt, to the last that has
    a label. The paper cuts half of the samples at one place behind the prompt, early enough that
    all mask tokens have labels, and drops the rest of the answer.
    """
    prompt, length = len(sample.prompt_ids), len(sample)
    if recipe.is_paper:
        if rng.random() >= _CUT:
            return Plan(sample)
        places = range(prompt - 1, max(prompt, length - 1 - recipe.num_masks))
        return Plan(sample, (rng.choice(places),), shortened=True)
    places = range(max(0, prompt - 2), length - 2)
    room = (recipe.row_tokens - length) // recipe.num_masks
    count = max(1, min(recipe.num_cuts, len(places), room))
    return Plan(sample, tuple(sorted(rng.sample(places, count))))


def pack(plans: Iterable[Plan], num_masks: int, row_tokens: int) -> list[list[Plan]]:
    """Fill rows with samples in their order; one that is longer than a row has its own."""
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
