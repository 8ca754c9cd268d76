import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from ragaccel.engine.row_by_row import RowByRow

ROWS = 16


@pytest.fixture(params=[1, 3, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def differing_rows(activation, size, dtype):
    """Count the rows that differ from the first though all are given the same numbers."""
    generator = torch.Generator().manual_seed(size)
    row = torch.randn(size, generator=generator).to(dtype)
    found = activation(row.expand(1, ROWS, size).contiguous())
    assert found.shape == (1, ROWS, size)
    return sum(not torch.equal(found[0, 0], found[0, i]) for i in range(ROWS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu"])
def test_equal_rows_stay_equal(name, dtype, threads):
    activation = ACT2FN[name]
    for size in (97, 4864, 5003):
        with RowByRow():
            assert differing_rows(activation, size, dtype) == 0


def test_outside_of_it_they_need_not(threads):
    found = [
        differing_rows(activation, size, torch.float32)
        for activation in (functional.silu, nn.GELU(approximate="tanh"))
        for size in (4864, 5003)
    ]
    if not any(found):
        pytest.skip("equal rows stay equal here")
    assert any(found)


def test_values_are_the_stock_ones():
    inputs = torch.randn(2, 3, 7, dtype=torch.float64)
    for activation in (functional.silu, functional.softplus, torch.sigmoid, nn.ReLU(), nn.ELU(0.5)):
        with RowByRow():
            found = activation(inputs)
            alone = activation(inputs[0, 0])
        torch.testing.assert_close(found, activation(inputs), rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(alone, found[0, 0], rtol=1e-14, atol=1e-14)
    with RowByRow():
        torch.testing.assert_close(inputs.sigmoid(), torch.sigmoid(inputs))
        empty = functional.silu(inputs[:, :0])
    assert empty.shape == (2, 0, 7)


def test_computing_in_place_is_in_place():
    inputs = torch.randn(1, 4, 6)
    expected = functional.silu(inputs)
    with RowByRow():
        functional.silu(inputs, inplace=True)
    torch.testing.assert_close(inputs, expected)
