"""The kernels between a layer's products against the stock modules: on a GPU, or interpreted."""

import numpy as np
import pytest
import torch
from interpreted import CUDA, DEVICE, load
from torch.nn.functional import linear, silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from ragaccel.engine import LayerNorm, Weights

pytest.importorskip("triton")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPSILON = 1e-5


@pytest.fixture(scope="module")
def layers():
    """The kernels, interpreted where there is no device."""
    with load("triton_layers") as module:
        yield module.TritonLayers(num_processors=132)


def random(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def stock_norm(size, dtype, seed=1):
    norm = LlamaRMSNorm(size, eps=EPSILON).to(DEVICE, dtype)
    norm.weight.data.copy_(1 + 0.2 * random(size, dtype=dtype, seed=seed))
    return norm, LayerNorm(norm.weight.data, EPSILON)


def assert_rounded_alike(found, expected):
    """Equal but for elements that lie between two numbers of their type, and few of these."""
    assert found.dtype == expected.dtype
    share = (16 if found.dtype == torch.float32 else 2) * torch.finfo(found.dtype).eps
    atol = share * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)
    if found.dtype != torch.float32:  # its last bit is that of the sum's order
        assert (found != expected).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [32, 576, 1024, 4096])
@torch.inference_mode()
def test_norms_round_as_the_modules_do(layers, size, dtype):
    module, norm = stock_norm(size, dtype)
    states, residual = (3 * random(5, size, dtype=dtype, seed=seed) for seed in (2, 3))
    assert_rounded_alike(layers.normalize(states, norm), module(states))
    found, total = layers.add_and_normalize(states, residual, norm)
    assert torch.equal(total, residual + states)
    assert_rounded_alike(found, module(residual + states))


@torch.inference_mode()
def test_results_of_any_layout_are_read_as_they_are(layers):
    """A packed or quantized product may return a part of a larger one."""
    dtype, rows, size = torch.bfloat16, 4, 64
    module, norm = stock_norm(size, dtype)
    wide = random(rows, 5 * size, dtype=dtype, seed=2)
    part, other, gates, values = (wide[:, at * size : (at + 1) * size] for at in range(4))
    found, total = layers.add_and_normalize(part, other, norm)
    assert torch.equal(total, part + other)
    assert_rounded_alike(found, module(part + other))
    assert_rounded_alike(layers.gate(gates, values), silu(gates) * values)
    pools = [
        [torch.zeros(2, 9, 32, dtype=dtype, device=DEVICE) for _ in range(2)] for _ in range(2)
    ]
    angles = [random(rows, 32, dtype=dtype, seed=seed) for seed in (4, 5)]
    slots = torch.tensor([3, 1, 7, 2], device=DEVICE)
    queries = [
        layers.rotate_and_store(states, angles, pool, slots)
        for pool, states in zip(
            pools, ((part, gates, values), [one.contiguous() for one in (part, gates, values)]),
            strict=True,
        )
    ]  # fmt: skip
    assert torch.equal(*queries)
    assert all(torch.equal(*one) for one in zip(*pools, strict=True))


