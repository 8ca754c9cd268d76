"""Supported architectures: how a model attends, why one is refused, and small copies of models.

In a small copy the sliding window, chunks and the trained length of rope begin after a few tokens,
so that a check on a CPU takes a fraction of a second.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from ragaccel.engine.target import TargetModel
from ragaccel.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    Shrinkers = Sequence[Callable[[Any], None]]


_FULL, _SLIDING = "full_attention", "sliding_attention"
_INT8 = (
    "{name} is quantized with LLM.int8, whose outlier columns depend on the other rows of a pass: "
    "load it in 4 bits, or without quantization"
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a model attends, and the longest sequence that it reads.

    Attributes:
        max_positions: the longest sequence, in tokens; None for no limit.
        window: the sliding window of its sliding layers, in positions; None without such layers.
        has_mixed_layers: the model has sliding and full layers, with one mask for each kind.
        omits_causal_masks: the model's attention is causal if it gets no mask.
        windows: the window of each layer, None for full attention.
        has_replaceable_attention: ragaccel's attention may replace the model's.
    """

    max_positions: int | None
    window: int | None
    has_mixed_layers: bool
    omits_causal_masks: bool
    windows: tuple[int | None, ...]
    has_replaceable_attention: bool

    @property
    def num_layers(self) -> int:
        """How many layers the model has."""
        return len(self.windows)

    def without_window(self) -> Architecture:
        """Return a copy with full attention in every layer."""
        return replace(self, window=None, windows=(None,) * len(self.windows))


class HuggingFaceTarget(TargetModel, Protocol):
    """Protocol of a transformers target model, for the self-check and for static passes."""

    model: Any
    architecture: Architecture

    @property
    def uses_own_attention(self) -> bool:
        """Whether the model runs with ragaccel's attention instead of its own."""
        ...


def read_architecture(model: PreTrainedModel) -> Architecture:
    """Read from a model's config and modules how it attends.

    Raises:
        UnsupportedModelError: the model cannot verify several tokens in a pass, or cannot drop
            rejected ones.
    """
    model = cast("Any", model)
    name = type(model).__name__
    _refuse_by_class(model, name)
    if getattr(model, "is_loaded_in_8bit", False):
        raise UnsupportedModelError(_INT8.format(name=name))
    refuse_by_config(model.config, {}, name)
    config: Any = model.config.get_text_config(decoder=True)
    attention = getattr(config, "_attn_implementation", None) or "eager"
    _refuse_by_attention(attention, name)
    layer_types = _layer_types(config, name)
    kinds = set(layer_types)
    window = getattr(config, "sliding_window", None) if _SLIDING in kinds else None
    if _SLIDING in kinds and not window:
        raise UnsupportedModelError(f"{name} has sliding layers but its config names no window")
    softcaps = getattr(config, "attn_logit_softcapping", None) is not None  # not in SDPA
    return Architecture(
        max_positions=read_max_positions(config),
        window=window,
        has_mixed_layers=len(kinds) > 1,
        omits_causal_masks=attention == "sdpa",
        windows=tuple(window if kind == _SLIDING else None for kind in layer_types),
        has_replaceable_attention=attention == "sdpa" or softcaps,
    )


def refuse_by_config(config: Any, model_kwargs: Mapping[str, Any], name: str = "") -> None:
    """Refuse a model that its config rules out, before any weights are loaded.

    Raises:
        UnsupportedModelError: the model is not supported; the message names the cause.
    """
    name = name or f"a {config.model_type} model"
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder: only causal models are supported"
        )
    text_config = config.get_text_config(decoder=True)
    if getattr(text_config, "alibi", False):
        raise UnsupportedModelError(
            f"{name} encodes positions by ALiBi, which ignores position_ids: it cannot verify a "
            "tree of draft tokens"
        )
    if not getattr(text_config, "is_causal", True):
        raise UnsupportedModelError(
            f"{name} attends to later tokens: only causal models are supported"
        )
    _layer_types(text_config, name)
    for quantization in (
        getattr(config, "quantization_config", None),
        model_kwargs.get("quantization_config"),
        model_kwargs,
    ):
        as_dict = quantization if isinstance(quantization, Mapping) else _fields(quantization)
        if as_dict.get("load_in_8bit") or as_dict.get("_load_in_8bit"):
            raise UnsupportedModelError(_INT8.format(name=name))


def describe_quantization(model: Any) -> str:
    """Return the quantization method of a model's weights; empty without quantization."""
    method = getattr(model, "quantization_method", None)
    if method is None:
        return ""
    config = getattr(model.config, "quantization_config", None)
    kind = getattr(config, "quant_type", None)  # of torchao
    return (
        f"{getattr(method, 'value', method)} {'' if kind is None else type(kind).__name__}".strip()
    )


