"""Attention of a pass against the textbook's in float64; deterministic attention bit by bit."""

from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest
import torch
from attended import CPU, SCALING, Sequence, attend, chain_of, tree_of
from hypothesis import given, settings, strategies as st

from ragaccel.decoding import DraftTree, attach_masks
from ragaccel.engine import (
    CHUNK,
    AttentionMasks,
    KVCache,
    PassAttention,
    attention,
    causal_rows,
    concat_rows,
    is_plain,
    tree_rows,
)


@st.composite
def any_parents(draw):
    n = draw(st.integers(1, 20))
    if draw(st.booleans()):
        return chain_of(n)
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, n))]


@settings(max_examples=150, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 40), any_parents()), min_size=1, max_size=3),
    heads=st.integers(1, 2),
    groups=st.sampled_from([1, 3, 7]),
    sizes=st.sampled_from([(8, 8), (5, 3)]),
    window=st.one_of(st.none(), st.integers(1, 30)),
    softcap=st.sampled_from([None, 0.7]),
    deterministic=st.booleans(),
    chunk=st.sampled_from([4, 16, CHUNK]),
)
def test_rows_attend_to_their_path_and_all_before(
    shapes, heads, groups, sizes, window, softcap, deterministic, chunk
):
    generator = torch.Generator().manual_seed(len(shapes) + groups)
    sequences = [
        Sequence(generator, start, parents, heads, groups, sizes) for start, parents in shapes
    ]
    expected = torch.cat([each.reference(window, softcap) for each in sequences], dim=1)
    with patch.object(attention, "CHUNK", chunk):
        found = attend(sequences, window, softcap, deterministic=deterministic)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


TREE = [-1, *(node // 3 for node in range(80))]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("groups", [1, 3])
def test_long_runs_and_trees(groups, softcap, deterministic):
    for start, window in product((0, 5, 300), (None, 9, 80)):
        generator = torch.Generator().manual_seed(start)
        for parents, is_run in ((chain_of(70), True), (TREE, False)):
            one = Sequence(generator, start, parents, 2, groups)
            found = attend([one], window, softcap, deterministic=deterministic, is_run=is_run)
            torch.testing.assert_close(found, one.reference(window, softcap), rtol=0, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("window", [None, 12])
def test_masks_and_grouped_heads_are_combined_on_a_cpu_only(monkeypatch, groups, window):
    """Otherwise the scores of all rows are stored: other devices' fused kernels take only one."""
    fused, asked = attention.scaled_dot_product_attention, []

    def attending(*states, **settings):
        asked.append(settings["attn_mask"] is not None)
        assert not (asked[-1] and settings.get("enable_gqa"))
        return fused(*states, **settings)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", attending)
    monkeypatch.setattr(attention, "_GROUPED_MASK_DEVICES", ())
    generator = torch.Generator().manual_seed(0)
    for parents in (TREE, chain_of(70)):
        sequence = Sequence(generator, 20, parents, 2, groups)
        found = attend([sequence], window)
        torch.testing.assert_close(found, sequence.reference(window), rtol=0, atol=1e-12)
    assert asked == [True] * 2 * groups


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch tells why flash is not on a CPU
@pytest.mark.parametrize("groups", [1, 3])
def test_a_gpu_attends_causally_without_a_mask_where_rows_see_all_before(monkeypatch, groups):
    """Else a mask of all cached tokens would keep torch from its fastest kernel."""
    used, causally = [], attention._attend_causally

    def attending(*states):
        used.append(True)
        return causally(*states)

    monkeypatch.setattr(attention, "_attend_causally", attending)
    monkeypatch.setattr(attention, "_has_flash_kernel", lambda *_: True)
    generator = torch.Generator().manual_seed(0)
    for start, window, parents, wanted in (
        (20, None, chain_of(70), True),
        (0, None, chain_of(70), True),
        (20, 200, chain_of(70), True),
        (20, 60, chain_of(70), False),
        (20, None, TREE, False),
        (20, None, chain_of(9), False),  # packed for the heads of a group
    ):
        used.clear()
        sequence = Sequence(generator, start, parents, 2, groups)
        found = attend([sequence], window, is_run=parents[-1] == len(parents) - 2)
        torch.testing.assert_close(found, sequence.reference(window), rtol=0, atol=1e-12)
        assert bool(used) == wanted
    monkeypatch.undo()
    assert not attention._has_flash_kernel(*sequence.states)


@pytest.mark.parametrize(
    ("n", "settings"),
    [
        (70, {}),
        (70, {"softcap": 0.7}),
        (9, {"softcap": 0.7}),
        (9, {"deterministic": True}),
        (1, {}),
    ],
)
def test_masks_are_made_once_a_pass_and_not_copied_for_the_heads_of_a_group(n, settings):
    sequence = Sequence(torch.Generator().manual_seed(0), 30, chain_of(n), 2, 3)
    rows = replace(sequence.lay_out(), deterministic=settings.pop("deterministic", False))
    made, making = [], AttentionMasks.make

    def keep(self, *args):
        made.append(making(self, *args))
        return made[-1]

    with patch.object(AttentionMasks, "make", keep):
        passing = PassAttention(rows, AttentionMasks(torch.float64, CPU))
        for layer, window in enumerate([20, 10, 20, 10]):
            passing.attend(layer, sequence.states, scaling=SCALING, window=window, **settings)
    assert len(made) == 2
    kept = {mask.data_ptr() for mask in passing._mask_cache.values()}
    assert kept == {mask.data_ptr() for mask in made}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("n", [1, 4, 5, 16, 70])
def test_precision_is_that_of_the_states(dtype, n, deterministic):
    generator = torch.Generator().manual_seed(n)
    chain = Sequence(generator, 300, chain_of(n), 2, 3, dtype=dtype)
    found = attend([chain], deterministic=deterministic)
    assert found.dtype == dtype
    allowed = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), chain.reference(), rtol=allowed, atol=allowed)


ROWS = 16
EDGES = [1, 17, CHUNK - 17, CHUNK - 16, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 9, 3 * CHUNK]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def row_at(
    length, index, groups, dtype, *, deterministic=True, window=None, after=0, num_rows=ROWS
):
    """The attention output of the token after ``length`` others, as row ``index`` of a pass.

    ``after`` is the seed of the tokens that follow it.
    """
    generator = torch.Generator().manual_seed(length)
    whole = Sequence(generator, length, [-1], 2, groups, (16, 16), dtype)
    others = torch.Generator().manual_seed(after)
    chain = Sequence(others, length - index, chain_of(num_rows), 2, groups, (16, 16), dtype)
    chain.keys[:, :, : length + 1], chain.values[:, :, : length + 1] = whole.keys, whole.values
    chain.queries[:, :, index] = whole.queries[:, :, 0]
    return attend([chain], window, deterministic=deterministic)[0, index]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("groups", "window", "lengths"),
    [
        *((groups, None, EDGES) for groups in (1, 3, 7)),
        *((3, window, (CHUNK - 3, 2 * CHUNK + 5)) for window in (7, CHUNK, CHUNK + 40)),
    ],
)
def test_a_deterministic_row_does_not_depend_on_its_place(groups, window, lengths, dtype):
    for length in lengths:
        plain = row_at(length, 0, groups, dtype, window=window)
        for index in range(1, min(ROWS, length + 1)):
            found = row_at(length, index, groups, dtype, window=window, after=index)
            assert torch.equal(found, plain), (length, index)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("n", [1, 3, 16, 70])
