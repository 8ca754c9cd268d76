"""Attention of bfloat16 rows on a CPU, by ``bfloat16_code``.

The splits of the tokens of each head are tasks for the threads.

A row's result depends neither on other rows than those of its path nor on the number of threads:
it is summed up in blocks of tokens that are counted from the sequence's start, with running maxima
(Dao et al., "FlashAttention", arXiv 2205.14135), and splits are combined in their order. The rows
of a draft tree count as their paths do: each row's scores and values of other rows are brought
together as if no other branches lay between them.

Shapes: n rows of one sequence, T tokens, those rows last, H query heads, K heads of keys and
values, R = n * H / K packed rows of such a head, D head size.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils

from ragaccel.engine.bfloat16_code import (
    F32,
    FLOAT,
    FLOATS,
    HAS_TILES,
    HAS_WIDE_REGISTERS,
    I32,
    I64,
    INTS,
    LANES,
    SHORTS,
    TILE_PAIRS,
    TILE_ROWS,
    WHOLE,
    Tasks,
    add_products,
    address_of,
    all_of,
    bits_of,
    bytes_at,
    configure_tiles,
    count,
    dot_product,
    exponential,
    factors_of,
    floats_at,
    instruction,
    larger,
    load,
    longs_at,
    multiply_tiles,
    narrow,
    new_counters,
    release_tiles,
    room_for,
    shorts_at,
    splat,
    splat_pair,
    store,
    store_narrow,
    widen,
)
from ragaccel.jit import compiled, inlined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

TILE = TILE_ROWS if HAS_TILES else 8 if HAS_WIDE_REGISTERS else 4
"""Rows that are multiplied at a time: 8, with two vectors of columns, are 16 sums that need not
wait."""
_STEP = 2 * TILE_PAIRS if HAS_TILES else 2
"""Tokens whose weighed values are added up at once."""
BLOCK = 128
"""Tokens after which a row's maximum may change."""
SPLIT = 512
"""Tokens whose sums are added up apart, by several threads if there are few rows."""
GROUP = 128
"""Most packed rows that are few; of more, so many are a task, over all tokens."""
HEAD_STEP = 32
"""What a head's size must be a multiple of."""


