"""The model that a run times, real or of random weights, with its tokenizer and adapter."""

from __future__ import annotations

import argparse
import json
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
    HuggingFaceModel,
    SpaceAdapter,
    Tokenizer,
    bundled_reader_path,
    load_model,
)

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


Side = Literal["both", "ours", "theirs"]
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Target:
    """A model as transformers has it and as our engine sees it: the same weights.

    ``model`` is transformers' own, untouched; ``ours`` runs a weight-sharing copy, if there can be
    one. ``space`` is its attached adapter, if any.
    """

    model: PreTrainedModel
    ours: HuggingFaceModel
    tokenizer: Tokenizer
    is_random: bool
    space: SpaceAdapter | None = None


def add_target_options(parser: argparse.ArgumentParser, model: str = "reader") -> None:
    """Add the options that say which model is run, with which tokenizer, and on what."""
    add = parser.add_argument
    add("--model", default=model, help="reader, a hub name, a folder, or random:SHAPE")
    add("--tokenizer", help="reader, a name in the data folder, a folder, or a hub name")
    add("--data", type=Path, help="data folder; also the variable RAGACCEL_DATA")
    add("--threads", type=int, help="processor threads (default: torch's)")
    add("--device", default="cpu", help="cpu, cuda or cuda:N")


def add_dtype_option(parser: argparse.ArgumentParser) -> None:
    """Add the option for a run in a single type of numbers."""
    help_text = "default: float32 on a CPU, bfloat16 on a GPU"
    parser.add_argument("--dtype", choices=DTYPES, help=help_text)


def chosen_target(options: argparse.Namespace, dtype: str | None, side: Side = "both") -> Target:
    """Load the target that the options name, in one type of numbers."""
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
    """Load ``reader``, a hub name, a folder, or ``random:SHAPE``.

    A random model takes the tokenizer its shape names from the data folder. ``dtype`` defaults to
    float32 on a CPU and bfloat16 elsewhere. ``side`` tells who is going to decode: with "ours" or
    "theirs" alone no more lies in memory than a program with that decoder needs.
    """
    kind = DTYPES[dtype or default_dtype(device)]
    if name.startswith("random:"):
        shape = read_shape(name.removeprefix("random:"))
        model = build_random_model(shape["config"], kind, torch.device(device))
        words = load_tokenizer(tokenizer or shape["tokenizer"], data)
        # A stock architecture needs no check against itself, and at this size it costs minutes.
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
    # Not owned, so that transformers' decoders run the stock model over its own weights.
    ours, words = load_model(where, dtype=kind, device=device, owned=side == "ours")
    if tokenizer is not None:
        words = load_tokenizer(tokenizer, data)
    return Target(ours.model, ours, words, False)


def _engine_model(model: PreTrainedModel, side: Side) -> HuggingFaceModel:
    return HuggingFaceModel(
        model, self_check=False, pack=False if side == "theirs" else None, owned=side == "ours"
    )


def load_tokenizer(name: str, data: Path | None = None) -> Tokenizer:
    """Load ``reader``, a name in ``tokenizers/`` of the data folder, a folder, or a hub name.

    Raises:
        MissingDataError: a name of the data folder when there is none.
    """
    if name == "reader":
        where: str | Path = bundled_reader_path()
    elif Path(name).is_dir() or "/" in name:
        where = name
    else:
        where = in_data(f"tokenizers/{name}", data)
    return Tokenizer(AutoTokenizer.from_pretrained(where))


def describe_target(options: argparse.Namespace) -> dict[str, Any]:
    """Return the model, tokenizer, dtype, device and threads of a run."""
    return {
        "model": shown_name(options.model),
        **({"tokenizer": shown_name(options.tokenizer)} if options.tokenizer else {}),
        "dtype": options.dtype or default_dtype(options.device),
        "device": options.device,
        "threads": torch.get_num_threads(),
    }


def shown_name(name: str) -> str:
    """A model's name as results tell it: of a file or folder of this machine its own name alone."""
    kind, colon, where = name.rpartition(":")
    return f"{kind}{colon}{Path(where).name}" if Path(where).exists() else name


def default_dtype(device: str) -> str:
    return "float32" if device == "cpu" else "bfloat16"


def adapter_beside(target: Target) -> Path | None:
    """Find the adapter in a model's own folder, or None."""
    where = getattr(target.model, "name_or_path", "")
    folder = Path(where) / FOLDER
    return folder if where and (folder / CONFIG_FILE).is_file() else None


def chosen_adapter(target: Target, named: Path | None) -> SpaceAdapter:
    """Load the adapter that is named, or the model's own.

    Raises:
        ValueError: neither; says what to do.
    """
    folder = named or adapter_beside(target)
    if folder is None:
        raise ValueError(
            "this model's folder holds no SPACE adapter: name one with --adapter, or train one "
            "with `ragaccel train space`"
        )
    return SpaceAdapter.load(folder)


def with_adapter(target: Target, adapter: SpaceAdapter) -> Target:
    """Make a target of the same weights with an adapter attached; the given one stays as it is.

    Raises:
        ConfigurationError: the adapter is for another model.
    """
    ours = HuggingFaceModel(target.model, self_check=False)
    ours.attach_space(adapter)
    return replace(target, ours=ours, space=adapter)


def masks_of(target: Target) -> range:
    """The mask tokens that a target reads; none without an attached adapter."""
    first = target.ours.vocab_size
    return range(first, first + target.ours.num_masks)


def useful_masks(target: Target) -> range:
    """Return the mask tokens that are worth their rows, as ``LLM`` uses them."""
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
