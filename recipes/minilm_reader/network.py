"""The reader's network: a stock causal ``BertLMHeadModel`` whose layers know questions and answers.

They are those of the embedding model that finds the passages (all-MiniLM-L6-v2), which was trained
to bring questions near the sentences that answer them. The reader sees only earlier tokens, and
has its own vocabulary: cased, so that it can quote, and small.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertConfig, BertLMHeadModel, PreTrainedTokenizerFast

from recipes.minilm_reader.vocabulary import MAX_POSITIONS

# Layers of the auxiliary losses: whether the question has a token's word, and how relevant a
# sentence is. Without the first, the second was not learned in a million tokens.
MATCH_LAYER, RELEVANCE_LAYER = 2, 5
ROWS_AT_ONCE = 2  # in attention: their weights stay in the processor's cache
_NOISE = 0.1  # of the embeddings' deviation: tells tokens apart that have the same word pieces


def new_reader(tokenizer: PreTrainedTokenizerFast, encoder: Path) -> BertLMHeadModel:
    """Build a reader from the folder of a BERT encoder.

    A token's embedding is the mean of those of the word pieces that spell it; a special token's is
    the separator's. Positions that the encoder does not have begin as its first ones.
    """
    weights = load_file(encoder / "model.safetensors")
    config = BertConfig.from_pretrained(encoder)
    config.update(
        {
            "is_decoder": True,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": MAX_POSITIONS,
            "type_vocab_size": 1,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "tie_word_embeddings": True,
        }
    )
    model = BertLMHeadModel(config)
    body = {
        name: value
        for name, value in weights.items()
        if name.startswith(("encoder.", "embeddings.LayerNorm"))
    }
    embeddings = "embeddings.{}_embeddings.weight".format
    body[embeddings("word")] = _composed(tokenizer, encoder, weights[embeddings("word")])
    known = weights[embeddings("position")]
    repeated = -(-MAX_POSITIONS // len(known))
    body[embeddings("position")] = known.repeat(repeated, 1)[:MAX_POSITIONS]
    body[embeddings("token_type")] = weights[embeddings("token_type")][:1]
    model.bert.load_state_dict(body)
    return model


def _composed(tokenizer: PreTrainedTokenizerFast, encoder: Path, known: Tensor) -> Tensor:
    """Return the embeddings [V, D] of a vocabulary from those of the encoder's word pieces."""
    pieces = Tokenizer.from_file(str(encoder / "tokenizer.json"))
    pieces.no_padding()
    pieces.no_truncation()
    vocabulary = pieces.get_vocab()
    backend = tokenizer.backend_tokenizer
    special = set(tokenizer.all_special_ids)
    noise = torch.randn(len(tokenizer), known.shape[1]) * known.std()
    composed = known[vocabulary["[SEP]"]] + _NOISE * noise
    for token in range(len(tokenizer)):
        if token in special:
            continue
        text = backend.decode([backend.token_to_id("."), token], skip_special_tokens=False)[1:]
        ids = pieces.encode(text.strip(), add_special_tokens=False).ids
        if ids and not text.startswith(" "):  # it continues a word
            first = pieces.id_to_token(ids[0])
            ids[0] = vocabulary.get(f"##{first}", ids[0])
        if ids:
            composed[token] = known[ids].mean(0) + _NOISE * noise[token]
    return composed


class TrainingForward(nn.Module):
    """The model's forward pass with auxiliary heads, faster than the model's own.

    It returns the model's hidden states, but uses no masks (rows are right-padded) and no cache,
    and computes no logits. Shapes: B rows, T tokens, D hidden.
    """

    def __init__(self, model: BertLMHeadModel) -> None:
        super().__init__()
        self.model = model
        self.match = nn.Linear(model.config.hidden_size, 1)
        self.relevance = nn.Linear(model.config.hidden_size, 1, bias=False)
        for head in (self.match, self.relevance):
            nn.init.normal_(head.weight, std=0.02)

    def forward(self, token_ids: Tensor, first_position: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states [B, T, D] of the last layer; match and relevance scores [B, T]."""
        body = self.model.bert
        positions = torch.arange(token_ids.shape[1], device=token_ids.device) + first_position
        x = body.embeddings(input_ids=token_ids, position_ids=positions[None])
        matches = scores = x[..., 0]
        for number, layer in enumerate(body.encoder.layer, start=1):
            attended = _attention(layer.attention.self, x)
            x = layer.attention.output(attended, x)
            x = layer.output(layer.intermediate(x), x)
            if number == MATCH_LAYER:
                matches = self.match(x)[..., 0]
            if number == RELEVANCE_LAYER:
                scores = self.relevance(x)[..., 0]
        return x, matches, scores


def _attention(attention: nn.Module, x: Tensor) -> Tensor:
    rows, tokens, width = x.shape
    shape = (rows, tokens, -1, attention.attention_head_size)
    query, key, value = (
        projection(x).view(shape).transpose(1, 2)
        for projection in (attention.query, attention.key, attention.value)
    )
    if x.is_cuda or query.dtype != torch.bfloat16:
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    else:
        mixed = _attention_in_cache(query, key, value)
    return mixed.transpose(1, 2).reshape(rows, tokens, width)


def _attention_in_cache(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention of few rows at a time: half the time of torch's on a processor."""
    later = torch.full((query.shape[2],) * 2, -torch.inf, dtype=query.dtype).triu(1)
    with torch.autocast("cpu", enabled=False):
        query = query * query.shape[-1] ** -0.5
        parts = zip(*(x.split(ROWS_AT_ONCE) for x in (query, key, value)), strict=True)
        return torch.cat([(q @ k.mT + later).softmax(-1) @ v for q, k, v in parts])