def test_slots_beyond_the_pass_are_never_read(n, deterministic):
    generator = torch.Generator().manual_seed(n)
    sequence = Sequence(generator, CHUNK - 2, chain_of(n), 2, 3)
    expected = attend([sequence], deterministic=deterministic)
    rows = sequence.lay_out()
    cache = rows.spans[0].cache
    cache.begin(CHUNK)
    garbage = torch.full((1, 2, CHUNK, 8), float("nan"), dtype=torch.float64)
    cache.write(0, garbage, garbage)
    cache.keep(())
    rows = replace(rows, deterministic=deterministic)
    cache.begin(n)
    found = PassAttention(rows, AttentionMasks(torch.float64, CPU)).attend(
        0, sequence.states, scaling=SCALING
    )
    assert torch.equal(found, expected)


# The rows of a pass.


def filled(length):
    """A cache that claims to hold so many tokens."""
    cache = KVCache()
    cache.begin(length)
    cache.keep(range(length))
    return cache


@pytest.mark.parametrize(
    ("tree", "limit", "positions", "masks"),
    [
        (DraftTree.chain([1, 2, 3]), None, [6, 7, 8], None),
        (tree_of([-1, 0, 0, 1]), None, [6, 7, 7, 8], None),
        (DraftTree.chain([1] * 5), 8, [6, 7, 7, 7, 7], None),  # never past what the model has
        (tree_of([-1, 0, 0, 1]), 8, [6, 7, 7, 7], None),
        (attach_masks(DraftTree.chain([1, 2]), [90, 91], [0, 1]), None, [6, 7, 7, 8, 8, 9],
         [False] * 2 + [True] * 4),
    ],
)  # fmt: skip
def test_rows_have_the_positions_and_marks_of_their_tree(tree, limit, positions, masks):
    rows = tree_rows(tree, filled(6), CPU, limit)
    assert rows.positions.tolist() == [positions]
    assert (rows.is_mask is None and masks is None) or rows.is_mask.tolist() == masks
    assert (rows.spans[0].sees is None) == tree.is_chain


def test_plain_attention_is_used_only_where_it_is_right():
    one, run, first = (
        causal_rows(tokens, filled(start), CPU).spans[0]
        for tokens, start in (([1], 7), ([1, 2], 7), ([1, 2], 0))
    )
    assert is_plain(one)
    assert is_plain(first)
    assert not is_plain(run)
    assert is_plain(one, window=8)
    assert not is_plain(one, window=7)
    assert not is_plain(tree_rows(tree_of([-1, 0, 0]), filled(0), CPU).spans[0])


def test_batched_sequences_do_not_attend_to_each_other():
    first, second = filled(3), filled(0)
    tree = attach_masks(DraftTree((10, 11, 12), (-1, 0, 0), (1.0,) * 3, ((),) * 3), [90], [1])
    rows = concat_rows([tree_rows(tree, first, CPU), causal_rows([5, 6], second, CPU)])
    assert rows.token_ids.tolist() == [[10, 11, 12, 90, 5, 6]]
    assert rows.positions.tolist() == [[3, 4, 4, 5, 0, 1]]
    assert [(span.cache, span.first, span.num_rows, span.start) for span in rows.spans] == [
        (first, 0, 4, 3),
        (second, 4, 2, 0),
    ]
    assert rows.is_mask.tolist() == [False] * 3 + [True] + [False] * 2
    sees = rows.sees()
    assert not sees[:4, 4:].any()
    assert not sees[4:, :4].any()
    assert sees[4:, 4:].tolist() == [[True, False], [True, True]]
    assert torch.equal(sees[:4, :4], rows.spans[0].sees)
    assert rows.attended == 7