def test_states_of_several_dtypes_are_refused(layers):
    """Torch would promote them, the kernels would round them."""
    one, other = (random(2, 64, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    _, norm = stock_norm(64, torch.bfloat16)
    pool = [torch.zeros(1, 4, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    for compute in (
        lambda: layers.add_and_normalize(one, other, norm),
        lambda: layers.gate(one, other),
        lambda: layers.rotate_and_store((other,) * 3, (one, one), pool, torch.tensor([1, 2])),
    ):
        with pytest.raises(ValueError, match="several dtypes"):
            compute()


@torch.inference_mode()
def test_a_row_of_zeros_stays_zero(layers):
    _, norm = stock_norm(64, torch.bfloat16)
    assert not layers.normalize(torch.zeros(2, 64, dtype=torch.bfloat16, device=DEVICE), norm).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (3, 1, 80), (6, 6, 128)])
@pytest.mark.parametrize("has_norms", [False, True])
@torch.inference_mode()
def test_rotations_round_as_the_modules_do_and_states_lie_in_their_slots(
    layers, heads, kv_heads, size, dtype, has_norms
):
    rows, slots = 5, torch.tensor([7, 3, 9, 0, 0], device=DEVICE)
    queries = random(rows, heads * size, dtype=dtype, seed=1)
    keys, values = (random(rows, kv_heads * size, dtype=dtype, seed=seed) for seed in (2, 3))
    freqs = torch.outer(torch.tensor([0.0, 1.0, 2.0, 700.0, 9.0]), 10000 ** -torch.rand(size // 2))
    emb = torch.cat((freqs, freqs), -1).to(DEVICE)
    angles = emb.cos().to(dtype), emb.sin().to(dtype)
    pool = torch.full((2, kv_heads, 12, size), float("nan"), dtype=dtype, device=DEVICE)
    norms, modules = None, None
    if has_norms:
        (query_module, query_norm), (key_module, key_norm) = (
            stock_norm(size, dtype, seed) for seed in (4, 5)
        )
        norms, modules = (query_norm, key_norm), (query_module, key_module)
    found = layers.rotate_and_store(
        (queries, keys, values), angles, tuple(pool.unbind()), slots, norms
    )
    q, k = (one.view(1, rows, -1, size) for one in (queries, keys))
    if modules:
        q, k = (module(one) for module, one in zip(modules, (q, k), strict=True))
    turned = apply_rotary_pos_emb(q, k, *(one[None] for one in angles), unsqueeze_dim=2)
    compare = assert_rounded_alike if has_norms else assert_same
    compare(found, turned[0][0])
    for row, slot in enumerate((7, 3, 9)):
        compare(pool[0, :, slot], turned[1][0, row])
        assert torch.equal(pool[1, :, slot], values[row].view(kv_heads, size))
    untouched = [slot for slot in range(12) if slot not in (0, 3, 7, 9)]
    assert pool[:, :, untouched].isnan().all()


def assert_same(found, expected):
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_gates_round_as_the_modules_do(layers, dtype):
    gates, values = (4 * random(7, 300, dtype=dtype, seed=seed) for seed in (1, 2))
    gates[0, :4] = torch.tensor([0.0, -90.0, 90.0, -1e4])
    with np.errstate(over="ignore"):  # of exp(1e4), interpreted
        found = layers.gate(gates, values)
    assert found.isfinite().all()
    assert_rounded_alike(found, silu(gates) * values)


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others(layers):
    states, residual = (random(9, 96, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    _, norm = stock_norm(96, torch.bfloat16)
    whole = layers.add_and_normalize(states, residual, norm)
    alone = layers.add_and_normalize(states[4:5], residual[4:5], norm)
    assert all(torch.equal(one[4:5], other) for one, other in zip(whole, alone, strict=True))
    assert torch.equal(layers.gate(states, residual)[4:5], layers.gate(states[4:5], residual[4:5]))


def test_rows_that_no_program_can_hold_are_refused(layers):
    norm = LayerNorm(torch.ones(20_000, device=DEVICE), EPSILON)
    with pytest.raises(ValueError, match="too large"):
        layers.normalize(torch.zeros(1, 20_000, device=DEVICE), norm)


@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_the_kernels_are_captured(layers):
    _, norm = stock_norm(64, torch.bfloat16)
    states = random(4, 64, dtype=torch.bfloat16)

    def compute():
        return layers.gate(*layers.add_and_normalize(states, states, norm))

    wanted, graph = compute(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = compute()
    graph.replay()
    assert torch.equal(found, wanted)


def random_weights(size, depth, dtype, seed, biased=False):
    bias = random(size, dtype=dtype, seed=seed + 1) if biased else None
    return Weights(0.1 * random(size, depth, dtype=dtype, seed=seed), bias)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_products_of_few_rows_are_those_of_the_modules(layers, dtype, biased):
    depth = 320
    states = random(20, depth, dtype=dtype)
    sizes = (70, 33, 5)
    weights = [
        random_weights(size, depth, dtype, seed, biased)
        for seed, size in zip((2, 4, 6), sizes, strict=True)
    ]
    assert layers.supports(states, weights)
    for found, one in zip(layers.multiply(states, weights), weights, strict=True):
        exact = linear(states.double(), *(part if part is None else part.double() for part in one))
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), exact, rtol=eps, atol=eps / 8)
    gate, values = weights[0], random_weights(sizes[0], depth, dtype, 8, biased)
    parts = layers.multiply(states, [gate, values])
    assert torch.equal(layers.multiply_gated(states, gate, values), layers.gate(*parts))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_products_in_parts_are_added_up_before_the_residual_stream(layers, dtype, biased):
    depth, size = 2 * 512 + 64, 70
    states, residual = random(5, depth, dtype=dtype), random(5, size, dtype=dtype, seed=7)
    weights = random_weights(size, depth, dtype, 2, biased)
    _, norm = stock_norm(size, dtype)
    parts = layers.multiply_in_parts(states, weights)
    assert parts.shape == (2, 5, size)
    whole = parts.sum(0).to(dtype)
    found = layers.add_and_normalize(parts, residual, norm)
    assert all(map(torch.equal, found, layers.add_and_normalize(whole, residual, norm)))
    eps = torch.finfo(dtype).eps
    (product,) = layers.multiply(states, [weights])
    torch.testing.assert_close(whole, product, rtol=eps, atol=eps / 8)
    assert torch.equal(layers.multiply_in_parts(states[2:3], weights)[:, 0], parts[:, 2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_a_product_has_the_same_bits_beside_any_rows(layers, dtype):
    """Whatever tiles are chosen for the sizes of matrices and the number of rows."""
    depth = 2048 if CUDA else 1024
    states = random(64, depth, dtype=dtype)
    for size in (48, 4096, 6144) if CUDA else (48,):
        weights = [random_weights(size, depth, dtype, seed=2)]
        (whole,) = layers.multiply(states, weights)
        gated = layers.multiply_gated(states, *weights, *weights)
        parts = layers.multiply_in_parts(states, *weights)
        assert len(parts) == {48: depth // 512, 4096: 2, 6144: 1}[size]
        for first, number in ((0, 1), (3, 5), (7, 16), (20, 17), (1, 33)):
            part = states[first : first + number]
            assert torch.equal(layers.multiply(part, weights)[0], whole[first : first + number])
            found = layers.multiply_gated(part, *weights, *weights)
            assert torch.equal(found, gated[first : first + number])
            found = layers.multiply_in_parts(part, *weights)
            assert torch.equal(found, parts[:, first : first + number])


@torch.inference_mode()
def test_other_products_are_left_to_the_modules(layers):
    depth, dtype = 64, torch.bfloat16
    weights = random_weights(8, depth, dtype, 1)
    assert layers.supports(random(64, depth, dtype=dtype), [weights])
    assert not layers.supports(random(65, depth, dtype=dtype), [weights]), "many rows"
    assert not layers.supports(random(4, depth, dtype=torch.float32), [weights]), "another dtype"
    exact = random_weights(8, depth, torch.float32, 1)
    assert not layers.supports(random(4, depth, dtype=torch.float32), [exact])
    part = Weights(random(depth, 8, dtype=dtype).T, None)
    assert not layers.supports(random(4, depth, dtype=dtype), [part]), "another layout"
    odd = random_weights(8, 72, dtype, 1)
    assert not layers.supports(random(4, 72, dtype=dtype), [odd]), "not read in whole tiles"
    biased = random_weights(8, depth, dtype, 1, biased=True)
    assert not layers.supports(random(4, depth, dtype=dtype), [weights, biased])
