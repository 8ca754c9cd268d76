"""Write models of transformers as GGUF files; needs gguf and safetensors, but no torch.

llama.cpp's own converter refuses tokenizers that it does not know by name. This one knows two
architectures, and takes the "gpt-2" rule for byte-level tokenizers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file

KINDS = {
    "float32": gguf.GGMLQuantizationType.F32,
    "float16": gguf.GGMLQuantizationType.F16,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
    "int4": gguf.GGMLQuantizationType.Q4_0,
}
_FILES = {
    "float32": gguf.LlamaFileType.ALL_F32,
    "float16": gguf.LlamaFileType.MOSTLY_F16,
    "bfloat16": gguf.LlamaFileType.MOSTLY_BF16,
    "int8": gguf.LlamaFileType.MOSTLY_Q8_0,
    "int4": gguf.LlamaFileType.MOSTLY_Q4_0,
}
_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Weight = NDArray[np.float32]


def write_gguf(folder: Path, path: Path, dtype: str) -> None:
    """Write a model's folder (``config.json``, ``model.safetensors``) as GGUF.

    Args:
        folder: A Llama or Qwen2 with tied embeddings, in float16 or float32. Without a
            ``tokenizer.json`` the file has an invented vocabulary, for use with token ids only.
        path: The file to write.
        dtype: float32, float16, bfloat16, int8 or int4 (llama.cpp's Q8_0, Q4_0), of the matrices;
            vectors are float32.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = config["model_type"]
    writer = gguf.GGUFWriter(path, kind)
    writer.add_file_type(_FILES[dtype])  # OpenVINO asks for it
    _add_settings(writer, config)
    if (folder / "tokenizer.json").exists():
        _add_tokenizer(writer, folder, config)
    else:
        _add_invented_vocabulary(writer, config["vocab_size"])
    for name, weight in load_file(folder / "model.safetensors").items():
        values = weight.astype(np.float32)
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            values = _interleaved(values, config[heads])
        target = KINDS[dtype if values.ndim > 1 else "float32"]
        writer.add_tensor(_gguf_name(name), quantize(values, target), raw_dtype=target)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_settings(writer: Any, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _gguf_name(name: str) -> str:
    name, _, part = name.removeprefix("model.").rpartition(".")  # weight or bias
    if name.startswith("layers."):
        _, layer, name = name.split(".", 2)
        return f"blk.{layer}.{_NAMES[name]}.{part}"
    return {"embed_tokens": "token_embd", "norm": "output_norm"}[name] + f".{part}"


def _interleaved(weight: Weight, num_heads: int) -> Weight:
    """Reorder a query or key projection's rows: llama.cpp keeps rotated pairs side by side."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _add_tokenizer(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = {token_id: text for text, token_id in tokenizer["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    tokens |= special
    _add_vocabulary(
        writer,
        [tokens[i] for i in range(config["vocab_size"])],
        set(special),
        [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        (config["bos_token_id"], config["eos_token_id"]),
    )


def _add_invented_vocabulary(writer: Any, size: int) -> None:
    letters = [chr(code) for code in range(33, 127)]
    words = [*letters, letters[0] + letters[1], *(f"token{i}" for i in range(size))][:size]
    _add_vocabulary(writer, words, {size - 1}, [" ".join(letters[:2])], (size - 1, size - 1))


def _add_vocabulary(
    writer: Any, words: list[str], special: set[int], merges: list[str], ends: tuple[int, int]
) -> None:
    types = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types(
        [types.CONTROL if i in special else types.NORMAL for i in range(len(words))]
    )
    writer.add_token_merges(merges)
    writer.add_bos_token_id(ends[0])
    writer.add_eos_token_id(ends[1])
    writer.add_add_bos_token(False)