def takes(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return whether ``attend`` can compute these, [1, H, n, D] and twice [1, K, T, D]."""
    size = queries.shape[-1]
    return (
        all(one.dtype == torch.bfloat16 and one.device.type == "cpu" for one in (queries, keys))
        and keys.dtype == values.dtype
        and keys.device == values.device
        and keys.shape == values.shape
        and len(queries) == len(keys) == 1
        and queries.shape[1] % keys.shape[1] == 0
        and size % HEAD_STEP == 0
        and keys.stride()[2:] == values.stride()[2:] == (size, 1)
    )


def attend(
    states: tuple[Tensor, Tensor, Tensor],
    scaling: float,
    mask: Tensor | None = None,
    sees: Tensor | None = None,
) -> Tensor:
    """Return the attention output of the last n tokens. [1, n, H, D].

    Args:
        states: queries [1, H, n, D], keys and values [1, K, T, D] that it ``takes``.
        scaling: factor of the scores.
        mask: added to the scores, [n, T]; without one, a row attends to all tokens before the
            n rows.
        sees: which of the rows each row attends to, itself included, [n, n] bool; without this, or
            a mask, those up to its own.
    """
    queries, keys, values = states
    queries = queries.contiguous()
    _, num_heads, num_rows, size = queries.shape
    _, num_kv_heads, num_tokens, _ = keys.shape
    if mask is not None:
        mask = given_mask(mask, num_rows, num_tokens)
    if sees is not None:
        sees = sees.expand(num_rows, num_rows).contiguous()
    heads, threads = (num_heads, num_kv_heads, size), torch.get_num_threads()
    plan = plan_of(heads, num_rows, num_tokens, is_tree=sees is not None, threads=threads)
    out = queries.new_empty(1, num_rows, num_heads, size)
    rooms = queries.new_empty(plan.num_bytes, dtype=torch.uint8)
    _counters, counters_at = new_counters(2 + num_kv_heads)
    _TASKS.run(
        threads,
        queries.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(),
        0 if mask is None else mask.data_ptr(), 0 if sees is None else sees.data_ptr(),
        keys.stride(1), values.stride(1),
        num_kv_heads, num_rows, plan.packed, size, num_tokens, plan.num_splits,
        rooms.data_ptr(), plan.part_rows, plan.part_bytes,
        rooms.data_ptr() + plan.num_parts * plan.part_bytes, plan.room_bytes,
        counters_at, plan.num_tasks, bits_of(scaling),
    )  # fmt: skip
    return out


def given_mask(mask: Tensor, num_rows: int, num_tokens: int) -> Tensor:
    """Return a mask as the compiled code reads it, [n, T]."""
    return mask.to(torch.bfloat16).expand(num_rows, num_tokens).contiguous()


@dataclass(frozen=True, slots=True)
class Plan:
    """How the attention of some rows is divided; fields are those of ``RECORD``."""

    packed: int
    num_splits: int
    num_tasks: int
    part_rows: int
    part_bytes: int
    num_parts: int
    room_bytes: int
    num_bytes: int
    """Of all parts and the threads' rooms behind them."""


def plan_of(
    heads: tuple[int, int, int], num_rows: int, num_tokens: int, *, is_tree: bool, threads: int
) -> Plan:
    """Return how to divide the attention of rows; ``heads`` are the sizes H, K and D."""
    num_heads, num_kv_heads, size = heads
    packed = num_heads // num_kv_heads * num_rows
    num_splits, num_groups = -(-num_tokens // SPLIT), -(-packed // GROUP)
    part_rows = min(GROUP, -(-packed // TILE) * TILE)
    num_tasks = num_kv_heads * (num_splits if num_groups == 1 else num_groups)
    num_parts = num_tasks if num_groups == 1 else 2 * threads
    part_bytes, room_bytes = part_rows * (size + 2) * 4, _room_bytes(size, num_rows * is_tree)
    num_bytes = num_parts * part_bytes + threads * room_bytes
    return Plan(
        packed, num_splits, num_tasks, part_rows, part_bytes, num_parts, room_bytes, num_bytes
    )


def check() -> None:
    """Compile ``attend``, and compare it with torch.

    Raises:
        RuntimeError: it differs by more than bfloat16 rounds.
    """
    generator = torch.Generator().manual_seed(0)
    for before, num_rows in ((SPLIT - 1, 3), (0, GROUP)):
        queries = torch.randn(1, 2, num_rows, HEAD_STEP, generator=generator)
        keys, values = torch.randn(2, 1, 1, before + num_rows, HEAD_STEP, generator=generator)
        states = queries.bfloat16(), keys.bfloat16(), values.bfloat16()
        chain = torch.ones(num_rows, num_rows, dtype=torch.bool).tril_()
        tree = chain.clone()
        tree[2:, 1] = False
        for sees, given in ((chain, None), (tree, tree)):
            scores = queries @ keys.mT * 0.2
            scores[..., before:].masked_fill_(~sees, float("-inf"))
            wanted = (scores.softmax(-1) @ values).transpose(1, 2)
            found = attend(states, 0.2, sees=given).float()
            if not torch.allclose(found, wanted, rtol=0.05, atol=0.05):
                raise RuntimeError("the compiled attention differs from torch's")


def _room_bytes(size: int, num_own: int) -> int:
    """Return how many bytes a thread works in; ``_attend_split`` divides them.

    ``num_own`` is the number of rows if they are those of a tree.
    """
    of_block = 2 * size * BLOCK * 2 + TILE * BLOCK * 6 + TILE * size * 2 + LANES * size * 2 + 64
    of_paths = TILE * (BLOCK + 1) * 8
    return of_block + of_paths + -(-num_own // BLOCK) * (size * BLOCK * 2 + TILE * BLOCK * 4)


def _places(builder: Any, address: Any, step: Any) -> list[Any]:
    """Return the addresses of two vectors in each of ``TILE`` rows."""
    rows = (address_of(builder, address, step, row) for row in range(TILE))
    return [builder.add(row, I64(64 * i)) for row in rows for i in range(2)]


@instruction(types.none, WHOLE, WHOLE, WHOLE, WHOLE, FLOAT, WHOLE, WHOLE)
def _score_by_rows(
    builder: Any,
    queries: Any,
    query_bytes: Any,
    keys: Any,
    num_pairs: Any,
    scaling: Any,
    out: Any,
    _num_rows: Any,
) -> None:
    """Write the scores of ``TILE`` queries and 32 keys, which lie in pairs of numbers."""
    sums = [cgutils.alloca_once_value(builder, all_of(0.0)) for _ in range(2 * TILE)]
    step = I64(BLOCK * 4)
    rows = [address_of(builder, queries, query_bytes, row) for row in range(TILE)]
    add_products(builder, sums, rows, (keys, step), num_pairs)
    factor = splat(builder, scaling)
    for total, place in zip(sums, _places(builder, out, step), strict=True):
        store(builder, builder.fmul(builder.load(total), factor), place)


@instruction(types.none, WHOLE, WHOLE, WHOLE, WHOLE, FLOAT, WHOLE, WHOLE)
def _score_by_tiles(
    builder: Any,
    queries: Any,
    query_bytes: Any,
    keys: Any,
    num_pairs: Any,
    scaling: Any,
    out: Any,
    num_rows: Any,
) -> None:
    """Do what ``_score_by_rows`` does, of so many rows."""
    step = I64(BLOCK * 4)
    multiply_tiles(builder, (queries, query_bytes), (keys, step), num_pairs, (out, step))
    _multiply_sums(builder, (out, step), num_rows, lambda _row: scaling)


@instruction(types.none, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE)
def _add_values_by_rows(
    builder: Any,
    weights: Any,
    values: Any,
    value_bytes: Any,
    num_pairs: Any,
    fades: Any,
    out: Any,
    _num_rows: Any,
) -> None:
    """Multiply 32 sums of each of ``TILE`` rows by the row's number in ``fades``; add values."""
    places = _places(builder, out, value_bytes)
    sums = []
    for number, place in enumerate(places):
        fade = load(builder, builder.add(fades, I64(number // 2 * 4)), F32)
        last = builder.fmul(load(builder, place, FLOATS), splat(builder, fade))
        sums.append(cgutils.alloca_once_value(builder, last))
    rows = [builder.add(weights, I64(row * BLOCK * 2)) for row in range(TILE)]
    add_products(builder, sums, rows, (values, value_bytes), num_pairs)
    for total, place in zip(sums, places, strict=True):
        store(builder, builder.load(total), place)


@instruction(types.none, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE)
def _add_values_by_tiles(
    builder: Any,
    weights: Any,
    values: Any,
    value_bytes: Any,
    num_pairs: Any,
    fades: Any,
    out: Any,
    num_rows: Any,
) -> None:
    """Do what ``_add_values_by_rows`` does, of so many rows."""

    def fade_of(row: Any) -> Any:
        return load(builder, address_of(builder, fades, I64(4), row), F32)

    rows, columns, sums = (weights, I64(BLOCK * 2)), (values, value_bytes), (out, value_bytes)
    _multiply_sums(builder, sums, num_rows, fade_of)
    multiply_tiles(builder, rows, columns, num_pairs, sums, is_added=True)


def _multiply_sums(
    builder: Any, sums: tuple[Any, Any], num_rows: Any, factor_of: Callable[[Any], Any]
) -> None:
    """Multiply 32 sums of each row by the row's factor."""
    with cgutils.for_range(builder, num_rows) as loop:
        factor = splat(builder, factor_of(loop.index))
        own = address_of(builder, *sums, loop.index)
        for place in (own, builder.add(own, I64(64))):
            store(builder, builder.fmul(load(builder, place, FLOATS), factor), place)


@instruction(types.none, WHOLE, WHOLE, WHOLE)
def _transpose(builder: Any, source: Any, row_bytes: Any, target: Any) -> None:
    """Write 32 numbers of 16 tokens as pairs, the tokens of each pair beside one another."""
    rows = [load(builder, address_of(builder, source, row_bytes, i), INTS) for i in range(LANES)]
    for step in (1, 2, 4, 8):  # exchange blocks of this size
        for i in (i for i in range(LANES) if not i & step):
            pair = rows[i], rows[i + step]
            low = [j + LANES - step if j & step else j for j in range(LANES)]
            high = [j + LANES if j & step else j + step for j in range(LANES)]
            rows[i], rows[i + step] = (
                builder.shuffle_vector(*pair, ir.Constant(INTS, chosen)) for chosen in (low, high)
            )
    for i, row in enumerate(rows):
        store(builder, row, builder.add(target, I64(i * BLOCK * 4)))


@instruction(types.none, WHOLE, WHOLE, WHOLE)
def _interleave(builder: Any, first: Any, second: Any, target: Any) -> None:
    """Write 32 numbers of two tokens as pairs of the two."""
    for half, pairs in enumerate(_pairs_of(builder, first, second)):
        store(builder, pairs, builder.add(target, I64(64 * half)))


def _pairs_of(builder: Any, first: Any, second: Any) -> list[Any]:
    """Return 32 numbers each from two addresses as two vectors of pairs."""
    rows = [load(builder, one, SHORTS, 2) for one in (first, second)]
    kind = ir.VectorType(I32, 2 * LANES)
    vectors = []
    for half in range(2):
        numbers = range(LANES * half, LANES * (half + 1))
        chosen = [one for i in numbers for one in (i, 2 * LANES + i)]
        vectors.append(builder.shuffle_vector(*rows, ir.Constant(kind, chosen)))
    return vectors


@instruction(types.none, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE)
def _add_chosen_by_rows(
    builder: Any, weights: Any, chosen: Any, num_pairs: Any, offset: Any, out: Any
) -> None:
    """Add the values of pairs of tokens to 32 sums of a row.

    ``chosen`` is where the addresses of the tokens' values are, ``offset`` that of the 32 numbers.
    """
    places = [builder.add(out, I64(64 * half)) for half in range(2)]
    sums = [cgutils.alloca_once_value(builder, load(builder, one, FLOATS)) for one in places]
    with cgutils.for_range(builder, num_pairs) as loop:
        values = _chosen_pairs(builder, address_of(builder, chosen, I64(16), loop.index), offset)
        pair = splat_pair(builder, address_of(builder, weights, I64(4), loop.index))
        for total, value in zip(sums, values, strict=True):
            builder.store(dot_product(builder, builder.load(total), pair, value), total)
    for total, place in zip(sums, places, strict=True):
        store(builder, builder.load(total), place)


@instruction(types.none, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE)
def _add_chosen_by_tiles(
    builder: Any, weights: Any, chosen: Any, num_pairs: Any, offset: Any, out: Any
) -> None:
    """Do what ``_add_chosen_by_rows`` does, by the second group of tiles, which has one row."""

    def load_columns(builder: Any, place: Any) -> list[tuple[Any, ...]]:
        return _chosen_pairs(builder, place, offset)

    rows, columns, sums = (weights, I64(0)), (chosen, I64(16)), (out, I64(0))
    multiply_tiles(
        builder, rows, columns, num_pairs, sums, (1,), is_added=True, load_columns=load_columns
    )


def _chosen_pairs(builder: Any, place: Any, offset: Any) -> list[tuple[Any, ...]]:
    """Return 32 numbers each of two tokens as pairs; the tokens' addresses are at ``place``."""
    both = (load(builder, builder.add(place, I64(8 * i)), I64) for i in range(2))
    pairs = _pairs_of(builder, *(builder.add(one, offset) for one in both))
    return [factors_of(builder, one) for one in pairs]


_score, _add_values, _add_chosen = (
    (_score_by_tiles, _add_values_by_tiles, _add_chosen_by_tiles)
    if HAS_TILES
    else (_score_by_rows, _add_values_by_rows, _add_chosen_by_rows)
)


@instruction(types.none, WHOLE, WHOLE, WHOLE)
def _hide_behind(builder: Any, scores: Any, shown: Any, padded: Any) -> None:
    """Set the scores behind those that are shown to minus infinity, up to whole vectors."""
    first, lanes = builder.and_(shown, I64(-LANES)), ir.Constant(INTS, list(range(LANES)))
    with cgutils.for_range_slice(builder, first, padded, I64(LANES)) as (place, _):
        left = splat(builder, builder.trunc(builder.sub(shown, place), I32))
        own = address_of(builder, scores, I64(4), place)
        found = load(builder, own, FLOATS)
        is_shown = builder.icmp_signed("<", lanes, left)
        store(builder, builder.select(is_shown, found, all_of(float("-inf"))), own)


@instruction(types.none, *[WHOLE] * 7)
def _soften(
    builder: Any,
    scores: Any,
    num_vectors: Any,
    num_rows: Any,
    tops: Any,
    totals: Any,
    fades: Any,
    weights: Any,
) -> None:
    """Write a tile's weights; update its rows' highest scores and sums, and by what they fade.

    What all rows need once is computed of all at a time: one after the other, each would wait for
    its own numbers most of the time. The sums of rows behind ``num_rows`` mean nothing.
    """
    partial = room_for(builder, TILE * 4 * LANES)
    with cgutils.for_range_slice(builder, num_rows, I64(TILE), I64(1)) as (row, _):
        store(builder, all_of(float("-inf")), address_of(builder, partial, I64(4 * LANES), row))
    with _rows_of(builder, num_rows, scores, partial) as (_, own, target):
        _write_highest(builder, own, num_vectors, target)
    last = _load_tile(builder, tops)
    top = larger(builder, _reduced(builder, partial, larger), last)
    floor = builder.select(builder.fcmp_ordered(">", top, all_of(float("-inf"))), top, all_of(0.0))
    _store_tile(builder, top, tops)
    fade = exponential(builder, builder.fsub(last, floor))
    _store_tile(builder, fade, fades)
    floors = room_for(builder, 4 * LANES)
    store(builder, floor, floors)
    with _rows_of(builder, num_rows, scores, partial) as (row, own, target):
        lowest = splat(builder, load(builder, address_of(builder, floors, I64(4), row), F32))
        out = address_of(builder, weights, I64(BLOCK * 2), row)
        _weigh(builder, own, num_vectors, lowest, out, target)
    added = _reduced(builder, partial, lambda builder, *both: builder.fadd(*both))
    total = builder.fmul(_load_tile(builder, totals), fade)
    _store_tile(builder, builder.fadd(total, added), totals)


@contextmanager
def _rows_of(builder: Any, num_rows: Any, scores: Any, partial: Any) -> Iterator[tuple[Any, ...]]:
    """Loop over rows, with the addresses of their scores and of their vector in ``partial``."""
    with cgutils.for_range(builder, num_rows) as loop:
        own = address_of(builder, scores, I64(BLOCK * 4), loop.index)
        yield loop.index, own, address_of(builder, partial, I64(4 * LANES), loop.index)


def _write_highest(builder: Any, scores: Any, num_vectors: Any, out: Any) -> None:
    """Write a vector of which the highest number is a row's highest score."""
    top = cgutils.alloca_once(builder, FLOATS)
    builder.store(all_of(float("-inf")), top)
    with cgutils.for_range(builder, num_vectors) as loop:
        own = load(builder, address_of(builder, scores, I64(64), loop.index), FLOATS)
        builder.store(larger(builder, own, builder.load(top)), top)
    store(builder, builder.load(top), out)


def _weigh(builder: Any, scores: Any, num_vectors: Any, floor: Any, weights: Any, out: Any) -> None:
    """Write e to the power of scores less ``floor`` as bfloat16; before, they sum up to ``out``."""
    total = cgutils.alloca_once(builder, FLOATS)
    builder.store(all_of(0.0), total)
    with cgutils.for_range(builder, num_vectors) as loop:
        own = load(builder, address_of(builder, scores, I64(64), loop.index), FLOATS)
        found = exponential(builder, builder.fsub(own, floor))
        builder.store(builder.fadd(builder.load(total), found), total)
        store_narrow(builder, found, address_of(builder, weights, I64(32), loop.index))
    store(builder, builder.load(total), out)


def _reduced(builder: Any, vectors: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Return what the numbers of each of ``TILE`` vectors combine to, each row's in its lane."""
    found = [
        load(builder, builder.add(vectors, I64(4 * LANES * row)), FLOATS) for row in range(TILE)
    ]
    width = LANES  # of what is left of a row
    while width > 1:
        halves = [
            [lane + offset for lane in range(2 * LANES) if lane % width < width // 2]
            for offset in (0, width // 2)
        ]
        # A single vector is combined with itself: its rows then repeat.
        pairs = list(zip(found[::2], found[1::2] or found, strict=True))
        found = [
            combine(
                builder,
                *(builder.shuffle_vector(*pair, ir.Constant(INTS, half)) for half in halves),
            )
            for pair in pairs
        ]
        width //= 2
    return found[0]


def _load_tile(builder: Any, address: Any) -> Any:
    """Return a vector of the numbers of a tile's rows, which may repeat behind them."""
    kind = ir.VectorType(F32, TILE)
    order = ir.Constant(INTS, [lane % TILE for lane in range(LANES)])
    own = load(builder, address, kind)
    return builder.shuffle_vector(own, own, order)


def _store_tile(builder: Any, numbers: Any, address: Any) -> None:
    """Store the first numbers of a vector, one for each row of a tile."""
    order = ir.Constant(ir.VectorType(I32, TILE), list(range(TILE)))
    store(builder, builder.shuffle_vector(numbers, numbers, order), address)


@instruction(FLOAT, FLOAT)
def _power_of_e(builder: Any, exponent: Any) -> Any:
    """Return e to the power of a float32 number."""
    return builder.extract_element(exponential(builder, splat(builder, exponent)), I32(0))


@inlined
def _copy_rows(source: int, have: int, target: int, wanted: int) -> None:
    """Copy ``have`` bfloat16 numbers, and zeros until there are as many as wanted."""
    given, copied = carray(shorts_at(source), (wanted,)), carray(shorts_at(target), (wanted,))
    for i in range(wanted):
        copied[i] = given[i] if i < have else np.uint16(0)


@inlined
def _arrange_keys(call: Any, keys: int, given: int, target: int, copies: int) -> int:
    """Write a block's keys in pairs; return their number, padded with zeros to 32s."""
    size = call.size
    padded = (given + 31) // 32 * 32
    for start in range(0, padded, 16):
        source = keys + start * size * 2
        if start + 16 > given:
            _copy_rows(source, max(0, given - start) * size, copies, 16 * size)
            source = copies
        for i in range(0, size, 32):
            _transpose(source + i * 2, size * 2, target + (i // 2 * BLOCK + start) * 4)
    return padded


@inlined
def _arrange_values(call: Any, values: int, given: int, target: int, copies: int) -> None:
    """Write a block's values in pairs, padded as the keys are."""
    size = call.size
    for start in range(0, (given + 31) // 32 * 32, 2):
        source = values + start * size * 2
        if start + 2 > given:
            _copy_rows(source, max(0, given - start) * size, copies, 2 * size)
            source = copies
        for i in range(0, size, 32):
            place = target + (start // 2 * size + i) * 4
            _interleave(source + i * 2, source + (size + i) * 2, place)


@inlined
def _arrange(call: Any, head: int, start: int, given: int, room: tuple[int, int, int]) -> int:
    """Write keys and values of a block of a head in pairs, to ``room``'s first two addresses."""
    keys = call.keys + (head * call.key_step + start * call.size) * 2
    values = call.values + (head * call.value_step + start * call.size) * 2
    _arrange_values(call, values, given, room[1], room[2])
    return int(_arrange_keys(call, keys, given, room[0], room[2]))


@inlined
def _queries_of(call: Any, head: int, row: int, copies: int) -> int:
    """Return where a tile's queries are: copied, with zeros after them, if the tile is not full."""
    queries = int(call.queries + (head * call.packed + row) * call.size * 2)
    if row + TILE <= call.packed:
        return queries
    _copy_rows(queries, (call.packed - row) * call.size, copies, TILE * call.size)
    return copies


@inlined
def _score_all(call: Any, queries: int, keys: int, padded: int, out: int, num_rows: int) -> None:
    """Write the scores of a tile of queries and a block's keys."""
    size, scaling = call.size, np.float32(call.scaling)
    for i in range(0, padded, 32):
        _score(queries, size * 2, keys + i * 4, size // 2, scaling, out + i * 4, num_rows)


@inlined
def _hide(
    call: Any, scores_at: int, first: int, num_rows: int, start: int, stop: int, padded: int
) -> None:
    """Hide tokens ``start`` to ``stop`` of a tile's scores from rows that do not attend to them."""
    first_hidden = call.num_tokens - call.num_rows + 1 if call.sees == 0 else call.num_tokens
    row = first % call.num_rows
    lowest = row if row + num_rows <= call.num_rows else 0
    if call.mask == 0 and padded <= min(stop, first_hidden + lowest) - start:
        return
    mask = carray(shorts_at(call.mask), (call.num_rows, call.num_tokens))
    scores = carray(floats_at(scores_at), (TILE, BLOCK))
    for i in range(num_rows):
        shown = stop
        if call.mask == 0:
            shown = max(start, min(stop, first_hidden + row))
        else:
            for token in range(start, stop):
                scores[i, token - start] += widen(mask[row, token])
        _hide_behind(scores_at + i * BLOCK * 4, shown - start, padded)
        row = row + 1 if row + 1 < call.num_rows else 0


@inlined
def _reach(call: Any, first: int, num_rows: int) -> int:
    """Return how many tokens from the first on the rows of a tile attend to at most."""
    if call.mask != 0 or call.sees != 0:
        return int(call.num_tokens)
    last = first % call.num_rows + num_rows - 1
    return int(call.num_tokens - max(0, call.num_rows - 1 - last))


@inlined
def _arrange_own_keys(call: Any, head: int, target: int, copies: int) -> None:
    """Write the keys of the pass's rows in pairs, block by block."""
    first = call.keys + (head * call.key_step + (call.num_tokens - call.num_rows) * call.size) * 2
    for start in range(0, call.num_rows, BLOCK):
        given, place = min(BLOCK, call.num_rows - start), start * call.size * 2
        _arrange_keys(call, first + place, given, target + place, copies)


@inlined
def _score_own(call: Any, queries: int, keys: int, out: int, num_rows: int) -> None:
    """Write the scores of a tile of queries and the keys of the pass's rows, block by block."""
    for start in range(0, call.num_rows, BLOCK):
        padded = (min(BLOCK, call.num_rows - start) + 31) // 32 * 32
        own_keys, place = keys + start * call.size * 2, out + start * TILE * 4
        _score_all(call, queries, own_keys, padded, place, num_rows)


@inlined
def _follow(
    call: Any,
    head: int,
    first: int,
    num_rows: int,
    place: int,
    own: Any,
    scores: Any,
    chosen: Any,
    ends: Any,
) -> int:
    """Continue a tile's scores in a block by those of each row's path in the tree.

    Args:
        call: The call.
        head: That of the keys and values.
        first: The tile's first row.
        num_rows: The number of its rows.
        place: The place in the block of the pass's first token, negative if it is in one before.
        own: Scores of all rows' tokens, in blocks, [.., TILE, BLOCK].
        scores: Scores of the tokens before, and those that are written, [TILE, BLOCK].
        chosen: Gets the addresses of the tokens' values, with those before and behind that are
            added up with them, [TILE, BLOCK].
        ends: Gets the number of each row's tokens in the block.

    Returns:
        The highest number, padded to 32s.
    """
    before, start = call.num_tokens - call.num_rows, max(0, place)
    sees = carray(bytes_at(call.sees), (call.num_rows, call.num_rows))
    first_value, step = (
        call.values + (head * call.value_step + before * call.size) * 2,
        call.size * 2,
    )
    width = 0
    for i in range(num_rows):
        row, at = (first + i) % call.num_rows, place
        for token in range(start // _STEP * _STEP, start):
            chosen[i, token] = first_value - (start - token) * step
        for token in range(row + 1):
            if sees[row, token] != 0:
                if 0 <= at < BLOCK:
                    score = own[token // BLOCK, i, token % BLOCK]
                    if call.mask != 0:
                        mask = carray(shorts_at(call.mask), (call.num_rows, call.num_tokens))
                        score += widen(mask[row, before + token])
                    scores[i, at], chosen[i, at] = score, first_value + token * step
                at += 1
        end = max(start, min(at, BLOCK))
        for token in range(end, (end + _STEP - 1) // _STEP * _STEP):
            chosen[i, token] = chosen[i, end - 1]  # of no weight
        ends[i], width = end, max(width, end)
    width = (width + 31) // 32 * 32
    for i in range(num_rows):
        for at in range(ends[i], width):
            scores[i, at] = -np.inf
    return width


@inlined
def _add_paths(
    weights: int, chosen: int, ends: Any, num_rows: int, num_added: int, size: int, sums: int
) -> None:
    """Add the values of each row's own tokens in a block, after so many pairs of all rows."""
    for i in range(num_rows):
        at, steps = i * BLOCK + 2 * num_added, (ends[i] + _STEP - 1) // _STEP
        for column in range(0, size, 32):
            _add_chosen(
                weights + at * 2, chosen + at * 8, steps * (_STEP // 2) - num_added, column * 2,
                sums + (i * size + column) * 4,
            )  # fmt: skip


@inlined
def _clear(call: Any, part: int, num_rows: int) -> None:
    """Set the sums and weights of a part's rows to 0, and their highest scores to none."""
    size = call.size
    sums = carray(floats_at(part), (call.part_rows * size,))
    statistics = carray(floats_at(part + call.part_rows * size * 4), (2, call.part_rows))
    for i in range((num_rows + TILE - 1) // TILE * TILE * size):
        sums[i] = 0
    for i in range(call.part_rows):
        statistics[0, i], statistics[1, i] = -np.inf, 0


@inlined
def _clear_weights(weights: int, fades_at: int) -> None:
    """Set a tile's weights and fades to 0.

    Without tiles, rows that are not there are multiplied, too, and may have slow numbers.
    """
    numbers = carray(shorts_at(weights), (TILE * BLOCK,))
    fades = carray(floats_at(fades_at), (TILE,))
    for i in range(TILE * BLOCK):
        numbers[i] = 0
    for i in range(TILE):
        fades[i] = 0


@compiled  # not inlined: it has two callers
def _attend_split(call: Any, head: int, first: int, split: int, part: int, room: int) -> None:
    """Write the sums of a split's values for a group of rows, their highest scores and weights.

    The group's first row is ``first``. The room holds keys and values of a block in pairs, a tile's
    scores, weights, fades and queries, and copies of the last tokens; for trees where the values of
    a tile's paths are, their numbers, and the keys in pairs and a tile's scores of all rows.
    """
    size, before = call.size, call.num_tokens - call.num_rows
    keys, values = room, room + size * BLOCK * 2
    scores_at = values + size * BLOCK * 2
    weights = scores_at + TILE * BLOCK * 4
    fades_at = weights + TILE * BLOCK * 2
    own_queries = fades_at + TILE * 4
    copies = own_queries + TILE * size * 2
    chosen_at = copies + LANES * size * 2
    ends_at = chosen_at + TILE * BLOCK * 8
    own_blocks = (call.num_rows + BLOCK - 1) // BLOCK if call.sees != 0 else 0
    own_scores = ends_at + TILE * 8
    own_keys = own_scores + own_blocks * TILE * BLOCK * 4
    scores = carray(floats_at(scores_at), (TILE, BLOCK))
    chosen, ends = carray(longs_at(chosen_at), (TILE, BLOCK)), carray(longs_at(ends_at), (TILE,))
    own = carray(floats_at(own_scores), (own_blocks, TILE, BLOCK))
    last_row = min(first + call.part_rows, call.packed)
    _clear(call, part, last_row - first)
    configure_tiles(min(TILE, last_row - first), 1)
    _clear_weights(weights, fades_at)
    end = min(call.num_tokens, (split + 1) * SPLIT)
    is_own_arranged = False
    for start in range(split * SPLIT, end, BLOCK):
        stop = min(start + BLOCK, end)
        shared = stop - start  # of the block's tokens, those that all rows have at the same place
        if call.sees != 0:
            shared = max(0, min(shared, before - start))
        is_own = start + shared < stop
        padded = -1
        for row in range(first, last_row, TILE):
            num_rows = min(TILE, last_row - row)
            reach = _reach(call, row, num_rows)
            if start >= reach:
                continue
            if padded < 0:
                padded = _arrange(call, head, start, shared, (keys, values, copies))
            if is_own and not is_own_arranged:
                is_own_arranged = True
                _arrange_own_keys(call, head, own_keys, copies)
            queries = _queries_of(call, head, row, own_queries)
            width = min(padded, (reach - start + 31) // 32 * 32)
            _score_all(call, queries, keys, width, scores_at, num_rows)
            _hide(call, scores_at, row, num_rows, start, min(start + shared, start + width), width)
            num_pairs = width // 2
            if is_own:
                _score_own(call, queries, own_keys, own_scores, num_rows)
                width = _follow(
                    call, head, row, num_rows, before - start, own, scores, chosen, ends
                )
                num_pairs = shared // _STEP * (_STEP // 2)
            tops = part + (call.part_rows * size + row - first) * 4
            totals = tops + call.part_rows * 4
            _soften(scores_at, width // LANES, num_rows, tops, totals, fades_at, weights)
            sums = part + (row - first) * size * 4
            for i in range(0, size * 4, 128):
                _add_values(weights, values + i, size * 4, num_pairs, fades_at, sums + i, num_rows)
            if is_own:
                _add_paths(weights, chosen_at, ends, num_rows, num_pairs, size, sums)


@inlined
def _add_part(call: Any, first: int, part: int, other: int) -> None:
    """Add the sums of the next split to those of the splits before it."""
    size, shape = call.size, (call.part_rows, call.size)
    sums, others = carray(floats_at(part), shape), carray(floats_at(other), shape)
    statistics = carray(floats_at(part + call.part_rows * size * 4), (2, call.part_rows))
    added = carray(floats_at(other + call.part_rows * size * 4), (2, call.part_rows))
    for row in range(min(call.part_rows, call.packed - first)):
        top = max(statistics[0, row], added[0, row])
        floor = top if top > -np.inf else np.float32(0)
        old = _power_of_e(statistics[0, row] - floor)
        new = _power_of_e(added[0, row] - floor)
        statistics[0, row] = top
        statistics[1, row] = statistics[1, row] * old + added[1, row] * new
        for i in range(size):
            sums[row, i] = sums[row, i] * old + others[row, i] * new


@inlined
def _write(call: Any, head: int, first: int, part: int) -> None:
    """Write the output of a group of rows from the sums of all splits."""
    size, num_rows = call.size, call.num_rows
    sharing = call.packed // num_rows
    out = carray(shorts_at(call.out), (num_rows, call.num_kv_heads * sharing, size))
    sums = carray(floats_at(part), (call.part_rows, size))
    statistics = carray(floats_at(part + call.part_rows * size * 4), (2, call.part_rows))
    for row in range(first, min(first + call.part_rows, call.packed)):
        total = statistics[1, row - first]
        for i in range(size):
            own = sums[row - first, i] / total
            out[row % num_rows, head * sharing + row // num_rows, i] = narrow(own)


@inlined
def _attend_group(call: Any, task: int, thread: int, room: int) -> None:
    """Attend over all tokens with a group of a head's rows."""
    part = call.parts + 2 * thread * call.part_bytes
    head, first = task % call.num_kv_heads, task // call.num_kv_heads * GROUP
    for split in range(call.num_splits):
        own = part if split == 0 else part + call.part_bytes
        _attend_split(call, head, first, split, own, room)
        if split > 0:
            _add_part(call, first, part, own)
    _write(call, head, first, part)


@inlined
def _attend_over_split(call: Any, task: int, room: int) -> None:
    """Attend over a split of the tokens with a head's rows; after the last of them, add up all."""
    head = task % call.num_kv_heads
    _attend_split(
        call, head, 0, task // call.num_kv_heads, call.parts + task * call.part_bytes, room
    )
    if count(call.counters + (2 + head) * 8) == call.num_splits - 1:
        part = call.parts + head * call.part_bytes
        for split in range(1, call.num_splits):
            _add_part(call, 0, part, part + split * call.num_kv_heads * call.part_bytes)
        _write(call, head, 0, part)


@compiled
def attend_splits(call: Any) -> None:
    """Run tasks of a call until none is left; it is one of ``RECORD``."""
    thread = count(call.counters + 8)
    room = call.rooms + thread * call.room_bytes
    task = count(call.counters)
    while task < call.num_tasks:
        if call.packed > GROUP:
            _attend_group(call, task, thread, room)
        else:
            _attend_over_split(call, task, room)
        task = count(call.counters)
    release_tiles()


def _run_tasks(calls: Any) -> None:
    attend_splits(carray(calls, (1,))[0])


_TASKS = Tasks(
    _run_tasks,
    (
        # Addresses, and how many elements later the next head begins.
        "queries", "keys", "values", "out", "mask", "sees", "key_step", "value_step",
        # The sizes K, n, R, D, T, and the number of splits.
        "num_kv_heads", "num_rows", "packed", "size", "num_tokens", "num_splits",
        # Addresses of sums with their statistics, of rooms for the threads, and their bytes;
        # address of the numbers of tasks begun, threads begun, and each head's splits done.
        "parts", "part_rows", "part_bytes", "rooms", "room_bytes", "counters", "num_tasks",
    ),
    ("scaling",),
)  # fmt: skip
RECORD = _TASKS.record
