"""The reader's network: a stock LlamaForCausalLM, its initial weights, a fast training pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    apply_rotary_pos_emb,
)

# Layers of the auxiliary losses: whether the question has a token's word, and how relevant a
# sentence is. Without the first, relevance was near 0.6 after 5M tokens, with it near 0.9 after
# 2.5M; one run each, which also differed in loss weight and passage size, so no ablation.
MATCH_LAYER, RELEVANCE_LAYER = 2, 4


def new_reader(
    vocab_size: int, special_ids: dict[str, int], *, hidden: int = 256, layers: int = 6
) -> LlamaForCausalLM:
    """Build an untrained reader.

    Half of the heads start with equal query and key weights, so that from the first step a token
    attends to its own earlier occurrences: copying and matching are learned sooner ("mimetic
    initialization", Trockman and Kolter, arXiv 2305.09828).
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=special_ids["bos"],
        eos_token_id=special_ids["eos"],
        pad_token_id=special_ids["pad"],
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            tied = attention.q_proj.weight.shape[0] // 2
            attention.q_proj.weight[:tied].normal_(0.0, 0.05)
            attention.k_proj.weight[:tied].copy_(attention.q_proj.weight[:tied])
            for weight in (attention.o_proj.weight, layer.mlp.down_proj.weight):
                weight.mul_((2 * layers) ** -0.5)
    return model


class TrainingForward(nn.Module):
    """The model's forward pass with auxiliary heads, faster than the model's own.

    It returns the model's hidden states, but uses no masks (rows are right-padded) and no cache,
    and computes no logits. The heads' scores are in float32 also where products are in bfloat16,
    which would round them to two or three digits. Shapes: B rows, T tokens, D hidden.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model
        self.match = nn.Linear(model.config.hidden_size, 1)
        self.relevance = nn.Linear(model.config.hidden_size, 1, bias=False)
        for head in (self.match, self.relevance):
            nn.init.normal_(head.weight, std=0.02)

    def forward(self, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states [B, T, D] after the last norm; match and relevance scores [B, T]."""
        body = self.model.model
        x = body.embed_tokens(token_ids)
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
        rotary = body.rotary_emb(x, positions)
        matches = scores = x[..., 0]
        for number, layer in enumerate(body.layers, start=1):
            assert isinstance(layer, LlamaDecoderLayer)
            x = x + _attention(layer.self_attn, layer.input_layernorm(x), rotary)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            if number == MATCH_LAYER:
                matches = _scores(self.match, x)
            if number == RELEVANCE_LAYER:
                scores = _scores(self.relevance, x)
        return body.norm(x), matches, scores


def _scores(head: nn.Linear, hidden: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        normed = F.rms_norm(hidden.float(), (hidden.shape[-1],))
        scores: Tensor = head(normed)[..., 0]
    return scores


def _attention(attention: LlamaAttention, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    rows, tokens, _ = x.shape
    shape = (rows, tokens, -1, attention.head_dim)
    query, key, value = (
        projection(x).view(shape).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, *rotary)
    mixed = F.scaled_dot_product_attention(query, key, value.to(query.dtype), is_causal=True)
    out: Tensor = attention.o_proj(mixed.transpose(1, 2).reshape(rows, tokens, -1))
    return out
