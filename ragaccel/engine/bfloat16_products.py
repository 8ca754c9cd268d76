"""Products of bfloat16 rows with the weights of linear layers on a CPU, by ``bfloat16_code``.

Of few rows, a product takes as long as reading the weights. They lie here as they are multiplied,
in pairs of numbers for 32 outputs at a time; some of these blocks, and of many rows some rows, are
a task for a thread. A row's result depends neither on the other rows nor on the number of threads.

Weights may have 8 bits (``engine.int8``): then half as much is read. Whole numbers of 8 bits are
bfloat16 numbers, which two tables look up, or become float32 ones where both numbers of a pair do;
the scales multiply the sums.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
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

# Of a thread at least, so that threads end at about the same time. Of many rows there are fewer:
# each task reads its rows and weights anew.
_TASKS_IF_FEW, _TASKS_IF_MANY = 8, 4
TILE = 8 if HAS_WIDE_REGISTERS else 6  # rows that are multiplied at a time
_AHEAD = 4096  # bytes of weights that are fetched early: 8 to 32 rows take 0.9 of the time
_SCALE_BYTES = int8.SCALE_LINES * int8.LINE
_GROUP = 2 * TILE_ROWS  # rows that are multiplied by tiles, or activated, at a time
_HALVES_BYTES = 2 * BLOCK_OUTPUTS * 2  # of a row's products of two blocks
# Of many rows, a group's pairs of so many tiles stay in the first cache while they are multiplied
# by so many blocks: up to twice as fast as block by block. A task's weights (of each half, if its
# products are activated) have at most so many bytes, 1.25 MiB, to stay in the second cache.
_CHUNK, _BLOCKS, _MAX_TASK_BYTES = 10, 8, 5 << 18
_SUM_BYTES = _GROUP * BLOCK_OUTPUTS * 4  # of a block and a group of rows


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
    bias = None if bias is None else bias.contiguous()
    added = None if added is None else added.contiguous()
    out = inputs.new_empty(*out_shape[:-1], _half(num_outputs) if is_activated else num_outputs)
    _run(
        inputs.data_ptr(),
        packed.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if added is None else added.data_ptr(),
        0 if is_activated else out.data_ptr(),
        out.data_ptr() if is_activated else 0,
        is_int8,
        out.numel() // out.shape[-1],
        num_pairs,
        num_blocks // 2 if is_activated else num_blocks,
    )
    return out


def silu_and_mul(products: Tensor) -> Tensor:
    """Return SiLU of the first half of each row times the other one. [.., O] to [.., O / 2].

    Raises:
        RuntimeError: the dtype or device is another, or the halves are not whole blocks.
    """
    _require(products, products.shape)
    products, num_outputs = products.contiguous(), products.shape[-1]
    activated = products.new_empty(*products.shape[:-1], _half(num_outputs))
    num_rows, num_blocks = products.numel() // num_outputs, num_outputs // BLOCK_OUTPUTS // 2
    _run(0, 0, 0, 0, products.data_ptr(), activated.data_ptr(), 0, num_rows, 0, num_blocks)
    return activated


def _half(num_outputs: int) -> int:
    if num_outputs % (2 * BLOCK_OUTPUTS):
        raise RuntimeError(f"halves of {num_outputs} outputs are not whole blocks")
    return num_outputs // 2


def _run(*given: int) -> None:
    """Run tasks; ``given`` are the numbers of a record up to that of blocks."""
    _begun, begun_at = new_counters(1)
    task_rows, task_blocks = divide(*given[-3:])
    _TASKS.run(torch.get_num_threads(), *given, int(task_rows), int(task_blocks), begun_at)


def divide(num_rows: int, num_pairs: Any, num_blocks: Any) -> tuple[Any, Any]:
    """Return the rows and the blocks of a task; numbers of pairs and blocks may be in arrays."""
    threads = torch.get_num_threads()
    if not HAS_TILES or num_rows <= _GROUP:
        return max(1, num_rows), np.maximum(1, num_blocks // (_TASKS_IF_FEW * threads))
    tasks = _TASKS_IF_MANY * threads
    cached = _MAX_TASK_BYTES // np.maximum(1, num_pairs * 4 * BLOCK_OUTPUTS)
    task_blocks = np.maximum(1, np.minimum(num_blocks // tasks, np.minimum(_BLOCKS, cached)))
    tasks_of_a_block = np.maximum(1, tasks * task_blocks // np.maximum(1, num_blocks))
    groups = -(-num_rows // _GROUP)
    return -(-groups // tasks_of_a_block) * _GROUP, task_blocks


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
    # Pairs that fill no tile, and those of two chunks; the last rows need both groups twice.
    sizes = 6, 2 * TILE_PAIRS * (_CHUNK + 1)
    for num_inputs, num_rows in product(sizes, (1, 6, 11, 3 * TILE_ROWS + 1)):
        weight = torch.randn(64, num_inputs, generator=generator).bfloat16()
        small = int8.pack(weight)
        rows = torch.randn(num_rows, num_inputs, generator=generator)
        rows = rows.mul_(num_inputs**-0.5).bfloat16()
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

    @instruction(types.none, *[WHOLE] * 10)
    def multiply_rows(
        builder: Any,
        last: Any,
        rows: Any,
        row_bytes: Any,
        weights: Any,
        num_pairs: Any,
        bias: Any,
        added: Any,
        added_bytes: Any,
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
        _finish(builder, sums, order, bias, (added, added_bytes), (out, out_bytes))

    return multiply_rows


def _add_by_tiles(num_groups: int, *, is_int8: bool) -> Any:
    """Return an instruction that adds products of rows and some pairs of a block to their sums.

    The rows are those of so many groups of tiles. The first pairs' products replace the sums.
    """

    @instruction(types.none, *[WHOLE] * 6)
    def add_by_tiles(
        builder: Any,
        rows: Any,
        row_bytes: Any,
        weights: Any,
        first_pair: Any,
        num_pairs: Any,
        sums: Any,
    ) -> None:
        columns, step = weights, I64(2 * int8.LINE)
        if is_int8:
            columns, step = builder.add(weights, I64(_SCALE_BYTES)), I64(int8.LINE)
        own = address_of(builder, rows, I64(4), first_pair)
        multiply_tiles(
            builder, (own, row_bytes), (address_of(builder, columns, step, first_pair), step),
            num_pairs, (sums, I64(2 * TILE_BYTES)), range(num_groups),
            is_added=builder.icmp_signed("!=", first_pair, I64(0)),
            load_columns=_look_up_int8 if is_int8 else None,
        )  # fmt: skip

    return add_by_tiles


def _finish_sums(*, is_int8: bool) -> Any:
    """Return an instruction that writes the products of rows and a block, given their sums."""

    @instruction(types.none, *[WHOLE] * 8)
    def finish_sums(
        builder: Any,
        num_rows: Any,
        sums: Any,
        weights: Any,
        bias: Any,
        added: Any,
        added_bytes: Any,
        out: Any,
        out_bytes: Any,
    ) -> None:
        with cgutils.for_range(builder, num_rows) as loop:
            own = _places(builder, sums, I64(2 * TILE_BYTES), [loop.index], TILE_BYTES)
            found = [cgutils.alloca_once_value(builder, load(builder, at, FLOATS)) for at in own]
            if is_int8:
                _scale(builder, weights, found)
            _finish(builder, found, [loop.index], bias, (added, added_bytes), (out, out_bytes))

    return finish_sums


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
    added: tuple[Any, Any],
    out: tuple[Any, Any],
) -> None:
    """Add a bias and ``added`` to the sums of rows if they are not 0, and write them rounded.

    ``added`` and ``out`` are addresses and the bytes from a row to the next.
    """
    for source, row in ((bias, I64(0)), added):
        with builder.if_then(builder.icmp_signed("!=", source, I64(0))):
            for total, place in zip(sums, _places(builder, source, row, order), strict=True):
                wide = load_narrow(builder, place)
                builder.store(builder.fadd(builder.load(total), wide), total)
    for total, place in zip(sums, _places(builder, *out, order), strict=True):
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
def _weights_of(call: Any, block: int) -> int:
    """Return the address of a block of weights."""
    if call.is_int8 != 0:
        return int(call.weights + block * (_SCALE_BYTES + call.num_pairs * BLOCK_OUTPUTS * 2))
    return int(call.weights + block * call.num_pairs * BLOCK_OUTPUTS * 4)


@inlined
def _added_of(call: Any, block: int, row: int) -> tuple[int, int, int]:
    """Return where a block's bias is, 0 for none, and what is added to rows, and a row's bytes."""
    column, row_bytes = block * BLOCK_OUTPUTS * 2, _row_bytes(call)
    return (
        call.bias + column if call.bias != 0 else 0,
        call.added + row * row_bytes + column if call.added != 0 else 0,
        row_bytes,
    )


@instruction(WHOLE)
def _products_room(builder: Any) -> Any:
    """Return the address of a block's products of both halves and a group of rows."""
    return room_for(builder, _GROUP * _HALVES_BYTES)


