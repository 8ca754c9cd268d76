"""A Llama with random weights, a tokenizer of its own, and answers that repeat themselves."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 259  # the bytes, the start, the end, and padding
MAX_LENGTH = 512
HEAD_SCALE = 0.35  # standard deviation of the output weights: how sure the model is of a token


def save(folder: Path) -> Path:
    """Save the model and its tokenizer, and return the folder."""
    _tokenizer().save_pretrained(folder)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=1.0)
        model.lm_head.weight.normal_(std=HEAD_SCALE)
        for layer in model.model.layers:  # heard beside the last token, not above it
            for part in (layer.self_attn.v_proj, layer.self_attn.o_proj):
                part.weight.normal_(std=0.06)
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                part.weight.normal_(std=0.12)
    model.save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    special = ["<s>", "</s>", "<pad>"]
    vocabulary |= {token: len(letters) + number for number, token in enumerate(special)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
