"""Stand-ins for tests: a hash embedder, and a tiny language model."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_TEMPLATE = (
    "{% for turn in messages %}<|{{ turn.role }}|>{{ turn.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tiny_model(folder: Path, *, context: int = 4096, seed: int = 0) -> Path:
    """Save a random Llama of two layers that reads and writes bytes, with a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|end|>"]
    by_bytes = Tokenizer(models.BPE(vocab={s: n for n, s in enumerate(symbols)}, merges=[]))
    by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_bytes.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=by_bytes, eos_token="<|end|>")
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


class HashEmbedder:
    """An embedder by hashed words: texts that share words have similar vectors.

    Args:
        fingerprint: Identifies the embedder; an index refuses another fingerprint than its own.
        seconds_a_text: Seconds to wait for each text, so that a process can be killed meanwhile.
    """

    dimension, max_tokens = 64, 256

    def __init__(self, fingerprint: str = "hashed words", seconds_a_text: float = 0.0) -> None:
        self.fingerprint = fingerprint
        self.seconds_a_text = seconds_a_text

    def count_tokens(self, texts: list[str]) -> list[int]:
        """Count the words of each text."""
        return [len(text.split()) for text in texts]

    def embed_documents(self, texts: list[str]) -> NDArray[np.float32]:
        """Embed documents; float32 [n, D]."""
        time.sleep(self.seconds_a_text * len(texts))
        vectors = np.full((len(texts), self.dimension), 1e-6, dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.lower().split():
                digest = hashlib.sha256(word.strip(".,;:?!()").encode()).digest()
                vectors[row, digest[0] % self.dimension] += 1.0 if digest[1] % 2 else -1.0
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """Embed a question; float32 [D]."""
        return self.embed_documents([text])[0]
