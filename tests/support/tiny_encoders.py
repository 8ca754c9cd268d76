"""Tiny sentence encoders with random weights, saved as the real ones are."""

import json
import string

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    PreTrainedTokenizerFast,
)

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*SPECIALS, *string.ascii_lowercase, *(f"##{c}" for c in string.ascii_lowercase)]
SHAPE = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 66,  # RoBERTa models do not use two of them
    "pad_token_id": 0,
}


def save_tokenizer(folder):
    tokenizer = Tokenizer(
        models.WordPiece({t: i for i, t in enumerate(VOCABULARY)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), SPECIALS, strict=True))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=64,
        **{f"{name}_token": token for name, token in names.items()},
    ).save_pretrained(folder)


def save_encoder(
    folder, pooling="mean", normalize=False, prompts=None, kind="bert", more=None, **shape
):
    torch.manual_seed(0)
    save_tokenizer(folder)
    config = AutoConfig.for_model(kind, **{**SHAPE, **shape})
    AutoModel.from_config(config).save_pretrained(folder)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {
            "idx": position,
            "name": str(position),
            "path": f"{position}_{kind}" if position else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for position, kind in enumerate(kinds)
    ]
    modes = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}
    settings = {f"pooling_mode_{mode}": name == pooling for name, mode in modes.items()}
    (folder / "1_Pooling").mkdir()
    _write(
        folder / "1_Pooling/config.json",
        {"word_embedding_dimension": 32, **settings, **(more or {})},
    )
    _write(folder / "modules.json", modules)
    _write(folder / "sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": False})
    _write(folder / "config_sentence_transformers.json", {"prompts": prompts or {}})
    return folder


def _write(path, value):
    path.write_text(json.dumps(value))
