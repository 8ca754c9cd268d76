"""The kernels against float64: on a CUDA device, or interpreted without one."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from interpreted import CUDA, DEVICE, load
from row_tables import block_table, copy_tables, make_segment, path_matrix

from ragaccel.engine import num_splits, rows_per_block
from ragaccel.engine.model_input import ancestor_paths

pytest.importorskip("triton")

SPLIT = 64
TREE = ancestor_paths([-1, 0, 1, 2, 3, 0, 5, 5, 2, 8])  # its first five rows are a chain


@pytest.fixture(scope="module")
def attention():
    """A separate copy of the module under test, with interpreted kernels if there is no device."""
    with load("triton_attention") as module:
        yield module


@dataclass(frozen=True)
class Pass:
    """One layer of a KV pool that holds NaN wherever no sequence lies, and queries."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    segments: tuple


def make_pass(segments, heads=2, kv_heads=1, head_size=16, dtype=torch.float32, slots=None):
    generator = torch.Generator().manual_seed(7)
    ends = [segment.base + segment.start + segment.num_rows for segment in segments]
    kv_pool = torch.full((slots or max(ends), kv_heads, 2, head_size), float("nan"))
    for segment, end in zip(segments, ends, strict=True):
        shape = kv_pool[segment.base : end].shape
        kv_pool[segment.base : end] = torch.randn(shape, generator=generator)
    num_rows = 1 + max(segment.first + segment.num_rows for segment in segments)
    q = 2 * torch.randn(heads, num_rows, head_size, generator=generator)
    keys, values = kv_pool.to(DEVICE, dtype).transpose(0, 1).unbind(2)
    return Pass(q.to(DEVICE, dtype).transpose(0, 1), keys, values, tuple(segments))


