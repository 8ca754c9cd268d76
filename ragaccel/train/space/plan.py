"""Planning: which places of which samples are guessed at, and what goes into a row together."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from ragaccel.train.space.layout import Plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ragaccel.train.space.recipe import Recipe
    from ragaccel.train.space.samples import Sample


class Rows:
    """The rows of a run, in an order that the recipe's seed decides and nothing else.

    A row can be asked for by its number, whatever was asked for before: a run goes on from a step's
    number alone.
    """

    def __init__(self, samples: Sequence[Sample], recipe: Recipe) -> None:
        self._samples, self._recipe = samples, recipe
        self._starts = [0]  # the number of the first row of each epoch
        self._epoch, self._rows = -1, list[list[Plan]]()

    def first_of(self, epoch: int) -> int:
        """Number of the first row of an epoch: how many the epochs before it have."""
        while len(self._starts) <= epoch:
            self._load(len(self._starts) - 1)
        return self._starts[epoch]

    def row(self, number: int) -> list[Plan]:
        """The samples of a row and their cuts."""
        epoch = max(0, self._epoch)
        while self._starts[min(epoch, len(self._starts) - 1)] > number:
            epoch -= 1
        while self.first_of(epoch + 1) <= number:
            epoch += 1
        self._load(epoch)
        return self._rows[number - self._starts[epoch]]

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
    """Draw where a sample is cut, if it is: as often as there are places and the row has room."""
    if recipe.mask_probability < 1 and rng.random() >= recipe.mask_probability:
        return Plan(sample)
    places = cut_places(sample, recipe)
    if recipe.variant == "plain":
        return Plan(sample, (rng.choice(places),), shortened=True)
    room = (recipe.row_tokens - len(sample)) // recipe.num_masks
    count = max(1, min(recipe.num_cuts, len(places), room))
    return Plan(sample, tuple(sorted(rng.sample(places, count))))


def cut_places(sample: Sample, recipe: Recipe) -> range:
    """Numbers of the real tokens behind which mask tokens may stand.

    From the prompt's last token on; early cuts begin at the one before it, where mask tokens are
    read with the prompt. The paper's last place is the one where all mask tokens have a label; late
    cuts go on to where one has.
    """
    first, end = max(0, len(sample.prompt_ids) - 1 - recipe.early_cuts), len(sample) - 2
    if not recipe.late_cuts:
        end = max(first + 1, len(sample) - 1 - recipe.num_masks)
    return range(first, end)


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
