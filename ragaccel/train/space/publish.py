"""Publishing: what a run learned as a folder that can be loaded; safetensors, never a pickle."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ragaccel.models.space_adapter import base_of
from ragaccel.models.space_files import FOLDER

if TYPE_CHECKING:
    from pathlib import Path

    from ragaccel.train.space.network import SpaceNetwork


def publish(
    network: SpaceNetwork,
    tokenizer: Any,
    folder: Path,
    *,
    training: dict[str, Any],
    merge: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Write what was learned; the network is of no use for training afterwards.

    A gated adapter is the folder itself. Low-rank changes of all rows are peft's folder, with the
    mask embeddings in ``space`` below it. Merged ones, and a model trained in full, are a model's
    folder with its tokenizer, and ``space`` below it as well.

    Args:
        network: a trained one.
        tokenizer: transformers' tokenizer of the model.
        folder: where to; files there are replaced.
        training: how it was trained, for whoever reads the folder.
        merge: add low-rank changes to the weights.
        dtype: of a whole model's weights; as they are by default.
    """
    adapter = network.adapter(training)
    if network.recipe.mode == "gated":
        adapter.save(folder)
        return
    model = network.model
    if network.recipe.mode == "lora" and not merge:
        # Asked to look whether embeddings were changed, it would ask the hub.
        model.save_pretrained(folder, save_embedding_layers=False)
    else:
        if network.recipe.mode == "lora":
            model = model.merge_and_unload()
        model = model if dtype is None else model.to(dtype)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        adapter = replace(adapter, base=base_of(model))
    adapter.save(folder / FOLDER)
