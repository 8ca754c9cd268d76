"""The drafter that TensorRT-LLM takes from its user.

The interface is that of ``tensorrt_llm/_torch/speculative/drafter.py`` and ``ngram.py``, commits
1ff19bb and 0249976, whose constructors differ. It was read, not run.
"""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from ragaccel.errors import ConfigurationError

from vllm_ragaccel.batch import BatchDrafter

if TYPE_CHECKING:
    from collections.abc import Sequence

_ANY_LENGTH, _ANY_ID = 1 << 30, 1 << 24  # the length differs by request, the vocabulary is not told


class RequestDrafts:
    """Drafts for requests that an engine names and whose tokens it tells.

    Args:
        num_tokens: the maximum number of draft tokens of a request.
        history: whether to draft from earlier requests as well, whoever sent them.
    """

    def __init__(self, num_tokens: int, *, history: bool) -> None:
        self._batch = BatchDrafter(num_tokens, _ANY_LENGTH, _ANY_ID, history=history)
        self._batch.warm_up()
        self._sizes: dict[Any, int] = {}  # tokens of each request at the last step

    def prepare(self, scheduled_requests: Any) -> None:
        """Set ``py_draft_tokens`` of all generation requests of a step."""
        running = list(scheduled_requests.generation_requests)
        reading = list(scheduled_requests.context_requests)
        texts = [list(request.get_tokens(0)) for request in chain(running, reading)]
        if not running:
            return
        known, self._sizes = self._sizes, {}
        new_ids: list[list[int]] = []
        for request, text in zip(running, texts, strict=False):
            start = known.get(request.request_id, len(text) - 1)
            new_ids.append(text[min(start, len(text) - 1) :])
            self._sizes[request.request_id] = len(text)
        new_ids += [[] for _ in reading]
        chains = self._batch.draft(new_ids, [len(text) for text in texts], _matrix(texts))
        for request, text, drafted in zip(running, texts, chains, strict=False):
            room = request.py_orig_prompt_len + request.py_max_new_tokens - 1 - len(text)
            request.py_draft_tokens = drafted[: max(0, room)]


def make_drafter(max_draft_len: int = 16, *, history: bool = False) -> Any:
    """Return a drafter for TensorRT-LLM's PyTorch backend.

    >>> # LLM(model, speculative_config=UserProvidedDecodingConfig(
    >>> #     max_draft_len=16, drafter=make_drafter(16)))

    Args:
        max_draft_len: the maximum number of draft tokens of a request, as in the configuration.
        history: whether to draft from earlier requests as well, whoever sent them.

    Raises:
        ConfigurationError: ``max_draft_len`` is below 1, or TensorRT-LLM is missing or differs.
    """
    if max_draft_len < 1:
        raise ConfigurationError(f"max_draft_len must be 1 or more, not {max_draft_len}")
    try:
        base = import_module("tensorrt_llm._torch.speculative.drafter").Drafter
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"TensorRT-LLM's drafter interface was not found ({error}): install tensorrt_llm with "
            "its PyTorch backend"
        ) from error

    class RagaccelDrafter(base):  # type: ignore[misc, valid-type]
        def __init__(self, drafts: RequestDrafts, **settings: Any) -> None:
            super().__init__(**settings)
            self._ragaccel = drafts

        def prepare_draft_tokens(
            self,
            scheduled_requests: Any,
            resource_manager: Any = None,  # noqa: ARG002
        ) -> None:
            self._ragaccel.prepare(scheduled_requests)

    taken = signature(base.__init__).parameters
    lengths = {"max_draft_len": max_draft_len, "max_total_draft_tokens": max_draft_len}
    settings = {name: value for name, value in lengths.items() if name in taken}
    return RagaccelDrafter(RequestDrafts(max_draft_len, history=history), **settings)


def _matrix(texts: Sequence[Sequence[int]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return token ids as [requests, longest], filled up with zeros."""
    filled = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in zip(filled, texts, strict=True):
        row[: len(text)] = text
    return filled
