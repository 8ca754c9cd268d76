"""Products of bfloat16 rows with the weights of linear layers on a CPU, by ``bfloat16_code``.

Of few rows, a product takes as long as reading the weights. They lie here as they are multiplied,
in pairs of numbers for 32 outputs at a time, which are tasks for the threads. A row's result
depends neither on the other rows nor on the number of threads.

Weights may have 8 bits (``engine.int8``): then half as much is read. Whole numbers of 8 bits are
bfloat16 numbers, which two tables look up, or become float32 ones where both numbers of a pair do;
the scales multiply the sums.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils

from ragaccel.engine import int8
from ragaccel.engine.bfloat16 import BLOCK_OUTPUTS, pack
from ragaccel.engine.bfloat16_code import (
    BYTES,
    FLOATS,
    HAS_DOT_PRODUCTS,
    HAS_TILES,
    HAS_WIDE_REGISTERS,
    I32,
    I64,
    INTS,
    LANES,
    TILE_BYTES,
    TILE_PAIRS,
    TILE_ROWS,
    WHOLE,
    Tasks,
    add_products,
    address_of,
    all_of,
    call_llvm,
    configure_tiles,
    count,
    exponential,
    factors_of,
    instruction,
    ints_of,
    load,
    load_narrow,
    load_pairs,
    multiply_tiles,
    new_counters,
    release_tiles,
    room_for,
    rounded,
    store_narrow,
)
from ragaccel.jit import compiled, inlined

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

TASKS_OF_A_THREAD = 8
"""Tasks of a product for each thread at least, so that threads end at about the same time."""
TILE = 8 if HAS_WIDE_REGISTERS else 6  # rows that are multiplied at a time
_AHEAD = 4096  # bytes of weights that are fetched early: 8 to 32 rows take 0.9 of the time
_SCALE_BYTES = int8.SCALE_LINES * int8.LINE


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
        packed: the weights, as ``bfloat16.pack`` or ``int8.pack`` packed them.
        bias: added to each row.
        added: added to the products.
        is_activated: return ``silu_and_mul`` of the products.

    Raises:
        RuntimeError: a shape, dtype or device is another.
    """
    num_blocks, num_pairs, _ = packed.shape
    is_int8 = int8.is_packed(packed)
    if is_int8 and packed.shape[2] == int8.LINE:
        num_pairs -= int8.SCALE_LINES
    else:
        _require(packed, (num_blocks, num_pairs, 2 * BLOCK_OUTPUTS))
    num_outputs = num_blocks * BLOCK_OUTPUTS
    _require(inputs, (*inputs.shape[:-1], 2 * num_pairs))
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
        is_int8,
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
    _run(0, 0, 0, 0, products.data_ptr(), activated.data_ptr(), 0, num_rows, 0, num_blocks)
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
    per_task = max(1, given[-1] // (TASKS_OF_A_THREAD * threads))
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
    bias = torch.randn(64, generator=generator).bfloat16()
    # Pairs that fill no tile and one, where there are tiles; the last rows need both groups twice.
    for num_inputs, num_rows in product((6, 2 * TILE_PAIRS), (1, 6, 11, 3 * TILE_ROWS + 1)):
        weight = torch.randn(64, num_inputs, generator=generator).bfloat16()
        small = int8.pack(weight)
        rows = torch.randn(num_rows, num_inputs, generator=generator).mul_(0.5).bfloat16()
        added = torch.randn(num_rows, 64, generator=generator).bfloat16()
        for packed, dense in ((pack(weight), weight), (small, int8.unpack(small))):
            given = rows, packed, bias, added
            found = multiply(*given).float()
            wanted = rows.float() @ dense.float().T + bias.float() + added.float()
            halves = found.chunk(2, -1)
            activated = multiply(*given, is_activated=True).float()
            both = (found, wanted), (activated, torch.nn.functional.silu(halves[0]) * halves[1])
            if not all(torch.allclose(*pair, rtol=0.02, atol=0.02) for pair in both):
                raise RuntimeError("the compiled products differ from torch's")


def _table(bits: torch.Tensor) -> list[Any]:
    """Return a table of 128 bytes as two vectors."""
    return [ir.Constant(BYTES, part.tolist()) for part in bits.to(torch.uint8).chunk(2)]


_BITS = torch.arange(128).bfloat16().view(torch.int16)  # of the magnitudes of weights of 8 bits
_LOW_BYTES, _HIGH_BYTES = _table(_BITS & 255), _table(_BITS >> 8)


def _look_up_int8(builder: Any, address: Any) -> list[tuple[Any, ...]]:
    """Return what ``load_pairs`` does, of weights of 8 bits, looked up in tables."""
    given = load(builder, address, BYTES)
    size = call_llvm(builder, "abs.v64i8", BYTES, given, ir.IntType(1)(0))
    low, high = (
        call_llvm(builder, "x86.avx512.vpermi2var.qi.512", BYTES, first, size, second)
        for first, second in (_LOW_BYTES, _HIGH_BYTES)
    )
    sign = builder.and_(given, ir.Constant(BYTES, [128] * int8.LINE))
    high = builder.or_(high, sign)
    vectors = []
    for half in range(2):
        places = (16 * lane + 8 * half + i for lane in range(4) for i in range(8))
        both = ir.Constant(ir.VectorType(I32, int8.LINE), [k for i in places for k in (i, i + 64)])
        vectors.append(factors_of(builder, builder.shuffle_vector(low, high, both)))
    return vectors


def _convert_int8(builder: Any, address: Any) -> list[tuple[Any, ...]]:
    """Return the factors of weights of 8 bits, converted one by one; ``_put_in_order`` their sums.

    Each 32 bits have the pairs of two outputs beside one another.
    """
    words = load(builder, address, INTS)
    found = []
    for shift in (24, 16, 8, 0):
        whole = builder.ashr(builder.shl(words, ints_of(shift)), ints_of(24))
        found.append(builder.sitofp(whole, FLOATS))
    return [tuple(found[:2]), tuple(found[2:])]


def _put_in_order(builder: Any, sums: Sequence[Any]) -> None:
    """Put a row's two sums of ``_convert_int8`` in the order of the outputs."""
    found = [builder.load(total) for total in sums]
    for half, total in enumerate(sums):
        order = [4 * (i // 4) + 2 * half + i % 4 // 2 + LANES * (i % 2) for i in range(LANES)]
        builder.store(builder.shuffle_vector(*found, ir.Constant(INTS, order)), total)


def _multiply_rows(num_rows: int, *, is_int8: bool) -> Any:
    """Return an instruction that multiplies at most so many rows by a block of weights.

    If there are fewer, the last one is multiplied in place of those that are not there.
    """

    @instruction(types.none, *[WHOLE] * 9)
    def multiply_rows(
        builder: Any,
        last: Any,
        rows: Any,
        row_bytes: Any,
        weights: Any,
        num_pairs: Any,
        bias: Any,
        added: Any,
        out: Any,
        out_bytes: Any,
    ) -> None:
        sums = [cgutils.alloca_once_value(builder, all_of(0.0)) for _ in range(2 * num_rows)]
        order = [
            builder.select(builder.icmp_signed("<", last, I64(row)), last, I64(row))
            for row in range(num_rows)
        ]
        if is_int8:
            columns, step = builder.add(weights, I64(_SCALE_BYTES)), int8.LINE
            load_columns = _look_up_int8 if HAS_DOT_PRODUCTS else _convert_int8
        else:
            columns, step, load_columns = weights, 2 * int8.LINE, load_pairs
        own = [address_of(builder, rows, row_bytes, row) for row in order]
        # Early loads do not help a single row of 16-bit weights.
        fetched = range(_AHEAD, _AHEAD + step, 64) if is_int8 or num_rows > 1 else ()
        add_products(builder, sums, own, (columns, I64(step)), num_pairs, load_columns, fetched)
        if is_int8:
            for both in zip(sums[::2], sums[1::2], strict=True):
                if not HAS_DOT_PRODUCTS:
                    _put_in_order(builder, both)
                _scale(builder, weights, both)
        _finish(builder, sums, order, bias, added, out, out_bytes)

    return multiply_rows


def _multiply_by_tiles(num_groups: int, *, is_int8: bool) -> Any:
    """Return an instruction that multiplies the rows of so many groups of tiles by a block."""

    @instruction(types.none, *[WHOLE] * 9)
    def multiply_by_tiles(
        builder: Any,
        last: Any,
        rows: Any,
        row_bytes: Any,
        weights: Any,
        num_pairs: Any,
        bias: Any,
        added: Any,
        out: Any,
        out_bytes: Any,
    ) -> None:
        num_most = num_groups * TILE_ROWS
        sums = room_for(builder, num_most * 2 * TILE_BYTES), I64(2 * TILE_BYTES)
        columns, step = weights, 2 * int8.LINE
        if is_int8:
            columns, step = builder.add(weights, I64(_SCALE_BYTES)), int8.LINE
        multiply_tiles(
            builder, (rows, row_bytes), (columns, I64(step)), num_pairs, sums, range(num_groups),
            load_columns=_look_up_int8 if is_int8 else None,
        )  # fmt: skip
        is_last = builder.icmp_signed("<", last, I64(num_most - 1))
        num_rows = builder.add(builder.select(is_last, last, I64(num_most - 1)), I64(1))
        with cgutils.for_range(builder, num_rows) as loop:
            own = _places(builder, *sums, [loop.index], TILE_BYTES)
            found = [cgutils.alloca_once_value(builder, load(builder, at, FLOATS)) for at in own]
            if is_int8:
                _scale(builder, weights, found)
            _finish(builder, found, [loop.index], bias, added, out, out_bytes)

    return multiply_by_tiles


def _scale(builder: Any, weights: Any, sums: Sequence[Any]) -> None:
    """Multiply a row's two sums by the scales of a block of weights of 8 bits."""
    for half, total in enumerate(sums):
        scale = load(builder, builder.add(weights, I64(64 * half)), FLOATS)
        builder.store(builder.fmul(builder.load(total), scale), total)


def _finish(
    builder: Any,
    sums: Sequence[Any],
    order: list[Any],
    bias: Any,
    added: Any,
    out: Any,
    out_bytes: Any,
) -> None:
    """Add a bias and ``added`` to the sums of rows if they are not 0, and write them rounded."""
    for source, row in ((bias, I64(0)), (added, out_bytes)):
        with builder.if_then(builder.icmp_signed("!=", source, I64(0))):
            for total, place in zip(sums, _places(builder, source, row, order), strict=True):
                wide = load_narrow(builder, place)
                builder.store(builder.fadd(builder.load(total), wide), total)
    for total, place in zip(sums, _places(builder, out, out_bytes, order), strict=True):
        store_narrow(builder, builder.load(total), place)


def _places(
    builder: Any, address: Any, step: Any, order: list[Any], num_bytes: int = LANES * 2
) -> list[Any]:
    """Return the addresses of a block's outputs, two vectors of so many bytes for each row."""
    rows = (address_of(builder, address, step, row) for row in order)
    return [builder.add(row, I64(half * num_bytes)) for row in rows for half in range(2)]


@instruction(types.none, WHOLE, WHOLE, WHOLE)
def _silu_and_mul(builder: Any, gate: Any, values: Any, out: Any) -> None:
    """Write SiLU of 32 numbers times others; both are rounded."""
    for half in range(2):
        place = I64(half * LANES * 2)
        own, others = (load_narrow(builder, builder.add(one, place)) for one in (gate, values))
        below = builder.fadd(all_of(1.0), exponential(builder, builder.fneg(own)))
        found = builder.fmul(rounded(builder, builder.fdiv(own, below)), others)
        store_narrow(builder, found, builder.add(out, place))


@inlined
def _row_bytes(call: Any) -> int:
    """Return the bytes of a row of products; the blocks are half of them if they are activated."""
    return int(call.num_blocks * BLOCK_OUTPUTS * (4 if call.activated != 0 else 2))


@inlined
def _block_bytes(call: Any) -> int:
    """Return the bytes of a block of weights."""
    if call.is_int8 != 0:
        return int(_SCALE_BYTES + call.num_pairs * BLOCK_OUTPUTS * 2)
    return int(call.num_pairs * BLOCK_OUTPUTS * 4)


@inlined
def _operands(
    call: Any, block: int, row: int
) -> tuple[int, int, int, int, int, int, int, int, int]:
    """Return the operands of an instruction that multiplies rows by a block, from ``row`` on."""
    row_bytes, out_bytes = call.num_pairs * 4, _row_bytes(call)
    column = block * BLOCK_OUTPUTS * 2
    return (
        call.num_rows - row - 1,
        call.rows + row * row_bytes,
        row_bytes,
        call.weights + block * _block_bytes(call),
        call.num_pairs,
        call.bias + column if call.bias != 0 else 0,
        call.added + row * out_bytes + column if call.added != 0 else 0,
        call.out + row * out_bytes + column,
        out_bytes,
    )


def _by_weights(make: Any, number: int) -> Any:
    """Return a function that multiplies rows by a block of either weights, from a row on."""
    by_pairs, by_int8 = (make(number, is_int8=is_int8) for is_int8 in (False, True))

    @inlined
    def multiply(call: Any, block: int, row: int) -> None:
        if call.is_int8 != 0:
            by_int8(*_operands(call, block, row))
        else:
            by_pairs(*_operands(call, block, row))

    return multiply


_multiply_tile, _multiply_half, _multiply_one = (
    _by_weights(_multiply_rows, number) for number in (TILE, TILE // 2, 1)
)
_multiply_group, _multiply_groups = (_by_weights(_multiply_by_tiles, number) for number in (1, 2))


@compiled  # not inlined: it has several callers
def _multiply_by_rows(call: Any, block: int) -> None:
    """Multiply all rows by a block of weights."""
    row = 0
    while row < call.num_rows:
        left = call.num_rows - row
        if left > TILE // 2:
            _multiply_tile(call, block, row)
            row += TILE
        elif left > 1:
            _multiply_half(call, block, row)
            row += TILE // 2
        else:
            _multiply_one(call, block, row)
            row += 1


@inlined
def _configure(num_rows: int) -> None:
    """Prepare this thread's tiles for so many rows, or the first 32 of them."""
    num_first, num_second = min(num_rows, TILE_ROWS), min(num_rows - TILE_ROWS, TILE_ROWS)
    configure_tiles(max(1, num_first), max(1, num_second))  # tiles of no rows end the process


@compiled  # not inlined: it has several callers
def _multiply_all(call: Any, block: int) -> None:
    """Multiply all rows by a block of weights, by tiles if its pairs fill them."""
    if call.num_pairs % TILE_PAIRS != 0:
        _multiply_by_rows(call, block)
        return
    row, num_rows = 0, call.num_rows
    while row < num_rows:
        if num_rows > 2 * TILE_ROWS:  # of up to 32, tiles are prepared once for all blocks
            _configure(num_rows - row)
        if num_rows - row > TILE_ROWS:
            _multiply_groups(call, block, row)
        else:
            _multiply_group(call, block, row)
        row += 2 * TILE_ROWS


_multiply_block = _multiply_all if HAS_TILES else _multiply_by_rows


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


@compiled
def multiply_blocks(call: Any) -> None:
    """Multiply all rows by blocks of weights until none is left; ``call`` is one of ``RECORD``."""
    first = count(call.begun) * call.per_task
    _configure(call.num_rows)
    while first < call.num_blocks:
        for block in range(first, min(first + call.per_task, call.num_blocks)):
            if call.activated != 0:
                _activate_block(call, block)
            else:
                _multiply_block(call, block)
        first = count(call.begun) * call.per_task
    release_tiles()


def _run_tasks(calls: Any) -> None:
    multiply_blocks(carray(calls, (1,))[0])


_TASKS = Tasks(
    _run_tasks,
    (
        # Addresses, whether weights have 8 bits, the numbers N, I / 2 and O / 32, the blocks of a
        # task, and the address of the number of tasks begun. If products are activated, the blocks
        # are half of those in ``out``.
        "rows", "weights", "bias", "added", "out", "activated", "is_int8",
        "num_rows", "num_pairs", "num_blocks", "per_task", "begun",
    ),
)  # fmt: skip
RECORD = _TASKS.record
