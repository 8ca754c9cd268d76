"""Small models: every decoder-only family of the installed transformers, random and tiny.

``configurations`` names what is tried of each family: without windows, with sliding ones, with a
``sliding_window`` that its code ignores, with every kind of rope it takes, with all lengths at
which it changes made short.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

VOCAB = 199
WINDOW = 28  # past what a check of a few tokens reads, far below what answers here reach
POSITIONS = 512
READABLE = 96  # tokens, where the frequencies change with the length: no answer goes past it
MOST_PARAMETERS = 20_000_000
FULL, SLIDING = "full_attention", "sliding_attention"
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "head_dim": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "qk_head_dim": 32,
    "embedding_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 96,
    "max_seq_len": POSITIONS,
    "rotary_dim": 8,
    "tie_word_embeddings": False,
}
# What the sizes above do not fit; None leaves a field as the family has it.
_FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"is_decoder": True},
    "bert-generation": {"is_decoder": True},
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "camembert": {"is_decoder": True},
    "cohere_compass_text": {
        "layer_types": [SLIDING, FULL],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in (SLIDING, FULL)
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2}},
    "cpmant": {"dim_head": 16, "dim_ff": 96, "prompt_types": 2, "prompt_length": 4},
    "ctrl": {"dff": 96},
    "data2vec-text": {"is_decoder": True},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "electra": {"is_decoder": True},
    "ernie": {"is_decoder": True},
    "falcon": {"head_dim": None, "num_kv_heads": 1},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": [96] * 4,
        "layer_types": [SLIDING, FULL] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "global_head_dim": 16,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB,
        "layer_types": [SLIDING, FULL],
        "sliding_window": WINDOW,
    },
    "gemma4_unified_text": {
        "global_head_dim": 16,
        "num_kv_shared_layers": 0,
        "layer_types": [SLIDING, FULL],
        "sliding_window": WINDOW,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 256},
    "lfm2_moe": {"layer_types": [FULL, FULL], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "megatron-bert": {"is_decoder": True},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "rembert": {"is_decoder": True, "input_embedding_size": 64, "output_embedding_size": 64},
    "roberta": {"is_decoder": True},
    "roberta-prelayernorm": {"is_decoder": True},
    "roc_bert": {"is_decoder": True, "shape_vocab_size": 199, "pronunciation_vocab_size": 199},
    "roformer": {"is_decoder": True},
    "trocr": {"decoder_ffn_dim": 96},
    "xglm": {"ffn_dim": 96},
    "xlm": {"is_encoder": False, "causal": True},
    "xlm-roberta": {"is_decoder": True},
    "xlm-roberta-xl": {"is_decoder": True},
    "xlnet": {"max_position_embeddings": None, "d_inner": 96, "d_head": 16},
    "xlstm": {"v_head_dim": None, "head_dim": None, "qk_head_dim": None, "num_heads": 4},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": None, "layer_types": None},
    "zaya": {"num_experts_per_tok": 1},
}
_ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0, "original_max_position_embeddings": READABLE},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {"factor": 4.0, "original_max_position_embeddings": READABLE},
}
EVERY_ROPE = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox", "gpt_oss", "olmo2")
# Lengths, besides windows, at which what a model computes changes.
_LENGTHS = {
    "attention_window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    "floor_scale": WINDOW,
    "index_topk": WINDOW,
    "index_block_size": 8,
    "keep_window_size": WINDOW,
    "local_attention": WINDOW,
    "log_scaling_n_floor": WINDOW,
    "rel_extent": WINDOW,
    "sliding_window_size": WINDOW,
    "window_size": WINDOW,
}
_OF_ONE_KIND = ("qwen4_exp_text",)  # hybrids that are not built with a layer of each kind
# Single faults that tables were made for, by what they are called.
SPECIAL: dict[tuple[str, str], dict[str, Any]] = {
    ("falcon", "alibi"): {"alibi": True},
    ("falcon", "new decoder"): {"new_decoder_architecture": True, "num_kv_heads": 2},
    ("llama4_text", "scaled queries"): {
        "layer_types": [FULL] * 2,
        "no_rope_layers": [1, 0],
        "attn_scale": 0.5,
        "floor_scale": WINDOW,
    },
    ("llama4_text", "no scaled queries"): {
        "layer_types": [FULL] * 2,
        "no_rope_layers": [1, 0],
        "attn_temperature_tuning": False,
    },
    ("gemma3n_text", "nothing shared"): {"num_kv_shared_layers": 0, "sliding_window": WINDOW},
    ("gemma4_text", "shared"): {
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, FULL] * 2,
    },
    ("gpt_neo", "few positions"): {"max_position_embeddings": 128},
    ("gpt2", "few positions"): {"n_positions": 80},
    ("ministral3", "scaled queries"): {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.3,
        }
    },
    ("gemma2", "softcaps"): {
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
        "sliding_window": WINDOW,
    },
    ("phi3", "partial rope"): {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        }
    },
}
EAGER = ("llama", "mistral", "gemma2", "qwen2", "gpt2", "gpt_neox", "cohere2", "phi3")


@dataclass(frozen=True)
class Configuration:
    """One row of the table: a family, what is changed of it, and which attention it runs with."""

    family: str
    variant: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    attention: str | None = None

    @property
    def name(self) -> str:
        """How it is called in the table."""
        return f"{self.family}, {self.variant}"


class NotBuildableError(Exception):
    """No small model of this family can be built here; says why."""


def families() -> list[str]:
    """Name every family that transformers maps to a causal language model."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def configurations(family: str) -> Iterator[Configuration]:
    """Name what is tried of a family; the plain configuration first, which is always there."""
    config = _base_or_none(family)
    kinds = set(getattr(config, "layer_types", None) or ())
    has_window = hasattr(config, "sliding_window")
    is_mixable = bool(kinds) and kinds <= {FULL, SLIDING}
    plain: dict[str, Any] = {"layer_types": [FULL] * _layers(config)} if is_mixable else {}
    if has_window and not is_mixable:
        plain["sliding_window"] = None if _builds(family, {"sliding_window": None}) else POSITIONS
    if kinds & {"linear_attention", "conv"} and family not in _OF_ONE_KIND:
        mixed = {"layer_types": [*config.layer_types[:1], *[FULL] * (_layers(config) - 1)]}
        plain |= mixed if _builds(family, mixed) else {}
    yield Configuration(family, "plain", plain)
    if config is None or config.is_encoder_decoder or hasattr(config, "text_config"):
        return
    all_full = {"layer_types": [FULL] * (_layers(config) if kinds else 0)}
    if kinds - {FULL, SLIDING} and _builds(family, all_full):
        yield Configuration(family, "all attention", all_full)
    if is_mixable:
        mixed = [SLIDING, FULL] * _layers(config)
        window = {"sliding_window": WINDOW, "use_sliding_window": True}
        yield Configuration(
            family, "mixed windows", {**window, "layer_types": mixed[: _layers(config)]}
        )
        yield Configuration(
            family, "all sliding", {**window, "layer_types": [SLIDING] * _layers(config)}
        )
    elif has_window and not kinds:
        yield Configuration(family, "sliding window", {"sliding_window": WINDOW})
    elif not kinds:
        yield Configuration(family, "leftover window", {"sliding_window": WINDOW})
    yield from _rope_configurations(family, config, plain)
    lengths = {name: length for name, length in _LENGTHS.items() if _is_length(config, name)}
    if lengths:
        yield Configuration(family, "short lengths", lengths)
    for (owner, variant), changes in SPECIAL.items():
        if owner == family:
            yield Configuration(family, variant, changes)
    if family in EAGER:
        window = {"sliding_window": WINDOW} if has_window else {}
        yield Configuration(family, "eager attention", window, "eager")


