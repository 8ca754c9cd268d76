"""Code for bfloat16 numbers on an x86 CPU, which numba compiles. It needs numba.

A processor with AVX512-BF16 multiplies pairs of bfloat16 numbers, and adds the two products to a
float32 sum; one with AMX does so with whole tiles of rows and columns, in the time of one row. On
others both numbers of a pair become float32 ones first.

Functions of this module that take a builder write LLVM's code; ``instruction`` makes them callable
in compiled functions. These get tensors by their addresses: arguments that are arrays take longer
to unpack than a norm takes.
"""

from __future__ import annotations

import ctypes
import logging
import math
import sys
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import binding, ir
from numba import from_dtype, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numpy.polynomial import Chebyshev, Polynomial

from ragaccel.engine.thread_team import openmp
from ragaccel.jit import callback, inlined

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger("ragaccel")

_MIN_LLVM = 16  # before, its dot product took integers
_FEATURES = set(cpu_target.target_context.codegen().magic_tuple()[2].split(","))
HAS_DOT_PRODUCTS = (
    {"+avx512bf16", "+avx512vbmi"} <= _FEATURES  # not Intel's Cooper Lake, which lacks the latter
    and binding.llvm_version_info[0] >= _MIN_LLVM
)
"""Whether the code uses dot products of pairs of bfloat16 numbers."""
HAS_WIDE_REGISTERS = "+avx512f" in _FEATURES
"""Whether there are 32 registers of 16 float32 numbers, not 16 of 8."""


def _may_use_tiles() -> bool:
    """Return whether Linux lets this process use AMX's registers, which it has to ask for."""
    if sys.platform != "linux":
        return False
    system_call, permission, tile_data = 158, 0x1023, 18  # arch_prctl, ARCH_REQ_XCOMP_PERM
    try:
        return bool(ctypes.CDLL(None).syscall(system_call, permission, tile_data) == 0)
    except (AttributeError, OSError, TypeError):
        return False


HAS_TILES = HAS_DOT_PRODUCTS and "+amx-bf16" in _FEATURES and _may_use_tiles()
"""Whether there are 8 registers of 16 rows of 64 bytes, and products of these (AMX)."""


def is_supported() -> bool:
    """Return whether the code that numba makes here can run, and should."""
    if not {"+avx2", "+fma"} <= _FEATURES or openmp() is None:
        return False
    if "+amx-bf16" in _FEATURES and not HAS_TILES:
        # Code that was compiled where tiles may be used would end a process that may not use them.
        logger.warning("the system allows no AMX here: bfloat16 is left to torch, which is slower")
        return False
    return True


@cache
def function_address(name: str) -> int:
    """Return the address of a function of torch's OpenMP library or of those that it needs."""
    return ctypes.cast(getattr(openmp(), name), ctypes.c_void_p).value or 0


class Tasks:
    """A function that threads of torch's pool call once each: it runs tasks until none is left.

    Those of another pool would compete with torch's for the cores. Give ``run`` always as many
    threads as torch has, or the pool is changed with every call.

    Args:
        run: gets a pointer to a record.
        fields: names of the record's whole numbers; 64-bit, in this order.
        factors: names of float64 numbers that follow them.

    Attributes:
        record: NumPy's type of the record.
    """

    def __init__(
        self, run: Callable[[Any], None], fields: Sequence[str], factors: Sequence[str] = ()
    ) -> None:
        kinds = [(name, np.int64) for name in fields] + [(name, np.float64) for name in factors]
        self._run, self.record = run, np.dtype(kinds)
        self._numbers = ctypes.c_int64 * len(kinds)
        self._compiled: Any = None

    def run(self, num_threads: int, *given: int) -> None:
        """Run all tasks; ``given`` are the record's numbers, factors as ``bits_of`` them.

        The first call compiles the function: LLVM ends the process where that is not supported.
        """
        if self._compiled is None:
            pointer = types.CPointer(from_dtype(self.record))
            self._compiled = callback(self._run, types.void(pointer))
        openmp().GOMP_parallel(self._compiled.address, self._numbers(*given), num_threads, 0)


@cache
def bits_of(number: float) -> int:
    """Return the whole number of a float64's bits."""
    return int(np.float64(number).view(np.int64))


@cache
def _counters(count: int) -> Any:
    return ctypes.c_int64 * count


