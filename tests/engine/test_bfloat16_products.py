"""Compiled bfloat16 products: against float64, and bit by bit."""

import pytest
import torch

from ragaccel.engine import bfloat16, bfloat16_products, int8

pytestmark = pytest.mark.skipif(
    not bfloat16.is_supported(), reason="nothing is compiled for bfloat16 here"
)


WEIGHTS = {16: bfloat16, 8: int8}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def in_8_bits(weight):
    """Round weights as ``int8`` says."""
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    return torch.round(weight.float() / scales).double() * scales


@pytest.mark.parametrize("bits", WEIGHTS)
@pytest.mark.parametrize("num_rows", [*range(1, 26), 64, 131])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(2, 32), (30, 64), (96, 1056), (704, 64)])
def test_products_are_those_of_the_weights_rounded_once(num_rows, num_inputs, num_outputs, bits):
    rows, weight = draw(num_rows, num_inputs), draw(num_outputs, num_inputs, seed=1)
    bias, added = draw(num_outputs, seed=2), draw(num_rows, num_outputs, seed=3)
    packed = WEIGHTS[bits].pack(weight)
    exact = in_8_bits(weight) if bits == 8 else weight.double()
    assert torch.equal(WEIGHTS[bits].unpack(packed), exact.bfloat16())
    product = rows.double() @ exact.T
    for more in ((), (bias,), (None, added), (bias, added)):
        found = bfloat16_products.multiply(rows, packed, *more)
        assert found.dtype == torch.bfloat16
        wanted = product + sum(one.double() for one in more if one is not None)
        torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("bits", WEIGHTS)
def test_a_row_has_the_same_bits_beside_any_others_and_with_any_number_of_threads(bits):
    rows, packed = draw(40, 576), WEIGHTS[bits].pack(draw(320, 576, seed=1))
    bias, added = draw(320, seed=2), draw(40, 320, seed=3)
    wanted = bfloat16_products.multiply(rows, packed, bias, added)
    known = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for first, stop in ((0, 1), (7, 8), (3, 6), (3, 9), (1, 14), (20, 40), (0, 31)):
                found = bfloat16_products.multiply(
                    rows[first:stop], packed, bias, added[first:stop]
                )
                assert torch.equal(found, wanted[first:stop])
    finally:
        torch.set_num_threads(known)


EXTREMES = [0.0, -0.0, 1e-30, 20.0, -20.0, 88.5, -88.5, 3e4, -3e4, float("inf"), float("nan")]


def test_silu_is_that_of_torch_in_float64_rounded_as_its_modules_round():
    products = torch.cat(
        [draw(7, 64, seed=4) * 3, torch.tensor(EXTREMES).bfloat16()[:, None] + draw(64)]
    )
    products[7:, 32:] = 1
    gate, values = products.double().chunk(2, -1)
    wanted = (torch.nn.functional.silu(gate).bfloat16().double() * values).bfloat16()
    found = bfloat16_products.silu_and_mul(products)
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-30, equal_nan=True)
    assert float((found != wanted)[:7].double().mean()) < 0.01


@pytest.mark.parametrize("bits", WEIGHTS)
@pytest.mark.parametrize("num_rows", [1, 3, 8, 20, 131])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(30, 64), (96, 1088), (704, 64)])
def test_products_are_activated_as_those_that_are_there(num_rows, num_inputs, num_outputs, bits):
    rows, bias = draw(num_rows, num_inputs), draw(num_outputs, seed=2)
    packed = WEIGHTS[bits].pack(draw(num_outputs, num_inputs, seed=1))
    for more in ((), (bias,)):
        wanted = bfloat16_products.silu_and_mul(bfloat16_products.multiply(rows, packed, *more))
        found = bfloat16_products.multiply(rows, packed, *more, is_activated=True)
        assert torch.equal(found, wanted)
        assert torch.equal(
            found[:1], bfloat16_products.multiply(rows[:1], packed, *more, is_activated=True)
        )


def test_halves_that_are_not_whole_blocks_are_not_activated():
    with pytest.raises(RuntimeError, match="halves of 96 outputs"):
        bfloat16_products.silu_and_mul(draw(2, 96))
    with pytest.raises(RuntimeError, match="halves of 96 outputs"):
        bfloat16_products.multiply(draw(2, 4), bfloat16.pack(draw(96, 4)), is_activated=True)


@pytest.mark.parametrize("num_inputs", [6, 64])
def test_no_rows_have_no_products(num_inputs):
    packed, none = bfloat16.pack(torch.ones(64, num_inputs).bfloat16()), torch.ones(0, num_inputs)
    for is_activated, num_outputs in ((False, 64), (True, 32)):
        found = bfloat16_products.multiply(none.bfloat16(), packed, is_activated=is_activated)
        assert found.shape == (0, num_outputs)


@pytest.mark.parametrize("bits", WEIGHTS)
@pytest.mark.parametrize("num_rows", [1, 8, 33])
def test_products_of_no_inputs_are_the_bias(num_rows, bits):
    rows, bias = torch.zeros(num_rows, 0).bfloat16(), draw(64)
    packed = WEIGHTS[bits].pack(torch.ones(64, 2).bfloat16())
    packed = packed[:, : int8.SCALE_LINES if bits == 8 else 0].contiguous()
    found = bfloat16_products.multiply(rows, packed, bias)
    assert torch.equal(found, bias.expand(num_rows, 64))
    activated = bfloat16_products.multiply(rows, packed, bias, is_activated=True)
    assert torch.equal(activated, bfloat16_products.silu_and_mul(found))


def test_inputs_may_have_any_layout():
    rows, weight = draw(2, 3, 64), draw(64, 64, seed=1)
    packed = bfloat16.pack(weight)
    found = bfloat16_products.multiply(rows.transpose(0, 1), packed)
    assert torch.equal(found, bfloat16_products.multiply(rows, packed).transpose(0, 1))


def test_weights_of_8_bits_may_be_large_or_zero(monkeypatch):
    weight = draw(160, 30) * draw(160, 1, seed=1).abs()
    weight[3], weight[4, 0] = 0, 3e38
    monkeypatch.setattr(int8, "_ROUNDED_OUTPUTS", 64)
    unpacked = int8.unpack(int8.pack(weight))
    assert not unpacked[3].any()
    size = weight.double().abs()
    step = size.amax(1, keepdim=True) / 127
    error = (unpacked.double() - weight.double()).abs()
    assert bool((error <= 0.501 * step + 2**-8 * (size + step)).all())


def test_only_whole_blocks_and_pairs_are_packed():
    assert bfloat16.can_pack(draw(64, 2))
    for weight in (draw(48, 2), draw(64, 3), draw(64, 2).float()):
        assert not bfloat16.can_pack(weight)


@pytest.mark.parametrize(
    ("rows", "more"),
    [
        (draw(3, 64).float(), ()),
        (draw(3, 64).to("meta"), ()),
        (draw(3, 32), ()),
        (draw(3, 64), (draw(64).float(),)),
        (draw(3, 64), (draw(32),)),
        (draw(3, 64), (None, draw(1, 64))),
    ],
)
def test_what_does_not_fit_is_refused(rows, more):
    packed = bfloat16.pack(draw(64, 64))
    with pytest.raises(RuntimeError, match="not bfloat16"):
        bfloat16_products.multiply(rows, packed, *more)
