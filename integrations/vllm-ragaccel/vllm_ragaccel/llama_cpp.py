"""The draft model that llama-cpp-python asks for drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from ragaccel.errors import ConfigurationError

from vllm_ragaccel.batch import BatchDrafter

_ANY_LENGTH, _ANY_ID = 1 << 30, 1 << 24  # llama-cpp-python cuts drafts at its context itself


class RagaccelDraft:
    """A draft model for llama-cpp-python.

    Use ``Llama(path, n_ctx=8192, logits_all=True, draft_model=RagaccelDraft())``, one each.
    It needs no model: it drafts what prompt and answer say already. Without ``logits_all``,
    llama-cpp-python fails behind ``n_batch`` tokens; let ``n_ctx`` be a multiple of 256.

    Args:
        num_pred_tokens: the maximum number of draft tokens of a step.
        history: whether to draft from earlier requests of this object as well.

    Raises:
        ConfigurationError: ``num_pred_tokens`` is below 1.
    """

    def __init__(self, num_pred_tokens: int = 10, *, history: bool = False) -> None:
        if num_pred_tokens < 1:
            raise ConfigurationError(f"num_pred_tokens must be 1 or more, not {num_pred_tokens}")
        self._batch = BatchDrafter(num_pred_tokens, _ANY_LENGTH, _ANY_ID, history=history)
        self._batch.warm_up()
        self._num_tokens, self._size = num_pred_tokens, 0

    def __call__(
        self,
        input_ids: NDArray[np.intc],
        /,
        **kwargs: Any,  # noqa: ARG002
    ) -> NDArray[np.intc]:
        """Return the draft tokens after the tokens of prompt and answer so far."""
        size = len(input_ids)
        num_new = size - self._size if 0 < size - self._size <= self._num_tokens + 1 else 1
        self._size = size
        new_ids = input_ids[-num_new:].tolist()
        (chain,) = self._batch.draft([new_ids], [size], input_ids[None])
        return np.array(chain, np.intc)