def new_counters(count: int) -> tuple[Any, int]:
    """Return so many counters for ``count``, all 0, and their address; keep them as long."""
    counters = _counters(count)()  # a quarter of the time of NumPy's arrays
    return counters, ctypes.addressof(counters)


LANES = 16
I64, I32, I16, I8 = (ir.IntType(bits) for bits in (64, 32, 16, 8))
F32 = ir.FloatType()


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's type of bfloat16, which llvmlite lacks."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


INTS, FLOATS = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
SHORTS, BYTES = ir.VectorType(I16, 2 * LANES), ir.VectorType(I8, 4 * LANES)
_NARROW, _PAIRS = (ir.VectorType(_BFloat(), count * LANES) for count in (1, 2))
_HALF_SHORTS = ir.VectorType(I16, LANES)


def all_of(number: float) -> Any:
    """Return a vector of equal float32 numbers."""
    return ir.Constant(FLOATS, [number] * LANES)


def ints_of(number: int) -> Any:
    """Return a vector of equal whole numbers."""
    return ir.Constant(INTS, [number] * LANES)


def load(builder: Any, address: Any, kind: Any, alignment: int = 4) -> Any:
    """Load a number or vector from an address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=alignment)


def store(builder: Any, vector: Any, address: Any, alignment: int = 4) -> None:
    """Store a vector at an address."""
    pointer = builder.inttoptr(address, vector.type.as_pointer())
    builder.store(vector, pointer, align=alignment)


def address_of(builder: Any, base: Any, step: Any, number: Any) -> Any:
    """Return the address ``number`` steps behind another one."""
    number = I64(number) if isinstance(number, int) else number
    return builder.add(base, builder.mul(step, number))


def splat(builder: Any, number: Any) -> Any:
    """Return a vector of equal numbers."""
    kind = ir.VectorType(number.type, LANES)
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, number, I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES))


def call_llvm(builder: Any, name: str, kind: Any, *given: Any, **options: Any) -> Any:
    """Call one of LLVM's intrinsic functions."""
    wanted = ir.FunctionType(kind, [one.type for one in given])
    function = cgutils.get_or_insert_function(builder.module, wanted, f"llvm.{name}")
    return builder.call(function, given, **options)


def load_narrow(builder: Any, address: Any) -> Any:
    """Load a vector of bfloat16 numbers as float32 ones."""
    return _widened(builder, load(builder, address, _HALF_SHORTS, 2))


def store_narrow(builder: Any, numbers: Any, address: Any) -> None:
    """Store a vector of float32 numbers as bfloat16 ones."""
    store(builder, _narrowed(builder, numbers), address, 2)


def rounded(builder: Any, numbers: Any) -> Any:
    """Return a vector of float32 numbers rounded to bfloat16."""
    return _widened(builder, _narrowed(builder, numbers))


def _widened(builder: Any, shorts: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(shorts, INTS), ints_of(16)), FLOATS)


def _narrowed(builder: Any, numbers: Any) -> Any:
    """Return the bits of numbers rounded to the nearest bfloat16, to an even one of two."""
    if HAS_DOT_PRODUCTS:  # such a processor rounds, too
        return builder.bitcast(builder.fptrunc(numbers, _NARROW), _HALF_SHORTS)
    bits = builder.bitcast(numbers, INTS)
    odd = builder.and_(builder.lshr(bits, ints_of(16)), ints_of(1))
    bits = builder.add(builder.add(bits, ints_of(0x7FFF)), odd)
    return builder.trunc(builder.lshr(bits, ints_of(16)), _HALF_SHORTS)


def factors_of(builder: Any, pairs: Any) -> tuple[Any, ...]:
    """Return a vector of pairs of bfloat16 numbers as ``dot_product`` takes it."""
    if HAS_DOT_PRODUCTS:
        return (builder.bitcast(pairs, _PAIRS),)
    bits = builder.bitcast(pairs, INTS)
    both = builder.shl(bits, ints_of(16)), builder.and_(bits, ints_of(-1 << 16))
    return tuple(builder.bitcast(one, FLOATS) for one in both)


def dot_product(builder: Any, total: Any, first: tuple[Any, ...], second: tuple[Any, ...]) -> Any:
    """Add the products of pairs of numbers to a vector of float32 sums."""
    if HAS_DOT_PRODUCTS:
        return call_llvm(builder, "x86.avx512bf16.dpbf16ps.512", FLOATS, total, *first, *second)
    for one, other in zip(first, second, strict=True):
        total = fma(builder, one, other, total)
    return total


