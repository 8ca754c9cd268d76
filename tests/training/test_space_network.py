"""Packed rows give the logits of the stock model over the visible tokens."""

import pytest
import torch
import torch.nn.functional as F
from space_networks import MASKS, PLANS, SAMPLES, all_logits, alone, batch_of, network_of
from tiny_models import make_tiny_model

from ragaccel.errors import UnsupportedModelError
from ragaccel.training import (
    Plan,
    SpaceNetwork,
    SpaceTrainer,
    make_arguments,
    make_recipe,
    plan_rows,
)

FAMILIES = ["llama", "mistral", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "gpt-neox", "opt"]


@pytest.fixture
def loss_of(tmp_path):
    """Return a function that computes the trainer's loss of a packed row."""

    def compute(network, batch):
        arguments = make_arguments(network.recipe, tmp_path, "cpu")
        trainer = SpaceTrainer(network, plan_rows(SAMPLES, network.recipe), arguments)
        return trainer.compute_loss(network, dict(batch))

    return compute


@pytest.mark.parametrize("mode", ["gated", "paper"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_is_what_the_model_says_of_visible_tokens(family, mode):
    network = network_of(family, mode)
    packed, real = all_logits(network, batch_of(PLANS)), 0
    mask = sum(plan.num_real for plan in PLANS)
    for plan in PLANS:
        ids = plan.sample.token_ids
        torch.testing.assert_close(packed[real : real + len(ids)], alone(network, ids, 0))
        real += len(ids)
        for cut in plan.cuts:
            expected = alone(network, ids[: cut + 1], MASKS)[cut + 1 :]
            torch.testing.assert_close(  # Gemma 2 takes softmax in single precision
                packed[mask : mask + MASKS], expected, rtol=1e-4, atol=1e-5
            )
            mask += MASKS
    assert mask == len(packed)


def test_the_papers_loss_is_the_mean_over_the_labels(loss_of):
    network = network_of("llama", "paper")
    batch = batch_of([Plan(SAMPLES[0], (17,), shortened=True), Plan(SAMPLES[1])])
    logits = all_logits(network, batch).float()
    each = F.cross_entropy(logits, batch["labels"][0], ignore_index=-100)
    torch.testing.assert_close(loss_of(network, batch), each)


def test_a_gated_base_learns_nothing(loss_of):
    network = network_of("llama", dtype=torch.float32).train()
    assert not network.model.training
    names = set(network.trained_parameters())
    assert "mask_embeddings" in names
    assert all(name.endswith((".down", ".up")) for name in names - {"mask_embeddings"})
    before = {name: weight.clone() for name, weight in network.model.named_parameters()}
    torch.autograd.backward(loss_of(network, batch_of(PLANS)))
    for name, weight in network.named_parameters():
        assert (weight.grad is not None) == (name in names)
    assert all(
        torch.equal(before[name], weight) for name, weight in network.model.named_parameters()
    )


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_gradients_are_those_of_passes_over_what_is_seen(family, loss_of):
    network = network_of(family)
    torch.autograd.backward(loss_of(network, batch_of(PLANS)))
    found = {name: weight.grad for name, weight in network.trained_parameters().items()}
    network.zero_grad()
    losses, weights = [], []
    for plan in PLANS:
        ids = plan.sample.token_ids
        taught = alone(network, ids, 0).float().softmax(-1)
        for cut in plan.cuts:
            count = min(MASKS, len(ids) - cut - 2)
            logits = alone(network, ids[: cut + 1], MASKS, learns=True)[cut + 1 :][:count].float()
            said = taught[cut + 1 : cut + 1 + count]
            losses += F.cross_entropy(logits, said, reduction="none")
            weights += [0.8**number for number in range(count)]
    weights = torch.tensor(weights)
    torch.autograd.backward((torch.stack(losses) * weights).sum() / weights.sum())
    for name, weight in network.trained_parameters().items():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-4, atol=1e-6)


def test_a_row_without_masks_still_reaches_their_embeddings(loss_of):
    """Otherwise several processes would wait for a gradient that never comes."""
    network = network_of("llama", "paper", dtype=torch.float32)
    torch.autograd.backward(loss_of(network, batch_of([Plan(SAMPLES[0])])))
    assert torch.count_nonzero(network.mask_embeddings.grad) == 0


def test_the_adapter_is_what_was_learned():
    network = network_of("llama", dtype=torch.float32, rank=2)
    adapter = network.adapter({"steps": 3})
    assert adapter.rank == 2
    assert adapter.training == {"steps": 3}
    assert adapter.mask_embeddings.dtype == torch.bfloat16
    layer = network.model.model.layers[1].mlp.up_proj
    assert torch.equal(adapter.changes["model.layers.1.mlp.up_proj"][1], layer.up.bfloat16())
    assert not network_of("llama", "paper").adapter().changes


def test_what_cannot_be_trained_is_refused():
    model = make_tiny_model("llama")
    model._is_stateful = True
    with pytest.raises(UnsupportedModelError, match="recurrent"):
        SpaceNetwork(model, make_recipe())