def run(attention, case, splits=None, block_rows=None, spare=1, split=SPLIT, **options):
    """Attend, with scratch that holds NaN; return the result and the scratch."""
    num_rows, heads, _ = case.q.shape
    block_rows = block_rows or rows_per_block(heads // len(case.keys))
    num_blocks = spare + sum(-(-segment.num_rows // block_rows) for segment in case.segments)
    sizes = {"num_rows": num_rows, "num_blocks": num_blocks, "num_words": 2}
    blocks = block_table(case.segments, **sizes, block_rows=block_rows, device=DEVICE)
    splits = splits or num_splits(int(blocks.stops.max()), SPLIT)
    kernel = attention.TritonKernel(split)
    stats, partials = kernel._scratch_for(case.q, splits)
    for part in (stats, partials):
        part.fill_(float("nan"))
    arrays = (case.q, case.keys, case.values, blocks)
    out = kernel(*arrays, num_splits=splits, **{"scaling": 0.3, **options})
    (scratch,) = kernel.buffers
    assert stats.nbytes + partials.nbytes <= scratch.nbytes < stats.nbytes + partials.nbytes + 16
    return out, stats


def expected(case, scaling=0.3, window=None, softcap=None):
    """The same attention in float64, a row at a time; zeros for padding."""
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    q, keys, values = (part.cpu().double() for part in (case.q, case.keys, case.values))
    for segment in case.segments:
        n, start = segment.num_rows, segment.start
        sees = np.tri(n, dtype=np.bool_) if segment.sees is None else path_matrix(segment.sees)
        positions = np.concatenate((np.arange(start), segment.positions))
        for row in range(n):
            seen = np.concatenate((np.ones(start, dtype=np.bool_), sees[row]))
            seen &= positions[start + row] - positions < (window or 10**6)
            slots = segment.base + seen.nonzero()[0]
            k, v = keys[:, slots], values[:, slots]
            grouped = q[segment.first + row].view(len(k), -1, q.shape[2])
            scores = grouped @ k.transpose(1, 2) * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[segment.first + row] = (scores.softmax(2) @ v).view(q.shape[1:])
    return out


def check(attention, case, **options):
    out = run(attention, case, **options)[0].cpu().double()
    options.pop("block_rows", None)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[case.q.dtype]
    torch.testing.assert_close(out, expected(case, **options), atol=tolerance, rtol=tolerance)


RAGGED = (
    make_segment(0, 1, 0, 80),
    make_segment(1, 10, 90, 59, TREE),
    make_segment(11, 3, 170, 0),
    make_segment(14, 18, 180, 3),
)
BRANCHING = ancestor_paths([-1, *(row // 2 for row in range(69))])
ONE_TREE = [make_segment(0, 10, 2, 60, TREE)]
PASSES = {
    "one row": ([make_segment(0, 1, 3, 20)], {}, {}),
    "first row of all": ([make_segment(0, 1, 3, 0)], {}, {}),
    "chain": ([make_segment(1, 5, 0, 30)], {}, {}),
    "tree": ([make_segment(0, 10, 9, 140, TREE)], {}, {}),
    "ragged": (RAGGED, {}, {}),
    "a prompt, which needs no bits": ([make_segment(0, 70, 1, 0)], {"heads": 1}, {}),
    "more rows than bits of a word": ([make_segment(0, 70, 0, 5, BRANCHING)], {"heads": 1}, {}),
    "capped scores": (RAGGED[:2], {}, {"softcap": 1.5, "scaling": 0.8}),
    "many splits": ([make_segment(0, 2, 0, 6 * SPLIT)], {"heads": 1}, {}),
    "longer splits": ([make_segment(0, 3, 0, 20 * SPLIT)], {"heads": 1}, {}),
    "more splits than are combined at a time": (
        [make_segment(0, 1, 0, 110 * SPLIT)], {"heads": 1}, {}
    ),
    "longer splits and a window": (
        [make_segment(0, 2, 0, 75 * SPLIT)], {"heads": 1}, {"window": 13 * SPLIT}
    ),
    **{
        f"{length} tokens": ([make_segment(0, 1, 0, length - 1)], {"heads": 1}, {})
        for length in (8 * SPLIT, 8 * SPLIT + 1, 12 * SPLIT, 12 * SPLIT + 1)
    },
    "many splits and a window": (
        [make_segment(0, 2, 0, 7 * SPLIT)], {"heads": 1}, {"window": 2 * SPLIT}
    ),
    "small blocks": (ONE_TREE, {}, {"block_rows": 4}),
    **{
        f"heads of {size}": (ONE_TREE, {"head_size": size}, {"scaling": 0.1})
        for size in (16, 64, 80, 128)
    },
    **{
        f"{heads} heads over {kv_heads}": (ONE_TREE, {"heads": heads, "kv_heads": kv_heads}, {})
        for heads, kv_heads in ((2, 2), (6, 2), (7, 1))
    },
    **{
        f"a window of {window}": (
            [make_segment(0, 10, 5, 140, TREE), make_segment(10, 2, 160, 3)], {}, {"window": window}
        )
        for window in (1, 4, 20, 70)
    },
    **{
        f"{dtype}, {more}": (
            RAGGED[:2], {"heads": 6, "kv_heads": 2, "head_size": 64, "dtype": dtype},
            {"scaling": 0.1, **more},
        )
        for dtype in (torch.float16, torch.bfloat16)
        for more in ({}, {"window": 30, "softcap": 2.0})
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_equals_float64(attention, name):
    segments, sizes, options = PASSES[name]
    check(attention, make_pass(segments, **sizes), **options)


@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 2.0}], ids=str)
def test_bits_do_not_depend_on_the_other_rows(attention, options):
    """A token's row in a tree, in a chain and alone, and beside other sequences."""
    tree = make_pass([make_segment(0, 10, 4, 125, TREE)], heads=3)
    wanted = run(attention, tree, **options)[0][4]
    chain = replace(tree, segments=(make_segment(0, 5, 4, 125),))
    alone = replace(tree, segments=(make_segment(4, 1, 4, 129),))
    beside = replace(tree, segments=(make_segment(0, 2, 4, 9), make_segment(2, 3, 4, 127)))
    for other in (chain, alone, beside):
        assert torch.equal(run(attention, other, **options)[0][4], wanted)


@pytest.mark.parametrize("options", [{}, {"window": 9}], ids=str)
def test_bits_do_not_depend_on_the_sizes_a_pass_is_padded_to(attention, options):
    case = make_pass(RAGGED[:2])
    wanted = run(attention, case, **options)[0]
    assert torch.equal(run(attention, case, splits=11, spare=4, **options)[0], wanted)
    more = replace(case, q=torch.cat((case.q, case.q)))
    out = run(attention, more, **options)[0]
    assert torch.equal(out[: len(wanted)], wanted)
    assert not out[len(wanted) :].any()


def test_bits_do_not_depend_on_where_a_sequence_lies(attention):
    low, high = ([make_segment(0, 10, base, 60, TREE)] for base in (0, 37))
    here, there = make_pass(low, slots=150), make_pass(high)
    assert torch.equal(here.keys[:, :70], there.keys[:, 37:])
    assert torch.equal(run(attention, here)[0], run(attention, there)[0])


def test_splits_that_nothing_reads_are_not_computed(attention):
    case = make_pass([make_segment(0, 3, 0, 200)])
    _, stats = run(attention, case, splits=6, window=20)
    computed = ~torch.isnan(stats[:, 0, 0, 0])
    assert computed.tolist() == [False, False, True, True, False, False]


@pytest.mark.parametrize(
    ("changes", "options", "match"),
    [
        ({}, {"split": 40}, "not a multiple"),
        ({}, {"block_rows": 256}, "use rows_per_block"),
        (
            {"q": torch.zeros(2, 3, 16, device=DEVICE)},
            {},
            "3 query heads are not a multiple of 2 KV heads",
        ),
        ({"q": torch.zeros(2, 2, 8, device=DEVICE)}, {}, "the queries' head size"),
        ({"q": torch.zeros(2, 2, 32, device=DEVICE)[:, :, ::2]}, {}, "contiguous"),
        (
            {"q": torch.zeros(2, 2, 16, device=DEVICE).half()},
            {},
            "queries, keys and values must have one dtype",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(attention, changes, options, match):
    case = make_pass([make_segment(0, 1, 0, 3)], heads=2, kv_heads=2)
    with pytest.raises(ValueError, match=match):
        run(attention, replace(case, **changes), **options)


def test_passes_share_the_memory_of_the_largest(attention):
    kernel = attention.TritonKernel(SPLIT)
    assert kernel.buffers == ()
    small, large = torch.zeros(2, 2, 16, device=DEVICE), torch.zeros(8, 2, 16, device=DEVICE)
    kernel._scratch_for(small, 3)
    (first,) = kernel.buffers
    kernel._scratch_for(large, 5)
    (second,) = kernel.buffers
    assert second is not first, "a captured graph may write to it"
    stats, partials = kernel._scratch_for(small, 3)
    assert kernel.buffers[0] is second
    assert (stats.shape, partials.shape) == ((3, 2, 2, 2), (3, 2, 2, 16))
    assert partials.data_ptr() % 16 == stats.data_ptr() % 16 == 0
    assert stats.data_ptr() + stats.nbytes <= partials.data_ptr()


@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("size", [16, 80])
def test_slots_move_in_order_and_no_others(attention, count, size):
    states = torch.randn(4, 3, 12, size, device=DEVICE)
    sources, targets = (torch.tensor(part, device=DEVICE) for part in ([4, 5, 7, 10], [3, 4, 5, 8]))
    wanted = states.clone()
    moved = states[:, :, sources[:count]]
    wanted[:, :, targets[:count]] = moved
    number = torch.tensor([count], device=DEVICE)
    attention.TritonKernel().move(states, sources, targets, number)
    assert torch.equal(states, wanted)


@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_a_graph_follows_its_tables(attention):
    case = make_pass(RAGGED[:2], 6, 2, 64, torch.bfloat16)
    sizes = {"num_rows": len(case.q), "num_blocks": 4, "num_words": 1}
    static = block_table((), **sizes, device=DEVICE)
    kernel = attention.TritonKernel(SPLIT)

    def attend():
        return kernel(case.q, case.keys, case.values, static, scaling=0.1, num_splits=4)

    attend()  # compiles, which cannot be done while a graph is recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for segments in (RAGGED[:2], RAGGED[:1], (make_segment(2, 7, 90, 40),)):
        copy_tables(static, block_table(segments, **sizes))
        graph.replay()
        wanted = run(attention, replace(case, segments=segments), scaling=0.1)[0]
        assert torch.equal(out, wanted)