def _fields(quantization: Any) -> dict[str, Any]:
    return dict(vars(quantization)) if hasattr(quantization, "__dict__") else {}


def refuse_recurrent(model: Any, config: Any, name: str) -> None:
    """Refuse a recurrent model or class of models.

    Raises:
        UnsupportedModelError: the model has a state that is not keys and values by position.
    """
    if getattr(model, "_is_stateful", False) and not _has_attention_layers_only(config):
        raise UnsupportedModelError(
            f"{name} is recurrent: its state cannot be rolled back to an accepted token"
        )


def _refuse_by_class(model: Any, name: str) -> None:
    refuse_recurrent(model, model.config, name)
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{name} has no language model head: load it with AutoModelForCausalLM"
        )
    if any(weight.is_inference() for weight in model.parameters()):
        raise UnsupportedModelError(
            f"{name} was made under torch.inference_mode(), where torch does not count writes to "
            "weights: load it outside of inference mode"
        )
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise UnsupportedModelError(
            f"{name} is split over processes (tensor parallel), which is not supported: load it "
            "with device_map='auto', or use vLLM"
        )
    parameters = inspect.signature(_inner(model).forward).parameters
    missing = [
        needed
        for needed in ("position_ids", cache_keyword(model), "attention_mask")
        if needed not in parameters
    ]
    if missing:
        raise UnsupportedModelError(
            f"{name} does not take {', '.join(missing)}: it cannot verify a tree of draft tokens"
        )


def cache_keyword(model: Any) -> str:
    """Return the keyword of a model's passes for their cache, which transformers 5.24 renamed."""
    own = _inner(model)
    passes = [own.forward, *(getattr(kind, "forward", None) for kind in type(own).__mro__)]
    for one in filter(callable, passes):  # a wrapper may pass keywords on
        names = inspect.signature(one).parameters
        if found := [name for name in ("past_key_values", "cache") if name in names]:
            return found[0]
    return "cache"


def cache_of(output: Any) -> Any:
    """Return the cache that a model's pass returned, by the name that is not deprecated."""
    found = getattr(output, "cache", None)
    return output.past_key_values if found is None else found


def _inner(model: Any) -> Any:
    """Return the model that a PEFT adapter wraps, to which it passes its keywords on."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _has_attention_layers_only(config: Any) -> bool:
    """Return whether a hybrid model's config names attention layers only."""
    kinds = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    return bool(kinds) and kinds <= {_FULL, _SLIDING}


def _refuse_by_attention(attention: str, name: str) -> None:
    kernel = attention.split("|")[-1]
    if "flash" in kernel or "flex" in kernel or kernel.startswith("paged"):
        raise UnsupportedModelError(
            f"{name} uses {attention}, which takes no tree masks: "
            "load it with attn_implementation='sdpa' or 'eager'"
        )


def _layer_types(config: Any, name: str) -> list[str]:
    modes = getattr(config, "kv_sharing_modes", None) or ()  # one per layer
    shares = any(mode not in (None, "store") for mode in modes)  # some may store for no other
    if getattr(config, "num_kv_shared_layers", 0) or shares:
        raise UnsupportedModelError(f"{name} shares keys and values between layers: not supported")
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        if getattr(config, "attention_chunk_size", None):
            kinds = ["chunked_attention"]
        else:
            kinds = [_SLIDING if getattr(config, "sliding_window", None) else _FULL]
        kinds = kinds * config.num_hidden_layers
    others = sorted(set(kinds) - {_FULL, _SLIDING})
    if others:
        raise UnsupportedModelError(
            f"{name} has {', '.join(others)} layers: only full and sliding attention can be "
            "rolled back to an accepted token"
        )
    return list(kinds)


