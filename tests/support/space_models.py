"""Models with a random SPACE adapter: its draft tokens are random, and answers stay the same."""

from __future__ import annotations

from dataclasses import replace

import torch
from tiny_models import make_tiny_model

from ragaccel.models import HuggingFaceModel, new_adapter
from ragaccel.models.space_adapter import GatedLinear


def random_adapter(model, num_masks=3, rank=2, seed=0, scale=1.0, **changes):
    adapter = new_adapter(model, num_masks, rank, seed=seed, **changes)
    generator = torch.Generator().manual_seed(seed)
    return replace(
        adapter,
        changes={
            name: (down, scale * torch.randn(up.shape, generator=generator))
            for name, (down, up) in adapter.changes.items()
        },
    )


def adapted_model(family, num_masks=3, dtype=torch.float64, seed=0, **changes):
    """A target model of a family with a random adapter; nobody else has it."""
    target = HuggingFaceModel(make_tiny_model(family, dtype, seed, **changes))
    target.attach_space(random_adapter(target.model, num_masks))
    return target


def ungate_linears(model):
    """Unwrap the layers that ``gate_linears`` wrapped."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, GatedLinear):
                setattr(parent, name, layer.inner)


def masks_of(target):
    return tuple(range(target.vocab_size, target.vocab_size + target.num_masks))