def fma(builder: Any, first: Any, second: Any, added: Any) -> Any:
    """Return products of float32 numbers plus others, rounded once."""
    return call_llvm(builder, "fma.v16f32", FLOATS, first, second, added)


def larger(builder: Any, first: Any, second: Any) -> Any:
    """Return the larger of two numbers of each lane, the second one if either is NaN."""
    return builder.select(builder.fcmp_ordered(">", first, second), first, second)


# 2 ** x for x between -0.5 and 0.5, by interpolation at Chebyshev's points: within 4e-6 of it. The
# last is 1 as a float32: tokens that are hidden must not change what is summed up before.
_TERMS = Chebyshev.interpolate(np.exp2, 4, (-0.5, 0.5)).convert(kind=Polynomial).coef[::-1].tolist()
_LOWEST_POWER, _HIGHEST_POWER = -126.0, 160.0  # of two: normal float32 numbers, and beyond all
_FRACTION_BITS, _EXPONENT_BIAS = 23, 127  # of float32


def exponential(builder: Any, exponent: Any) -> Any:
    """Return e to the power of float32 numbers, but 0 where that is below the normal numbers.

    Smaller ones take 150 cycles.
    """
    power = builder.fmul(exponent, all_of(math.log2(math.e)))
    is_lost = builder.fcmp_ordered("<", power, all_of(_LOWEST_POWER))
    power = larger(builder, all_of(_LOWEST_POWER), power)  # no slow numbers arise; NaN stays NaN
    capped, highest = power, all_of(_HIGHEST_POWER)
    if not HAS_WIDE_REGISTERS:
        capped = builder.select(builder.fcmp_ordered("<", power, highest), power, highest)
    whole = call_llvm(builder, "rint.v16f32", FLOATS, capped)
    rest = builder.fsub(power, whole)
    found = all_of(_TERMS[0])
    for term in _TERMS[1:]:
        found = fma(builder, found, rest, all_of(term))
    if HAS_WIDE_REGISTERS:  # which scale in one instruction, even NaN by infinity to infinity
        given = found, whole, found, ir.Constant(I16, -1), I32(4)
        found = call_llvm(builder, "x86.avx512.mask.scalef.ps.512", FLOATS, *given)
        return builder.select(is_lost, all_of(0.0), found)
    whole = builder.fptosi(whole, INTS)
    half = builder.ashr(whole, ints_of(1))
    for part in (half, builder.sub(whole, half)):  # 2 ** whole may be no float32
        bits = builder.shl(builder.add(part, ints_of(_EXPONENT_BIAS)), ints_of(_FRACTION_BITS))
        found = builder.fmul(found, builder.bitcast(bits, FLOATS))
    return builder.select(is_lost, all_of(0.0), found)


def prefetch(builder: Any, address: Any) -> None:
    """Fetch what is at an address, which need not exist, into the cache."""
    pointer = I8.as_pointer()
    wanted = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, wanted, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, pointer), I32(0), I32(3), I32(1)])


def load_pairs(builder: Any, address: Any) -> list[tuple[Any, ...]]:
    """Return the factors of two vectors of pairs of bfloat16 numbers from an address."""
    places = (builder.add(address, I64(64 * i)) for i in range(2))
    return [factors_of(builder, load(builder, place, INTS)) for place in places]


def splat_pair(builder: Any, address: Any) -> tuple[Any, ...]:
    """Return the factors of a vector of equal pairs of bfloat16 numbers, one of an address."""
    return factors_of(builder, splat(builder, load(builder, address, I32)))