def read_max_positions(config: Any) -> int | None:
    """Return the longest sequence whose tokens all have the same rotary frequencies.

    With dynamic and long scaling the frequencies change once a sequence exceeds the trained
    length, so that a row's result depends on the longest row of its pass.
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    for rope in _ropes(config):
        kind = rope.get("rope_type", rope.get("type"))
        if kind == "dynamic":
            trained = rope.get("original_max_position_embeddings") or limit
        elif kind == "longrope":
            trained = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", limit
            )
        else:
            continue
        limit = trained if limit is None or trained is None else min(limit, trained)
    return limit


def rope_kinds(config: Any) -> set[str]:
    """Return the kinds of rope scaling that a config names; without scaling "default" or none."""
    kinds = (rope.get("rope_type", rope.get("type")) for rope in _ropes(config))
    return {kind for kind in kinds if kind is not None}


def _ropes(config: Any) -> list[dict[str, Any]]:
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [found, *(part for part in found.values() if isinstance(part, dict))]


SHORT_LENGTH = 8
_TRAINED_LENGTH = 16  # rope's trained length if frequencies stay the same past it
_READABLE_LENGTH = 64  # rope's trained length if requests may not exceed it
_MAX_POSITIONS = 128
_UNREACHABLE = 4096
_VOCAB_SIZE = 211
_NUM_LAYERS = 4
_MAX_WEIGHTS = 60_000_000
# Names of config fields that are lengths, and words that exclude a name.
_LENGTH = re.compile(
    r"window|chunk_(size|length)|floor|original_max_position|local_attention|index_topk"
    r"|index_block_size|index_local|rel_extent|block_size|mem_len|max_distance|context_length"
)
_NO_LENGTH = re.compile(r"layer|pattern|vocab|group|dim|head|scaling")
_SIZES = {
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "intermediate_size_mlp": 64,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "dense_intermediate_size": 64,
    "expert_ffn_hidden_size": 32,
    "ffn_dim": 64,
    "ffn_hidden_size": 64,
    "decoder_ffn_dim": 64,
    "dff": 64,
    "dim_ff": 64,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size_per_layer_input": _VOCAB_SIZE,
    "hidden_size_per_layer_input": 32,
}
_EQUAL_TO_HIDDEN_SIZE = ("embedding_size", "word_embed_proj_dim", "input_embedding_size")


# Two threads that restore torch's random state would overwrite each other's.
_RANDOM_STATE_LOCK = Lock()


class NoCopyError(Exception):
    """Raised if no small copy of a model can be made; the message says why."""


def make_small_copy(model: Any, seed: int, *, windowed: bool = True, shortened: bool = True) -> Any:
    """Build a model of the same class with few layers, small sizes and short lengths.

    It has at least one layer of each kind, random weights large enough to distinguish tokens, and
    the model's attention implementation. The model, its config, torch's random state and its
    default dtype stay unchanged.

    Args:
        model: the model whose class and config are used; its weights are not read.
        seed: seed of the random weights.
        windowed: keep the sliding window of the config.
        shortened: shorten lengths; else make them too long to matter.

    Raises:
        NoCopyError: the class cannot be built small on a CPU.
    """
    problems = []
    first: list[Callable[[Any], None]] = [_shorten if shortened else _lengthen]
    if not windowed:
        first.append(remove_window)
    for shrinkers in ((_take_layers, _shrink_sizes), (_shrink_sizes,), (_take_layers,)):
        made = _try_build(model, (*first, *shrinkers), seed)
        if not isinstance(made, Exception):
            return made
        problems.append(made)
    raise NoCopyError(f"{type(problems[0]).__name__}: {problems[0]}") from problems[0]


def _try_build(model: Any, shrinkers: Shrinkers, seed: int) -> Any:
    """Return a copy built with these changes of its config, or the error if that fails."""
    try:
        return _build(*_shrink_config(model, shrinkers), seed)
    except Exception as error:  # classes raise anything for unexpected sizes
        return error


def remove_window(config: Any) -> None:
    """Remove the sliding window from a config, in place."""
    config = config.get_text_config(decoder=True)
    config.sliding_window = None
    kinds = getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = ["full_attention"] * len(kinds)


def find_lengths(config: Any) -> dict[str, int]:
    """Return the lengths in a config at which a model may change, by name.

    Lengths beyond the longest sequence that the model reads are left out.
    """
    config = config.get_text_config(decoder=True)
    limit = read_max_positions(config)
    return {
        name: value
        for holder in (vars(config), *_ropes(config))
        for name, value in holder.items()
        if _is_length(name, value) and (limit is None or value < limit)
    }


def _is_length(name: str, value: Any) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return is_number and bool(_LENGTH.search(name)) and not _NO_LENGTH.search(name)


def _shrink_config(model: Any, shrinkers: Shrinkers) -> tuple[type[Any], Any]:
    """Return the class to build and a copy of its config with these changes."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kind, config = type(base), deepcopy(base.config)
    attention = getattr(base.config.get_text_config(decoder=True), "_attn_implementation", None)
    text = config.get_text_config(decoder=True)
    if text is not config:  # decoding does not use the parts for images or sound
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
        if found is not None:
            kind, config = found, text
    for holder in (config, text):
        vars(holder).pop("quantization_config", None)
    if attention is not None:
        config._attn_implementation = attention
    for shrink in shrinkers:
        shrink(text)
    text.vocab_size = min(text.vocab_size, _VOCAB_SIZE)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, min(getattr(text, name), 2))
    return kind, config