@instruction(WHOLE)
def _sums_room(builder: Any) -> Any:
    """Return the address of the sums of some blocks and a group of rows."""
    return room_for(builder, _BLOCKS * _SUM_BYTES)


@inlined
def _multiplied(call: Any, block: int) -> range:
    """Return the blocks of weights for a block: itself, or one of each half, to be activated."""
    return range(block, call.num_blocks * (2 if call.activated != 0 else 1), call.num_blocks)


@inlined
def _out_of(call: Any, block: int, row: int, room: int) -> tuple[int, int]:
    """Return where products of rows and a block of weights are written, and a row's bytes."""
    if call.activated != 0:
        return room + block // call.num_blocks * BLOCK_OUTPUTS * 2, _HALVES_BYTES
    row_bytes = call.num_blocks * BLOCK_OUTPUTS * 2
    return call.out + row * row_bytes + block * BLOCK_OUTPUTS * 2, row_bytes


@inlined
def _activate(
    call: Any, block: int, row: int, stop: int, gate: int, values: int, step: int
) -> None:
    """Activate the products of rows and a block of each half; ``step`` is their rows' bytes."""
    row_bytes = call.num_blocks * BLOCK_OUTPUTS * 2
    out = call.activated + row * row_bytes + block * BLOCK_OUTPUTS * 2
    for at in range(stop - row):
        _silu_and_mul(gate + at * step, values + at * step, out + at * row_bytes)


