"""The layout: samples with mask tokens behind, packed into one row, and which token sees which.

Mask token i (1 to K) of a cut behind real token c stands at position c + i and predicts the token
after its own position, c + i + 1. It sees the real tokens up to c and its group's mask tokens up to
itself: what a decoder's first guesses see. The paper (arXiv 2402.11809, Figure 2) lays out k + 1 of
them, of which the last predicts nothing; that one is left out here.

Shapes: N tokens of a row, all real ones first; K mask tokens of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


class Collator:
    """Lays the samples of a packed row out, as a batch of one.

    Args:
        num_masks: K.
        vocab_size: rows of the input embedding: the first mask token's id.
    """

    def __init__(self, num_masks: int, vocab_size: int) -> None:
        self._num_masks, self._vocab_size = num_masks, vocab_size

    def __call__(self, rows: Sequence[Iterable[Plan]]) -> dict[str, Tensor]:
        """Lay one row out.

        Returns:
            ``input_ids`` [1, N], where mask token i has the id vocab_size + i - 1;
            ``position_ids`` [1, N], within the sample; ``attention_mask`` [1, 1, N, N], which token
            (row) sees which (column); ``labels`` [1, N], the next token of an answer, -100 where
            there is none; ``teachers`` [1, N], for a mask token with a label the real token before
            that label, if it is laid out, else -1.
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
    """A sample's ids, positions, sample, how many real tokens each sees, labels, teachers."""
    ids, prompt = torch.tensor(plan.sample.token_ids), len(plan.sample.prompt_ids)
    place = torch.arange(plan.num_real)
    labels = torch.full_like(place, IGNORED)
    learned = place[prompt - 1 : len(ids) - 1]
    labels[learned] = ids[learned + 1]
    samples, teachers = torch.full_like(place, number), torch.full_like(place, -1)
    return torch.stack((ids[: len(place)], place, samples, place + 1, labels, teachers))


def _mask_tokens(plan: Plan, number: int, start: int, num_masks: int, vocab_size: int) -> Tensor:
    """The same of its groups of mask tokens; its real tokens begin at ``start``."""
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
