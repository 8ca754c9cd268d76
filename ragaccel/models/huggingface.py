"""Hugging Face models as targets: stock forward passes over our own KV cache.

Nothing is patched: a ``transformers`` cache object hands our buffers to the model, full-length
for every layer, and a sliding window is put into the mask, so that any layer can roll back.
"""

from __future__ import annotations

import os
import platform
import re
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ragaccel.engine.layout import Masks, Rows, is_plain
from ragaccel.models.architecture import Architecture, read_architecture
from ragaccel.models.self_check import check_model

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from ragaccel.engine.kv_cache import KVCache


class HuggingFaceModel:
    """A causal language model of transformers as a target model.

    Puts the model into evaluation mode. Unless ``self_check`` is off, a small tree and its
    compaction are first verified against transformers' own passes.

    Raises:
        ModelRefusedError: if the model cannot be decoded exactly; the message names the cause.
    """

    def __init__(self, model: PreTrainedModel, *, self_check: bool = True) -> None:
        self.architecture: Architecture = read_architecture(model)
        self.model = cast("Any", model)
        self.model.eval()
        # The mask meets the queries, which have the type of what the first layer is given.
        embedding: Tensor = self.model.get_input_embeddings().weight
        self.device: torch.device = embedding.device
        dtype = embedding.dtype if embedding.dtype.is_floating_point else model.dtype
        self._masks = Masks(dtype, self.device)
        self.vocab_size: int = embedding.shape[0]
        if self_check:
            check_model(self)

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model reads, in tokens."""
        return self.architecture.max_positions

    @property
    def dtype(self) -> torch.dtype:
        """The type of the activations."""
        return self._masks.dtype

    @property
    def cost_key(self) -> str:
        """Tells this model on this device from others whose passes cost differently."""
        place = self.device.type
        if place == "cuda":
            place = torch.cuda.get_device_name(self.device)
        elif place == "cpu":
            place = f"{platform.machine()} {torch.get_num_threads()} of {os.cpu_count()} threads"
        weights = sum(weight.numel() for weight in self.model.parameters())
        kinds = sorted({str(weight.dtype) for weight in self.model.parameters()})
        name = f"{type(self.model).__name__} {weights} {' '.join(kinds)} {place}"
        return re.sub(r"[^0-9A-Za-z]+", "-", name.replace("torch.", "")).strip("-").lower()

    def forward(self, rows: Rows, cache: KVCache, keep: int) -> Tensor:
        """Run the rows; return the logits of the last ``keep`` of them, [keep, V]."""
        if not isinstance(cache.adapter, _CacheAdapter):
            cache.adapter = _CacheAdapter(cache, self.architecture.num_layers)
        output = self.model(
            input_ids=rows.token_ids,
            attention_mask=self._attention_mask(rows),
            position_ids=rows.positions,
            past_key_values=cache.adapter,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: Tensor = output.logits[0]
        return logits

    def _attention_mask(self, rows: Rows) -> Tensor | dict[str, Tensor | None] | None:
        architecture = self.architecture
        window = architecture.window
        if not architecture.is_mixed:
            if architecture.skips_plain_masks and is_plain(rows, window):
                return None
            return self._masks.make(rows, window)
        full = None
        if not (architecture.skips_plain_masks and is_plain(rows)):
            full = self._masks.make(rows)
        near = full
        if window is not None and rows.start + rows.depth >= window:
            near = self._masks.make(rows, window)
        return {"full_attention": full, "sliding_attention": near}


class _CacheLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of our cache, for the questions models ask of single layers."""

    is_sliding = False

    def __init__(self, cache: KVCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache, self._index = cache, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: our buffers are made by the first write."""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Store the rows' states and return all attended ones."""
        return self._cache.write(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many states an update returns, and the first one's position."""
        return self._cache.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return how many tokens are cached."""
        return self._cache.length

    def get_max_length(self) -> int:
        """Return -1: our cache grows."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1, for releases that still ask under this name."""
        return -1


class _CacheAdapter(Cache):
    """Our cache as transformers' models see it; made once for each of our caches."""

    def __init__(self, cache: KVCache, num_layers: int) -> None:
        super().__init__(layers=[_CacheLayer(cache, i) for i in range(num_layers)])
        self._cache = cache

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Store the rows' states and return all attended ones."""
        return self._cache.write(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Return how many tokens are cached."""
        return self._cache.length
