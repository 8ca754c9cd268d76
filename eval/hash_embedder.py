"""An embedder without a model: bags of hashed words, for trials that are not of embedding."""

from __future__ import annotations

import hashlib
import time

import numpy as np
from numpy.typing import NDArray


class HashEmbedder:
    """Texts that share words are near one another.

    Args:
        fingerprint: What an index made with it remembers; another one makes it another embedder.
        seconds_a_text: How long it takes, so that a process can be met in the middle of its work.
    """

    dimension, max_tokens = 64, 256

    def __init__(self, fingerprint: str = "hashed words", seconds_a_text: float = 0.0) -> None:
        self.fingerprint = fingerprint
        self.seconds_a_text = seconds_a_text

    def count_tokens(self, texts: list[str]) -> list[int]:
        """Count the words of each text."""
        return [len(text.split()) for text in texts]

    def embed_documents(self, texts: list[str]) -> NDArray[np.float32]:
        """Embed texts to be found; float32 [n, D]."""
        time.sleep(self.seconds_a_text * len(texts))
        vectors = np.full((len(texts), self.dimension), 1e-6, dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.lower().split():
                digest = hashlib.sha256(word.strip(".,;:?!()").encode()).digest()
                vectors[row, digest[0] % self.dimension] += 1.0 if digest[1] % 2 else -1.0
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """Embed a text to find by; float32 [D]."""
        return self.embed_documents([text])[0]
