"""SPACE adapters: which a model has beside it, and a target that wears one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragaccel.models.hf_model import HuggingFaceModel
from ragaccel.models.space_adapter import CONFIG_FILE, FOLDER, SpaceAdapter

if TYPE_CHECKING:
    from eval.targets import Target


def adapter_beside(target: Target) -> Path | None:
    """Find the adapter in a model's own folder; None where there is none."""
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


def wearing(target: Target, adapter: SpaceAdapter) -> Target:
    """Make a target of the same weights that wears an adapter; the given one stays as it is.

    Raises:
        ConfigurationError: the adapter is for another model.
    """
    ours = HuggingFaceModel(target.model, self_check=False)
    ours.attach_space(adapter)
    return replace(target, ours=ours, space=adapter)


def masks_of(target: Target) -> range:
    """The mask tokens that a target reads; none where it wears no adapter."""
    first = target.ours.vocab_size
    return range(first, first + target.ours.num_masks)


def useful_masks(target: Target) -> range:
    """Those of them that are worth their rows, as ``LLM`` takes them."""
    return masks_of(target)[: target.space.num_useful if target.space is not None else 0]


def describe_adapter(adapter: SpaceAdapter) -> dict[str, Any]:
    """Tell how large an adapter is and how it was trained, as results keep it."""
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
