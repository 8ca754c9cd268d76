"""Watching: which of a model's weights were changed since they were last looked at."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import nn

from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

_STOCK = (nn.Parameter, torch.Tensor)
_SAMPLE = 16  # numbers of a weight that are compared
_ANEW = "make a new LLM of it, or load it anew"


class WeightWatch:
    """Looks at weights between requests, in a millisecond or less.

    What torch counts is seen for certain: writes in place, other storage. Writes through ``data``
    it does not count; they are seen by a few numbers of each weight. What leaves all of these as
    they were, as a write to one row may, has to be told: ``mark``.

    Args:
        model: whose parameters must stay the same objects.
        weights: those that are looked at.
    """

    def __init__(self, model: nn.Module, weights: Sequence[Tensor]) -> None:
        self.version = 0
        """How many times changes were seen."""
        self._places = [
            (module, name, weight)
            for module in model.modules()
            for name, weight in module.named_parameters(recurse=False)
            if weight.device.type != "meta"  # accelerate's hooks put others there meanwhile
        ]
        self._weights = list(weights)
        self._kinds = [_kind(weight) for weight in weights]
        self._is_marked = False
        self._note()

    def mark(self) -> None:
        """Tell that any of the weights may have been changed."""
        self._is_marked = True

    def look(self) -> Sequence[Tensor]:
        """Return the weights that changed since the last time, all where torch did not count it.

        Raises:
            ConfigurationError: they have another type or place now, or others took theirs.
        """
        self._refuse_others()
        stamps = [stamp(weight) for weight in self._weights]
        changed = [
            weight
            for weight, before, now in zip(self._weights, self._stamps, stamps, strict=True)
            if before != now
        ]
        if self._is_marked or (not changed and not _equal(self._samples, self._sample())):
            changed = list(self._weights)
        if changed:
            self.version += 1
            self._is_marked = False
            self._note()
        return changed

    def _refuse_others(self) -> None:
        for weight, kind in zip(self._weights, self._kinds, strict=True):
            if _kind(weight) != kind:
                before, now = (f"{dtype} on {place}" for dtype, place in (kind, _kind(weight)))
                raise ConfigurationError(
                    f"this model was {before.removeprefix('torch.')} when the LLM was made and is "
                    f"{now.removeprefix('torch.')} now: {_ANEW}"
                )
        for module, name, weight in self._places:
            if module._parameters.get(name) is not weight:
                raise ConfigurationError(
                    f"parameters of this model, {name!r} of {type(module).__name__} for one, were "
                    f"replaced by others since the LLM was made: {_ANEW}"
                )

    def _note(self) -> None:
        self._stamps = [stamp(weight) for weight in self._weights]
        self._samples = self._sample()

    def _probes(self) -> Iterator[Tensor]:
        """A few numbers of each weight, where they lie now: views kept would keep the storage."""
        for weight in self._weights:
            is_plain = type(weight) in _STOCK and weight.layout == torch.strided
            is_there = is_plain and weight.device.type != "meta" and weight.is_contiguous()
            if is_there and weight.element_size() > 1:  # not all operations know 8-bit types
                numbers = weight.detach().view(-1)
                # An odd step, as an even one may meet the same column of every row.
                yield numbers[:: max(1, len(numbers) // _SAMPLE) | 1]

    def _sample(self) -> list[Tensor]:
        with torch.no_grad():
            return [torch.cat(list(probes)) for _, probes in groupby(self._probes(), _kind)]


def stamp(weight: Tensor) -> tuple[int, int]:
    """What changes when a tensor is written to in place, or given other storage.

    What is written to its ``data`` goes unseen, as torch itself does not see it.
    """
    version = 0 if weight.is_inference() else weight._version
    return version, weight.data_ptr() if type(weight) in _STOCK else 0


def _kind(weight: Tensor) -> tuple[torch.dtype, torch.device]:
    return weight.dtype, weight.device


def _equal(samples: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether they are the same to the last bit, what is no number included."""
    return all(
        torch.equal(_bits(one), _bits(other)) for one, other in zip(samples, others, strict=True)
    )


def _bits(numbers: Tensor) -> Tensor:
    return numbers.view(torch.uint8)