def build(configuration: Configuration, dtype: torch.dtype) -> Any:
    """Build the model with random weights that make it say something else at every token.

    Raises:
        NotBuildableError: says why it cannot be built, or not small.
    """
    try:
        config = small_config(configuration.family, configuration.changes)
        if config.is_encoder_decoder:
            raise NotBuildableError("an encoder-decoder, or the decoder of one")
        _refuse_large(config)
        if dtype == torch.float64:
            config._experts_implementation = "eager"  # the others multiply no float64
        torch.manual_seed(7)
        model: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation=configuration.attention
        )
    except NotBuildableError:
        raise
    except Exception as error:
        raise NotBuildableError(
            f"not built: {type(error).__name__}: {first_line(error)}"
        ) from error
    model = _with_wandering_weights(model.eval()).to(dtype)
    for holder in (model.config, model.generation_config):
        holder.eos_token_id = None
    model.generation_config.pad_token_id = 2
    return model


def small_config(family: str, changes: Mapping[str, Any] | None = None) -> Any:
    """Make the config of a family's small model; ``changes`` override its fields."""
    kind = CONFIG_MAPPING[family]
    known = kind()
    own = _FAMILIES.get(family, {})
    sizes = {name: value for name, value in {**_SIZES, **own}.items() if _takes(known, name, own)}
    if "kv_lora_rank" in sizes:  # latent attention has keys for every head
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    changed = changes or {}
    fields = {name: value for name, value in sizes.items() if value is not None}
    return kind(**{**fields, **changed})


