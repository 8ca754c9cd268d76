"""The layout: samples with mask tokens behind, packed into one row, and which token sees which.

Mask token i (1 to K) of a cut behind real token c stands at position c + i and predicts the token
after its own position, c + i + 1. It sees the real tokens up to c and its group's mask tokens up to
itself: what a decoder's first guesses see. The paper (arXiv 2402.11809, Figure 2) lays out k + 1 of
them, of which the last predicts nothing; that one is left out here.

Shapes: N tokens of a row, K mask tokens of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from ragaccel.train.space.samples import Sample

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Plan:
    """How one sample is laid out.

    ``cuts`` are numbers of real tokens, each the last one that a group of mask tokens sees. A
    ``shortened`` sample ends there, and has one; without a cut it is laid out as it is.
    """

    sample: Sample
    cuts: tuple[int, ...] = ()
    shortened: bool = False

    @property
    def num_real(self) -> int:
        """Real tokens that are laid out."""
        return self.cuts[0] + 1 if self.shortened else len(self.sample)

    def num_tokens(self, num_masks: int) -> int:
        """All tokens that are laid out."""
        return self.num_real + num_masks * len(self.cuts)


@dataclass(frozen=True, slots=True)
class Layout:
    """A packed row; every tensor is [N].

    Attributes:
        token_ids: mask token i has the id vocab_size + i - 1.
        positions: within the sample.
        samples: which sample of the row a token belongs to.
        visible: how many real tokens of its sample it sees.
        groups: 0 for real tokens, else which group of the row.
        labels: the next token; -100 where nothing is learned.
        teachers: for a mask token with a label, the row of the real token before that label; -1
            where there is none.
    """

    token_ids: Tensor
    positions: Tensor
    samples: Tensor
    visible: Tensor
    groups: Tensor
    labels: Tensor
    teachers: Tensor

    @property
    def is_mask(self) -> Tensor:
        """Say of every token whether it is a mask token."""
        return self.groups > 0

    def __len__(self) -> int:
        return len(self.token_ids)

    def to(self, device: torch.device) -> Layout:
        """The same on another device."""
        return Layout(*(getattr(self, field.name).to(device) for field in fields(self)))

    def sees(self, window: int | None = None) -> Tensor:
        """Say of every token (row) which tokens (column) it sees, bool [N, N].

        Args:
            window: positions a token looks back over, itself included; ``None`` for all.
        """
        positions, groups = self.positions, self.groups
        is_real = groups == 0
        real = is_real[None] & (positions[None] < self.visible[:, None])
        own = (groups[:, None] == groups[None]) & ~is_real[None]
        own &= positions[None] <= positions[:, None]
        found = (self.samples[:, None] == self.samples[None]) & (real | own)
        if window is not None:
            found &= positions[:, None] - positions[None] < window
        return found


def lay_out(
    plans: Iterable[Plan], *, num_masks: int, vocab_size: int, learns_real: bool = False
) -> Layout:
    """Lay samples out side by side in one row.

    Args:
        plans: the samples and their cuts.
        num_masks: K.
        vocab_size: rows of the input embedding: the first mask token's id.
        learns_real: label the real tokens of answers too.
    """
    parts: list[list[Tensor]] = []
    start = num_groups = 0
    for number, plan in enumerate(plans):
        part = _lay_out_one(plan, num_masks, vocab_size, learns_real=learns_real)
        teachers = torch.where(part[6] >= 0, part[6] + start, part[6])
        groups = torch.where(part[4] > 0, part[4] + num_groups, part[4])
        parts.append(
            [*part[:2], torch.full_like(groups, number), part[3], groups, part[5], teachers]
        )
        start += len(groups)
        num_groups += len(plan.cuts)
    return Layout(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _lay_out_one(plan: Plan, num_masks: int, vocab_size: int, *, learns_real: bool) -> list[Tensor]:
    """One sample's columns, in the order of Layout's fields; rows are counted from its first."""
    ids = torch.tensor(plan.sample.token_ids)
    prompt, length, real = len(plan.sample.prompt_ids), len(ids), plan.num_real
    place = torch.arange(real)
    labels = torch.full((real,), IGNORED)
    if learns_real:
        learned = torch.arange(prompt - 1, min(real, length - 1))
        labels[learned] = ids[learned + 1]
    cuts = torch.tensor(plan.cuts, dtype=torch.long)
    ahead = torch.arange(1, num_masks + 1)
    at = (cuts[:, None] + ahead).flatten()
    has_label = at + 1 < length
    next_ids = ids[(at + 1).clamp(max=length - 1)]
    none = torch.full_like(at, IGNORED)
    has_teacher = has_label & (at < real)
    each = [
        (ids[:real], (vocab_size - 1 + ahead).repeat(len(cuts))),
        (place, at),
        (torch.zeros_like(place), torch.zeros_like(at)),
        (place + 1, (cuts + 1).repeat_interleave(num_masks)),
        (torch.zeros_like(place), torch.arange(1, len(cuts) + 1).repeat_interleave(num_masks)),
        (labels, torch.where(has_label, next_ids, none)),
        (torch.full_like(place, -1), torch.where(has_teacher, at, torch.full_like(at, -1))),
    ]
    return [torch.cat(pair) for pair in each]
