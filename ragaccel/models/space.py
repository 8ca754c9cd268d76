"""An adapter that a target model wears: where its passes meet mask tokens.

Shapes: N rows of a pass, V vocabulary, K mask tokens, D hidden size.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ragaccel.models.gated import MaskRows, gate_linears

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from ragaccel.models.space_adapter import SpaceAdapter


class WornSpace:
    """A SPACE adapter on a model: mask embeddings for its passes, gated changes in its layers.

    Token V + i is the mask token i. Rows of real tokens are computed as without the adapter, to the
    last bit in a pass of as many rows: mask tokens take no part in what they attend to, and no
    layer changes them. A mixture of experts groups its rows by the experts they go to, so there
    they may round differently.

    Args:
        adapter: what was trained; it must fit the model (``SpaceAdapter.check``).
        network: the modules that passes run through; its linear layers are wrapped.
        dtype: the type of the activations.
    """

    def __init__(self, adapter: SpaceAdapter, network: Any, dtype: torch.dtype) -> None:
        self.adapter, self.num_masks = adapter, adapter.num_masks
        self._rows = MaskRows()
        embedding = network.get_input_embeddings()
        self._vocab_size: int = embedding.weight.shape[0]
        masks = adapter.mask_embeddings.expand(self.num_masks, -1)
        self._masks = masks.to(_place(embedding, masks.device), dtype)
        self._changes = {}
        for name, (down, up) in adapter.changes.items():
            place = _place(network.get_submodule(name), self._masks.device)
            self._changes[name] = (down.to(place, dtype), up.to(place, dtype))
        self.wrap(network)

    def wrap(self, network: nn.Module) -> None:
        """Gate the layers of one more module tree over the same weights."""
        gate_linears(network, self._changes, self._rows)

    def embed(self, network: Any, token_ids: Tensor) -> Tensor:
        """Embed token ids [1, N], mask tokens among them: [1, N, D]."""
        last = self._vocab_size - 1
        known: Tensor = network.get_input_embeddings()(token_ids.clamp(max=last))
        number = (token_ids - self._vocab_size).clamp(min=0)
        masks = self._masks[number.to(self._masks.device)].to(known.device, known.dtype)
        return torch.where((token_ids > last)[..., None], masks, known)

    @contextmanager
    def marked(self, token_ids: Tensor, *, is_static: bool = False) -> Iterator[None]:
        """Tell the gated layers which rows are mask tokens, while a pass of them runs.

        Args:
            token_ids: [1, N], where the numbers can be read without waiting for a device, unless
                ``is_static``.
            is_static: the pass is captured, or stands for one that is: its shapes must not follow
                what the tokens are.
        """
        are_masks = token_ids[0] >= self._vocab_size
        if is_static:
            self._rows.gate = are_masks[:, None]
        else:
            self._rows.index = are_masks.nonzero()[:, 0]
            self._rows.num_rows = len(are_masks)
        try:
            yield
        finally:
            self._rows.clear()


def _place(layer: nn.Module, otherwise: torch.device) -> torch.device:
    """Where a layer computes; of offloaded weights accelerate's hooks know where they are used."""
    weight = getattr(layer, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.device.type != "meta":
        return weight.device
    used = getattr(getattr(layer, "_hf_hook", None), "execution_device", None)
    return otherwise if used is None else torch.device(used)
