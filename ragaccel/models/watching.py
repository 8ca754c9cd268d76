"""Watching: what of a model was changed since it was last looked at, weights and all else."""

from __future__ import annotations

from copy import copy
from itertools import chain, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

_STOCK = (nn.Parameter, torch.Tensor)
_SAMPLE = 16  # numbers of a weight that are compared
_FEW = 4096  # numbers of a buffer that are all compared
# Which adapters a layer of PEFT uses, those of transformers' own integration included, and how.
_ADAPTERS = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
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

    def count(self) -> None:
        """Count a change of something else than weights."""
        self.version += 1

    def look(self) -> Sequence[Tensor]:
        """Return the weights that changed since the last time, all where torch did not count it.

        Raises:
            ConfigurationError: as ``refuse_others``.
        """
        self.refuse_others()
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

    def refuse_others(self) -> None:
        """Raise ConfigurationError for weights of another type or place, or others in theirs."""
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


class StructureWatch:
    """Looks between requests at what a model is made of besides its weights, in 0.1 ms or so.

    Adapters that are switched, and buffers that are written to or replaced, are followed: copies of
    the model are given the same. Other modules are refused, and other hooks or forward methods are
    where there are copies, which do without.

    Args:
        model: what callers change.
        copies: other trees of modules over the same tensors.
    """

    def __init__(self, model: nn.Module, copies: Sequence[nn.Module] = ()) -> None:
        self.modules = list(model.modules())
        self._states: list[dict[str, Any]] = [module.__dict__ for module in self.modules]
        self._children = list(map(itemgetter("_modules"), self._states))
        self._hooks = [
            hooks
            for state in self._states
            for hooks in (state["_forward_hooks"], state["_forward_pre_hooks"])
        ]
        kinds = dict.fromkeys(map(type, self.modules))
        self._kinds = list(dict.fromkeys(chain.from_iterable(kind.__mro__ for kind in kinds)))
        self._made_of, self._has_copies = self._parts(), bool(copies)
        trees = [dict(tree.named_modules()) for tree in copies]
        named = [
            (module, [tree[name] for tree in trees if name in tree])
            for name, module in model.named_modules()
        ]
        self._adapted = [pair for pair in named if "_disable_adapters" in pair[0].__dict__]
        self._buffers = [
            (module, name, twins)
            for module, twins in named
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.device.type != "meta"
        ]
        self._adapters, self._merged = _copied(self._adapters_now()), self._merged_now()
        self._note_buffers()

    @property
    def is_training(self) -> bool:
        """Whether any module is in training mode."""
        return any(map(itemgetter("training"), self._states))

    def look(self) -> bool:
        """Follow what was changed; say whether anything was.

        Raises:
            ConfigurationError: it cannot be followed.
        """
        found = self._follow_parts()
        return self._follow_adapters() | self._follow_buffers() | found

    def take_merged(self) -> bool:
        """Whether adapters were merged into weights, or taken out, since the last time."""
        before, self._merged = self._merged, self._merged_now()
        return self._merged != before

    def _parts(self) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Modules, hooks, forward methods of their own and those of their classes: as they are."""
        return (
            list(chain.from_iterable(map(dict.values, self._children))),
            list(chain.from_iterable(self._hooks)),
            [state.get("forward") for state in self._states],
            [vars(kind).get("forward") for kind in self._kinds],
        )

    def _follow_parts(self) -> bool:
        now = self._parts()
        if now == self._made_of:
            return False
        names = ("modules", "hooks", "forward methods")
        # What was done to a class its instances in copies do as well.
        for what, before, part in zip(names, self._made_of, now, strict=False):
            if before != part and (self._has_copies or what == "modules"):
                raise ConfigurationError(
                    f"{what} of this model were added, removed or replaced since the LLM was made, "
                    f"which it does not follow: undo that, or {_ANEW}"
                )
        self._made_of = now
        return True

    def _adapters_now(self) -> list[tuple[Any, ...]]:
        return [tuple(map(module.__dict__.get, _ADAPTERS)) for module, _ in self._adapted]

    def _merged_now(self) -> list[Any]:
        return [list(module.__dict__.get("merged_adapters") or ()) for module, _ in self._adapted]

    def _follow_adapters(self) -> bool:
        if not self._adapted or (now := self._adapters_now()) == self._adapters:
            return False
        for off, _, merged, _ in now:
            if off and merged:  # such a layer would change the weights that all share
                raise ConfigurationError(
                    "adapters of this model are switched off while merged into its weights: call "
                    "unmerge_adapter() first"
                )
        for (module, twins), state in zip(self._adapted, now, strict=True):
            for twin in twins:
                known = zip(_ADAPTERS, state, strict=True)
                twin.__dict__.update(
                    {name: copy(value) for name, value in known if name in module.__dict__}
                )
        self._adapters = _copied(now)
        return True

    def _follow_buffers(self) -> bool:
        now = [module._buffers.get(name) for module, name, _ in self._buffers]
        if (
            all(map(_is, now, self._known_buffers))
            and self._buffer_stamps == [stamp(one) for one in now if one is not None]
            and _equal(self._buffer_numbers, self._few_numbers())
        ):
            return False
        for (_, name, twins), buffer in zip(self._buffers, now, strict=True):
            for twin in twins:
                twin._buffers[name] = buffer
        self._note_buffers()
        return True

    def _note_buffers(self) -> None:
        self._known_buffers = [module._buffers.get(name) for module, name, _ in self._buffers]
        self._buffer_stamps = [stamp(one) for one in self._known_buffers if one is not None]
        self._buffer_numbers = self._few_numbers()

    def _few_numbers(self) -> list[Tensor]:
        """The numbers of small buffers, such as rotary frequencies: writes through ``data``."""
        small = [
            one.detach().reshape(-1)
            for one in self._known_buffers
            if one is not None and one.is_floating_point() and one.numel() <= _FEW
        ]
        with torch.no_grad():
            return [torch.cat(list(same)) for _, same in groupby(small, _kind)]


def _copied(states: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Copies that stay as they are while their lists and mappings are written to."""
    return [tuple(map(copy, state)) for state in states]


def _is(one: Any, other: Any) -> bool:
    return one is other


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
