"""A stand-in for an embedding model: bags of hashed words; texts that share words are near."""

import hashlib

import numpy as np


class HashEmbedder:
    """Embeds without a model; ``embedded`` keeps the documents that it was given."""

    dimension, max_tokens, fingerprint, embedded = 64, 256, "hash-embedder", ()

    def __init__(self, fingerprint=None, dimension=None):
        self.fingerprint = fingerprint or self.fingerprint
        self.dimension = dimension or self.dimension

    def count_tokens(self, texts):
        return [len(text.split()) for text in texts]

    def embed_documents(self, texts):
        self.embedded = [*self.embedded, *texts]
        return self._vectors(texts)

    def embed_query(self, text):
        return self._vectors([text])[0]

    def _vectors(self, texts):
        vectors = np.full((len(texts), self.dimension), 1e-6, dtype=np.float32)
        for i, text in enumerate(texts):
            for word in text.lower().split():
                digest = hashlib.sha256(word.strip(".,;:?!()").encode()).digest()
                bucket = int.from_bytes(digest[2:8], "big") % self.dimension
                vectors[i, bucket] += 1.0 if digest[1] % 2 else -1.0
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
