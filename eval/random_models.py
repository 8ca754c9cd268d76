"""Random models: true-size networks of a named shape, for timing; what they say means nothing."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SHAPES = Path(__file__).parent / "shapes"
_BLOCK = 1 << 22  # values drawn; larger weights repeat them, which no multiplication notices
_STD = 0.02


def read_shape(name: str) -> dict[str, Any]:
    """Read a shape by its name in ``eval/shapes`` or by its file: ``{tokenizer, config}``.

    Raises:
        FileNotFoundError: names the shapes there are.
    """
    path = Path(name) if name.endswith(".json") else SHAPES / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(shape.stem for shape in SHAPES.glob("*.json")))
        raise FileNotFoundError(f"no shape {name!r}: take one of {known}, or a JSON file")
    shape: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return shape


def build_random_model(
    config: dict[str, Any], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> PreTrainedModel:
    """Build a stock model of a configuration with random weights, in seconds at any size.

    Weights are normal with standard deviation 0.02, norms 1 and biases 0, drawn once and repeated
    rather than drawn for every parameter: a pass costs what it costs with trained weights.
    """
    made = AutoConfig.for_model(**config)
    with _without_init(), device:
        model: Any = AutoModelForCausalLM.from_config(made, dtype=dtype)  # type: ignore[no-untyped-call]
    model.tie_weights()  # part of the initialization that was skipped
    generator = torch.Generator(device).manual_seed(seed)
    block = torch.randn(_BLOCK, generator=generator, device=device, dtype=torch.float32)
    block = (block * _STD).to(dtype)
    with torch.no_grad():
        for number, (name, weight) in enumerate(model.named_parameters()):
            if name.endswith("bias"):
                weight.zero_()
            elif weight.dim() == 1:
                weight.fill_(1.0)
            else:
                _fill(weight, block.roll(7919 * number))
    model.eval()
    built: PreTrainedModel = model
    return built


def _fill(weight: torch.Tensor, block: torch.Tensor) -> None:
    flat = weight.view(-1)
    whole = flat.numel() // _BLOCK * _BLOCK
    flat[:whole].view(-1, _BLOCK).copy_(block.expand(whole // _BLOCK, _BLOCK))
    flat[whole:].copy_(block[: flat.numel() - whole])


def _without_init() -> AbstractContextManager[Any]:
    """Skip the library's own initialization, minutes at 7B; older releases lack the switch."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        return nullcontext()
    skipping: AbstractContextManager[Any] = no_init_weights()
    return skipping
