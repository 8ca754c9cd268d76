"""Caches as transformers' models see them during a pass over our own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.cache_utils import Cache, CacheLayerMixin

from ragaccel.engine.model_input import is_plain, reaches_past
from ragaccel.models.attention import enter_layer

if TYPE_CHECKING:
    from torch import Tensor

    from ragaccel.engine.kv_cache import KVCache
    from ragaccel.engine.model_input import Masks, Rows
    from ragaccel.models.architecture import Architecture


class PassCache(Cache):
    """The cache as models see it during a pass whose attention does the storing itself."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(layers=[])
        self._length = rows.attended - rows.num_rows

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Note the layer; the attention is given the rows' own states and stores them."""
        enter_layer(layer_idx)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Return how many tokens are cached."""
        return max(0, self._length)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:  # noqa: ARG002
        """Return how many states an update returns, and the first one's position."""
        return query_length, 0


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


class CacheAdapter(Cache):
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


def stock_mask(
    rows: Rows, masks: Masks, architecture: Architecture
) -> Tensor | dict[str, Tensor | None] | None:
    """Make the mask that a model's own attention is given for the rows of one sequence."""
    span, window = rows.spans[0], architecture.window
    skips = architecture.skips_plain_masks
    if not architecture.is_mixed:
        if skips and is_plain(span, window):
            return None
        return masks.make(rows, span, window)[None, None]
    full = None if skips and is_plain(span) else masks.make(rows, span)[None, None]
    near = full
    if reaches_past(span, window):
        near = masks.make(rows, span, window)[None, None]
    return {"full_attention": full, "sliding_attention": near}
