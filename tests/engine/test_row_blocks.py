import numpy as np
import pytest
from hypothesis import given, strategies as st
from row_tables import block_table, make_segment

from ragaccel.engine import BlockSegment, num_splits, pack_bits, rows_per_block
from ragaccel.engine.model_input import ancestor_paths


def used(blocks):
    return [entry[:6] for entry in blocks.table.tolist() if entry[1]]


def bits(words):
    return [j for j in range(64 * len(words)) if int(words[j // 64]) >> j % 64 & 1]


def test_rows_are_cut_into_blocks_of_one_sequence_each():
    segments = [make_segment(0, 5, 100, 7), make_segment(6, 2, 40, 0)]
    blocks = block_table(segments, num_rows=10, num_blocks=6, block_rows=4)
    assert used(blocks) == [[0, 4, 100, 7, 0, 1], [4, 1, 100, 7, 0, 1], [6, 2, 40, 0, 6, 1]]
    assert blocks.positions.tolist() == [7, 8, 9, 10, 11, 0, 0, 1, 0, 0]
    assert blocks.stops.tolist() == [8, 9, 10, 11, 12, 0, 1, 2, 0, 0]
    assert blocks.block_rows == 4
    segment = BlockSegment(0, 3, 0, 5, ancestor_paths([-1, 0, 1]), np.array([5, 6, 6]))
    assert block_table([segment], num_rows=3, num_blocks=1).positions.tolist() == [5, 6, 6]


@given(st.data())
def test_bits_tell_what_a_row_of_a_tree_sees(data):
    n = data.draw(st.integers(1, 70))
    parents = [-1, *(data.draw(st.integers(0, row - 1)) for row in range(1, n))]
    segment = make_segment(3, n, 0, 20, ancestor_paths(parents))
    blocks = block_table([segment], num_rows=80, num_blocks=5, num_words=2)
    for row in range(n):
        path = [row]
        while path[0]:
            path.insert(0, parents[path[0]])
        assert bits(blocks.sees[3 + row]) == path
        assert blocks.positions[3 + row] == 20 + len(path) - 1
    assert not blocks.table[:, 5].any()


def test_words_are_64_bits_with_the_first_row_lowest():
    words = pack_bits([1 << row for row in range(66)], 2).tolist()
    assert words[0] == [1, 0]
    assert words[63:] == [[-(2**63), 0], [0, 1], [0, 2]]
    with pytest.raises(ValueError, match="65 rows do not fit in 1 words"):
        pack_bits([1] * 65, 1)


@pytest.mark.parametrize(
    ("segment", "match"),
    [
        (make_segment(0, 0, 0, 0), "rows 0 to 0"),
        (make_segment(7, 2, 0, 0), "rows 7 to 9"),
        (make_segment(0, 8, 0, 0), "need 4 blocks"),
    ],
)
def test_rows_that_do_not_fit_are_refused(segment, match):
    with pytest.raises(ValueError, match=match):
        block_table([segment], num_rows=8, num_blocks=3, block_rows=2)


def test_blocks_are_smaller_where_more_heads_share_one_and_splits_cover_a_sequence():
    assert [rows_per_block(group) for group in (1, 4, 5, 8, 12, 64, 71)] == [16, 16, 8, 8, 4, 1, 1]
    assert [num_splits(length, 64) for length in (1, 64, 65, 512)] == [1, 1, 2, 8]
    # Eight splits of 64 tokens, then splits of 256.
    assert [num_splits(length, 64) for length in (513, 768, 769, 1024, 1025)] == [9, 9, 10, 10, 11]
    assert [num_splits(length) for length in (2048, 32_768, 131_072)] == [8, 38, 134]
