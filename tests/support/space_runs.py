"""A model that counts, and training runs on texts that count."""

from functools import cache

import torch
import torch.nn.functional as F
from space_networks import MASKS
from tiny_models import make_tiny_model

from ragaccel.training import (
    Sample,
    Samples,
    SpaceNetwork,
    SpaceTrainer,
    make_arguments,
    make_recipe,
    plan_rows,
)

COUNT = 20  # tokens of a text that counts, and begins again


def counting(start, length=14):
    ids = tuple((start + i) % COUNT for i in range(length))
    return Sample(ids[:3], ids[3:])


SAMPLES = Samples(tuple(counting(start) for start in range(COUNT)))
HELD_OUT = tuple(counting(start, 11) for start in range(COUNT))
SMALL = {"num_masks": MASKS, "row_tokens": 160}


@cache
def counting_weights():
    model = make_tiny_model("llama", torch.float32, initializer_range=0.05)
    ids = torch.tensor([sample.token_ids for sample in SAMPLES.rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(40):
        logits = model(ids[:, :-1]).logits
        torch.autograd.backward(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def network_of(mode="gated", **changes):
    """Return a network over a model that counts, which a gated adapter can learn from."""
    model = make_tiny_model("llama", torch.float32, initializer_range=0.05)
    model.load_state_dict(counting_weights())
    return SpaceNetwork(model, make_recipe(mode, **{**SMALL, **changes}))


def trainer_of(folder, mode="gated", *callbacks, network=None, held_out=HELD_OUT, **changes):
    """Return a trainer with its run folder."""
    network = network or network_of(mode, **changes)
    arguments = make_arguments(network.recipe, folder, "cpu")
    rows = plan_rows(SAMPLES.rows, network.recipe, arguments.world_size)
    return SpaceTrainer(network, rows, arguments, held_out=held_out, callbacks=callbacks)


def weights_of(network):
    """Return copies of the trained parameters."""
    return {name: weight.detach().clone() for name, weight in network.trained_parameters().items()}
