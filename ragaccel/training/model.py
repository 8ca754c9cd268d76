"""The network that is trained: a model with mask tokens and gated LoRA layers.

Shapes: N tokens of a row, M of them with logits, V vocabulary, D hidden size, K mask tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import DynamicCache

from ragaccel.models.space_adapter import (
    FOLDER,
    MaskRows,
    SpaceAdapter,
    describe_base_model,
    gate_linears,
    new_adapter,
)
from ragaccel.models.support import cache_keyword, read_architecture

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from transformers.cache_utils import Cache

    from ragaccel.training.config import Recipe


class SpaceNetwork(nn.Module):
    """A causal language model with mask tokens; the recipe decides which weights are trained.

    The model is changed in place: in mode "gated" its linear layers are wrapped.

    Raises:
        UnsupportedModelError: The model cannot be decoded exactly, so an adapter would be useless.
    """

    def __init__(self, model: Any, recipe: Recipe) -> None:
        super().__init__()
        self.architecture = read_architecture(model)
        self.base = describe_base_model(model)
        self.recipe = recipe
        self._rows = MaskRows()
        rank, shared = recipe.rank, recipe.is_paper
        adapter = new_adapter(model, recipe.num_masks, rank, shared_mask=shared, seed=recipe.seed)
        self.model: Any = model.requires_grad_(recipe.is_paper)
        device = model.get_input_embeddings().weight.device
        self.mask_embeddings = nn.Parameter(adapter.mask_embeddings.to(device))
        self._changed = list(adapter.changes)
        changes = {name: (a.to(device), b.to(device)) for name, (a, b) in adapter.changes.items()}
        for layer in gate_linears(model, changes, self._rows):
            layer.down.requires_grad_(True)
            layer.up.requires_grad_(True)

    def train(self, mode: bool = True) -> SpaceNetwork:
        """Set the training mode; the base of a gated adapter never uses dropout."""
        super().train(mode)
        if not self.recipe.is_paper:
            self.model.eval()
        return self

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that training changes, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor, wanted: Tensor
    ) -> Tensor:
        """Run a packed row of ``Collator``; return the logits of some tokens.

        In mode "gated" the real tokens run first, without gradients because nothing is learned
        there; the mask tokens then attend to their cached keys and values.

        Args:
            input_ids: [1, N].
            position_ids: [1, N].
            attention_mask: True where a token attends to another, bool [1, 1, N, N].
            wanted: [M] indices of the tokens whose logits are returned, real ones first.

        Returns:
            Logits [M, V].
        """
        embedded, attends = self._embed(input_ids[0])[None], attention_mask
        if self.recipe.is_paper:
            return self._run(embedded, position_ids, position_ids, attends, wanted)
        real = int((input_ids < self.base.vocab_size).sum())
        cache, is_real = DynamicCache(), wanted < real
        with torch.no_grad():
            before = position_ids[:, :real]
            own = embedded[:, :real], before, before, attends[..., :real, :real]
            real_logits = self._run(*own, wanted[is_real], cache)
        self._rows.gate = input_ids[0, real:, None] >= self.base.vocab_size
        try:
            own = embedded[:, real:], position_ids[:, real:], position_ids, attends[..., real:, :]
            mask_logits = self._run(*own, wanted[~is_real] - real, cache)
        finally:
            self._rows.clear()
        return torch.cat((real_logits, mask_logits))

    def _run(
        self,
        embedded: Tensor,
        positions: Tensor,
        key_positions: Tensor,
        attends: Tensor,
        wanted: Tensor,
        cache: Cache | None = None,
    ) -> Tensor:
        """Run tokens after those in the cache; return logits [M, V] at the indices ``wanted``."""
        full_mask = sliding_mask = _additive(attends, embedded.dtype)
        if self.architecture.window is not None:
            distance = positions[0, :, None] - key_positions[0, None]
            sliding_mask = _additive(
                attends & (distance < self.architecture.window), embedded.dtype
            )
        masks = {"full_attention": full_mask, "sliding_attention": sliding_mask}
        output = self.model(
            inputs_embeds=embedded,
            attention_mask=masks if self.architecture.has_mixed_layers else sliding_mask,
            position_ids=positions,
            use_cache=cache is not None,
            logits_to_keep=wanted,
            **{cache_keyword(self.model): cache},
        )
        logits: Tensor = output.logits[0]
        return logits

    def _embed(self, ids: Tensor) -> Tensor:
        """Return embeddings [N, D]; mask embeddings get a gradient even without a mask token."""
        is_mask = ids >= self.base.vocab_size
        found: Tensor = self.model.get_input_embeddings()(ids.masked_fill(is_mask, 0))
        masked = is_mask.nonzero()[:, 0]
        number = ids[masked] - self.base.vocab_size
        masks = self.mask_embeddings[number.clamp(max=len(self.mask_embeddings) - 1)]
        return found.index_copy(0, masked, masks.to(found.dtype))

    def adapter(self, training: dict[str, Any] | None = None) -> SpaceAdapter:
        """Return the adapter that was trained, rounded to bfloat16."""
        layers = {name: self.model.get_submodule(name) for name in self._changed}
        changes = {
            name: (_to_bfloat16(one.down), _to_bfloat16(one.up)) for name, one in layers.items()
        }
        masks = _to_bfloat16(self.mask_embeddings)
        return SpaceAdapter(self.base, self.recipe.num_masks, masks, changes, training or {})

    def publish(
        self, folder: Path, tokenizer: Any, training: dict[str, Any], dtype: torch.dtype
    ) -> None:
        """Write what was trained to a folder that can be loaded.

        A gated adapter is written to the folder itself. After the paper's training the folder holds
        the model and its tokenizer, with the mask embeddings in ``space`` below it; the network
        cannot be trained further then.

        Args:
            folder: Output folder; files in it are replaced.
            tokenizer: transformers' tokenizer of the model.
            training: Training settings and metrics, written to the same folder.
            dtype: Data type of a model's weights.
        """
        adapter = self.adapter(training)
        if not self.recipe.is_paper:
            adapter.save(folder)
            return
        model = self.model.to(dtype)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        replace(adapter, base=describe_base_model(model)).save(folder / FOLDER)


def _additive(attends: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(attends.shape, dtype=dtype, device=attends.device)
    return mask.masked_fill_(~attends, float("-inf"))


def _to_bfloat16(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.bfloat16).cpu()
