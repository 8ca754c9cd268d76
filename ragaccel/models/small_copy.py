"""A small copy of a model: its class and layers over a few random weights, with short lengths.

What a model does past its sliding window, its chunks or the trained length of its rope shows within
some tens of tokens of such a copy, on a processor, in a fraction of a second.
"""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from ragaccel.models.architecture import read_max_positions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Ways = Sequence[Callable[[Any], None]]

SHORT = 8
_TRAINED = 16  # tokens of rope's original length, where it changes nothing by itself
_READABLE = 64  # tokens, where no request may outgrow that length
_POSITIONS = 128
_UNREACHED = 4096
_VOCAB = 211
_LAYERS = 4
_MOST_WEIGHTS = 60_000_000
# A number of the config is a length if its name says so. Counts of layers and of experts do not.
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
    "vocab_size_per_layer_input": _VOCAB,
    "hidden_size_per_layer_input": 32,
}
_FOLLOW_HIDDEN = ("embedding_size", "word_embed_proj_dim", "input_embedding_size")


# Two that each put torch's random state back would put back the other's.
_ONE_AT_A_TIME = Lock()


class NoCopyError(Exception):
    """No small copy can be made of a model; says why."""


def make_small_copy(model: Any, seed: int, *, windowed: bool = True, shortened: bool = True) -> Any:
    """Build a copy of a model's class with few layers, small sizes and short lengths.

    It has at least one layer of each kind, random weights large enough to tell tokens apart, and
    the model's attention implementation. The model, its config, torch's random state and its
    default type stay as they are.

    Args:
        model: whose class and config are taken; weights are not read.
        seed: of the weights.
        windowed: keep the sliding window that the config names.
        shortened: make lengths short; else so long that nothing reaches them.

    Raises:
        NoCopyError: the class cannot be built small on a processor.
    """
    problems = []
    first: list[Callable[[Any], None]] = [_shorten if shortened else _lengthen]
    if not windowed:
        first.append(drop_window)
    for ways in ((_take_layers, _narrow), (_narrow,), (_take_layers,)):
        made = _made(model, (*first, *ways), seed)
        if not isinstance(made, Exception):
            return made
        problems.append(made)
    raise NoCopyError(f"{type(problems[0]).__name__}: {problems[0]}") from problems[0]


def _made(model: Any, ways: Ways, seed: int) -> Any:
    """Build a copy made small in these ways; return the error if that does not go."""
    try:
        return _built(*_shrunken(model, ways), seed)
    except Exception as error:  # whatever a class raises for sizes that it was not made for
        return error


def drop_window(config: Any) -> None:
    """Let a config name no sliding window."""
    config = config.get_text_config(decoder=True)
    config.sliding_window = None
    kinds = getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = ["full_attention"] * len(kinds)


def lengths_of(config: Any) -> dict[str, int]:
    """Find the lengths in a config at which a model may change, by name.

    Those that no sequence reaches, because the model reads less, are left out.
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


def _ropes(config: Any) -> Iterator[dict[str, Any]]:
    found = vars(config).get("rope_parameters") or vars(config).get("rope_scaling") or {}
    if isinstance(found, dict):
        yield found
        yield from (part for part in found.values() if isinstance(part, dict))


def _shrunken(model: Any, ways: Ways) -> tuple[type[Any], Any]:
    """Return the class to build and its config, changed in these ways."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kind, config = type(base), deepcopy(base.config)
    attention = getattr(base.config.get_text_config(decoder=True), "_attn_implementation", None)
    text = config.get_text_config(decoder=True)
    if text is not config:  # the other parts, of pictures or sound, take no part in decoding
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
        if found is not None:
            kind, config = found, text
    for holder in (config, text):
        vars(holder).pop("quantization_config", None)
    if attention is not None:
        config._attn_implementation = attention
    for shrink in ways:
        shrink(text)
    text.vocab_size = min(text.vocab_size, _VOCAB)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, min(getattr(text, name), 2))
    return kind, config