@inlined
def _activate_room(call: Any, block: int, row: int, stop: int, room: int) -> None:
    """Activate the products of rows and a block of each half, which lie in ``room``, if wanted."""
    if call.activated != 0:
        _activate(call, block, row, stop, room, room + BLOCK_OUTPUTS * 2, _HALVES_BYTES)


def _of_both(make: Any, *given: int) -> Any:
    """Return the instructions for weights of 16 bits and of 8."""
    return (make(*given, is_int8=is_int8) for is_int8 in (False, True))


def _multiply_some(number: int) -> Any:
    """Return a function that multiplies at most so many rows by a block of weights."""
    by_pairs, by_int8 = _of_both(_multiply_rows, number)

    @inlined
    def multiply(call: Any, block: int, row: int, stop: int, out: int, out_bytes: int) -> None:
        row_bytes, weights = call.num_pairs * 4, _weights_of(call, block)
        rows, last = call.rows + row * row_bytes, stop - row - 1
        bias, added, added_bytes = _added_of(call, block, row)
        if call.is_int8 != 0:
            by_int8(
                last, rows, row_bytes, weights, call.num_pairs, bias, added, added_bytes, out,
                out_bytes,
            )  # fmt: skip
        else:
            by_pairs(
                last, rows, row_bytes, weights, call.num_pairs, bias, added, added_bytes, out,
                out_bytes,
            )  # fmt: skip

    return multiply