def add_products(
    builder: Any,
    sums: list[Any],
    rows: list[Any],
    right: tuple[Any, Any],
    num_pairs: Any,
    load_columns: Callable[[Any, Any], list[tuple[Any, ...]]] = load_pairs,
    fetched: Sequence[int] = (),
) -> None:
    """Add the products of rows and two vectors of columns to variables, two for each row.

    ``rows`` are the addresses of the rows' numbers, ``right`` that of the columns' pairs of numbers
    and the bytes from one pair to the next, which ``load_columns`` loads. With each pair, what is
    ``fetched`` bytes behind it is fetched into the cache.
    """
    if not HAS_DOT_PRODUCTS and len(sums) > 2:
        _add_widened_products(builder, sums, rows, right, num_pairs, load_columns, fetched)
        return
    with cgutils.for_range(builder, num_pairs) as loop:
        place = address_of(builder, *right, loop.index)
        _prefetch_all(builder, place, fetched)
        columns = load_columns(builder, place)
        offset = builder.mul(loop.index, I64(4))
        for number, row in enumerate(rows):
            pair = splat_pair(builder, builder.add(row, offset))
            for column, variable in zip(columns, sums[2 * number :][:2], strict=True):
                builder.store(dot_product(builder, builder.load(variable), pair, column), variable)


_COPIED_PAIRS = 128  # of each row at a time, which stay in the first cache


def _add_widened_products(
    builder: Any,
    sums: list[Any],
    rows: list[Any],
    right: tuple[Any, Any],
    num_pairs: Any,
    load_columns: Callable[[Any, Any], list[tuple[Any, ...]]],
    fetched: Sequence[int],
) -> None:
    """Do what ``add_products`` does, with float32 copies of some of the rows' numbers at a time."""
    first_copy = room_for(builder, 8 * _COPIED_PAIRS * len(rows))
    copies = [builder.add(first_copy, I64(i * _COPIED_PAIRS * 8)) for i in range(len(rows))]
    with cgutils.for_range_slice(builder, I64(0), num_pairs, I64(_COPIED_PAIRS)) as (start, _):
        left_over = builder.sub(num_pairs, start)
        is_last = builder.icmp_signed("<", left_over, I64(_COPIED_PAIRS))
        num_copied = builder.select(is_last, left_over, I64(_COPIED_PAIRS))
        for row, copy in zip(rows, copies, strict=True):
            own = address_of(builder, row, I64(4), start)
            _widen_pairs(builder, own, num_copied, copy)
        columns = address_of(builder, *right, start), right[1]
        # One vector at a time, if sums of both need more registers than there are.
        for parts in ((0, 1),) if HAS_WIDE_REGISTERS else ((0,), (1,)):
            with cgutils.for_range(builder, num_copied) as loop:
                place = address_of(builder, *columns, loop.index)
                _prefetch_all(builder, place, fetched if 0 in parts else ())
                for factor in range(2):
                    _load_no_earlier(builder)
                    factors = [one[factor] for one in load_columns(builder, place)]
                    offset = builder.add(builder.mul(loop.index, I64(8)), I64(4 * factor))
                    numbers = [builder.add(copy, offset) for copy in copies]
                    _add_one_factor(builder, sums, numbers, factors, parts)


def _add_one_factor(
    builder: Any, sums: list[Any], numbers: list[Any], factors: list[Any], parts: Sequence[int]
) -> None:
    """Add the products of float32 numbers of addresses, one of each row, and vectors."""
    for i, address in enumerate(numbers):
        number = splat(builder, load(builder, address, F32))
        for part in parts:
            total = sums[2 * i + part]
            builder.store(fma(builder, number, factors[part], builder.load(total)), total)


def _load_no_earlier(builder: Any) -> None:
    """Begin no load after this before it: LLVM would load much more than registers can hold."""
    nothing = ir.FunctionType(ir.VoidType(), [])
    builder.asm(nothing, "", "~{memory}", [], side_effect=True)


def _prefetch_all(builder: Any, address: Any, offsets: Sequence[int]) -> None:
    for offset in offsets:
        prefetch(builder, builder.add(address, I64(offset)))


def _widen_pairs(builder: Any, source: Any, num_pairs: Any, target: Any) -> None:
    """Copy pairs of bfloat16 numbers as float32 ones."""
    num_numbers = builder.shl(num_pairs, I64(1))
    num_whole = builder.and_(num_numbers, I64(-LANES))
    with cgutils.for_range_slice(builder, I64(0), num_whole, I64(LANES)) as (place, _):
        numbers = load_narrow(builder, address_of(builder, source, I64(2), place))
        store(builder, numbers, address_of(builder, target, I64(4), place))
    with cgutils.for_range_slice(builder, num_whole, num_numbers, I64(1)) as (place, _):
        bits = load(builder, address_of(builder, source, I64(2), place), I16, 2)
        bits = builder.shl(builder.zext(bits, I32), I32(16))
        store(builder, bits, address_of(builder, target, I64(4), place))


