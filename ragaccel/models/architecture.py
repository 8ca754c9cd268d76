"""Architecture: what a model's configuration says about how it must be decoded, or refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from ragaccel.errors import ModelRefusedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FULL, _SLIDING = "full_attention", "sliding_attention"
_INT8 = (
    "{name} is quantized with LLM.int8, whose outlier columns depend on the other rows of a pass: "
    "load it in 4 bits, or without quantization"
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a model attends and how far it reads.

    ``window`` is the sliding window of its sliding layers, in positions; ``is_mixed`` tells that
    it has sliding and full layers, which are given a mask each; ``skips_plain_masks`` that its
    attention is causal without a mask. ``windows`` has the window of each layer, ``None`` for
    full ones; ``exchanges_attention`` tells that its attention may be exchanged for ours.
    """

    max_positions: int | None
    window: int | None
    is_mixed: bool
    skips_plain_masks: bool
    windows: tuple[int | None, ...]
    exchanges_attention: bool

    @property
    def num_layers(self) -> int:
        """How many layers the model has."""
        return len(self.windows)

    def without_window(self) -> Architecture:
        """Return the same with full attention in every layer."""
        return replace(self, window=None, windows=(None,) * len(self.windows))


def read_architecture(model: PreTrainedModel) -> Architecture:
    """Read what decoding needs from a model.

    Raises:
        ModelRefusedError: for models that cannot be verified in blocks or rolled back.
    """
    model = cast("Any", model)
    name = type(model).__name__
    _refuse_by_class(model, name)
    if getattr(model, "is_loaded_in_8bit", False):
        raise ModelRefusedError(_INT8.format(name=name))
    refuse_by_config(model.config, {}, name)
    config: Any = model.config.get_text_config(decoder=True)
    attention = getattr(config, "_attn_implementation", None) or "eager"
    _refuse_by_attention(attention, name)
    layer_types = _layer_types(config, name)
    kinds = set(layer_types)
    window = getattr(config, "sliding_window", None) if _SLIDING in kinds else None
    if _SLIDING in kinds and not window:
        raise ModelRefusedError(f"{name} has sliding layers but its config names no window")
    softcaps = getattr(config, "attn_logit_softcapping", None) is not None  # beyond SDPA
    return Architecture(
        max_positions=read_max_positions(config),
        window=window,
        is_mixed=len(kinds) > 1,
        skips_plain_masks=attention == "sdpa",
        windows=tuple(window if kind == _SLIDING else None for kind in layer_types),
        exchanges_attention=attention == "sdpa" or softcaps,
    )


def refuse_by_config(config: Any, model_kwargs: Mapping[str, Any], name: str = "") -> None:
    """Refuse what the configuration alone rules out, before any weights are loaded.

    Raises:
        ModelRefusedError: naming the cause.
    """
    name = name or f"a {config.model_type} model"
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefusedError(f"{name} is an encoder-decoder: only causal models are decoded")
    text_config = config.get_text_config(decoder=True)
    if getattr(text_config, "alibi", False):
        raise ModelRefusedError(
            f"{name} tells places by alibi, whose biases it counts in its cache and not by "
            "position_ids: a tree of guesses cannot be placed in it"
        )
    if not getattr(text_config, "is_causal", True):
        raise ModelRefusedError(f"{name} attends to what follows: only causal models are decoded")
    _layer_types(text_config, name)
    for quantization in (
        getattr(config, "quantization_config", None),
        model_kwargs.get("quantization_config"),
        model_kwargs,
    ):
        as_dict = quantization if isinstance(quantization, Mapping) else _fields(quantization)
        if as_dict.get("load_in_8bit") or as_dict.get("_load_in_8bit"):
            raise ModelRefusedError(_INT8.format(name=name))


def quantization_of(model: Any) -> str:
    """Name how transformers quantized a model's weights; empty if it did not."""
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


def _refuse_by_class(model: Any, name: str) -> None:
    if getattr(model, "_is_stateful", False) and not _attends_only(model.config):
        raise ModelRefusedError(
            f"{name} is recurrent: its state cannot be rolled back to an accepted token"
        )
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise ModelRefusedError(
            f"{name} has no language model head: load it with AutoModelForCausalLM"
        )
    if any(weight.is_inference() for weight in model.parameters()):
        raise ModelRefusedError(
            f"{name} was made under torch.inference_mode(), where torch does not count what is "
            "written to its weights: load it outside of that"
        )
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise ModelRefusedError(
            f"{name} is split over processes (tensor parallel), where every process would have to "
            "draft alike: load it with device_map='auto', or use vLLM"
        )
    # An adapter (PEFT) hands its keywords on to the model it wraps.
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    parameters = inspect.signature(inner.forward).parameters
    missing = [
        needed
        for needed in ("position_ids", "past_key_values", "attention_mask")
        if needed not in parameters
    ]
    if missing:
        raise ModelRefusedError(
            f"{name} takes no {', '.join(missing)}: a tree of guesses cannot be placed in it"
        )


def _attends_only(config: Any) -> bool:
    """Whether a config of hybrids names layers of attention and no others."""
    kinds = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    return bool(kinds) and kinds <= {_FULL, _SLIDING}


def _refuse_by_attention(attention: str, name: str) -> None:
    kernel = attention.split("|")[-1]
    if "flash" in kernel or "flex" in kernel or kernel.startswith("paged"):
        raise ModelRefusedError(
            f"{name} uses {attention}, which takes no tree masks: "
            "load it with attn_implementation='sdpa' or 'eager'"
        )


def _layer_types(config: Any, name: str) -> list[str]:
    modes = getattr(config, "kv_sharing_modes", None) or ()  # of each layer, None for those alone
    if getattr(config, "num_kv_shared_layers", 0) or any(mode is not None for mode in modes):
        raise ModelRefusedError(f"{name} shares keys and values between layers: not supported")
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        if getattr(config, "attention_chunk_size", None):
            kinds = ["chunked_attention"]
        else:
            kinds = [_SLIDING if getattr(config, "sliding_window", None) else _FULL]
        kinds = kinds * config.num_hidden_layers
    others = sorted(set(kinds) - {_FULL, _SLIDING})
    if others:
        raise ModelRefusedError(
            f"{name} has {', '.join(others)} layers: only full and sliding attention can be "
            "rolled back to an accepted token"
        )
    return list(kinds)


def read_max_positions(config: Any) -> int | None:
    """Return the longest sequence whose tokens all see the same rotary frequencies.

    With dynamic and long scaling the frequencies change once a sequence outgrows the trained
    length, so that what a row computes depends on the longest row of its pass.
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    for rope in _rope_parameters(config):
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


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [found, *(part for part in found.values() if isinstance(part, dict))]
