import json
import os
import stat

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from ragaccel.drafting import UnusableFileError, read_archive, write_archive

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


def test_it_is_what_safetensors_itself_can_load(path):
    assert load_file(path)["a/b"].tolist() == [0, 1, 2, 3, 4]


def test_arrays_of_any_layout_are_written_as_they_look(path):
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    arrays = {"turned": table.T, "every second": table[:, ::2]}
    write_archive(path, {}, arrays)
    found = read_archive(path, 1 << 20)[1]
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())


def test_equal_contents_make_equal_files_that_only_the_owner_reads(path):
    before = path.read_bytes()
    write_archive(path, {"x": "ü"}, ARRAYS)
    assert path.read_bytes() == before
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_a_missing_file_reads_as_none(tmp_path):
    assert read_archive(tmp_path / "missing" / "kept", 1 << 20) is None


def test_folders_are_made(tmp_path):
    write_archive(tmp_path / "a" / "b" / "kept", {}, {})
    assert read_archive(tmp_path / "a" / "b" / "kept", 1 << 20) == ({}, {})


def test_python_objects_are_not_written(path, tmp_path):
    with pytest.raises(SafetensorError, match="object"):
        write_archive(path, {}, {"bad": np.array([{}], object)})
    assert read_archive(path, 1 << 20)[0] == {"x": "ü"}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("told", ["", "1", "[]", '{"header": {}}', '{"header": [], "crc32": 0}'])
def test_a_header_of_another_form_is_refused(path, told):
    path.write_bytes(save(ARRAYS, {"ragaccel": told}))
    with pytest.raises(ValueError, match=r"header|checksum|Expecting"):
        read_archive(path, 1 << 20)
    path.write_bytes(save(ARRAYS, {"other": told}))
    with pytest.raises(UnusableFileError, match="no header"):
        read_archive(path, 1 << 20)


def test_other_numbers_than_were_written_are_refused(path):
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    with pytest.raises(UnusableFileError, match="checksum"):
        read_archive(path, 1 << 20)


def test_more_bytes_than_may_be_are_not_read(path):
    with pytest.raises(UnusableFileError, match="larger than the limit of 100 bytes"):
        read_archive(path, 100)


@pytest.mark.parametrize("shape", [(10**13,), (-1,), (4,), (6,), (5, 2), (0, 10**9), (2**63, 2)])
@pytest.mark.parametrize("end", [20, 10**12])
def test_an_array_is_as_large_as_it_says(path, shape, end):
    declared = {"d": {"dtype": "I32", "shape": shape, "data_offsets": [0, end]}}
    header = json.dumps(declared).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(20))
    with pytest.raises(SafetensorError, match=r"invalid|overflow|covered"):
        read_archive(path, 1 << 20)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnusableFileError, match="not a regular file"):
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
