"""Gated layers: mask tokens' rows are changed, all others are the same to the last bit."""

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, make_tiny_model

from ragaccel.models.gated import MaskRows, gate_linears, linear_sizes, ungate_linears

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
    rows.index = torch.tensor([8, 9])
    by_index = logits_of(model, ids)
    rows.clear()
    rows.gate = torch.arange(10)[:, None] >= 8
    by_gate = logits_of(model, ids)
    for found in (by_index, by_gate):
        assert torch.equal(found[:, :8], plain[:, :8])
        assert (found[:, 8:] - plain[:, 8:]).abs().min() > 0
    torch.testing.assert_close(by_index, by_gate, rtol=1e-4, atol=1e-4)
    ungate_linears(model)
    rows.gate = None
    assert torch.equal(logits_of(model, ids), plain)


def test_the_head_is_no_layer_to_change():
    model = make_tiny_model("llama")
    assert "lm_head" not in linear_sizes(model)
    assert linear_sizes(model)["model.layers.1.mlp.down_proj"] == (64, 32)


def test_a_wrapped_layer_answers_for_the_one_inside():
    model = make_tiny_model("llama", torch.float32)
    weight = model.model.layers[0].self_attn.q_proj.weight
    gate_linears(model, random_changes(model), MaskRows())
    assert model.model.layers[0].self_attn.q_proj.weight is weight
    with pytest.raises(AttributeError):
        model.model.layers[0].self_attn.q_proj.nothing  # noqa: B018


def test_what_does_not_fit_is_named():
    model = make_tiny_model("llama", torch.float32)
    with pytest.raises(ValueError, match="q_proj takes"):
        gate_linears(
            model,
            {"model.layers.0.self_attn.q_proj": (torch.zeros(2, 5), torch.zeros(32, 2))},
            MaskRows(),
        )
    with pytest.raises(KeyError):
        gate_linears(model, {"model.norm_of": (torch.zeros(2, 5), torch.zeros(5, 2))}, MaskRows())
