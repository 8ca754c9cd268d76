"""Load or build the model of a run, with real or random weights, its tokenizer and adapter."""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from eval.data import in_data
from ragaccel.models import (
    CONFIG_FILE,
    FOLDER,
    GRAPH_DTYPES,
    HuggingFaceModel,
    SpaceAdapter,
    Tokenizer,
    bundled_reader_path,
    load_model,
    round_to_int8,
)

SHAPES = Path(__file__).parent / "shapes"
_BLOCK = 1 << 22  # values drawn; repeating them does not change a pass's time
_STD = 0.02


def read_shape(name: str) -> dict[str, Any]:
    """Read a shape, ``{tokenizer, config}``, by its name in ``eval/shapes`` or its file."""
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

    Weights are normal with standard deviation 0.02, norms 1 and biases 0. One block of values is
    drawn and repeated in all parameters. A pass takes the same time as with trained weights.
    """
    made = AutoConfig.for_model(**config)
    with _without_init(), device:
        model: Any = AutoModelForCausalLM.from_config(made, dtype=dtype)  # type: ignore[no-untyped-call]
    model.tie_weights()  # initialization, skipped, would do it
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
    """Skip transformers' initialization, which takes minutes at 7B; older releases cannot."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        return nullcontext()
    skipping: AbstractContextManager[Any] = no_init_weights()
    return skipping


Side = Literal["both", "ours", "theirs"]
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
INT8 = "int8"
"""Weights of 8 bits, which compute in bfloat16: all decoders run the same packed layers."""
DTYPE_NAMES = (*DTYPES, INT8)


@dataclass(frozen=True, slots=True)
class Target:
    """One model for transformers' decoders and for ours, with the same weights.

    ``model`` is the unchanged transformers model; ``ours`` runs a weight-sharing copy if the model
    allows one. ``space`` is the attached SPACE adapter, or None.
    """

    model: PreTrainedModel
    ours: HuggingFaceModel
    tokenizer: Tokenizer
    is_random: bool
    space: SpaceAdapter | None = None


def chosen_target(options: Namespace, dtype: str | None, side: Side = "both") -> Target:
    """Load the target that the options name, in the given dtype; see :func:`load_target`."""
    return load_target(
        options.model,
        tokenizer=options.tokenizer,
        dtype=dtype,
        device=options.device,
        data=options.data,
        side=side,
    )


def load_target(
    name: str,
    *,
    tokenizer: str | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    data: Path | None = None,
    side: Side = "both",
) -> Target:
    """Load a target by name: ``reader``, a hub name, a folder, or ``random:SHAPE``.

    A random model uses the tokenizer that its shape names, from the data folder. ``dtype`` defaults
    to float32 on a CPU and bfloat16 elsewhere. With ``side`` "ours" or "theirs", only what our or
    transformers' decoders need is in memory.

    Raises:
        RuntimeError: ours would be measured on a GPU without CUDA graphs.
    """
    is_int8 = dtype == INT8
    if is_int8 and side == "theirs":
        raise ValueError("transformers alone has no weights of 8 bits: take another dtype")
    kind = torch.bfloat16 if is_int8 else DTYPES[dtype or default_dtype(device)]
    if name.startswith("random:"):
        shape = read_shape(name.removeprefix("random:"))
        words = load_tokenizer(tokenizer or shape["tokenizer"], data)  # first: it may be missing
        model = build_random_model(shape["config"], kind, torch.device(device))
        if is_int8:
            round_to_int8(model)
        # A stock architecture needs no self-check, which takes minutes at this size.
        return Target(model, _engine_model(model, side), words, True)
    where = bundled_reader_path() if name == "reader" else name
    if side == "theirs":
        loaded = AutoModelForCausalLM.from_pretrained(where, dtype=kind).to(device)
        words = (
            load_tokenizer(tokenizer, data)
            if tokenizer
            else Tokenizer(AutoTokenizer.from_pretrained(where))
        )
        return Target(loaded, _engine_model(loaded, side), words, False)
    # Not owned: transformers' decoders must run the stock model on its own weights.
    ours, words = load_model(
        where,
        dtype=INT8 if is_int8 else kind,
        device=device,
        owned=side == "ours" or is_int8,
    )
    if tokenizer is not None:
        words = load_tokenizer(tokenizer, data)
    return Target(ours.model, with_graphs(ours), words, False)


