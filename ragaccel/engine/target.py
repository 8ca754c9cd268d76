"""The target model as the engine sees it, and the check that deterministic mode works for it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ragaccel.decoding.tree import DraftTree, attach_masks
from ragaccel.engine import attention
from ragaccel.engine.interrupts import in_inference_mode
from ragaccel.engine.model_input import causal_rows, tree_rows
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from ragaccel.engine.kv_cache import KVCache
    from ragaccel.engine.model_input import Rows


class TargetModel(Protocol):
    """A causal language model whose output must be reproduced exactly."""

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        ...

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the model reads, in tokens; ``None`` for no limit."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id that the model reads, mask tokens not counted."""
        ...

    @property
    def num_masks(self) -> int:
        """How many mask tokens the model reads; their ids begin at ``vocab_size``."""
        ...

    @property
    def num_captures(self) -> int:
        """How many passes were captured as CUDA graphs, failed captures included."""
        ...

    @property
    def graphs_status(self) -> str:
        """On a GPU "on" if passes are replayed as CUDA graphs, else "off" and why; else empty."""
        ...

    @property
    def pass_lock(self) -> AbstractContextManager[Any]:
        """Lock held while a pass is computed and read, shared by all engines over the model."""
        ...

    @property
    def batchable(self) -> bool:
        """Whether one pass can hold rows of several sequences, and deterministic passes work."""
        ...

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row has the same bits in any ordinary pass."""
        ...

    @property
    def unbatchable_reason(self) -> str:
        """Why the model is not ``batchable``, and what to do; empty if it is."""
        ...

    def refresh(self) -> int:
        """Use changed weights from now on; return how many changes there were so far.

        Raises:
            ConfigurationError: the model must be loaded again after this change.
        """
        ...

    def new_cache(self, capacity: int | None, limit: int | None) -> KVCache:
        """Return an empty cache for passes of this model; arguments are those of ``KVCache``."""
        ...

    def free_memory(self) -> None:
        """Free the memory that only makes later passes faster."""
        ...

    def finish_compiling(self) -> None:
        """Wait for functions that are compiled in the background and make later passes faster."""
        ...

    def capture_passes(self, attended: int, *, num_rows: int, num_sequences: int) -> None:
        """Capture all sizes of pass up to these numbers as CUDA graphs, where there are any.

        Args:
            attended: most cached tokens and rows of a sequence.
            num_rows: most rows of a sequence.
            num_sequences: most sequences of a pass.
        """
        ...

    def forward(self, rows: Rows, keep: int) -> Tensor:
        """Write the rows' keys and values to their caches; return the logits of the last rows.

        Args:
            rows: inputs in host memory; ``begin`` has been called on every cache.
            keep: how many of the last rows need logits.

        Returns:
            [keep, V], valid until the next pass.
        """
        ...

    def greedy_ids(self, logits: Tensor) -> Tensor | None:
        """Return the highest logit's index in each row, [keep, 1], if the pass computed it.

        Args:
            logits: the very tensor that the last ``forward`` returned, unchanged.
        """
        ...


_SHIFT = 5
_NUM_SHIFTS = 4
_CONTEXT_CHUNK = 64  # rows of a pass over the context; with separate experts each row needs memory
_NOT_DETERMINISTIC = (
    "exact=True is not supported for this model: what it computes for a token depends on the "
    "other tokens of the pass. If it is a mixture of experts, load it with "
    "experts_implementation='batched_mm'"
)


@in_inference_mode
def check_deterministic(model: TargetModel, num_rows: int, *, deterministic: bool) -> None:
    """Check that a token's logits do not depend on the pass that computes it or on its row.

    Compare overlapping passes at the start of a sequence and, if the model reads that far, around
    the first boundary between the chunks that attention reduces. Of ordinary passes, every other
    one is over a tree, with the model's mask tokens at its root.

    Args:
        model: a model that runs with the engine's attention.
        num_rows: rows of a deterministic pass.
        deterministic: whether to check deterministic passes, or ordinary ones.

    Raises:
        ConfigurationError: the logits differ.
    """
    max_shift = _NUM_SHIFTS * _SHIFT
    edge = max(0, attention.CHUNK + 1 - num_rows)
    for first in dict.fromkeys((0, edge)):
        if model.max_positions is None or first + max_shift + num_rows <= model.max_positions:
            passes = _shifted_passes(first, model, num_rows, deterministic=deterministic)
            if not all(
                torch.equal(one[_SHIFT:], next_[:-_SHIFT]) for one, next_ in pairwise(passes)
            ):
                raise ConfigurationError(_NOT_DETERMINISTIC)


def _shifted_passes(
    first: int, model: TargetModel, num_rows: int, *, deterministic: bool
) -> list[Tensor]:
    """Return the logits of overlapping passes: the first begins after ``first`` tokens.

    Each later pass begins ``_SHIFT`` tokens after the previous one.
    """
    mask_ids = range(model.vocab_size, model.vocab_size + model.num_masks)
    length = first + _NUM_SHIFTS * _SHIFT + num_rows
    tokens = [(7919 * i + i * i + 1) % model.vocab_size for i in range(length)]
    cache = model.new_cache(None, None)
    for start in range(0, first, _CONTEXT_CHUNK):
        rows = causal_rows(tokens[start : min(start + _CONTEXT_CHUNK, first)], cache)
        model.forward(replace(rows, deterministic=deterministic), 1)
        cache.keep(range(rows.num_rows))
    passes = []
    for number in range(_NUM_SHIFTS):
        start = first + number * _SHIFT
        chain = tokens[start : start + num_rows]
        if deterministic or number % 2 == 0:
            rows, step = causal_rows(chain, cache), 1
        else:
            tree = attach_masks(_with_branches(chain), mask_ids, [0])
            rows, step = tree_rows(tree, cache, max_positions=model.max_positions), 2
        rows = replace(rows, deterministic=deterministic)
        logits = model.forward(rows, rows.num_rows)
        passes.append(logits[: step * num_rows : step].clone())
        cache.keep(range(0, step * _SHIFT, step))
    return passes


def _with_branches(chain: Sequence[int]) -> DraftTree:
    """Return a tree of a chain's tokens; each has another child first, with its own token."""
    tokens = [token for each in chain for token in (each, each)]
    parents = [(node - 1) // 2 * 2 if node else -1 for node in range(len(tokens))]
    n = len(tokens)
    return DraftTree(tuple(tokens), tuple(parents), (1.0,) * n, ((),) * n)
