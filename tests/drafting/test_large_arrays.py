"""Arrays in pages of their own."""

import mmap
import os

import numpy as np
import pytest

from ragaccel.drafting import MIN_MMAP_BYTES, arrays as large_arrays

SIZES = (0, 1, 100, MIN_MMAP_BYTES // 4, MIN_MMAP_BYTES)  # of four bytes each


def test_only_large_ones_have_pages_of_their_own():
    assert large_arrays.zeros((MIN_MMAP_BYTES // 8 - 1,), np.float64).base is None
    large = large_arrays.zeros((MIN_MMAP_BYTES // 16, 2), np.float64)
    assert large.shape == (MIN_MMAP_BYTES // 16, 2)
    while not isinstance(large, mmap.mmap):
        large = large.base if isinstance(large, np.ndarray) else large.obj


@pytest.mark.parametrize("size", SIZES)
def test_arrays_are_like_numpys(size):
    made = large_arrays.zeros((size,), np.int32)
    assert np.array_equal(made, np.zeros(size, np.int32))
    assert (made.dtype, made.flags.c_contiguous) == (np.int32, True)
    rng = np.random.default_rng(size)
    made[:] = array = rng.integers(0, 99, size, dtype=np.int32)
    new, at = rng.integers(0, 99, 40, dtype=np.int32), np.sort(rng.integers(0, size + 1, 40))
    assert np.array_equal(large_arrays.concatenate([made, new]), np.concatenate([array, new]))
    assert np.array_equal(large_arrays.insert(made, at, new), np.insert(array, at, new))
    table = array.reshape(-1, 1)
    assert np.array_equal(large_arrays.concatenate([table, table]), np.concatenate([table, table]))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_forked_process_writes_into_its_own():
    array = large_arrays.zeros((MIN_MMAP_BYTES,), np.int32)
    if (child := os.fork()) == 0:
        array[:] = 1
        os._exit(0)
    os.waitpid(child, 0)
    assert not array.any()
