"""Products of bfloat16 rows with the weights of linear layers on a CPU, by ``bfloat16_code``.

Of few rows, a product takes as long as reading the weights. They lie here as they are multiplied,
in pairs of numbers for 32 outputs at a time, which are tasks for the threads. A row's result
depends neither on the other rows nor on the number of threads.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from numba import carray, types
from numba.core import cgutils

from ragaccel.engine.bfloat16 import BLOCK_OUTPUTS, pack
from ragaccel.engine.bfloat16_code import (
    FLOATS,
    I64,
    LANES,
    NARROW,
    TILE,
    WHOLE,
    Tasks,
    add_products,
    address_of,
    all_of,
    count,
    exponential,
    instruction,
    load,
    new_counters,
    store,
)
from ragaccel.jit import compiled, inlined

if TYPE_CHECKING:
    from torch import Tensor

_TASKS_OF_A_THREAD = 8  # at least, so that threads end at about the same time
_AHEAD = 4096  # bytes of weights that are fetched early: 8 to 32 rows take 0.9 of the time


def multiply(
    inputs: Tensor,
    packed: Tensor,
    bias: Tensor | None = None,
    added: Tensor | None = None,
    *,
    is_activated: bool = False,
) -> Tensor:
    """Return the products of inputs [.., I] and weights, plus a bias [O] and ``added``. [.., O].

    All are summed in float32, and rounded once.

    Args:
        inputs: the rows.
        packed: the weights, as they were packed.
        bias: added to each row.
        added: added to the products.
        is_activated: return ``silu_and_mul`` of the products.

    Raises:
        RuntimeError: a shape, dtype or device is another.
    """
    num_blocks, num_pairs, _ = packed.shape
    num_outputs = num_blocks * BLOCK_OUTPUTS
    _require(inputs, (*inputs.shape[:-1], 2 * num_pairs))
    _require(packed, (num_blocks, num_pairs, 2 * BLOCK_OUTPUTS))
    out_shape = (*inputs.shape[:-1], num_outputs)
    for given, shape in ((bias, (num_outputs,)), (added, out_shape)):
        if given is not None:
            _require(given, shape)
    inputs = inputs.contiguous()
    out = inputs.new_empty(out_shape)
    bias = None if bias is None else bias.contiguous()
    added = None if added is None else added.contiguous()
    activated = _new_halves(out) if is_activated else None
    _run(
        inputs.data_ptr(),
        packed.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if added is None else added.data_ptr(),
        out.data_ptr(),
        0 if activated is None else activated.data_ptr(),
        out.numel() // num_outputs,
        num_pairs,
        num_blocks // 2 if is_activated else num_blocks,
    )
    return out if activated is None else activated


def silu_and_mul(products: Tensor) -> Tensor:
    """Return SiLU of the first half of each row times the other one. [.., O] to [.., O / 2].

    Raises:
        RuntimeError: the dtype or device is another, or the halves are not whole blocks.
    """
    _require(products, products.shape)
    products = products.contiguous()
    activated, num_outputs = _new_halves(products), products.shape[-1]
    num_rows, num_blocks = products.numel() // num_outputs, num_outputs // BLOCK_OUTPUTS // 2
    _run(0, 0, 0, 0, products.data_ptr(), activated.data_ptr(), num_rows, 0, num_blocks)
    return activated


def _new_halves(products: Tensor) -> Tensor:
    *shape, num_outputs = products.shape
    if num_outputs % (2 * BLOCK_OUTPUTS):
        raise RuntimeError(f"halves of {num_outputs} outputs are not whole blocks")
    return products.new_empty(*shape, num_outputs // 2)


def _run(*given: int) -> None:
    """Run tasks; ``given`` are the numbers of a record up to that of blocks."""
    threads = torch.get_num_threads()
    _begun, begun_at = new_counters(1)
    per_task = max(1, given[-1] // (_TASKS_OF_A_THREAD * threads))
    _TASKS.run(threads, *given, per_task, begun_at)


def _require(given: Tensor, shape: tuple[int, ...]) -> None:
    if given.dtype != torch.bfloat16 or not given.is_cpu or given.shape != shape:
        raise RuntimeError(
            f"got {given.dtype} {tuple(given.shape)} on {given.device}, "
            f"not bfloat16 {shape} on the CPU"
        )


def check() -> None:
    """Compile ``multiply``, and compare it with torch.

    Raises:
        RuntimeError: it differs by more than bfloat16 rounds.
    """
    generator = torch.Generator().manual_seed(0)
    weight, bias = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((64, 6), (64,))
    )
    for num_rows in (1, 6, 11):
        rows = torch.randn(num_rows, 6, generator=generator).bfloat16()
        added = torch.randn(num_rows, 64, generator=generator).bfloat16()
        found = multiply(rows, pack(weight), bias, added).float()
        wanted = rows.float() @ weight.float().T + bias.float() + added.float()
        halves = multiply(rows, pack(weight), bias, added).float().chunk(2, -1)
        activated = multiply(rows, pack(weight), bias, added, is_activated=True).float()
        both = (found, wanted), (activated, torch.nn.functional.silu(halves[0]) * halves[1])
        if not all(torch.allclose(*pair, rtol=0.02, atol=0.02) for pair in both):
            raise RuntimeError("the compiled products differ from torch's")


def _multiply_rows(num_rows: int) -> Any:
    """Return an instruction that multiplies so many rows by a block of weights."""

    @instruction(types.none, *[WHOLE] * 8)
    def multiply_rows(
        builder: Any,
        rows: Any,
        row_bytes: Any,
        weights: Any,
        num_pairs: Any,
        bias: Any,
        added: Any,
        out: Any,
        out_bytes: Any,
    ) -> None:
        numbers = range(2 * num_rows)
        sums = [cgutils.alloca_once_value(builder, all_of(0.0)) for _ in numbers]
        columns = weights, I64(64 * 2)
        ahead = _AHEAD if num_rows > 1 else 0
        add_products(builder, sums, (rows, row_bytes), columns, num_pairs, ahead)
        for source, step in ((bias, I64(0)), (added, out_bytes)):
            with builder.if_then(builder.icmp_signed("!=", source, I64(0))):
                for total, place in zip(sums, _places(builder, source, step, numbers), strict=True):
                    wide = builder.fpext(load(builder, place, NARROW, 2), FLOATS)
                    builder.store(builder.fadd(builder.load(total), wide), total)
        for total, place in zip(sums, _places(builder, out, out_bytes, numbers), strict=True):
            store(builder, builder.fptrunc(builder.load(total), NARROW), place, 2)

    return multiply_rows


def _places(builder: Any, address: Any, step: Any, numbers: range) -> list[Any]:
    """Return the addresses of a block's outputs, two vectors for each row."""
    return [
        builder.add(address_of(builder, address, step, number // 2), I64(number % 2 * LANES * 2))
        for number in numbers
    ]


_multiply_tile, _multiply_half, _multiply_one = map(_multiply_rows, (TILE, TILE // 2, 1))


@instruction(types.none, WHOLE, WHOLE, WHOLE)
def _silu_and_mul(builder: Any, gate: Any, values: Any, out: Any) -> None:
    """Write SiLU of 32 numbers times others; both are rounded."""
    for half in range(2):
        place = I64(half * LANES * 2)
        own, others = (
            builder.fpext(load(builder, builder.add(one, place), NARROW, 2), FLOATS)
            for one in (gate, values)
        )
        below = builder.fadd(all_of(1.0), exponential(builder, builder.fneg(own)))
        opened = builder.fptrunc(builder.fdiv(own, below), NARROW)
        found = builder.fmul(builder.fpext(opened, FLOATS), others)
        store(builder, builder.fptrunc(found, NARROW), builder.add(out, place), 2)


@inlined
def _row_bytes(call: Any) -> int:
    """Return the bytes of a row of products; the blocks are half of them if they are activated."""
    return int(call.num_blocks * BLOCK_OUTPUTS * (4 if call.activated != 0 else 2))


@inlined
def _operands(call: Any, block: int, row: int) -> tuple[int, int, int, int, int, int, int, int]:
    """Return the operands of an instruction that multiplies rows by a block, from ``row`` on."""
    row_bytes, out_bytes = call.num_pairs * 4, _row_bytes(call)
    column = block * BLOCK_OUTPUTS * 2
    return (
        call.rows + row * row_bytes,
        row_bytes,
        call.weights + block * BLOCK_OUTPUTS * row_bytes,
        call.num_pairs,
        call.bias + column if call.bias != 0 else 0,
        call.added + row * out_bytes + column if call.added != 0 else 0,
        call.out + row * out_bytes + column,
        out_bytes,
    )


@compiled  # not inlined: it has several callers
def _multiply_block(call: Any, block: int) -> None:
    """Multiply all rows by a block of weights.

    The last rows are multiplied beside some before them, again and to the same bits, where that
    takes less time than one at a time.
    """
    num_rows, row = call.num_rows, 0
    while row + TILE <= num_rows:
        _multiply_tile(*_operands(call, block, row))
        row += TILE
    left = num_rows - row
    if left > TILE // 2 and num_rows >= TILE:
        _multiply_tile(*_operands(call, block, num_rows - TILE))
    elif left > 1 and num_rows >= TILE // 2:
        if left > TILE // 2:
            _multiply_half(*_operands(call, block, 0))
        _multiply_half(*_operands(call, block, num_rows - TILE // 2))
    else:
        for one in range(row, num_rows):
            _multiply_one(*_operands(call, block, one))


@inlined
def _activate_block(call: Any, block: int) -> None:
    """Multiply all rows by a block of each half of the weights, if any; activate the products."""
    other = block + call.num_blocks
    if call.weights != 0:
        _multiply_block(call, block)
        _multiply_block(call, other)
    for row in range(call.num_rows):
        products = call.out + row * _row_bytes(call)
        activated = call.activated + row * _row_bytes(call) // 2
        _silu_and_mul(
            products + block * BLOCK_OUTPUTS * 2, products + other * BLOCK_OUTPUTS * 2,
            activated + block * BLOCK_OUTPUTS * 2,
        )  # fmt: skip


def _run_tasks(calls: Any) -> None:
    """Multiply all rows by blocks of weights until none is left."""
    call = carray(calls, (1,))[0]
    first = count(call.begun) * call.per_task
    while first < call.num_blocks:
        for block in range(first, min(first + call.per_task, call.num_blocks)):
            if call.activated != 0:
                _activate_block(call, block)
            else:
                _multiply_block(call, block)
        first = count(call.begun) * call.per_task


_TASKS = Tasks(
    _run_tasks,
    (
        # Addresses, the numbers N, I / 2 and O / 32, the blocks of a task, and the address of the
        # number of tasks begun. If products are activated, the blocks are half of those in ``out``.
        "rows", "weights", "bias", "added", "out", "activated",
        "num_rows", "num_pairs", "num_blocks", "per_task", "begun",
    ),
)  # fmt: skip
