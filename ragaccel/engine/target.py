"""The target model as the engine sees it: rows over caches in, logits out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor

    from ragaccel.engine.kv_cache import KVCache
    from ragaccel.engine.layout import Rows


class TargetModel(Protocol):
    """A causal language model whose output must be reproduced exactly.

    ``max_positions`` is the longest sequence it can read, ``None`` if there is no limit;
    ``vocab_size`` how many different tokens it can read, ``num_masks`` how many mask tokens
    besides, with the ids that follow; ``joins_sequences`` whether one pass can
    take the rows of several, and exact ones.
    """

    @property
    def device(self) -> torch.device:
        """Where logits come out."""
        ...

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model reads, in tokens."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id the model reads."""
        ...

    @property
    def num_masks(self) -> int:
        """How many mask tokens it reads, numbered from ``vocab_size`` on."""
        ...

    @property
    def num_captures(self) -> int:
        """How many passes were captured, to be replayed later, or were to be."""
        ...

    @property
    def pass_lock(self) -> AbstractContextManager[Any]:
        """Held while a pass is computed and read, by whichever engine: the model is one."""
        ...

    @property
    def joins_sequences(self) -> bool:
        """Whether one pass can take the rows of several sequences."""
        ...

    @property
    def why_apart(self) -> str:
        """Why no pass can, and what helps; empty where ``joins_sequences``."""
        ...

    def refresh(self) -> int:
        """Follow weights that were changed; return how many times any were.

        Raises:
            ConfigurationError: they were changed in a way that cannot be followed.
        """
        ...

    def new_cache(self, capacity: int | None, limit: int | None) -> KVCache:
        """Make an empty cache for passes of this model; arguments are ``KVCache``'s."""
        ...

    def free_memory(self) -> None:
        """Free what is kept only to make later passes faster: the device is full."""
        ...

    def forward(self, rows: Rows, keep: int) -> Tensor:
        """Write the rows' states to their caches; return the logits of the last ``keep``.

        [keep, V], valid until the next pass. The rows are in host memory; the pass has been begun
        on every cache.
        """
        ...
