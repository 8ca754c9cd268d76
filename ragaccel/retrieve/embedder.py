"""Embedders: texts to unit vectors; the protocol, and sentence-transformers models behind it."""

from __future__ import annotations

import hashlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ragaccel.errors import MissingExtraError, ModelNotFoundError
from ragaccel.forking import PerProcess, claim_torch
from ragaccel.retrieve.embedder_settings import (
    EmbedderSettings,
    explained,
    require_known_modules,
)
from ragaccel.retrieve.weights import file_sha256, find_model_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ragaccel.retrieve.encoder import TextEncoder

    Vectors = NDArray[np.float32]

_BATCH_TOKENS = 1024


class Embedder(Protocol):
    """What the index asks of an embedding model. D is ``dimension``."""

    @property
    def dimension(self) -> int:
        """Numbers in a vector."""

    @property
    def max_tokens(self) -> int:
        """The longest text that is embedded whole, special tokens not counted."""

    @property
    def fingerprint(self) -> str:
        """Changes when the vectors would: an index made with another one is refused."""

    def embed_documents(self, texts: list[str]) -> Vectors:
        """Embed texts to be found; float32 [len(texts), D], rows of length 1."""

    def embed_query(self, text: str) -> Vectors:
        """Embed a text to find by; float32 [D], of length 1."""

    def count_tokens(self, texts: list[str]) -> list[int]:
        """Count the tokens of each text, special tokens left out."""


def load_embedder(name_or_path: str | Path | None = None) -> SentenceTransformerEmbedder:
    """Find an embedder by name or folder; all-MiniLM-L6-v2 without a name.

    Cheap: the weights are loaded when something is first embedded.

    Raises:
        ModelNotFoundError: See :func:`ragaccel.retrieve.weights.find_model_folder`.
    """
    return SentenceTransformerEmbedder(find_model_folder(name_or_path))


class SentenceTransformerEmbedder:
    """A sentence-transformers model in a folder; safe to call from several threads.

    BERT, RoBERTa and their like with mean or first-token pooling, the default model among them, run
    through :class:`ragaccel.retrieve.encoder.TextEncoder`, which loads in half the time and gives
    the same vectors; any other model through sentence-transformers itself.

    A process that was forked from one that had used a model cannot embed (ForkError). To
    open an embedder, and to count tokens, uses none.

    Args:
        folder: The model's folder.
        device: Where it runs; a GPU when there is one if None.
    """

    def __init__(self, folder: Path, device: str | None = None) -> None:
        self.folder = folder
        self.device = device
        self.settings = EmbedderSettings(folder)
        self._tokenizer: Any = None
        self._encoder: TextEncoder | None = None
        self._model: Any = None
        self._fingerprint = ""
        self._lock = PerProcess(threading.Lock)

    @property
    def max_tokens(self) -> int:
        """The longest text that is embedded whole, special tokens not counted."""
        specials: int = self._load_tokenizer().num_special_tokens_to_add(False)
        return self.settings.max_length - specials

    @property
    def dimension(self) -> int:
        """Numbers in a vector."""
        if self.settings.is_plain:
            with explained(self.folder):
                return int(self.settings.config["hidden_size"])
        model = self._load_model()
        ask = getattr(model, "get_embedding_dimension", None)  # its name since version 6
        return int((ask or model.get_sentence_embedding_dimension)())

    @property
    def fingerprint(self) -> str:
        """The sha256 of the weights and of the settings that shape the vectors."""
        if not self._fingerprint:
            weights = sorted(
                path
                for pattern in ("*.safetensors", "*.bin", "*/*.safetensors", "*/*.bin")
                for path in self.folder.glob(pattern)
            )
            parts = [*map(file_sha256, weights), self.settings.described()]
            self._fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        return self._fingerprint

    def count_tokens(self, texts: list[str]) -> list[int]:
        """Count the tokens of each text, special tokens left out; loads no weights."""
        encoded = self._load_tokenizer().encode_batch_fast(
            _whole_characters(texts), add_special_tokens=False
        )
        return [len(encoding) for encoding in encoded]

    def embed_documents(self, texts: list[str]) -> Vectors:
        """Embed texts to be found; float32 [n, D]. What is beyond ``max_tokens`` is not seen."""
        return self._embed(texts, "document")

    def embed_query(self, text: str) -> Vectors:
        """Embed a text to find by; float32 [D]."""
        vector: Vectors = self._embed([text], "query")[0]
        return vector

    def _embed(self, texts: list[str], role: str) -> Vectors:
        if not self.settings.is_plain:
            return self._through_model(f"encode_{role}", texts)
        from ragaccel.retrieve.encoder import each_on_one_core

        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        prompt = self.settings.prompts.get(role, "")
        encoder, ids = self._load_encoder(), self._token_ids([prompt + text for text in texts])
        batches = _batches([len(row) for row in ids])
        jobs = [partial(encoder.encode, [ids[i] for i in batch]) for batch in batches]
        for batch, rows in zip(batches, each_on_one_core(jobs), strict=True):
            vectors[batch] = rows.numpy()
        return vectors

    def _token_ids(self, texts: list[str]) -> list[list[int]]:
        longest = self.settings.max_length
        encoded = self._load_tokenizer().encode_batch_fast(_whole_characters(texts))
        ids = [encoding.ids for encoding in encoded]
        return [row if len(row) <= longest else [*row[: longest - 1], row[-1]] for row in ids]

    def _through_model(self, method: str, texts: list[str]) -> Vectors:
        embed: Callable[..., Any] = getattr(self._load_model(), method)
        vectors = embed(
            _whole_characters(texts), normalize_embeddings=True, show_progress_bar=False
        )
        return np.asarray(vectors, dtype=np.float32)

    def _load_tokenizer(self) -> Any:
        with self._lock.get():
            if self._tokenizer is None:
                self._tokenizer = _read_tokenizer(self.folder)
            return self._tokenizer

    def _load_encoder(self) -> TextEncoder:
        claim_torch()
        with self._lock.get():
            if self._encoder is None:
                with explained(self.folder):
                    from ragaccel.retrieve.encoder import TextEncoder

                    settings = self.settings
                    self._encoder = TextEncoder(
                        self.folder, settings.pooling, settings.max_length, self.device or _device()
                    )
            return self._encoder

    def _load_model(self) -> Any:
        claim_torch()
        with self._lock.get():
            if self._model is None:
                try:
                    from sentence_transformers import SentenceTransformer
                except ImportError:
                    raise MissingExtraError("sentence-transformers", "retrieval") from None
                with explained(self.folder):
                    require_known_modules(self.folder)
                    self._model = SentenceTransformer(
                        str(self.folder), device=self.device, local_files_only=True
                    )
            return self._model


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _whole_characters(texts: list[str]) -> list[str]:
    """The texts without halves of characters, which a question cut short in an emoji ends with."""
    return [text.encode(errors="replace").decode() for text in texts]


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Texts of like length together, longest first, up to a number of tokens that suits a cache."""
    batches: list[list[int]] = []
    room = 0
    for position in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        if room < lengths[position] or not batches:
            batches.append([])
            room = max(_BATCH_TOKENS, lengths[position])
            width = lengths[position]
        batches[-1].append(position)
        room -= width
    return batches


def _read_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelNotFoundError(f"{folder} has no tokenizer.json: save the model's fast tokenizer")
    with explained(folder):
        tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
