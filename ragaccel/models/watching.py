"""Watching: what of a model was changed since it was last looked at, weights and all else."""

from __future__ import annotations

from copy import copy
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

_STOCK = (nn.Parameter, torch.Tensor)  # others may have no storage of their own
# Which adapters a layer of PEFT uses, those of transformers' own integration included, and how.
_ADAPTERS = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
_ANEW = "make a new LLM of it, or load it anew"
_version = attrgetter("_version")


class WeightWatch:
    """Looks at weights between requests: those written to in place, or given other storage.

    Writes through ``data`` into the same storage are not counted by torch, and not seen here: they
    have to be told, by ``mark``.

    Args:
        model: whose parameters must stay the same objects.
        weights: those that are looked at.
    """

    def __init__(self, model: nn.Module, weights: Sequence[Tensor]) -> None:
        self.version = 0
        """How many times changes were seen."""
        places = [
            (module._parameters, name, weight)
            for module in model.modules()
            for name, weight in module.named_parameters(recurse=False)
            if weight.device.type != "meta"  # accelerate's hooks put others there meanwhile
        ]
        self._places: list[dict[str, Any]] = [place for place, _, _ in places]
        self._names = [name for _, name, _ in places]
        self._parameters: list[Any] = [weight for _, _, weight in places]
        self._weights = list(weights)
        self._kinds = [_kind(weight) for weight in weights]
        self._is_marked = False
        self._stamps, self._storages = _stamps(self._weights), _storages(self._weights)

    def mark(self) -> None:
        """Tell that any of the weights may have been changed."""
        self._is_marked = True

    def count(self) -> None:
        """Count a change of something else than weights."""
        self.version += 1

    def look(self) -> Sequence[Tensor]:
        """Return the weights that changed since the last time, all where ``mark`` told of it.

        Raises:
            ConfigurationError: as ``refuse_others``, or for weights of another type or place.
        """
        self.refuse_others()
        stamps = _stamps(self._weights)
        # New storage may lie where that which was freed did, as after half().float().
        freed = [storage is not None and storage.expired() for storage in self._storages]
        if stamps == self._stamps and not self._is_marked and not any(freed):
            return []
        self._refuse_kinds()
        known = zip(self._weights, self._stamps, stamps, freed, strict=True)
        changed = [one for one, old, new, gone in known if gone or old != new or self._is_marked]
        self._stamps, self._is_marked = stamps, False
        self._storages = _storages(self._weights)
        self.version += 1
        return changed

    def refuse_others(self) -> None:
        """Raise ConfigurationError for parameters that others took the place of."""
        now = list(map(dict.get, self._places, self._names))
        if all(map(is_, now, self._parameters)):
            return
        name = next(
            name
            for name, one, known in zip(self._names, now, self._parameters, strict=True)
            if one is not known
        )
        raise ConfigurationError(
            f"parameters of this model, a {name!r} for one, were replaced by others since the LLM "
            f"was made: {_ANEW}"
        )

    def _refuse_kinds(self) -> None:
        for weight, kind in zip(self._weights, self._kinds, strict=True):
            if _kind(weight) != kind:
                before, now = (f"{dtype} on {place}" for dtype, place in (kind, _kind(weight)))
                raise ConfigurationError(
                    f"this model was {before.removeprefix('torch.')} when the LLM was made and is "
                    f"{now.removeprefix('torch.')} now: {_ANEW}"
                )


class StructureWatch:
    """Looks between requests at what a model is made of besides its weights.

    Adapters that are switched, and buffers that are written to or replaced, are followed: copies of
    the model are given the same. Other modules are refused, and other hooks are where there are
    copies, which do without.

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

    def _parts(self) -> tuple[list[Any], list[Any]]:
        """Modules and hooks, as they are."""
        return _all_values(self._children), _all_values(self._hooks)

    def _follow_parts(self) -> bool:
        now = self._parts()
        if now == self._made_of:
            return False
        for what, before, part in zip(("modules", "hooks"), self._made_of, now, strict=True):
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
        now = self._buffers_now()
        if all(map(is_, now, self._known_buffers)) and _stamps(now) == self._buffer_stamps:
            return False
        for (_, name, twins), buffer in zip(self._buffers, now, strict=True):
            for twin in twins:
                twin._buffers[name] = buffer
        self._note_buffers()
        return True

    def _buffers_now(self) -> list[Any]:
        return [module._buffers.get(name) for module, name, _ in self._buffers]

    def _note_buffers(self) -> None:
        self._known_buffers = self._buffers_now()
        self._buffer_stamps = _stamps(self._known_buffers)


def _all_values(mappings: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, mappings)))


def _copied(states: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Copies that stay as they are while their lists and mappings are written to."""
    return [tuple(map(copy, state)) for state in states]


def _stamps(tensors: Sequence[Any]) -> list[tuple[int, int] | None]:
    """What changes of each when it is written to in place, or given other storage."""
    try:
        return list(zip(map(_version, tensors), map(torch.Tensor.data_ptr, tensors), strict=True))
    except (AttributeError, RuntimeError, TypeError):
        return [None if one is None else _stamp(one) for one in tensors]


def _stamp(tensor: Tensor) -> tuple[int, int]:
    """The same for any tensor; torch counts nothing of one that was made in inference mode."""
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr() if type(tensor) in _STOCK else 0


def _storages(tensors: Sequence[Tensor]) -> list[Any]:
    """The storage of each, without keeping it; None where a tensor has none of its own."""
    weak: Any = StorageWeakRef
    return [weak(one.untyped_storage()) if type(one) in _STOCK else None for one in tensors]


def _kind(weight: Tensor) -> tuple[torch.dtype, torch.device]:
    return weight.dtype, weight.device
