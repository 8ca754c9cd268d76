"""Small networks that read mask tokens, with changes large enough to be seen."""

import torch
from tiny_models import VOCAB, make_tiny_model, random_prompt

from ragaccel.training import Collator, Plan, Sample, SpaceNetwork, make_recipe

MASKS = 3
SAMPLES = [
    Sample(tuple(random_prompt(14 + 9 * i, i)), tuple(random_prompt(8 + i, 50 + i)))
    for i in range(2)
]
PLANS = [Plan(sample, tuple(len(sample.prompt_ids) + i for i in (-1, 2, 5))) for sample in SAMPLES]


def network_of(family, mode="gated", dtype=torch.float64, **changes):
    model = make_tiny_model(family, dtype)
    recipe = make_recipe(mode, **{"num_masks": MASKS, **changes})
    network = SpaceNetwork(model, recipe).to(dtype).eval()
    with torch.no_grad():  # or a new adapter changes nothing
        for name, weight in network.trained_parameters().items():
            if mode != "paper" or name == "mask_embeddings":
                weight.normal_(0, 0.3)
    return network


def batch_of(plans):
    return Collator(MASKS, VOCAB)([plans])


def run(network, batch, wanted=None):
    """The logits of wanted tokens; of all by default."""
    names = ("input_ids", "position_ids", "attention_mask")
    wanted = torch.arange(batch["input_ids"].shape[1]) if wanted is None else wanted
    return network(*(batch[name] for name in names), wanted=wanted)


def all_logits(network, batch):
    with torch.no_grad():
        return run(network, batch)


def alone(network, ids, masks, learns=False):
    """The logits of mask tokens behind visible ones: the model itself, nothing packed."""
    embedding = network.model.get_input_embeddings()
    real = embedding(torch.tensor(ids))
    number = torch.arange(masks).clamp(max=len(network.mask_embeddings) - 1)
    vectors = torch.cat((real, network.mask_embeddings[number].to(real.dtype)))
    network._rows.gate = torch.arange(len(ids) + masks)[:, None] >= len(ids)
    with torch.set_grad_enabled(learns):
        found = network.model(inputs_embeds=vectors[None], use_cache=False).logits[0]
    network._rows.clear()
    return found
