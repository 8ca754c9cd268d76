"""The network: packed rows equal what the stock model computes of the tokens that are seen."""

import pytest
import torch
import torch.nn.functional as F
from space_networks import MASKS, PLANS, SAMPLES, all_logits, alone, layout_of, network_of
from tiny_models import make_tiny_model

from ragaccel.errors import ConfigurationError, MissingExtraError, ModelRefusedError
from ragaccel.train.space.layout import Plan
from ragaccel.train.space.network import SpaceNetwork
from ragaccel.train.space.recipe import make_recipe

FAMILIES = ["llama", "mistral", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "gpt-neox", "opt"]


@pytest.mark.parametrize("mode", ["gated", "lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_is_what_the_model_says_of_visible_tokens(family, mode):
    network = network_of(family, mode)
    layout = layout_of(PLANS)
    packed, start = all_logits(network, layout), 0
    for plan in PLANS:
        ids = plan.sample.token_ids
        real = alone(network, ids, 0)
        torch.testing.assert_close(packed[start : start + len(ids)], real)
        start += len(ids)
        for cut in plan.cuts:
            expected = alone(network, ids[: cut + 1], MASKS)[cut + 1 :]
            torch.testing.assert_close(  # Gemma 2 takes softmax in single precision
                packed[start : start + MASKS], expected, rtol=1e-4, atol=1e-5
            )
            start += MASKS
    assert start == len(layout)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_real_tokens_rows_are_the_models_own(family):
    model = make_tiny_model(family)
    ids = SAMPLES[0].token_ids
    with torch.no_grad():
        own = model(torch.tensor([ids])).logits[0]
    packed = all_logits(network_of(family), layout_of(PLANS))
    torch.testing.assert_close(packed[: len(ids)], own)


def test_one_embedding_serves_all_masks():
    network = network_of("llama", shared_mask=True)
    assert len(network.mask_embeddings) == 1
    with torch.no_grad():
        vectors = network._embedded(layout_of(PLANS), layout_of(PLANS).is_mask.nonzero()[:, 0])
    masked = vectors[layout_of(PLANS).is_mask]
    assert torch.equal(masked, network.mask_embeddings.expand(len(masked), -1))


def test_the_loss_is_the_mean_of_labels_by_weight():
    network = network_of("llama", "full", loss_weight=3.0)
    layout = layout_of(PLANS, learns_real=True)
    logits = all_logits(network, layout)
    each = F.cross_entropy(logits.float(), layout.labels, reduction="none", ignore_index=-100)
    labelled = layout.labels != -100
    weights = labelled * torch.where(layout.is_mask, 3.0, 1.0)
    found = network(layout)
    torch.testing.assert_close(found.loss, (each * weights).sum() / weights.sum())
    right = (logits.argmax(-1) == layout.labels)[layout.is_mask & labelled].float().mean()
    torch.testing.assert_close(found.guessed, right)


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_a_taught_mask_learns_what_the_model_says(decay):
    network = network_of("llama", mask_decay=decay)
    layout = layout_of(PLANS)
    logits = all_logits(network, layout).float()
    rows = (layout.teachers >= 0).nonzero()[:, 0]
    taught = logits[layout.teachers[rows]].softmax(-1)
    each = -(taught * logits[rows].log_softmax(-1)).sum(-1)
    weights = decay ** (layout.token_ids[rows] - network.base.vocab_size)
    expected = (each * weights).sum() / weights.sum()
    torch.testing.assert_close(network(layout).loss, expected)


def test_a_gated_base_learns_nothing():
    network = network_of("llama", dtype=torch.float32).train()
    assert not network.model.training
    names = set(network.trained())
    assert "mask_embeddings" in names
    assert all(name.endswith((".down", ".up")) for name in names - {"mask_embeddings"})
    before = {name: weight.clone() for name, weight in network.model.named_parameters()}
    torch.autograd.backward(network(layout_of(PLANS)).loss)
    for name, weight in network.named_parameters():
        assert (weight.grad is not None) == (name in names)
    assert all(
        torch.equal(before[name], weight) for name, weight in network.model.named_parameters()
    )


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_gradients_are_those_of_passes_over_what_is_seen(family):
    network = network_of(family, distill=False, mask_decay=1.0)
    torch.autograd.backward(network(layout_of(PLANS)).loss)
    found = {name: weight.grad for name, weight in network.trained().items()}
    network.zero_grad()
    losses = []
    for plan in PLANS:
        ids = plan.sample.token_ids
        for cut in plan.cuts:
            labels = ids[cut + 2 : cut + 2 + MASKS]
            logits = alone(network, ids[: cut + 1], MASKS, learns=True)[cut + 1 :]
            losses += F.cross_entropy(logits[: len(labels)], torch.tensor(labels), reduction="none")
    torch.autograd.backward(torch.stack(losses).mean())
    for name, weight in network.trained().items():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-4, atol=1e-6)


def test_a_row_without_masks_still_reaches_their_embeddings():
    """Or several processes would wait for a gradient that never comes."""
    network = network_of("llama", "full", dtype=torch.float32)
    torch.autograd.backward(network(layout_of([Plan(SAMPLES[0])], learns_real=True)).loss)
    assert torch.count_nonzero(network.mask_embeddings.grad) == 0


def test_bfloat16_is_computed_over_weights_as_they_are():
    network = network_of("qwen3", dtype=torch.float32)
    layout = layout_of(PLANS)
    exact = network(layout).loss
    with torch.autocast("cpu", torch.bfloat16):
        rough = network(layout).loss
    torch.autograd.backward(rough)
    assert rough != exact
    torch.testing.assert_close(rough, exact, rtol=0.05, atol=0.05)


def test_the_adapter_is_what_was_learned():
    network = network_of("llama", dtype=torch.float32, rank=2)
    adapter = network.adapter({"steps": 3})
    assert adapter.rank == 2
    assert adapter.training == {"steps": 3}
    assert adapter.mask_embeddings.dtype == torch.bfloat16
    layer = network.model.model.layers[1].mlp.up_proj
    assert torch.equal(adapter.changes["model.layers.1.mlp.up_proj"][1], layer.up.bfloat16())
    assert not network_of("llama", "full").adapter().changes


def test_what_cannot_be_trained_is_refused(monkeypatch):
    with pytest.raises(ConfigurationError, match="there are down_proj"):
        network_of("llama", targets=("nothing",))
    model = make_tiny_model("llama")
    model._is_stateful = True
    with pytest.raises(ModelRefusedError, match="recurrent"):
        SpaceNetwork(model, make_recipe())
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"ragaccel\[train\]"):
        network_of("llama", "lora")
