"""bfloat16 attention on a CPU that multiplies pairs: against float64, and bit by bit."""

import pytest
import torch
from attended import SCALING, Sequence, attend, chain_of

from ragaccel.engine import attention, bfloat16, bfloat16_attention

pytestmark = pytest.mark.skipif(
    not bfloat16.is_supported(), reason="nothing is compiled for bfloat16 here"
)
TREE = [-1, 0, 0, 1, 1, 2, 5, 6, 0]


@pytest.fixture(autouse=True)
def without_torch(monkeypatch):
    """Whatever these tests attend with, it must not be torch's own attention."""

    def fail(*_args, **_kwargs):
        raise AssertionError("torch attends")

    monkeypatch.setattr(attention, "scaled_dot_product_attention", fail)


def sequence(start, parents, heads=2, groups=3, size=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Sequence(generator, start, parents, heads, groups, (size, size), torch.bfloat16)


def assert_close(found, wanted):
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("start", [0, 1, 30, 31, 119, 120, 128, 503, 511, 512, 1100])
@pytest.mark.parametrize("parents", [[-1], chain_of(9), TREE])
def test_rows_attend_to_what_is_before_them_wherever_blocks_end(start, parents):
    one = sequence(start, parents)
    assert_close(attend([one]), one.reference())


@pytest.mark.parametrize(("heads", "groups", "size"), [(1, 1, 32), (5, 1, 96), (2, 7, 128)])
def test_heads_may_be_of_any_number_and_of_several_sizes(heads, groups, size):
    one = sequence(200, TREE, heads, groups, size)
    assert_close(attend([one]), one.reference())


@pytest.mark.parametrize(("start", "groups"), [(0, 1), (3, 3), (700, 3)])
def test_a_prompt_is_read_in_wide_passes(start, groups):
    one = sequence(start, chain_of(150), groups=groups)
    assert_close(attend([one], is_run=True), one.reference())


@pytest.mark.parametrize("parents", [[-1], chain_of(9), TREE])
def test_a_sliding_window_hides_what_is_before_it(parents):
    one = sequence(300, parents)
    assert_close(attend([one], window=150), one.reference(window=150))


def test_sequences_of_a_pass_attend_each_over_its_own_tokens():
    several = [sequence(start, parents, seed=start) for start, parents in ((5, TREE), (600, [-1]))]
    wanted = torch.cat([one.reference() for one in several], dim=1)
    assert_close(attend(several), wanted)


def path_of(parents, row):
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


WIDE_TREE = [-1, *(max(0, row - row % 7 - 1) for row in range(1, 150))]


LONG_TREE = [-1, *((row - 1) // 2 * 2 for row in range(1, 290))]  # a path of 145, and its siblings


@pytest.mark.parametrize("window", [None, 100, 5])
@pytest.mark.parametrize("start", [0, 1, 60, 125, 508, 1021])
@pytest.mark.parametrize("parents", [chain_of(12), TREE, WIDE_TREE, LONG_TREE])
def test_a_row_has_the_same_bits_alone_and_beside_any_others(start, parents, window):
    whole = sequence(start, parents)
    found = attend([whole], window)
    for row in range(len(parents)) if len(parents) < 20 else range(0, len(parents), 19):
        path = path_of(parents, row)
        slots = [*range(start), *(start + each for each in path)]
        alone = sequence(start + len(path) - 1, [-1])
        alone.keys, alone.values = (part[:, :, slots] for part in (whole.keys, whole.values))
        alone.queries = whole.queries[:, :, row : row + 1]
        assert torch.equal(attend([alone], window)[:, 0], found[:, row])


@pytest.mark.parametrize("parents", [TREE, WIDE_TREE])
def test_the_number_of_threads_changes_no_bits(parents):
    one, known = sequence(1500, parents), torch.get_num_threads()
    found = []
    try:
        for number in (1, 2, 3, 7):
            torch.set_num_threads(number)
            found.append(attend([one]))
    finally:
        torch.set_num_threads(known)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("factor", [300, 1e6, 1e10, 1e30])
def test_scores_of_any_height_are_softened_without_overflow(factor):
    one = sequence(700, TREE)
    one.queries *= factor
    assert_close(attend([one]), one.reference())


@pytest.mark.parametrize("height", [1e6, 1e10, -1e10])
def test_equal_scores_of_any_height_weigh_the_same(height):
    one = sequence(700, [-1])
    one.queries[:], one.keys[:] = 0, 0
    one.queries[..., 0], one.keys[..., 0] = height, 1
    assert_close(attend([one]), one.reference())


def test_the_lowest_number_in_a_mask_hides_as_well_as_infinity():
    one, found = sequence(700, chain_of(3), heads=1, groups=2), []
    for lowest in (torch.finfo(torch.bfloat16).min, float("-inf")):
        mask = torch.zeros(3, 703)
        mask[:, :300] = lowest
        states = one.queries, one.keys, one.values
        found.append(bfloat16_attention.attend(states, SCALING, mask))
    assert torch.equal(*found)


def test_what_is_no_number_is_not_hidden():
    one = sequence(200, TREE)
    one.keys[:, 0, 150] = float("nan")
    found = attend([one])[0]
    assert found[:, :3].isnan().all()
    assert found[:, 3:].isfinite().all()


def test_a_row_that_attends_to_nothing_spoils_no_other():
    one = sequence(700, chain_of(20), heads=1, groups=2)
    states = one.queries, one.keys, one.values
    mask = torch.zeros(20, 720)
    mask[3] = float("-inf")
    found = bfloat16_attention.attend(states, SCALING, mask)[0]
    assert found[3].isnan().all()
    mask[3] = 0
    wanted = bfloat16_attention.attend(states, SCALING, mask)[0]
    kept = [row for row in range(20) if row != 3]
    assert torch.equal(found[kept], wanted[kept])


@pytest.mark.parametrize("size", [8, 80])
def test_torch_attends_with_heads_of_other_sizes(size, monkeypatch):
    monkeypatch.undo()
    one = sequence(200, TREE, size=size)
    assert_close(attend([one]), one.reference())