def _shorten(config: Any) -> None:
    """Make short what the model may reach, and leave what it may not."""
    lengths = lengths_of(config)
    changes_by_length = read_max_positions(config) != _positions(config)
    for holder in (vars(config), *_ropes(config)):
        for name in [name for name in lengths if holder.get(name) == lengths[name]]:
            short = SHORT
            if name.startswith("original_max_position"):
                short = _READABLE if changes_by_length else _TRAINED
            holder[name] = min(holder[name], short)
        if "original_max_position_embeddings" in holder and changes_by_length:
            trained = holder["original_max_position_embeddings"]
            holder["original_max_position_embeddings"] = min(trained or _READABLE, _READABLE)
    if _positions(config) is not None:
        config.max_position_embeddings = min(_positions(config) or 0, _POSITIONS)


def _lengthen(config: Any) -> None:
    """Put all but the trained lengths of rope out of reach."""
    for name, value in lengths_of(config).items():
        if name in vars(config) and not name.startswith("original_max_position"):
            vars(config)[name] = max(value, _UNREACHED)
    if _positions(config) is not None:
        config.max_position_embeddings = min(_positions(config) or 0, _POSITIONS)


def _positions(config: Any) -> int | None:
    found = getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) else None


def _take_layers(config: Any) -> None:
    """Take the first few layers and the first of each further kind."""
    count = config.num_hidden_layers
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == count and not name.startswith("_")
    }
    single = vars(config).get("_heterogeneity_spec")  # what single layers have otherwise
    others = {} if single is None else single.per_layer_overrides
    kinds: dict[str, int] = {}
    for layer in range(count):
        kind = repr([*(value[layer] for value in lists.values()), others.get(layer)])
        kinds.setdefault(kind, layer)
    taken = sorted({*range(min(count, _LAYERS)), *kinds.values()})[: 2 * _LAYERS]
    for name, value in lists.items():
        setattr(config, name, type(value)(value[layer] for layer in taken))
    config.num_hidden_layers = len(taken)
    if others:
        kept = {new: others[old] for new, old in enumerate(taken) if old in others}
        config._heterogeneity_spec = replace(single, per_layer_overrides=kept)


def _narrow(config: Any) -> None:
    """Make sizes small; heads keep their width, to which tables of frequencies are cut."""
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    width = _head_dim(config) or config.hidden_size // heads
    few_keys = min(keys, 2)
    few = few_keys * min(max(1, heads // keys), 2)
    for name in _FOLLOW_HIDDEN:
        if hasattr(config, name):
            setattr(config, name, few * width)
    config.hidden_size = few * width
    config.num_attention_heads = few
    if getattr(config, "num_key_value_heads", None) is not None:
        config.num_key_value_heads = few_keys
    for name, most in _SIZES.items():
        value = vars(config).get(name)
        if isinstance(value, int):
            setattr(config, name, min(value, most))
        elif isinstance(value, (list, tuple)) and all(isinstance(each, int) for each in value):
            setattr(config, name, type(value)(min(each, most) for each in value))


def _head_dim(config: Any) -> int | None:
    try:
        found: int | None = getattr(config, "head_dim", None)
    except RuntimeError:  # some layers have another; this is what the rest have
        found = vars(config).get("head_dim")
    return found


def _built(kind: type[Any], config: Any, seed: int) -> Any:
    with torch.device("meta"):
        count = sum(weight.numel() for weight in kind(deepcopy(config)).parameters())
    if count > _MOST_WEIGHTS:
        raise NoCopyError(f"its smallest copy has {count:,} weights")
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch's own function seeds every GPU as well
        copy = kind(config)
    copy = copy.eval().float()
    _scale_up(copy, torch.Generator().manual_seed(seed))
    with torch.inference_mode():  # some sizes are found not to fit by a pass alone
        read = copy(input_ids=torch.tensor([[3, 4, 5]]), use_cache=True)
        copy(input_ids=torch.tensor([[6]]), past_key_values=read.past_key_values, use_cache=True)
    return copy


def _scale_up(model: Any, chance: torch.Generator) -> None:
    """Draw weights so large that what a token sees shows in its logits."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=chance, dtype=torch.float32)
            if weight.dim() < 2:
                weight.add_(0.1 * noise)
            else:
                is_table = any(part in name for part in _TABLES)
                weight.copy_(noise * (1.0 if is_table else 1.8 / weight.shape[-1] ** 0.5))


_TABLES: Sequence[str] = ("embed", "wte", "wpe", "embd")
