import logging
import os
import pickle

import numpy as np
import pytest
from filled_memory import drafts, opened, saved

from ragaccel.drafting import memory as files, read_archive, write_archive
from ragaccel.errors import ConfigurationError


@pytest.fixture
def path(tmp_path):
    return saved(tmp_path / "memory")


def assert_refused(path, reason, caplog, **changes):
    """The file is left alone, the log says why, and the memory works without it."""
    before = path.read_bytes() if path.is_file() and os.access(path, os.R_OK) else None
    with caplog.at_level(logging.WARNING, "ragaccel"):
        memory = opened(path, **changes)
    assert str(path) in memory.load_error
    assert reason in memory.load_error
    assert "Delete it or choose another path" in memory.load_error
    assert [record.getMessage() for record in caplog.records] == [memory.load_error]
    assert memory.namespaces == []
    memory.of("new").remember([1, 2], [3])
    assert memory.of("new").history.num_requests == 1
    with pytest.raises(ConfigurationError, match="is not used"):
        memory.save()
    caplog.clear()
    files._save_all_at_exit()
    assert not caplog.records, "at exit there is nothing more to say"
    if before is not None:
        assert path.read_bytes() == before


def rewritten(path, change):
    """Write the file again with a changed header and arrays."""
    header, arrays = read_archive(path, 1 << 30)
    change(header, arrays)
    write_archive(path, header, arrays)


def test_another_model_is_refused(path, caplog):
    assert_refused(path, "another model, 'model', not with 'other'", caplog, fingerprint="other")


def test_a_newer_version_is_refused(path, caplog):
    rewritten(path, lambda header, _: header.update(version=2))
    assert_refused(path, "newer ragaccel wrote it in version 2", caplog)


@pytest.mark.parametrize("version", [None, "1", True, 0, 1.0])
def test_no_version_is_refused(path, caplog, version):
    rewritten(path, lambda header, _: header.update(version=version))
    assert_refused(path, "no valid version", caplog)


def test_a_file_of_another_format_is_refused(path, caplog):
    rewritten(path, lambda header, _: header.update(format="ragaccel answers"))
    assert_refused(path, "not a ragaccel memory file", caplog)


@pytest.mark.parametrize("names", [None, "ab", [1, 2], ["a", "a"], {"a": 1}])
def test_a_header_without_namespaces_is_refused(path, caplog, names):
    rewritten(path, lambda header, _: header.update(namespaces=names))
    assert_refused(path, "its header", caplog)


def test_a_header_that_is_no_object_is_refused(path, caplog):
    write_archive(path, [1], {})
    assert_refused(path, "header is not an object", caplog)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"just some notes\n",
        b"PK\x03\x04" + bytes(96),
        b"\x93NUMPY\x01\x00",
        pickle.dumps({"format": "ragaccel memory"}),
        bytes(1000),
    ],
    ids=["empty", "text", "a zip", "npy", "pickle", "zeros"],
)
def test_something_else_is_refused(path, caplog, content):
    path.write_bytes(content)
    assert_refused(path, "it is damaged or of another kind", caplog)


def test_an_array_file_with_a_pickle_in_it_is_refused(path, caplog):
    np.save(str(path) + ".npy", np.array([{}], object), allow_pickle=True)
    os.replace(str(path) + ".npy", path)
    assert_refused(path, "damaged", caplog)


def test_a_file_that_is_cut_off_is_refused(path, caplog):
    content = path.read_bytes()
    for size in np.linspace(1, len(content) - 1, 12).astype(int):
        path.write_bytes(content[:size])
        caplog.clear()
        assert_refused(path, "damaged", caplog)


def test_flipped_bytes_are_refused_or_change_nothing(path):
    content = path.read_bytes()
    expected = drafts(opened(path).of("mine"))
    refused = 0
    for at in np.random.default_rng(0).integers(0, len(content), 120):
        flipped = bytearray(content)
        flipped[at] ^= 0x55
        path.write_bytes(flipped)
        memory = opened(path)
        refused += bool(memory.load_error)
        if not memory.load_error:
            assert drafts(memory.of("mine")) == expected
    assert refused > 60


def test_a_folder_is_refused(tmp_path, caplog):
    assert_refused(tmp_path, "a folder", caplog)


def test_a_file_in_the_place_of_the_folder_is_refused(path, caplog):
    assert_refused(path / "memory", "cannot be read (Not a directory)", caplog)


def test_a_file_that_may_not_be_read_is_refused(path, caplog, monkeypatch):
    real = open

    def forbidden(name, *args, **kwargs):
        if str(name) == str(path):
            raise PermissionError(13, "Permission denied")
        return real(name, *args, **kwargs)

    content = path.read_bytes()
    monkeypatch.setattr("builtins.open", forbidden)
    monkeypatch.setattr(os, "access", lambda *args: False)
    assert_refused(path, "cannot be read (Permission denied)", caplog)
    monkeypatch.undo()
    assert path.read_bytes() == content


def test_a_file_much_larger_than_the_memory_is_refused(path, caplog):
    with open(path, "ab") as file:
        file.truncate(6 << 20)
    assert_refused(path, "larger than the", caplog, max_bytes=1 << 20)


def other(array, at, value):
    changed = array.copy()
    changed.flat[at] = value
    return changed


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("history/token_ids", 5, 60),
        ("history/token_ids", 5, -1),
        ("history/prompt_lengths", 0, -1),
        ("history/answer_lengths", 0, 1 << 30),
        ("calibration/by_source", 0, np.nan),
        ("calibration/by_length", 0, 3.1),
        ("calibration/by_depth", 0, -3.1),
    ],
)
def test_numbers_out_of_range_are_refused(path, caplog, name, at, value):
    def change(_, arrays):
        arrays[f"1/{name}"] = other(arrays[f"1/{name}"], at, value)

    rewritten(path, change)
    assert_refused(path, "damaged", caplog)


def changes_of_form():
    def lacks(arrays, name):
        del arrays[name]

    def other_type(arrays, name):
        kind = np.float32 if arrays[name].dtype == np.float64 else np.int64
        arrays[name] = arrays[name].astype(kind)

    def too_short(arrays, name):
        arrays[name] = arrays[name][:-1]

    def flat(arrays, name):
        arrays[name] = arrays[name][None]

    return [lacks, other_type, too_short, flat]


@pytest.mark.parametrize("change", changes_of_form(), ids=lambda change: change.__name__)
@pytest.mark.parametrize(
    "name",
    [
        *(f"history/{n}" for n in ("token_ids", "prompt_lengths", "answer_lengths")),
        *(f"calibration/{n}" for n in ("by_source", "by_length", "by_depth")),
    ],
)
def test_arrays_of_another_form_are_refused(path, caplog, name, change):
    rewritten(path, lambda _, arrays: change(arrays, f"0/{name}"))
    assert_refused(path, "damaged", caplog)


def test_ids_of_a_larger_vocabulary_are_refused(path, caplog):
    assert_refused(path, "outside 0 to 19", caplog, vocab_size=20)
