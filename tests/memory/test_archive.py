import os
import stat
import zipfile

import numpy as np
import pytest

from ragaccel.memory.archive import UnusableError, read_archive, write_archive

ARRAYS = {"a/b": np.arange(5, dtype=np.int32), "none": np.zeros((0, 3)), "c": np.eye(2)}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "kept"
    write_archive(path, {"x": "ü"}, ARRAYS)
    return path


def test_what_is_written_is_read(path):
    header, arrays = read_archive(path, 1 << 20)
    assert header == {"x": "ü"}
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert np.array_equal(arrays[name], array)


def test_it_is_what_numpy_itself_can_load(path):
    with np.load(path, allow_pickle=False) as loaded:
        assert loaded["a/b"].tolist() == [0, 1, 2, 3, 4]


def test_equal_contents_make_equal_files_that_only_the_owner_reads(path):
    before = path.read_bytes()
    write_archive(path, {"x": "ü"}, ARRAYS)
    assert path.read_bytes() == before
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_there_is_none_where_there_is_no_file(tmp_path):
    assert read_archive(tmp_path / "missing" / "kept", 1 << 20) is None


def test_folders_are_made(tmp_path):
    write_archive(tmp_path / "a" / "b" / "kept", {}, {})
    assert read_archive(tmp_path / "a" / "b" / "kept", 1 << 20) == ({}, {})


def test_python_objects_are_neither_written_nor_read(path, tmp_path):
    with pytest.raises(ValueError, match="Object"):
        write_archive(path, {}, {"bad": np.array([{}], object)})
    assert read_archive(path, 1 << 20)[0] == {"x": "ü"}
    assert list(tmp_path.iterdir()) == [path]
    with open(path, "wb") as file:
        np.savez(file, header=np.array([{}], object))
    with pytest.raises(UnusableError, match="objects"):
        read_archive(path, 1 << 20)


def test_more_bytes_than_may_be_are_not_read(path):
    with pytest.raises(UnusableError, match="larger than the 100 bytes"):
        read_archive(path, 100)


def test_what_is_compressed_is_not_read(path):
    with open(path, "wb") as file:
        np.savez_compressed(file, header=np.zeros(1 << 24))
    with pytest.raises(UnusableError, match="compressed"):
        read_archive(path, 1 << 20)


def test_sizes_that_are_only_declared_are_not_believed(path):
    data = path.read_bytes()
    end = data.rindex(b"PK\x01\x02")  # the last member's entry in the directory
    huge = data[: end + 24] + (1 << 31).to_bytes(4, "little") + data[end + 28 :]
    path.write_bytes(huge)
    with pytest.raises(UnusableError, match="declares more"):
        read_archive(path, 1 << 20)


@pytest.mark.parametrize("shape", [(10**13,), (-1,), (4,), (6,), (5, 2), (0, 10**9)])
def test_an_array_is_as_large_as_it_says(path, shape):
    text = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    member = np.lib.format.magic(1, 0) + len(text).to_bytes(2, "little") + text + bytes(20)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("d.npy", member)
    with pytest.raises(UnusableError, match="not of the size"):
        read_archive(path, 1 << 20)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnusableError, match="no file"):
        read_archive(tmp_path / "pipe", 1 << 20)


@pytest.mark.parametrize("function", ["os.replace", "os.fsync"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(path, monkeypatch, function):
    before = path.read_bytes()

    def fails(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(function, fails)
    with pytest.raises(OSError, match="No space"):
        write_archive(path, {"x": "new"}, ARRAYS)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
