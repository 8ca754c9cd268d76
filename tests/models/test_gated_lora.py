"""Gated layers: mask tokens' rows are changed, all others are the same to the last bit."""

import pytest
import torch
from space_models import ungate_linears
from tiny_models import FAMILIES, VOCAB, make_tiny_model

from ragaccel.models import MaskRows, gate_linears, linear_sizes

RANK = 2


def random_changes(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            torch.randn(RANK, given, generator=generator),
            torch.randn(taken, RANK, generator=generator),
        )
        for name, (given, taken) in linear_sizes(model).items()
    }


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_only_rows_of_mask_tokens_are_changed(family):
    model = make_tiny_model(family, torch.float32)
    ids = torch.randint(0, VOCAB, (1, 10))
    plain, rows = logits_of(model, ids), MaskRows()
    gate_linears(model, random_changes(model), rows)
    assert torch.equal(logits_of(model, ids), plain)
    rows.gate = torch.arange(10)[:, None] >= 8
    found = logits_of(model, ids)
    assert torch.equal(found[:, :8], plain[:, :8])
    assert (found[:, 8:] - plain[:, 8:]).abs().min() > 0
    rows.clear()
    assert torch.equal(logits_of(model, ids), plain)
    rows.gate = torch.ones(10, 1, dtype=torch.bool)
    ungate_linears(model)
    assert torch.equal(logits_of(model, ids), plain)


class Experts(torch.nn.Module):
    """Two experts that get some rows each, and a router that ranks them."""

    class Router(torch.nn.Linear):
        def forward(self, inputs):
            scores = super().forward(inputs)
            return scores, scores.argmax(-1)

    def __init__(self):
        super().__init__()
        self.router = self.Router(4, 2)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, inputs):
        chosen, found = self.router(inputs[0])[1], torch.zeros_like(inputs[0])
        for number, expert in enumerate(self.experts):
            own = chosen == number
            found[own] = expert(inputs[0][own])
        return found[None]


def test_layers_that_are_given_other_rows_stay_what_they_were():
    torch.manual_seed(1)
    model, inputs = Experts(), torch.randn(1, 9, 4)
    with torch.no_grad():
        plain, rows = model(inputs), MaskRows()
        experts = {f"experts.{i}": (torch.randn(RANK, 4), torch.randn(4, RANK)) for i in (0, 1)}
        gate_linears(model, random_changes(model) | experts, rows)
        rows.gate = torch.arange(9)[:, None] < 2
        assert torch.equal(model(inputs), plain)


def test_a_wrapped_layer_answers_for_the_one_inside():
    model = make_tiny_model("llama", torch.float32)
    weight = model.model.layers[0].self_attn.q_proj.weight
    gate_linears(model, random_changes(model), MaskRows())
    assert model.model.layers[0].self_attn.q_proj.weight is weight
    with pytest.raises(AttributeError):
        model.model.layers[0].self_attn.q_proj.nothing  # noqa: B018


def test_what_does_not_fit_is_named():
    model = make_tiny_model("llama", torch.float32)
    wrong = {"model.layers.0.self_attn.q_proj": (torch.zeros(2, 5), torch.zeros(32, 2))}
    with pytest.raises(ValueError, match="q_proj have shapes"):
        gate_linears(model, wrong, MaskRows())
    with pytest.raises(KeyError):
        gate_linears(model, {"model.norm_of": (torch.zeros(2, 5), torch.zeros(5, 2))}, MaskRows())


def test_layers_of_single_experts_are_not_changed():
    """One expert may get all rows in another order: changes would hit real tokens."""
    model = torch.nn.ModuleDict(
        {"gate": torch.nn.Linear(4, 2), "experts": torch.nn.ModuleList([torch.nn.Linear(4, 4)])}
    )
    assert set(linear_sizes(model)) == {"gate"}
    model = make_tiny_model("llama", torch.float32)
    model.model.layers[0].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(32, 32)])
    assert not any("experts" in name for name in linear_sizes(model))
