from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from ragaccel.engine import AttentionMasks, KVCache, PassAttention, causal_rows
from ragaccel.models import attention_of_pass, use_rowwise_activations

CPU = torch.device("cpu")
ROWS = 16


@pytest.fixture(params=[1, 3, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def in_a_pass(*, deterministic):
    rows = replace(causal_rows([1], KVCache(), CPU), deterministic=deterministic)
    return attention_of_pass(PassAttention(rows, AttentionMasks(torch.float32, CPU)), [])


def differing_rows(activation, size, dtype):
    """Count the rows that differ from the first though all are given the same numbers."""
    generator = torch.Generator().manual_seed(size)
    row = torch.randn(size, generator=generator).to(dtype)
    found = activation(row.expand(1, ROWS, size).contiguous())
    assert found.shape == (1, ROWS, size)
    return sum(not torch.equal(found[0, 0], found[0, i]) for i in range(ROWS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu"])
def test_equal_rows_stay_equal_in_deterministic_passes(name, dtype, threads):
    network = nn.Sequential(ACT2FN[name])
    use_rowwise_activations(network)
    for size in (97, 4864, 5003):
        with in_a_pass(deterministic=True):
            assert differing_rows(network, size, dtype) == 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_values_are_the_stock_ones(deterministic):
    inputs = torch.randn(2, 3, 7, dtype=torch.float64)
    for make in (nn.SiLU, nn.Softplus, nn.Sigmoid, nn.ReLU, lambda: nn.ELU(0.5)):
        network = nn.Sequential(make())
        use_rowwise_activations(network)
        with in_a_pass(deterministic=deterministic):
            found, alone, empty = network(inputs), network(inputs[0, 0]), network(inputs[:, :0])
        torch.testing.assert_close(found, make()(inputs), rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(alone, found[0, 0], rtol=1e-14, atol=1e-14)
        assert empty.shape == (2, 0, 7)


def test_hooks_of_activations_run_once():
    calls = []
    network = nn.Sequential(nn.SiLU())
    network[0].register_forward_hook(lambda *_: calls.append(1))
    use_rowwise_activations(network)
    with in_a_pass(deterministic=True):
        network(torch.zeros(1, 5, 7))
    assert calls == [1]
