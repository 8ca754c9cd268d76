"""Targets: the model a run times, real or random, with its tokenizer."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.examples import in_data
from eval.random_models import build_random_model, read_shape
from ragaccel.models.hf_model import HuggingFaceModel
from ragaccel.models.load import bundled_reader_path, load_model
from ragaccel.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ragaccel.models.space_adapter import SpaceAdapter

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

    ``model`` is transformers' own, untouched; ``ours`` runs a twin of it, where there can be one.
    ``space`` is the adapter that it wears, if any.
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
    """Tell which model was run, in whose tokens if not its own, and on what."""
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
