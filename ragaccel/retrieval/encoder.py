"""A text encoder on transformers: makes a unit vector of each text's token ids.

This module imports torch and transformers, which takes seconds; the embedder imports it only when
it first embeds. Shapes: B texts, L tokens, E hidden size.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModel
from transformers.utils import logging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


_LENGTH_STEP = 8


def run_single_threaded(jobs: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
    """Run jobs in parallel threads, each on one core, and return their results in order.

    Splitting one matrix product over several cores makes them wait for each other after every
    product; on a busy machine this makes a query of 7 ms take a second.
    """
    with _SINGLE_THREADED as threads:
        if threads == 1 or len(jobs) == 1:
            return [job() for job in jobs]
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(lambda job: job(), jobs))


def num_threads() -> int:
    """Return how many jobs ``run_single_threaded`` runs at once."""
    return _SINGLE_THREADED.num_threads


class _SingleThreaded:
    """A context manager that limits torch to one thread per operation.

    It yields the number of threads that torch used before.

    torch stores the number per thread and as the default of later threads. Blocks may overlap:
    each restores the number that the first of them found.
    """

    def __init__(self) -> None:
        self._lock, self._num_inside, self._num_threads_before = Lock(), 0, 1

    @property
    def num_threads(self) -> int:
        """The number of threads that torch uses outside."""
        with self._lock:
            return self._num_threads_before if self._num_inside else torch.get_num_threads()

    def __enter__(self) -> int:
        with self._lock:
            if not self._num_inside:
                self._num_threads_before = torch.get_num_threads()
            self._num_inside += 1
            torch.set_num_threads(1)
            return self._num_threads_before

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            torch.set_num_threads(self._num_threads_before)


_SINGLE_THREADED = _SingleThreaded()


def load_encoder(folder: Path, device: str) -> Any:
    """Return the transformers model of a folder, in float32; it never runs remote code.

    Raises:
        ValueError: Weights are missing.
    """
    own: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(folder, **own)
    with _silence_transformers():
        model, loaded = AutoModel.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation="sdpa",  # overrides the file's choice only if config is given
            use_safetensors=True,
            output_loading_info=True,
            **own,
        )
    missing = [name for name in loaded["missing_keys"] if not name.startswith("pooler.")]
    if missing:
        raise ValueError(f"it has no weights for {min(missing)}")
    return model.to(device).eval()


class TextEncoder:
    """A transformers model with pooled hidden states, in float32; it never runs remote code.

    Args:
        folder: A model folder with ``config.json`` and ``model.safetensors``.
        pooling: ``"mean"`` over the text's tokens, or ``"cls"``: the first token's state.
        max_length: The maximum number of tokens of a text.
        device: The torch device, e.g. ``"cuda"``.

    Raises:
        ValueError: Weights are missing.
    """

    def __init__(self, folder: Path, pooling: str, max_length: int, device: str) -> None:
        self._model = load_encoder(folder, device)
        self._padding_id: int = self._model.config.pad_token_id or 0
        self._pooling = pooling
        self._max_length = max_length
        self._device = device

    @torch.inference_mode()
    def encode(self, token_ids: list[list[int]]) -> Tensor:
        """Encode texts given as token ids with special tokens; return float32 [B, E] on the CPU."""
        length = self._padded_length(max(map(len, token_ids)), len(token_ids))
        rows = [row + [self._padding_id] * (length - len(row)) for row in token_ids]
        seen = [[1] * len(row) + [0] * (length - len(row)) for row in token_ids]
        mask = torch.tensor(seen, device=self._device)
        ids = torch.tensor(rows, device=self._device)
        states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        return F.normalize(self._pool(states, mask), dim=-1).cpu()

    def _padded_length(self, longest: int, num_texts: int) -> int:
        """Return a batch's length, rounded up, since torch caches memory for every length."""
        if num_texts == 1:
            return longest
        return min(-(-longest // _LENGTH_STEP) * _LENGTH_STEP, self._max_length)

    def _pool(self, states: Tensor, mask: Tensor) -> Tensor:
        if self._pooling == "cls":
            return states[:, 0]
        weights = mask[:, :, None].to(states.dtype)
        return (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Hide transformers' progress bar and its table of unused weights."""
    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
