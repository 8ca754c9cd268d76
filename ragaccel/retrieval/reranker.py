"""Rerankers: models that read question and passage together and set the final order."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ragaccel.errors import MissingExtraError, ModelNotFoundError
from ragaccel.paths import claim_torch
from ragaccel.retrieval.embedder import translate_model_errors
from ragaccel.retrieval.store import embedded_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.passage import Passage


class Reranker(Protocol):
    """The interface of a reranker: a model that scores passages for a question."""

    def scores(self, question: str, passages: Sequence[Passage]) -> list[float]:
        """Return how well each passage answers the question; larger is better."""


class CrossEncoderReranker:
    """A sentence-transformers cross-encoder, e.g. ``cross-encoder/ms-marco-MiniLM-L6-v2``.

    Args:
        name_or_path: A model in the local cache or on the hub, or its folder.
        device: The torch device; None: a GPU if there is one.
    """

    def __init__(self, name_or_path: str | Path, device: str | None = None) -> None:
        self.name = str(name_or_path)
        self.device = device
        self._model: Any = None
        self._lock = threading.Lock()

    def scores(self, question: str, passages: Sequence[Passage]) -> list[float]:
        """Return how well each passage answers the question, on the model's own scale.

        Raises:
            ConfigurationError: This process was forked from one that had used a model.
        """
        if not passages:
            return []
        claim_torch()
        pairs = [(question, embedded_text(passage)) for passage in passages]
        with self._lock:
            scores = self._load().predict(pairs, show_progress_bar=False)
        if scores.ndim != 1:
            raise ModelNotFoundError(
                f"{self.name} is not a reranker, as it gives several scores for one pair: use a"
                " cross-encoder with one output"
            )
        return [float(score) for score in scores]

    def _load(self) -> Any:
        if self._model is None:
            try:
                from sentence_transformers import CrossEncoder
            except ImportError:
                raise MissingExtraError("sentence-transformers", "retrieval") from None
            from ragaccel.retrieval.embedder import find_model_folder

            folder = find_model_folder(self.name)
            with translate_model_errors(folder):
                self._model = CrossEncoder(str(folder), device=self.device, local_files_only=True)
        return self._model