def _shorten(config: Any) -> None:
    """Shorten the lengths that a sequence can reach, in place."""
    lengths = find_lengths(config)
    changes_by_length = read_max_positions(config) != _positions(config)
    for holder in (vars(config), *_ropes(config)):
        for name in [name for name in lengths if holder.get(name) == lengths[name]]:
            short = SHORT_LENGTH
            if name.startswith("original_max_position"):
                short = _READABLE_LENGTH if changes_by_length else _TRAINED_LENGTH
            holder[name] = min(holder[name], short)
        if "original_max_position_embeddings" in holder and changes_by_length:
            trained = holder["original_max_position_embeddings"]
            holder["original_max_position_embeddings"] = min(
                trained or _READABLE_LENGTH, _READABLE_LENGTH
            )
    if _positions(config) is not None:
        config.max_position_embeddings = min(_positions(config) or 0, _MAX_POSITIONS)


def _lengthen(config: Any) -> None:
    """Make all lengths but rope's trained ones too long to reach, in place."""
    for name, value in find_lengths(config).items():
        if name in vars(config) and not name.startswith("original_max_position"):
            vars(config)[name] = max(value, _UNREACHABLE)
    if _positions(config) is not None:
        config.max_position_embeddings = min(_positions(config) or 0, _MAX_POSITIONS)


def _positions(config: Any) -> int | None:
    found = getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) else None


def _take_layers(config: Any) -> None:
    """Keep the first few layers and the first layer of each further kind, in place."""
    count = config.num_hidden_layers
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == count and not name.startswith("_")
    }
    single = vars(config).get("_heterogeneity_spec")  # overrides of single layers
    others = {} if single is None else single.per_layer_overrides
    kinds: dict[str, int] = {}
    for layer in range(count):
        kind = repr([*(value[layer] for value in lists.values()), others.get(layer)])
        kinds.setdefault(kind, layer)
    taken = sorted({*range(min(count, _NUM_LAYERS)), *kinds.values()})[: 2 * _NUM_LAYERS]
    for name, value in lists.items():
        setattr(config, name, type(value)(value[layer] for layer in taken))
    config.num_hidden_layers = len(taken)
    if others:
        kept = {new: others[old] for new, old in enumerate(taken) if old in others}
        config._heterogeneity_spec = replace(single, per_layer_overrides=kept)


def _shrink_sizes(config: Any) -> None:
    """Shrink sizes in place; heads keep their width, which tables of frequencies depend on."""
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    width = _head_dim(config) or config.hidden_size // heads
    num_key_heads = min(keys, 2)
    num_heads = num_key_heads * min(max(1, heads // keys), 2)
    for name in _EQUAL_TO_HIDDEN_SIZE:
        if hasattr(config, name):
            setattr(config, name, num_heads * width)
    config.hidden_size = num_heads * width
    config.num_attention_heads = num_heads
    if getattr(config, "num_key_value_heads", None) is not None:
        config.num_key_value_heads = num_key_heads
    for name, maximum in _SIZES.items():
        value = vars(config).get(name)
        if isinstance(value, int):
            setattr(config, name, min(value, maximum))
        elif isinstance(value, (list, tuple)) and all(isinstance(each, int) for each in value):
            setattr(config, name, type(value)(min(each, maximum) for each in value))


def _head_dim(config: Any) -> int | None:
    try:
        found: int | None = getattr(config, "head_dim", None)
    except RuntimeError:  # layers differ: use the default of the config
        found = vars(config).get("head_dim")
    return found


def _build(kind: type[Any], config: Any, seed: int) -> Any:
    with torch.device("meta"):
        count = sum(weight.numel() for weight in kind(deepcopy(config)).parameters())
    if count > _MAX_WEIGHTS:
        raise NoCopyError(f"its smallest copy has {count:,} weights, more than {_MAX_WEIGHTS:,}")
    with _RANDOM_STATE_LOCK, torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds every GPU as well
        copy = kind(config)
    copy = copy.eval().float()
    _scale_up(copy, torch.Generator().manual_seed(seed))
    with torch.inference_mode():  # some wrong sizes show only in a pass
        read = copy(input_ids=torch.tensor([[3, 4, 5]]), use_cache=True)
        kept = {cache_keyword(copy): cache_of(read)}
        copy(input_ids=torch.tensor([[6]]), **kept, use_cache=True)
    return copy


def _scale_up(model: Any, generator: torch.Generator) -> None:
    """Draw weights large enough that every attended token changes the logits."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            if weight.dim() < 2:
                weight.add_(0.1 * noise)
            else:
                is_table = any(part in name for part in _TABLES)
                weight.copy_(noise * (1.0 if is_table else 1.8 / weight.shape[-1] ** 0.5))


_TABLES: Sequence[str] = ("embed", "wte", "wpe", "embd")