_multiply_tile, _multiply_half, _multiply_one = map(_multiply_some, (TILE, TILE // 2, 1))


@compiled  # not inlined: it has several callers
def _multiply_by_rows(call: Any, block: int, row: int, stop: int, place: tuple[int, int]) -> None:
    """Multiply rows by a block of weights; ``place`` is that of the products, as of ``_out_of``."""
    out, out_bytes = place
    while row < stop:
        if stop - row > TILE // 2:
            _multiply_tile(call, block, row, stop, out, out_bytes)
            row, out = row + TILE, out + TILE * out_bytes
        elif stop - row > 1:
            _multiply_half(call, block, row, stop, out, out_bytes)
            row, out = row + TILE // 2, out + TILE // 2 * out_bytes
        else:
            _multiply_one(call, block, row, stop, out, out_bytes)
            row, out = row + 1, out + out_bytes


@compiled  # not inlined: it has several callers
def _multiply_blocks_by_rows(call: Any, first: int, end: int, row: int, stop: int) -> None:
    """Multiply rows by blocks of weights."""
    room = _products_room()
    step = _GROUP if call.activated != 0 else max(1, stop - row)
    for block in range(first, end):
        for start in range(row, stop, step):
            some = min(start + step, stop)
            for own in _multiplied(call, block):
                _multiply_by_rows(call, own, start, some, _out_of(call, own, start, room))
            _activate_room(call, block, start, some, room)


_add_half, _add_half_int8 = _of_both(_add_by_tiles, 1)
_add_group, _add_group_int8 = _of_both(_add_by_tiles, 2)
_finish_pairs, _finish_int8 = _of_both(_finish_sums)


@inlined
def _add_chunk(call: Any, block: int, row: int, stop: int, pair: int, num: int, sums: int) -> None:
    """Add the products of a group of rows and some pairs of a block to their sums."""
    row_bytes, weights = call.num_pairs * 4, _weights_of(call, block)
    rows = call.rows + row * row_bytes
    if stop - row > TILE_ROWS:
        if call.is_int8 != 0:
            _add_group_int8(rows, row_bytes, weights, pair, num, sums)
        else:
            _add_group(rows, row_bytes, weights, pair, num, sums)
    elif call.is_int8 != 0:
        _add_half_int8(rows, row_bytes, weights, pair, num, sums)
    else:
        _add_half(rows, row_bytes, weights, pair, num, sums)


@inlined
def _finish_block(
    call: Any, block: int, row: int, stop: int, sums: int, out: tuple[int, int]
) -> None:
    """Write the products of a group of rows and a block, given their sums."""
    weights = _weights_of(call, block)
    bias, added, added_bytes = _added_of(call, block, row)
    if call.is_int8 != 0:
        _finish_int8(stop - row, sums, weights, bias, added, added_bytes, out[0], out[1])
    else:
        _finish_pairs(stop - row, sums, weights, bias, added, added_bytes, out[0], out[1])


@compiled  # not inlined: it has several callers
def _multiply_blocks_by_tiles(call: Any, first: int, end: int, row: int, stop: int) -> None:
    """Multiply a group of rows by blocks of weights, some at a time, whose sums are kept."""
    sums, room = _sums_room(), _products_room()
    # A single group reads the weights once, from memory, which takes longest: it needs no chunks.
    chunk = call.num_pairs
    if call.num_rows > _GROUP:
        num_tiles = call.num_pairs // TILE_PAIRS
        num_chunks = (num_tiles + _CHUNK - 1) // _CHUNK
        chunk = (num_tiles + num_chunks - 1) // num_chunks * TILE_PAIRS
    step = _BLOCKS // 2 if call.activated != 0 else _BLOCKS
    for start in range(first, end, step):
        for pair in range(0, call.num_pairs, chunk):
            num_pairs, place = min(chunk, call.num_pairs - pair), sums
            is_last = pair + num_pairs == call.num_pairs
            for block in range(start, min(start + step, end)):
                for own in _multiplied(call, block):
                    _add_chunk(call, own, row, stop, pair, num_pairs, place)
                    if is_last:
                        _finish_block(call, own, row, stop, place, _out_of(call, own, row, room))
                    place += _SUM_BYTES
                if is_last:
                    _activate_room(call, block, row, stop, room)


@compiled  # not inlined: it has several callers
def _multiply_all_by_tiles(call: Any, first: int, end: int, row: int, stop: int) -> None:
    """Multiply rows by blocks of weights, by tiles if their pairs fill them."""
    if call.num_pairs == 0 or call.num_pairs % TILE_PAIRS != 0:
        _multiply_blocks_by_rows(call, first, end, row, stop)
        return
    for start in range(row, stop, _GROUP):
        some = min(start + _GROUP, stop)
        num_first = min(some - start, TILE_ROWS)
        configure_tiles(num_first, max(1, some - start - num_first))  # none would end the process
        _multiply_blocks_by_tiles(call, first, end, start, some)
    release_tiles()


_multiply_task = _multiply_all_by_tiles if HAS_TILES else _multiply_blocks_by_rows


@inlined
def _activate_task(call: Any, first: int, end: int, row: int, stop: int) -> None:
    """Activate products of rows and blocks that are there."""
    row_bytes = _row_bytes(call)
    for block in range(first, end):
        gate = call.out + row * row_bytes + block * BLOCK_OUTPUTS * 2
        values = gate + call.num_blocks * BLOCK_OUTPUTS * 2
        _activate(call, block, row, stop, gate, values, row_bytes)


@compiled
def multiply_blocks(call: Any) -> None:
    """Run tasks of a product until none is left; ``call`` is one of ``RECORD``."""
    num_tasks = max(1, (call.num_rows + call.task_rows - 1) // call.task_rows)  # of a block
    task = count(call.begun)
    while task // num_tasks * call.task_blocks < call.num_blocks:
        first = task // num_tasks * call.task_blocks
        end = min(first + call.task_blocks, call.num_blocks)
        row = task % num_tasks * call.task_rows
        stop = min(row + call.task_rows, call.num_rows)
        if call.out == 0 or call.activated == 0:
            _multiply_task(call, first, end, row, stop)
        else:
            _activate_task(call, first, end, row, stop)
        task = count(call.begun)


def _run_tasks(calls: Any) -> None:
    multiply_blocks(carray(calls, (1,))[0])


_TASKS = Tasks(
    _run_tasks,
    (
        # Addresses, whether weights have 8 bits, the numbers N, I / 2 and O / 32, those of a task's
        # rows and blocks, and the address of the number of tasks begun. If products are activated,
        # the blocks are half of them, and ``out`` is 0, or where the products already are. Weights
        # that are 0 would not tell the latter: those of no inputs have no address.
        "rows", "weights", "bias", "added", "out", "activated", "is_int8",
        "num_rows", "num_pairs", "num_blocks", "task_rows", "task_blocks", "begun",
    ),
)  # fmt: skip
RECORD = _TASKS.record
