"""A BERT sentence encoder in plain torch: what all-MiniLM-L6-v2 computes, ready in a second.

``import sentence_transformers`` takes four to six seconds, more than re-indexing an edited file
should take in all. The family most sentence embedders belong to (BERT encoder, mean or first-token
pooling) is sixty lines of torch, tested equal to sentence-transformers' own.

Shapes: B texts, L tokens, E hidden size, A attention heads, D = E / A.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from ragaccel.retrieve.embedder_settings import GELUS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


_LENGTH_STEP = 8


@dataclass(frozen=True, slots=True)
class BertShape:
    """The settings of a BERT encoder that its computation depends on."""

    num_layers: int
    num_heads: int
    norm_epsilon: float
    gelu: str

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BertShape:
        """Take the shape from a model's ``config.json``."""
        return cls(
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            norm_epsilon=config.get("layer_norm_eps", 1e-12),
            gelu=GELUS[config.get("hidden_act", "gelu")],
        )


def each_on_one_core(jobs: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
    """Run jobs side by side, each on a core of its own, and return their results in order.

    Texts need nothing from each other, so the cores need not wait for each other after every
    matrix product; on a busy machine that waiting makes a query of 7 ms take a second.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if threads == 1 or len(jobs) == 1:
            return [job() for job in jobs]
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(lambda job: job(), jobs))
    finally:
        torch.set_num_threads(threads)


class BertEncoder:
    """Token ids to one L2-normalised vector a text.

    Args:
        folder: A model folder with ``config.json`` and ``model.safetensors``.
        pooling: ``"mean"`` over the text's tokens, or ``"cls"``: the first token's state.
        device: Where it runs, e.g. ``"cuda"``.
    """

    def __init__(self, folder: Path, pooling: str = "mean", device: str = "cpu") -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.shape = BertShape.from_config(config)
        self.pooling = pooling
        self.device = device
        weights = load_file(folder / "model.safetensors", device=device)
        self.weights = {
            name.removeprefix("bert."): tensor.float()
            for name, tensor in weights.items()
            if tensor.is_floating_point()
        }

    @torch.inference_mode()
    def encode(self, token_ids: list[list[int]]) -> Tensor:
        """Encode texts given as token ids, special tokens included; float32 [B, E] on the CPU."""
        lengths = torch.tensor([len(ids) for ids in token_ids], device=self.device)
        longest = self._padded(max(map(len, token_ids)), len(token_ids))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in token_ids])
        mask = torch.arange(longest, device=self.device)[None] < lengths[:, None]
        hidden = self._embed(ids.to(self.device))
        full = bool(mask.all())
        for layer in range(self.shape.num_layers):
            hidden = self._layer(f"encoder.layer.{layer}.", hidden, None if full else mask)
        return F.normalize(self._pool(hidden, mask), dim=-1).cpu()

    def _padded(self, longest: int, num_texts: int) -> int:
        """The length of a batch; of few kinds, as torch keeps memory for every one it saw."""
        if num_texts == 1:
            return longest
        most: int = self.weights["embeddings.position_embeddings.weight"].shape[0]
        return min(-(-longest // _LENGTH_STEP) * _LENGTH_STEP, most)

    def _embed(self, ids: Tensor) -> Tensor:
        weights = self.weights
        states = F.embedding(ids, weights["embeddings.word_embeddings.weight"])
        states = states + weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
        states = states + weights["embeddings.token_type_embeddings.weight"][0]
        return self._norm("embeddings.LayerNorm", states)

    def _layer(self, name: str, hidden: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, size = hidden.shape
        query, key, value = (
            self._linear(f"{name}attention.self.{part}", hidden)
            .view(batch, length, self.shape.num_heads, -1)
            .transpose(1, 2)
            for part in ("query", "key", "value")
        )
        seen = None if mask is None else mask[:, None, None]
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        mixed = mixed.transpose(1, 2).reshape(batch, length, size)
        mixed = self._linear(f"{name}attention.output.dense", mixed)
        hidden = self._norm(f"{name}attention.output.LayerNorm", mixed + hidden)
        wide = self._linear(f"{name}intermediate.dense", hidden)
        wide = F.gelu(wide, approximate=self.shape.gelu)
        wide = self._linear(f"{name}output.dense", wide)
        return self._norm(f"{name}output.LayerNorm", wide + hidden)

    def _pool(self, hidden: Tensor, mask: Tensor) -> Tensor:
        if self.pooling == "cls":
            return hidden[:, 0]
        weight = mask[:, :, None].to(hidden.dtype)
        return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)

    def _linear(self, name: str, states: Tensor) -> Tensor:
        return F.linear(states, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, name: str, states: Tensor) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        bias = self.weights[f"{name}.bias"]
        return F.layer_norm(states, weight.shape, weight, bias, self.shape.norm_epsilon)
