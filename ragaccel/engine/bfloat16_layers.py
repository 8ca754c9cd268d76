"""All decoder layers of a pass of bfloat16 rows on a CPU in one call, by ``bfloat16_code``.

Starting each operation of a layer from Python took 1 to 2 of the 8 to 10 ms of a 135M model's step.
Here the threads go through the layers together, and wait for one another after each operation.
Results are those of the operations one by one, to the last bit.

Shapes: N rows of S sequences, n rows of one, T tokens with these, L layers, E hidden size, F inner
size, H query heads, K heads of keys and values, D head size, R rank of a change.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types

from ragaccel.engine import (
    bfloat16_attention as attention,
    bfloat16_products as products,
    int8,
    row_kernels,
)
from ragaccel.engine.bfloat16 import BLOCK_OUTPUTS, pack
from ragaccel.engine.bfloat16_code import (
    I32,
    I64,
    WHOLE,
    Tasks,
    call_llvm,
    count,
    doubles_at,
    function_address,
    instruction,
    longs_at,
    records_at,
)
from ragaccel.engine.kv_cache import KVCache
from ragaccel.engine.model_input import causal_rows
from ragaccel.engine.row_kernels import normalize_row, rotate_row
from ragaccel.jit import compiled, inlined

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ragaccel.engine.model_input import RowSpan

PRODUCTS = 4
"""Products of a layer: of queries, keys and values; of the output; of gate and up; down."""
_NORMS = 4  # weights of a layer's norms: before attention and MLP, of query heads, of key heads
_EPSILONS = 3  # of the norms before attention and MLP, and of heads
_WHOLE_ROWS = 64  # most rows that go through all layers in one call, which no signal interrupts
# Looks at the others' progress before a thread sleeps, and microseconds that it sleeps: another
# program may be running where a thread that is waited for would.
_SPINS, _SLEEP = 1 << 10, 20
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What stays the same of a layer; ``sizes`` are the outputs and inputs of its products."""

    sizes: Sequence[tuple[int, int]]
    epsilons: tuple[float, float, float]
    scaling: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of all layers as they are now; None for a bias or norm that is not there."""

    packed: Sequence[Tensor]  # [L * PRODUCTS]
    biases: Sequence[Tensor | None]  # [L * PRODUCTS], each [O]
    norms: Sequence[Tensor | None]  # [L * 4]


@dataclass(frozen=True, slots=True)
class RowChanges:
    """Low-rank changes of products in adjoining rows; None for a product without one."""

    rows: slice
    downs: Sequence[Tensor | None]  # [L * PRODUCTS], each [R, I], packed
    ups: Sequence[Tensor | None]  # [L * PRODUCTS], each [O, R], packed


@dataclass(frozen=True, slots=True)
class CachedRows:
    """The rows of one sequence; keys and values of each layer have room for them."""

    span: RowSpan
    buffers: Sequence[Tensor]  # [2 L], keys and values alternating, each [1, K, C, D]
    masks: Sequence[Tensor | None]  # [L], each [n, T] and added to the scores


class CompiledLayers:
    """The decoder layers of a model.

    Args:
        layers: their shapes.
        heads: H, K and D.
    """

    def __init__(self, layers: Sequence[LayerShape], heads: tuple[int, int, int]) -> None:
        self._layers, self._heads = layers, heads
        self._calls = np.zeros((len(layers), PRODUCTS), products.RECORD)
        sizes = np.array([layer.sizes for layer in layers])  # [L, PRODUCTS, 2]
        self._calls["num_blocks"] = sizes[..., 0] // BLOCK_OUTPUTS
        self._calls["num_blocks"][:, _GATE] //= 2  # blocks of both halves are multiplied at a time
        self._calls["num_pairs"] = sizes[..., 1] // 2
        self._epsilons = np.array([layer.epsilons for layer in layers])

    def run(
        self,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        sequences: Sequence[CachedRows],
        weights: LayerWeights,
        changes: RowChanges | None = None,
    ) -> None:
        """Compute the hidden states behind the layers, and write keys and values to the caches.

        Args:
            hidden: the embedded rows [N, E]; they are overwritten by the results.
            angles: cosines and sines [N, D], the sines of the first half negated.
            sequences: the rows by sequences.
            weights: the weights.
            changes: they are rounded, and added to the rounded products.
        """
        threads, num_rows, num_layers = torch.get_num_threads(), len(hidden), len(self._layers)
        num_heads, num_kv_heads, size = self._heads
        plans = [self._plan(own, threads) for own in sequences]
        inner = int(self._calls["num_blocks"][:, _GATE].max()) * BLOCK_OUTPUTS
        row_sizes = (
            hidden.shape[1], hidden.shape[1], (num_heads + 2 * num_kv_heads) * size,
            num_heads * size, num_heads * size, 0 if changes is None else 2 * inner, inner,
        )  # fmt: skip
        needed = [num_rows * numbers * 2 for numbers in row_sizes]
        needed += [threads * size * 2, *(plan.num_bytes for plan in plans)]
        room, places = _allocate(needed)
        other, normed, states, queries, attended, gate, activated, heads, *rooms = places
        counters = np.zeros((num_layers, PRODUCTS + 2), np.int64)
        calls = self._products(weights, num_rows, counters)
        calls["rows"] = normed, attended, normed, activated
        calls["out"] = states, other, 0 if changes is None else gate, hidden.data_ptr()
        calls["added"] = 0, hidden.data_ptr(), 0, other
        calls["activated"] = 0, 0, activated, 0
        changed, kept = ((), None) if changes is None else _changes(changes, calls)
        splits, done = self._attentions(sequences, plans, rooms, (queries, attended))
        norms, firsts = _addresses(weights.norms), np.array([own.span.first for own in sequences])
        step = num_layers if num_rows <= _WHOLE_ROWS else 1
        for layer in range(0, num_layers, step):
            _TASKS.run(
                threads,
                step, len(sequences), num_rows, hidden.shape[1], num_heads, num_kv_heads, size,
                calls[layer].ctypes.data, splits[layer].ctypes.data,
                norms[layer * _NORMS :].ctypes.data, self._epsilons[layer].ctypes.data,
                firsts.ctypes.data, hidden.data_ptr(), other, normed, states,
                angles[0].data_ptr(), angles[1].data_ptr(), heads,
                *([records[layer:].ctypes.data for records in changed] or (0, 0)),
                counters[layer].ctypes.data,
                function_address("omp_get_num_threads"), function_address("usleep"),
            )  # fmt: skip
        del room, done, kept  # not before: the records have their addresses

    def _products(
        self, weights: LayerWeights, num_rows: int, counters: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        """Return the records of products [L, PRODUCTS], without the addresses of rows."""
        calls: np.ndarray[Any, Any] = self._calls.copy()
        is_int8 = [int8.is_packed(one) for one in weights.packed]
        calls["is_int8"] = np.reshape(is_int8, calls.shape)
        calls["weights"] = _addresses(weights.packed).reshape(calls.shape)
        calls["bias"] = _addresses(weights.biases).reshape(calls.shape)
        calls["num_rows"] = num_rows
        _divide(calls, num_rows)
        calls["begun"] = _places_in(counters)[:, 2:]
        return calls

    def _plan(self, own: CachedRows, threads: int) -> attention.Plan:
        span, num_tokens = own.span, own.span.cache.stop
        is_tree = span.paths is not None
        return attention.plan_of(
            self._heads, span.num_rows, num_tokens, is_tree=is_tree, threads=threads
        )

    def _attentions(
        self,
        sequences: Sequence[CachedRows],
        plans: Sequence[attention.Plan],
        rooms: Sequence[int],
        states: tuple[int, int],
    ) -> tuple[np.ndarray[Any, Any], object]:
        """Return the records of attention [L, S], and what has to be kept for them.

        ``states`` are the addresses of all queries [.., H, n, D] and of the output [N, H, D].
        """
        num_layers, (num_heads, num_kv_heads, size) = len(self._layers), self._heads
        found = np.zeros((num_layers, len(sequences)), attention.RECORD)
        counters = np.zeros((*found.shape, 2 + num_kv_heads), np.int64)
        found["num_kv_heads"], found["size"] = num_kv_heads, size
        found["scaling"] = np.array([layer.scaling for layer in self._layers])[:, None]
        found["counters"] = _places_in(counters)[..., 0]
        kept: list[object] = [counters]
        for number, (own, plan, room) in enumerate(zip(sequences, plans, rooms, strict=True)):
            calls, span = found[:, number], own.span
            for name in ("packed", "num_splits", "num_tasks", "part_rows", "part_bytes"):
                calls[name] = getattr(plan, name)
            calls["room_bytes"], calls["parts"] = plan.room_bytes, room
            calls["rooms"] = room + plan.num_parts * plan.part_bytes
            calls["num_rows"], calls["num_tokens"] = span.num_rows, span.cache.stop
            place = span.first * num_heads * size * 2
            calls["queries"], calls["out"] = states[0] + place, states[1] + place
            calls["keys"], calls["values"] = _addresses(own.buffers).reshape(num_layers, 2).T
            steps = [buffer.stride(1) for buffer in own.buffers]
            calls["key_step"], calls["value_step"] = np.array(steps).reshape(num_layers, 2).T
            wanted = span.num_rows, span.cache.stop
            masks = {
                id(one): attention.given_mask(one, *wanted) for one in own.masks if one is not None
            }
            calls["mask"] = _addresses([masks.get(id(one)) for one in own.masks])
            kept.append(masks)
            if span.sees is not None:
                sees = span.sees.contiguous()
                calls["sees"] = sees.data_ptr()
                kept.append(sees)
        return found, kept


_GATE = 2  # its place among a layer's products


def _split_activations(gates: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], object]:
    """Return records [L] that activate the products of ``gates`` [L], and what is kept for them."""
    found, counters = np.zeros_like(gates), np.zeros(len(gates), np.int64)
    for name in ("out", "activated", "num_blocks", "num_rows", "task_rows", "task_blocks"):
        found[name] = gates[name]
    found["begun"] = _places_in(counters)
    gates["activated"] = 0
    gates["num_blocks"] *= 2
    return found, counters


def _changes(
    changes: RowChanges, calls: np.ndarray[Any, Any]
) -> tuple[Sequence[np.ndarray[Any, Any]], object]:
    """Return records of changes [L, PRODUCTS, 2] and activations [L], and what is kept for them.

    A change's are those of down and up. Activations come after it, no longer with the product:
    ``calls`` [L, PRODUCTS] are altered.
    """
    activations, activations_begun = _split_activations(calls[:, _GATE])
    first, num_rows = changes.rows.start, changes.rows.stop - changes.rows.start
    found = np.zeros((*calls.shape, 2), products.RECORD)
    counters = np.zeros(found.shape, np.int64)
    downs, ups = found[..., 0], found[..., 1]
    for records, packed in ((downs, changes.downs), (ups, changes.ups)):
        shapes = [(0, 0) if one is None else one.shape[:2] for one in packed]
        sizes = np.reshape(shapes, (*records.shape, 2))
        records["num_blocks"], records["num_pairs"] = sizes[..., 0], sizes[..., 1]
        records["weights"] = _addresses(packed).reshape(records.shape)
    low = torch.empty(
        num_rows * int(downs["num_blocks"].max()) * BLOCK_OUTPUTS * 2, dtype=torch.uint8
    )
    downs["rows"] = calls["rows"] + first * calls["num_pairs"] * 4
    downs["out"] = ups["rows"] = low.data_ptr()
    ups["out"] = ups["added"] = calls["out"] + first * calls["num_blocks"] * BLOCK_OUTPUTS * 2
    found["num_rows"] = num_rows
    _divide(found, num_rows)
    found["begun"] = _places_in(counters)
    return (found, activations), (counters, activations_begun, low)


def _divide(calls: np.ndarray[Any, Any], num_rows: int) -> None:
    """Divide products of so many rows into tasks."""
    divided = products.divide(num_rows, calls["num_pairs"], calls["num_blocks"])
    calls["task_rows"], calls["task_blocks"] = divided


def _addresses(tensors: Sequence[Tensor | None]) -> np.ndarray[Any, Any]:
    return np.array([0 if one is None else one.data_ptr() for one in tensors], np.int64)


def _places_in(counters: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the address of each counter."""
    first = counters.ctypes.data
    places: np.ndarray[Any, Any] = np.arange(first, first + counters.nbytes, 8)
    return np.reshape(places, counters.shape)