def _engine_model(model: PreTrainedModel, side: Side) -> HuggingFaceModel:
    ours = HuggingFaceModel(
        model, self_check=False, pack=False if side == "theirs" else None, owned=side == "ours"
    )
    return ours if side == "theirs" else with_graphs(ours)


def with_graphs(ours: HuggingFaceModel) -> HuggingFaceModel:
    """Return a model, whose passes are replayed as CUDA graphs if it is on a GPU.

    Figures of passes that are launched one by one would look like ours.

    Raises:
        RuntimeError: they are not; the message says why.
    """
    if ours.device.type == "cuda" and ours.dtype in GRAPH_DTYPES and ours.graphs_status != "on":
        raise RuntimeError(f"CUDA graphs are {ours.graphs_status}")
    return ours


def load_tokenizer(name: str, data: Path | None = None) -> Tokenizer:
    """Load ``reader``, a name in the data folder's ``tokenizers/``, a folder or a hub name."""
    if name == "reader":
        where: str | Path = bundled_reader_path()
    elif Path(name).is_dir() or "/" in name:
        where = name
    else:
        where = in_data(f"tokenizers/{name}", data)
    return Tokenizer(AutoTokenizer.from_pretrained(where))


def describe_target(options: Namespace) -> dict[str, Any]:
    """Return the model, tokenizer, dtype, device and threads of a run."""
    return {
        "model": shown_name(options.model),
        **({"tokenizer": shown_name(options.tokenizer)} if options.tokenizer else {}),
        "dtype": options.dtype or default_dtype(options.device),
        "device": options.device,
        "threads": torch.get_num_threads(),
    }


def shown_name(name: str) -> str:
    """Return a model's name for results; a path is cut to its last part."""
    kind, colon, where = name.rpartition(":")
    return f"{kind}{colon}{Path(where).name}" if Path(where).exists() else name


def default_dtype(device: str) -> str:
    return "float32" if device == "cpu" else "bfloat16"


def adapter_beside(target: Target) -> Path | None:
    """Return the path of the adapter in the model's own folder, or None if it has none."""
    where = getattr(target.model, "name_or_path", "")
    folder = Path(where) / FOLDER
    return folder if where and (folder / CONFIG_FILE).is_file() else None


def chosen_adapter(target: Target, named: Path | None) -> SpaceAdapter:
    """Load the adapter ``named``, or the one in the model's own folder."""
    folder = named or adapter_beside(target)
    if folder is None:
        raise ValueError(
            "this model's folder holds no SPACE adapter: name one with --adapter, or train one "
            "with `ragaccel train space`"
        )
    return SpaceAdapter.load(folder)


def with_adapter(target: Target, adapter: SpaceAdapter) -> Target:
    """Return a new target with the same weights and an attached adapter."""
    ours = HuggingFaceModel(target.model, self_check=False)
    ours.attach_space(adapter)
    return replace(target, ours=ours, space=adapter)


def masks_of(target: Target) -> range:
    """Return the ids of a target's mask tokens; empty without an attached adapter."""
    first = target.ours.vocab_size
    return range(first, first + target.ours.num_masks)


def useful_masks(target: Target) -> range:
    """Return the ids of the mask tokens that ``LLM`` would use: those that repay their rows."""
    return masks_of(target)[: target.space.num_useful if target.space is not None else 0]


def describe_adapter(adapter: SpaceAdapter) -> dict[str, Any]:
    """Return the size of an adapter and how it was trained."""
    return {
        "num_masks": adapter.num_masks,
        "num_useful": adapter.num_useful,
        "rank": adapter.rank,
        "parameters": _numbers(adapter),
        "training": adapter.training,
    }


def _numbers(adapter: SpaceAdapter) -> int:
    changes = sum(down.numel() + up.numel() for down, up in adapter.changes.values())
    return adapter.mask_embeddings.numel() + changes
