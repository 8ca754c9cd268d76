"""Gated layers: low-rank changes that act on the rows of mask tokens alone.

Follows gated LoRA (Samragh et al., 2025, arXiv 2507.11851): a row of a real token is computed by
the layer as it was, to the last bit; a mask token's row gets x A B besides. Layers are wrapped from
outside: stock linear ones, packed or quantized ones, GPT-2's transposed ones.

Shapes: N rows of a pass, M of them mask tokens, R rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

_MOST = 1e4  # of a mask token's numbers in float16


class MaskRows:
    """Which rows of the pass at hand are mask tokens; shared by all gated layers of a model.

    ``index`` [M] says it by number. ``gate`` [N, 1] says it of every row, for passes that are
    captured once and replayed, where the numbers change and the shapes may not. With neither
    every layer is what it was. ``num_rows`` is N, where ``index`` alone does not tell it.
    """

    def __init__(self) -> None:
        self.index: Tensor | None = None
        self.gate: Tensor | None = None
        self.num_rows: int | None = None

    def clear(self) -> None:
        """Say that no row is one."""
        self.index = self.gate = self.num_rows = None

    def are_of(self, inputs: Tensor) -> bool:
        """Whether these are the rows of the pass, not some of them, as an expert is given."""
        num_rows = self.num_rows if self.gate is None else self.gate.shape[0]
        return num_rows is None or (inputs.dim() > 1 and inputs.shape[-2] == num_rows)


class GatedLinear(nn.Module):
    """A linear layer and a low-rank change that mask tokens' rows alone are given.

    Where it is given other rows than those of the pass it stays what it was: nobody knows which of
    them are mask tokens.

    Args:
        inner: the layer, which stays as it is.
        down: [R, in_features].
        up: [out_features, R].
        rows: which rows are mask tokens.
    """

    def __init__(self, inner: nn.Module, down: Tensor, up: Tensor, rows: MaskRows) -> None:
        super().__init__()
        self.inner, self._rows = inner, rows
        self.down = nn.Parameter(down, requires_grad=False)
        self.up = nn.Parameter(up, requires_grad=False)

    def __getattr__(self, name: str) -> Any:
        """Answer for the layer inside: models ask a layer for its weight or its sizes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply [..., N, in_features] to [..., N, out_features]."""
        found: Tensor = self.inner(inputs)
        rows = self._rows
        # A router that is a linear layer by its type may return more than a product.
        if not rows.are_of(inputs) or not isinstance(found, torch.Tensor):
            return found
        if rows.gate is not None:
            changed = _bounded(found + self._change(inputs).to(found.dtype))
            return torch.where(rows.gate, changed, found)
        if rows.index is None:
            return found
        index = rows.index.to(inputs.device)
        change = self._change(inputs.index_select(-2, index)).to(found.dtype)
        if found.dtype == torch.float16:
            changed = _bounded(found.index_select(-2, index) + change)
            return found.index_copy(-2, index, changed)
        return found.index_add(-2, index, change)

    def _change(self, inputs: Tensor) -> Tensor:
        hidden = nn.functional.linear(inputs.to(self.down.dtype), self.down)
        return nn.functional.linear(hidden, self.up)


def _bounded(changed: Tensor) -> Tensor:
    """Keep mask tokens' numbers finite where the type ends at 65,504.

    Real tokens weigh mask tokens' states with 0, and 0 times infinity is no number.
    """
    if changed.dtype != torch.float16:
        return changed
    return changed.nan_to_num(0.0, _MOST, -_MOST).clamp(-_MOST, _MOST)


def linear_sizes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Name a language model's linear layers but its head: inputs and outputs of each.

    Quantized and packed layers count; an embedding and what makes logits do not, nor do the layers
    of single experts: they are given some rows of a pass, in an order of their own, so that none
    could tell which of them are mask tokens.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        name: sizes
        for name, layer in model.named_modules()
        if layer is not head
        and "experts" not in name.split(".")
        and (sizes := _sizes(layer)) is not None
    }


def gate_linears(
    model: nn.Module, changes: Mapping[str, tuple[Tensor, Tensor]], rows: MaskRows
) -> list[GatedLinear]:
    """Wrap the named layers of a model, in place; each change is its ``down`` and ``up``.

    A change is put where its layer is; its numbers keep their type unless the layer computes in a
    shorter one.

    Raises:
        KeyError: no layer of that name.
        ValueError: a change of other sizes than its layer's.
    """
    gated = []
    for name, (down, up) in changes.items():
        parent_name, _, own = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        layer = getattr(parent, own, None)
        if not isinstance(layer, nn.Module):
            raise KeyError(name)
        if _sizes(layer) != (down.shape[1], up.shape[0]) or down.shape[0] != up.shape[1]:
            raise ValueError(
                f"{name} takes {_sizes(layer)}, not a change of {tuple(down.shape)} and "
                f"{tuple(up.shape)}"
            )
        wrapped = GatedLinear(layer, down, up, rows)
        wrapped.train(layer.training)
        setattr(parent, own, wrapped)
        gated.append(wrapped)
    return gated


def ungate_linears(model: nn.Module) -> None:
    """Put back the layers that ``gate_linears`` wrapped."""
    for parent, name, layer in list(_gated(model)):
        setattr(parent, name, layer.inner)


def _gated(model: nn.Module) -> Iterator[tuple[nn.Module, str, GatedLinear]]:
    for parent in model.modules():
        for name, layer in parent.named_children():
            if isinstance(layer, GatedLinear):
                yield parent, name, layer


def _sizes(layer: nn.Module) -> tuple[int, int] | None:
    """What a linear layer of any kind takes and gives; None of other modules."""
    if isinstance(layer, GatedLinear):
        return None
    given, taken = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
    if isinstance(given, int) and isinstance(taken, int):
        return given, taken
    weight = getattr(layer, "weight", None)
    if type(layer).__name__ == "Conv1D" and isinstance(weight, torch.Tensor) and weight.dim() == 2:
        return weight.shape[0], weight.shape[1]  # GPT-2's, which multiplies from the left
    return None