def random_prompt(chance: random.Random, length: int) -> list[int]:
    """Draw random tokens in which spans come again, so that copying has something to find."""
    start = [chance.randrange(5, VOCAB) for _ in range(max(1, length // 2))]
    tokens = list(start)
    while len(tokens) < length:
        at = chance.randrange(len(start))
        tokens += start[at : at + chance.randrange(1, 12)]
    return tokens[:length]


def mutated(tokens: Sequence[int], chance: random.Random, rate: float = 0.12) -> list[int]:
    """Drop, insert and exchange some tokens, so that guesses hold for a while and then do not."""
    found: list[int] = []
    for token in tokens:
        drawn = chance.random()
        if drawn < rate / 3:
            continue
        if drawn < rate:
            found.append(chance.randrange(VOCAB))
        if not rate / 3 <= drawn < 2 * rate / 3:
            found.append(token)
    return found


def first_line(error: Exception) -> str:
    """What an error says, on one line of the table."""
    lines = str(error).strip().split("\n")
    return " ".join(" ".join(lines[:2]).split())[:500]


def _base_or_none(family: str, changes: Mapping[str, Any] | None = None) -> Any:
    try:
        return small_config(family, changes)
    except Exception:  # told of when it is built
        return None


def _builds(family: str, changes: Mapping[str, Any]) -> bool:
    return _base_or_none(family, changes) is not None


def _takes(known: Any, name: str, own: Mapping[str, Any]) -> bool:
    try:
        return name in own or hasattr(known, name)
    except Exception:  # some fields differ by layer and are not to be asked for
        return False


def _layers(config: Any) -> int:
    return len(config.layer_types)


def _is_length(config: Any, name: str) -> bool:
    return isinstance(getattr(config, name, None), int)


def _rope_configurations(
    family: str, config: Any, plain: Mapping[str, Any]
) -> Iterator[Configuration]:
    rope = getattr(config, "rope_parameters", None)
    if (
        not rope or "rope_theta" not in rope or not hasattr(config, "hidden_size")
    ):  # none, or one for every kind of layer
        return
    names = list(_ROPES)
    chosen = names if family in EVERY_ROPE else [names[sum(map(ord, family)) % len(names)]]
    chosen = ["longrope"] if family.startswith("phi3") else chosen  # takes no other
    for name in chosen:
        fields = {**rope, **_ROPES[name], "rope_type": name}
        dims = int(_rotary_dim(config) * rope.get("partial_rotary_factor", 1.0)) // 2
        if name == "longrope":
            fields.update(short_factor=[1.0] * dims, long_factor=[2.0] * dims)
        changes: dict[str, Any] = {**plain, "rope_parameters": fields}
        if hasattr(config, "original_max_position_embeddings"):
            changes["original_max_position_embeddings"] = fields.get(
                "original_max_position_embeddings", POSITIONS
            )
        yield Configuration(family, f"rope {name}", changes)


def _rotary_dim(config: Any) -> int:
    found = getattr(config, "qk_rope_head_dim", None) or getattr(config, "head_dim", None)
    return int(found or config.hidden_size // config.num_attention_heads)


def _refuse_large(config: Any) -> None:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    count = sum(weight.numel() for weight in model.parameters())
    if count > MOST_PARAMETERS:
        text = getattr(config, "text_config", None)
        own = getattr(text, "model_type", "")
        where = f"; its text model is tried as {own}" if own in families() else ""
        raise NotBuildableError(f"has parts that are not text{where}")


def _with_wandering_weights(model: Any) -> Any:
    """Scale random weights up, so that greedy answers depend on all that was read."""
    chance = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=chance, dtype=torch.float32)
            if weight.dim() < 2:
                weight.add_(0.1 * noise.to(weight.dtype))
                continue
            is_table = any(part in name for part in ("embed", "wte", "wpe", "embd"))
            scale = 1.0 if is_table else 1.8 / weight.shape[-1] ** 0.5
            weight.copy_((scale * noise).to(weight.dtype))
        head = model.get_output_embeddings()
        given = model.get_input_embeddings()
        if head is not None and given is not None and head.weight is given.weight:
            # What a token is told by must not make it its own likeliest successor.
            head.weight = torch.nn.Parameter(given.weight.roll(1, 0).clone())
    return model


def class_of(family: str) -> str:
    """Name the class that transformers maps a family to."""
    config = CONFIG_MAPPING[family]
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(config, None)
    return "" if found is None else str(getattr(found, "__name__", found))
