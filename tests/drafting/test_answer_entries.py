import numpy as np
import pytest

from ragaccel.drafting import (
    AnswerMemory,
    AnswerMemoryStats,
    Entry,
    Key,
    num_bytes,
    pack,
    read_archive,
    unit_vector,
    unpack,
    write_archive,
)


def never(texts):
    raise AssertionError


@pytest.mark.parametrize("scale", [1e-320, 1e-200, 1, 1e200])
def test_vectors_have_length_one_whatever_their_scale(scale):
    vector = unit_vector(np.array([[3.0, 4.0]]) * scale)
    assert vector.dtype == np.float32
    assert vector == pytest.approx([0.6, 0.8], abs=1e-3)


def entries():
    vectors = np.eye(3, dtype=np.float32)
    return [
        (Key("a", "one"), Entry("1", vectors[0], 7)),
        (Key("b", "one"), Entry("22", vectors[1], 3)),
        (Key("a", "two"), Entry("333", vectors[2], 5)),
    ]


def test_what_is_packed_is_unpacked_in_its_order():
    made = unpack(*pack(entries()))
    assert [key for key, _ in made] == [key for key, _ in entries()]
    assert [entry.answer for _, entry in made] == ["1", "22", "333"]
    assert [entry.number for _, entry in made] == [2, 0, 1], "the order in which they came"
    assert all(num_bytes(*one) == num_bytes(*two) for one, two in zip(made, entries(), strict=True))
    assert unpack(*pack([])) == []


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("text", np.frombuffer(b"oneonetwo122333!", np.uint8)),
        ("text", np.frombuffer(b"oneonetwo1223\xff3", np.uint8)),
        ("question_lengths", np.array([3, 3, 4], np.int32)),
        ("question_lengths", np.array([3, 6, 0], np.int32)),
        ("answer_lengths", np.array([1, 2], np.int32)),
        ("answer_lengths", np.array([1, 2, 3], np.int64)),
        ("namespace_of", np.array([0, 2, 0], np.int32)),
        ("namespace_of", np.array([-1, 1, 0], np.int32)),
        ("namespace_of", np.array([0, 0, 0], np.int32)),
        ("came", np.array([0, 0, 1], np.int32)),
        ("came", np.array([0, 3, 1], np.int32)),
        ("vectors", np.full((3, 3), np.nan, np.float32)),
        ("vectors", np.full((3, 3), 0.5, np.float32)),
        ("vectors", np.zeros((3, 0), np.float32)),
        ("vectors", np.eye(2, dtype=np.float32)),
        ("vectors", np.eye(3)),
        ("vectors", None),
    ],
)
def test_arrays_that_are_no_entries_are_refused(tmp_path, name, array):
    header, arrays = pack(entries())
    arrays.pop(name)
    if array is not None:
        arrays[name] = array
    with pytest.raises(ValueError, match=r"."):
        unpack(header, arrays)
    path = tmp_path / "answers"
    AnswerMemory(never, path=path).save()
    written, _ = read_archive(path, 1 << 20)
    write_archive(path, {**written, **header}, arrays)
    memory = AnswerMemory(never, path=path)
    assert "damaged" in memory.load_error
    assert memory.stats() == AnswerMemoryStats(0, 0, 0, 0, 0)