def _allocate(sizes: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Return memory for parts of so many bytes, and the parts' addresses."""
    ends = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
    room = torch.empty(ends[-1], dtype=torch.uint8)
    return room, [room.data_ptr() + start for start in ends[:-1]]


@instruction(WHOLE, WHOLE)
def _look(builder: Any, address: Any) -> Any:
    """Return a counter that other threads increase."""
    pointer = builder.inttoptr(address, I64.as_pointer())
    return builder.load_atomic(pointer, "acquire", 8)


@instruction(types.none)
def _pause(builder: Any) -> None:
    """Tell the processor that this thread waits."""
    call_llvm(builder, "x86.sse2.pause", ir.VoidType())


@instruction(types.int32, WHOLE, WHOLE)
def _call(builder: Any, address: Any, given: Any) -> Any:
    """Call a function of a whole number, or of nothing, that returns one."""
    pointer = ir.FunctionType(I32, [I32]).as_pointer()
    return builder.call(builder.inttoptr(address, pointer), [builder.trunc(given, I32)])


_products_at, _attentions_at = records_at(products.RECORD), records_at(attention.RECORD)


@inlined
def _wait(call: Any, at: Any) -> None:
    """Wait until all threads have arrived here; ``at`` are this one's number and that of all."""
    expected = (count(call.counters) // at[1] + 1) * at[1]
    spins = 0
    while _look(call.counters) < expected:
        spins += 1
        if spins % _SPINS == 0:
            _call(call.sleep_at, _SLEEP)
        else:
            _pause()


@inlined
def _normalize_rows(call: Any, rows: int, norm: int, epsilon: float, at: Any) -> None:
    """Write norms of rows, by weights; ``at`` are the number of this thread and that of all."""
    row_bytes = call.hidden_size * 2
    for row in range(at[0], call.num_rows, at[1]):
        place = row * row_bytes
        normalize_row(rows + place, norm, call.normed + place, call.hidden_size, epsilon)


@inlined
def _store_rows(call: Any, own: Any, first: int, norms: Any, epsilon: float, at: Any) -> None:
    """Rotate rows of a sequence that begins with row ``first``, and write to its cache."""
    size = call.size
    states_bytes = (call.num_heads + 2 * call.num_kv_heads) * size * 2
    for row in range(at[0], own.num_rows, at[1]):
        place = (first + row) * size * 2
        slot = (own.num_tokens - own.num_rows + row) * size * 2
        rotate_row(
            call.states + (first + row) * states_bytes,
            (call.cosines + place, call.sines + place),
            (norms[2], norms[3], epsilon),
            (own.queries + row * size * 2, own.num_rows * size),
            (own.keys + slot, own.values + slot, own.key_step, own.value_step),
            (call.num_heads, call.num_kv_heads, size),
            call.heads + at[0] * size * 2,
        )


@compiled  # not inlined: it has several callers
def _multiply(call: Any, product: Any, changes: Any, at: Any) -> None:
    """Multiply rows by a product's weights, and change some; ``changes`` are down and up."""
    products.multiply_blocks(product)
    if call.changes != 0:
        products.multiply_blocks(changes[0])
        _wait(call, at)
        products.multiply_blocks(changes[1])
    _wait(call, at)


def _run_layers(calls: Any) -> None:
    """Go through some layers, as one thread of a team."""
    call = carray(calls, (1,))[0]
    at = count(call.counters + 8), _call(call.team_at, 0)
    multiplied = carray(_products_at(call.products), (call.num_layers, PRODUCTS))
    changed = carray(_products_at(call.changes), (call.num_layers, PRODUCTS, 2))
    activations = carray(_products_at(call.activations), (call.num_layers,))
    attended = carray(_attentions_at(call.attentions), (call.num_layers, call.num_sequences))
    norms = carray(longs_at(call.norms), (call.num_layers, _NORMS))
    epsilons = carray(doubles_at(call.epsilons), (call.num_layers, _EPSILONS))
    firsts = carray(longs_at(call.firsts), (call.num_sequences,))
    for layer in range(call.num_layers):
        _normalize_rows(call, call.hidden, norms[layer, 0], epsilons[layer, 0], at)
        _wait(call, at)
        _multiply(call, multiplied[layer, 0], changed[layer, 0], at)
        for own in range(call.num_sequences):
            attention_of_own, heads_epsilon = attended[layer, own], epsilons[layer, 2]
            _store_rows(call, attention_of_own, firsts[own], norms[layer], heads_epsilon, at)
        _wait(call, at)
        for own in range(call.num_sequences):
            attention.attend_splits(attended[layer, own])
        _wait(call, at)
        _multiply(call, multiplied[layer, 1], changed[layer, 1], at)
        _normalize_rows(call, call.other, norms[layer, 1], epsilons[layer, 1], at)
        _wait(call, at)
        _multiply(call, multiplied[layer, _GATE], changed[layer, _GATE], at)
        if call.changes != 0:
            products.multiply_blocks(activations[layer])
            _wait(call, at)
        _multiply(call, multiplied[layer, 3], changed[layer, 3], at)


_TASKS = Tasks(
    _run_layers,
    (
        # Numbers and sizes.
        "num_layers", "num_sequences", "num_rows", "hidden_size",
        "num_heads", "num_kv_heads", "size",
        # Addresses of the records of products and of attention, of tables of addresses of norms'
        # weights, of epsilons and of each sequence's first row.
        "products", "attentions", "norms", "epsilons", "firsts",
        # Addresses of states of all rows, and of a head of each thread.
        "hidden", "other", "normed", "states", "cosines", "sines", "heads",
        # Addresses of the records of changes and of activations behind them, or 0.
        "changes", "activations",
        # Addresses of the numbers of threads that have arrived and begun, and of functions that
        # return the number of threads and sleep for microseconds.
        "counters", "team_at", "sleep_at",
    ),
)  # fmt: skip


def check() -> None:
    """Compile the layers, and compare them with their operations one by one.

    Raises:
        RuntimeError: they give other bits.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    size, num_rows, inner, rank = attention.HEAD_STEP, 3, 2 * BLOCK_OUTPUTS, BLOCK_OUTPUTS
    sizes = (4 * size, size), (size, 2 * size), (2 * inner, size), (size, inner)
    packed = [pack(draw(*shape)) for shape in sizes]
    weights = LayerWeights(packed, [None] * PRODUCTS, [draw(size) for _ in range(_NORMS)])
    downs = [pack(draw(rank, inputs)) for _, inputs in sizes]
    ups = [pack(draw(outputs, rank)) for outputs, _ in sizes]
    changes = RowChanges(slice(1, num_rows), downs, ups)
    shape = LayerShape(sizes, (1e-5, 1e-6, 1e-4), 0.2)
    hidden, angles = draw(num_rows, size), (draw(num_rows, size), draw(num_rows, size))
    cache = KVCache()
    span = causal_rows([0] * num_rows, cache).spans[0]
    buffers = cache.make_buffers(0, *draw(2, 1, 1, 0, size))
    rows = CachedRows(span, buffers, (None,))
    # First, so that ``row_kernels`` are compiled last: whether they are decides on the next run.
    layers = CompiledLayers([shape], (2, 1, size))
    for given in (None, changes):
        found = hidden.clone()
        layers.run(found, angles, [rows], weights, given)
        kept = [buffer[:, :, :num_rows].clone() for buffer in buffers]
        wanted = _one_by_one(shape, hidden, angles, buffers, weights, given)
        stored = [buffer[:, :, :num_rows] for buffer in buffers]
        if not all(map(torch.equal, (found, *kept), (wanted, *stored))):
            raise RuntimeError("compiled layers differ from their operations")


def _one_by_one(
    layer: LayerShape,
    hidden: Tensor,
    angles: tuple[Tensor, Tensor],
    buffers: Sequence[Tensor],
    weights: LayerWeights,
    changes: RowChanges | None,
) -> Tensor:
    """Return the hidden states [N, E] behind a layer of two heads, by one operation at a time."""
    num_rows, size = hidden.shape

    def product(place: int, inputs: Tensor, added: Tensor | None = None) -> Tensor:
        found = products.multiply(inputs, weights.packed[place], None, added)
        if changes is not None:
            rows, down, up = changes.rows, changes.downs[place], changes.ups[place]
            assert down is not None
            assert up is not None
            low = products.multiply(inputs[rows], down)
            found[rows] = products.multiply(low, up, None, found[rows])
        return found

    def normalized(states: Tensor, place: int) -> Tensor:
        out, norm = torch.empty_like(states), weights.norms[place]
        assert norm is not None
        places = states.data_ptr(), norm.data_ptr(), out.data_ptr()
        row_kernels.normalize(*places, num_rows, size, layer.epsilons[place])
        return out

    keys, values = buffers
    norms = _addresses(weights.norms)
    states = product(0, normalized(hidden, 0))
    queries = hidden.new_empty(1, 2, num_rows, size)
    row_kernels.rotate_and_store(
        states.data_ptr(),
        (angles[0].data_ptr(), angles[1].data_ptr()),
        (int(norms[2]), int(norms[3]), layer.epsilons[2]),
        queries.data_ptr(),
        (keys.data_ptr(), values.data_ptr(), keys.stride(1), values.stride(1)),
        (num_rows, 2, 1, size),
    )
    stored = keys[:, :, :num_rows], values[:, :, :num_rows]
    attended = attention.attend((queries, *stored), layer.scaling).view(num_rows, -1)
    other = product(1, attended, hidden)
    gate = product(_GATE, normalized(other, 1))
    return product(3, products.silu_and_mul(gate), other)