def instruction(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function that writes code with a builder to be called in compiled functions."""

    def decorate(write: Callable[..., Any]) -> Any:
        def make(_typing: Any, *_parameters: Any) -> Any:
            def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
                found = write(builder, *given)
                return context.get_dummy_value() if found is None else found

            return result(*parameters), generate

        make.__name__ = write.__name__
        make.__signature__ = signature(write)  # type: ignore[attr-defined]  # numba counts these
        return intrinsic(make)

    return decorate


WHOLE, FLOAT = types.int64, types.float32

TILE_ROWS, TILE_BYTES = 16, 64
TILE_PAIRS = TILE_BYTES // 4
"""Pairs of bfloat16 numbers that a product of tiles adds up at once."""
# Registers: of two groups of rows, of two halves of 32 columns, and of the sums of both.
_ROW_TILES, _COLUMN_TILES, _SUM_TILES = (0, 1), (2, 3), ((4, 5), (6, 7))
_CONFIGURATION_BYTES, _WIDTHS_AT, _HEIGHTS_AT = 64, 16, 48


@instruction(types.none, WHOLE, WHOLE)
def configure_tiles(builder: Any, num_first: Any, num_second: Any) -> None:
    """Give the two groups of this thread's tiles, if it has any, so many rows, 1 to 16 each."""
    if not HAS_TILES:
        return
    kind = ir.ArrayType(I8, _CONFIGURATION_BYTES)
    room = cgutils.alloca_once(builder, kind)
    builder.store(ir.Constant(kind, bytearray(_CONFIGURATION_BYTES)), room)
    first = builder.ptrtoint(room, I64)
    store(builder, I8(1), first, 1)  # the only palette
    heights = dict.fromkeys(_COLUMN_TILES, I64(TILE_PAIRS))
    for group, number in enumerate((num_first, num_second)):
        heights |= dict.fromkeys((_ROW_TILES[group], *_SUM_TILES[group]), number)
    for tile, number in heights.items():
        store(builder, I16(TILE_BYTES), builder.add(first, I64(_WIDTHS_AT + 2 * tile)), 2)
        store(builder, builder.trunc(number, I8), builder.add(first, I64(_HEIGHTS_AT + tile)), 1)
    call_llvm(builder, "x86.ldtilecfg", ir.VoidType(), builder.bitcast(room, I8.as_pointer()))


@instruction(types.none)
def release_tiles(builder: Any) -> None:
    """Empty this thread's tiles, which the system would save with its other registers."""
    if HAS_TILES:
        call_llvm(builder, "x86.tilerelease", ir.VoidType())


def _move_tile(builder: Any, name: str, tile: int, address: Any, step: Any) -> None:
    place = builder.inttoptr(address, I8.as_pointer())
    call_llvm(builder, f"x86.tile{name}64", ir.VoidType(), I8(tile), place, step)


def multiply_tiles(
    builder: Any,
    rows: tuple[Any, Any],
    columns: tuple[Any, Any],
    num_pairs: Any,
    sums: tuple[Any, Any],
    groups: Sequence[int] = (0,),
    *,
    is_added: Any = False,
    load_columns: Callable[[Any, Any], list[tuple[Any, ...]]] | None = None,
) -> None:
    """Write the float32 products of rows and 32 columns, by the tiles of one group or of both.

    ``rows``, ``columns`` and ``sums`` are addresses and the bytes from a row, pair of numbers or
    row to the next.

    Args:
        builder: The builder.
        rows: The rows, those of the second group 16 behind those of the first.
        columns: Pairs of numbers of the columns.
        num_pairs: Their number, of whole tiles.
        sums: Where the products are written.
        groups: The groups of tiles.
        is_added: Whether to add the products to ``sums``; may be LLVM's truth value.
        load_columns: Loads a pair of each column as ``load_pairs`` does, if they do not lie so.
    """
    starts = [address_of(builder, *rows, TILE_ROWS * place) for place in range(len(groups))]
    outs = [
        (tile, builder.add(address_of(builder, *sums, TILE_ROWS * place), I64(TILE_BYTES * half)))
        for place, group in enumerate(groups)
        for half, tile in enumerate(_SUM_TILES[group])
    ]
    is_added = is_added if isinstance(is_added, ir.Value) else ir.IntType(1)(is_added)
    with builder.if_else(is_added) as (added, not_added):
        with added:
            for tile, out in outs:
                _move_tile(builder, "loadd", tile, out, sums[1])
        with not_added:
            for tile, _ in outs:
                call_llvm(builder, "x86.tilezero", ir.VoidType(), I8(tile))
    with cgutils.for_range_slice(builder, I64(0), num_pairs, I64(TILE_PAIRS)) as (pair, _):
        place, step = address_of(builder, *columns, pair), columns[1]
        if load_columns is not None:
            place, step = _lay_out(builder, place, step, load_columns), I64(2 * TILE_BYTES)
        for half, tile in enumerate(_COLUMN_TILES):
            _move_tile(builder, "loadd", tile, builder.add(place, I64(TILE_BYTES * half)), step)
        for group, start in zip(groups, starts, strict=True):
            own = address_of(builder, start, I64(4), pair)
            _move_tile(builder, "loadd", _ROW_TILES[group], own, rows[1])
            for total, column in zip(_SUM_TILES[group], _COLUMN_TILES, strict=True):
                given = I8(total), I8(_ROW_TILES[group]), I8(column)
                call_llvm(builder, "x86.tdpbf16ps", ir.VoidType(), *given)
    for tile, out in outs:
        _move_tile(builder, "stored", tile, out, sums[1])


def _lay_out(builder: Any, place: Any, step: Any, load_columns: Any) -> Any:
    """Write the pairs of two tiles of columns as tiles are loaded; return their address."""
    room = room_for(builder, TILE_PAIRS * 2 * TILE_BYTES)
    for pair in range(TILE_PAIRS):
        vectors = load_columns(builder, address_of(builder, place, step, pair))
        for half, (vector,) in enumerate(vectors):
            store(builder, vector, builder.add(room, I64((2 * pair + half) * TILE_BYTES)))
    return room


def room_for(builder: Any, num_bytes: int) -> Any:
    """Return the address of memory of the function being compiled, which is not filled."""
    with builder.goto_entry_block():  # numba's own function would fill it with zeros
        room = builder.alloca(ir.ArrayType(I8, num_bytes))
        room.align = 64
    return builder.ptrtoint(room, I64)


@instruction(WHOLE, WHOLE)
def count(builder: Any, address: Any) -> Any:
    """Add one to a counter that threads share; return what it was."""
    pointer = builder.inttoptr(address, I64.as_pointer())
    return builder.atomic_rmw("add", pointer, I64(1), "acq_rel")


@instruction(types.CPointer(types.uint16), WHOLE)
def shorts_at(builder: Any, address: Any) -> Any:
    """Return a pointer to the 16-bit numbers at an address."""
    return builder.inttoptr(address, I16.as_pointer())


@instruction(types.CPointer(types.uint8), WHOLE)
def bytes_at(builder: Any, address: Any) -> Any:
    """Return a pointer to the bytes at an address."""
    return builder.inttoptr(address, I8.as_pointer())


@instruction(types.CPointer(WHOLE), WHOLE)
def longs_at(builder: Any, address: Any) -> Any:
    """Return a pointer to the 64-bit whole numbers at an address."""
    return builder.inttoptr(address, I64.as_pointer())


@instruction(types.CPointer(types.float64), WHOLE)
def doubles_at(builder: Any, address: Any) -> Any:
    """Return a pointer to the float64 numbers at an address."""
    return builder.inttoptr(address, ir.DoubleType().as_pointer())


@instruction(types.CPointer(FLOAT), WHOLE)
def floats_at(builder: Any, address: Any) -> Any:
    """Return a pointer to the float32 numbers at an address."""
    return builder.inttoptr(address, F32.as_pointer())


def records_at(record: np.dtype[Any]) -> Any:
    """Return an instruction that returns a pointer to such records at an address."""
    pointer = ir.ArrayType(I8, record.itemsize).as_pointer()

    @instruction(types.CPointer(from_dtype(record)), WHOLE)
    def at(builder: Any, address: Any) -> Any:
        return builder.inttoptr(address, pointer)

    return at


@inlined
def widen(bits: int) -> Any:
    """Return a bfloat16, given by its bits, as float32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@inlined
def narrow(number: Any) -> Any:
    """Return the bits of a float32 rounded to the nearest bfloat16, to an even one of two."""
    bits = np.float32(number).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
