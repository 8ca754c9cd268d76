"""Memories in files: what is saved is read back, and a damaged file is refused and left alone."""

import gc
import json
import logging
import os
import stat
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest
from damaged_files import DAMAGE
from filled_memory import drafts, opened, teach
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from ragaccel.drafting import (
    AnswerMemory,
    memory as files,
    read_archive,
    write_archive,
)
from ragaccel.errors import ConfigurationError, StorageError

WORDS = ["ferry", "seven", "leaves", "moon", "cheese"]
FULL = OSError(28, "No space left on device")
ARRAYS = {"a/b": np.arange(5, dtype=np.int32), "none": np.zeros((0, 3)), "c": np.eye(2)}


def embed(texts):
    """Embed a text by counting words."""
    return np.array([[text.count(word) for word in WORDS] for text in texts], np.float32) + 0.01


class Drafts:
    """The memory of earlier requests."""

    format, arrays = "ragaccel memory", "0/history/"
    open = staticmethod(opened)

    @staticmethod
    def fill(memory):
        teach(memory.of("mine"), 1)
        teach(memory.of("theirs"), 2)

    @staticmethod
    def add(memory):
        memory.of("new").remember([1, 2], [3])

    @staticmethod
    def contents(memory):
        names = memory.namespaces
        return names, [(drafts(memory.of(name)), memory.of(name).stats()) for name in names]


class Answers:
    """The memory of answers to earlier questions."""

    format, arrays = "ragaccel answers", ""

    @staticmethod
    def open(path, **changes):
        return AnswerMemory(embed, **{"path": path, "fingerprint": "model", **changes})

    @staticmethod
    def fill(memory):
        memory.add("ferry leaves", "Um sieben – täglich.", "mine")
        memory.add("ferry leaves", "\ud800 half a pair", "theirs")
        memory.add("?", "!", "mine")
        memory.similar("ferry leaves", "mine", k=1)

    @staticmethod
    def add(memory):
        memory.add("seven", "new", "new")

    @staticmethod
    def contents(memory):
        asked = [(q, n) for q in ("?", *WORDS) for n in ("mine", "theirs", "new")]
        stats = memory.stats()
        return stats.entries, stats.num_bytes, [memory.similar(*one) for one in asked]


@pytest.fixture(params=[Drafts, Answers])
def kind(request):
    return request.param


@pytest.fixture
def path(tmp_path, kind):
    memory = kind.open(tmp_path / "kept")
    kind.fill(memory)
    memory.save()
    return memory.path


def test_what_is_saved_is_read_back_and_goes_on_alike(kind, path, tmp_path):
    taught = kind.open(None)
    kind.fill(taught)
    memory, again = kind.open(path), kind.open(path)
    assert memory.load_error == ""
    assert not memory.has_unsaved_changes, "what was only read is not written again"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600, "only the owner reads it"
    again.path = tmp_path / "copy"
    again.save()
    assert again.path.read_bytes() == path.read_bytes(), "equal memories make equal files"
    assert kind.contents(memory) == kind.contents(taught)
    for one in (memory, taught):
        kind.add(one)
    assert memory.has_unsaved_changes
    assert kind.contents(memory) == kind.contents(taught)
    memory.save()
    assert not memory.has_unsaved_changes
    assert kind.contents(kind.open(path)) == kind.contents(taught)
    memory.clear()
    assert memory.has_unsaved_changes
    memory.save()
    assert kind.contents(kind.open(path)) == kind.contents(kind.open(None))


def test_a_missing_file_is_a_new_one_and_its_folder_is_made(kind, tmp_path, caplog):
    memory = kind.open(tmp_path / "a" / "b" / "kept")
    assert (memory.load_error, caplog.records) == ("", [])
    assert not memory.path.parent.exists(), "nothing is made before something is saved"
    memory.save()
    assert kind.open(memory.path).load_error == ""


def test_the_home_folder_and_links_are_followed(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    kind.open("~/link").save()
    assert (tmp_path / "real").is_file()
    assert (tmp_path / "link").is_symlink()
    with pytest.raises(ConfigurationError, match="path="):
        kind.open(None).save()


@pytest.mark.parametrize("function", ["os.replace", "os.fsync"])
def test_a_save_that_fails_leaves_the_old_file_whole(kind, path, monkeypatch, function):
    before, memory = path.read_bytes(), kind.open(path)
    kind.add(memory)
    monkeypatch.setattr(function, lambda *_: (_ for _ in ()).throw(FULL))
    with pytest.raises(StorageError, match=r"No space left.*free some space"):
        memory.save()
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    assert memory.has_unsaved_changes
    memory.save()
    assert not memory.has_unsaved_changes
    assert path.read_bytes() != before


# A damaged, foreign or newer file is refused.


def assert_refused(kind, path, reason, caplog, **changes):
    """Assert that the log says why, that the memory works without the file and leaves it alone."""
    before = path.read_bytes() if path.is_file() and os.access(path, os.R_OK) else None
    caplog.clear()
    with caplog.at_level(logging.WARNING, "ragaccel"):
        memory = kind.open(path, **changes)
    assert str(path) in memory.load_error
    assert reason in memory.load_error
    assert "Delete it or choose another path" in memory.load_error
    assert [record.getMessage() for record in caplog.records] == [memory.load_error]
    empty = kind.open(None, **changes)
    assert kind.contents(memory) == kind.contents(empty)
    for one in (memory, empty):
        kind.add(one)
    assert kind.contents(memory) == kind.contents(empty)
    with pytest.raises(ConfigurationError, match="is not used"):
        memory.save()
    caplog.clear()
    files._save_all_at_exit()
    assert not caplog.records, "at exit there is nothing more to say"
    if before is not None:
        assert path.read_bytes() == before


DAMAGED = "it is damaged or of another kind"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        *((damage, DAMAGED) for damage in DAMAGE),
        ({"ragaccel": ""}, DAMAGED),
        ({"ragaccel": "1"}, "its header is not an object"),
        ({"ragaccel": "[]"}, "its header is not an object"),
        ({"ragaccel": '{"header": {}}'}, "its checksum does not match"),
        ({"ragaccel": '{"header": [], "crc32": 0}'}, "its header is not an object"),
        ({"other": "{}"}, "it has no header"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(kind, path, caplog, damage, reason):
    right = path.read_bytes()
    path.write_bytes(DAMAGE[damage](right) if damage in [*DAMAGE] else save(ARRAYS, damage))
    assert_refused(kind, path, reason, caplog)


def test_flipped_bytes_are_refused_or_change_nothing(kind, path):
    content, expected, refused = path.read_bytes(), kind.contents(kind.open(path)), 0
    for at in np.random.default_rng(0).integers(0, len(content), 120):
        flipped = bytearray(content)
        flipped[at] ^= 0x55
        path.write_bytes(flipped)
        memory = kind.open(path)
        refused += bool(memory.load_error)
        assert memory.load_error or kind.contents(memory) == expected
    assert refused > 60


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fingerprint": "other"}, "another model, 'other', not with 'model'"),
        ({"version": 2}, "newer ragaccel wrote it in version 2"),
        *(({"version": version}, "no valid version") for version in (None, "1", True, 0, 1.0)),
        ({"format": "ragaccel others"}, "it is not a ragaccel"),
        ({"format": None}, "it is not a ragaccel"),
        *(({"namespaces": names}, "its header") for names in (None, "ab", [1, 2], ["a", "a"])),
        ({"namespaces": {"a": 1}}, "its header"),
    ],
)
def test_a_header_of_another_file_is_refused(kind, path, caplog, changes, reason):
    header, arrays = read_archive(path, 1 << 30)
    assert header["format"] == kind.format
    write_archive(path, {**header, **changes}, arrays)
    assert_refused(kind, path, reason, caplog)


def test_what_is_no_file_that_can_be_read_is_refused(kind, path, tmp_path, caplog, monkeypatch):
    assert_refused(kind, tmp_path, "it is a folder", caplog)
    assert_refused(kind, path / "kept", "cannot be read (Not a directory)", caplog)
    os.mkfifo(tmp_path / "pipe")  # reading it would block
    assert_refused(kind, tmp_path / "pipe", "not a regular file", caplog)
    with open(path, "ab") as file:
        file.truncate(6 << 20)
    assert_refused(kind, path, "larger than the limit of", caplog, max_bytes=1 << 20)
    path.unlink()
    path.symlink_to(tmp_path / "secret")
    (tmp_path / "secret").touch()
    real = open

    def forbidden(name, *args, **kwargs):
        if str(name).endswith("secret"):
            raise PermissionError(13, "Permission denied")
        return real(name, *args, **kwargs)

    monkeypatch.setattr("builtins.open", forbidden)
    monkeypatch.setattr(os, "access", lambda *args: False)
    assert_refused(kind, tmp_path / "secret", "cannot be read (Permission denied)", caplog)


def holds(at, value):
    """Return a change of one number."""

    def change(array):
        array = array.copy()
        array.flat[at] = value
        return array

    return change


FORMS = (
    lambda array: None,
    lambda array: array.astype(np.float32 if array.dtype == np.float64 else np.int64),
    lambda array: array[:-1],
    lambda array: array[None],
    lambda array: array[..., 0],
)
HISTORY = ("token_ids", "prompt_lengths", "answer_lengths")
CORRECTIONS = ("by_source", "by_length", "by_depth")
ENTRIES = ("text", "question_lengths", "answer_lengths", "namespace_of", "came", "vectors")
BAD_ARRAYS = [
    *((Drafts, f"0/history/{name}", change) for name in HISTORY for change in FORMS),
    *((Drafts, f"0/calibration/{name}", change) for name in CORRECTIONS for change in FORMS),
    (Drafts, "1/history/token_ids", holds(5, 60)),
    (Drafts, "1/history/token_ids", holds(5, -1)),
    (Drafts, "1/history/prompt_lengths", holds(0, -1)),
    (Drafts, "1/history/prompt_lengths", holds(0, 1)),
    (Drafts, "1/history/answer_lengths", holds(0, 1 << 30)),
    (Drafts, "1/history/answer_lengths", holds(0, 2**31 - 1)),
    (Drafts, "1/calibration/by_source", holds(0, np.nan)),
    (Drafts, "1/calibration/by_length", holds(0, 3.1)),
    (Drafts, "1/calibration/by_depth", holds(0, -3.1)),
    (Drafts, "1/space_calibration/values", holds(0, -1.0)),
    (Drafts, "1/space_calibration/values", holds(0, 64.1)),
    (Drafts, "1/space_calibration/by_depth", holds(0, 4.1)),
    (Drafts, "1/space_calibration/by_rank", FORMS[0]),
    *((Answers, name, change) for name in ENTRIES for change in FORMS),
    (Answers, "text", lambda array: np.append(array, np.uint8(33))),
    (Answers, "text", holds(-1, 0xFF)),
    (Answers, "question_lengths", holds(0, 13)),
    (Answers, "question_lengths", lambda array: array + np.array([1, -1, 0], np.int32)),
    (Answers, "answer_lengths", lambda array: array + np.array([1, -1, 0], np.int32)),
    (Answers, "answer_lengths", holds(0, 2**31 - 1)),
    (Answers, "namespace_of", holds(0, 2)),
    (Answers, "namespace_of", holds(0, -1)),
    (Answers, "namespace_of", np.zeros_like),
    (Answers, "came", holds(0, 3)),
    (Answers, "came", np.zeros_like),
    (Answers, "vectors", holds(0, np.nan)),
    (Answers, "vectors", lambda array: np.full_like(array, 0.5)),
    (Answers, "vectors", lambda array: array[:, :0]),
]


def test_arrays_that_no_memory_wrote_are_refused(tmp_path, caplog):
    for kind in (Drafts, Answers):
        memory = kind.open(tmp_path / "kept")
        kind.fill(memory)
        header, arrays = memory._state()
        memory.save()
        (head, whole), path = read_archive(memory.path, 1 << 30), memory.path
        for name, change in ((name, change) for of, name, change in BAD_ARRAYS if of is kind):
            bad = {**arrays, name: change(arrays[name])}
            write_archive(path, head, {key: a for key, a in bad.items() if a is not None})
            assert_refused(kind, path, "damaged", caplog)
        assert whole.keys() == arrays.keys()
        assert header["namespaces"] == head["namespaces"]
        path.unlink()


def test_ids_of_a_larger_vocabulary_are_refused(tmp_path, caplog):
    memory = opened(tmp_path / "kept")
    teach(memory.of(""), 1)
    memory.save()
    assert_refused(Drafts, memory.path, "outside 0 to 19", caplog, vocab_size=20)


def test_answers_of_another_embedder_are_refused(tmp_path, caplog):
    memory = Answers.open(tmp_path / "kept")
    Answers.fill(memory)
    memory.save()
    for part in (np.s_[:, :-1], np.s_[:, ::-1]):  # of another dimension; of the same

        class Changed(Answers):
            @staticmethod
            def open(path, part=part):
                given = {"path": path, "fingerprint": "model"}
                return AnswerMemory(lambda texts: embed(texts)[part], **given)

        assert_refused(Changed, memory.path, "another embedder", caplog)
    with pytest.raises(ConfigurationError, match="embed returned"):
        AnswerMemory(lambda texts: np.ones(3), path=memory.path, fingerprint="model")


def test_a_namespace_may_be_opened_while_the_memory_is_saved(tmp_path, monkeypatch):
    memory = opened(tmp_path / "kept", max_namespaces=1)
    state, opening = type(memory)._state, []

    def open_meanwhile(self):  # the thread that saves holds what a save must wait for
        if not opening:
            opening.append(threading.Thread(target=open_many, daemon=True))
            opening[0].start()
            opening[0].join(0.5)
        return state(self)

    def open_many():
        for number in range(files.SAVE_INTERVAL + 1):
            memory.of(str(number))

    monkeypatch.setattr(type(memory), "_state", open_meanwhile)
    memory.of("first")
    saving = threading.Thread(target=memory.save, daemon=True)
    saving.start()
    saving.join(20)
    assert not saving.is_alive()
    opening[0].join(20)
    assert not opening[0].is_alive()


# A smaller memory takes in what fits.


def test_a_smaller_memory_keeps_the_newest_requests_and_namespaces(tmp_path):
    memory = opened(tmp_path / "kept")
    Drafts.fill(memory)
    memory.of("mine")
    memory.save()
    one = opened(memory.path, max_namespaces=1)
    assert one.namespaces == ["mine"]
    assert one.stats().evicted_namespaces == 1
    assert one.has_unsaved_changes, "what was left out is still in the file"
    assert drafts(one.of("mine")) == drafts(memory.of("mine"))
    small = opened(memory.path, max_bytes=1 << 14)
    assert small.load_error == ""
    assert small.num_bytes <= 1 << 14
    kept, all_ids = (m.of("mine").history.state()["token_ids"] for m in (small, memory))
    assert np.array_equal(kept, all_ids[-len(kept) :])


def test_a_smaller_answer_memory_keeps_what_was_used_last(tmp_path):
    memory = Answers.open(tmp_path / "kept")
    for number in range(20):
        memory.add(f"ferry {number}", "x" * 100)
    memory.save()
    small = Answers.open(memory.path, max_bytes=1024)
    kept = small.stats().entries
    assert (small.load_error, small.stats().evictions) == ("", 20 - kept)
    assert 0 < small.stats().num_bytes <= 1024
    found = [one.question for one in small.similar("ferry", k=20)]
    assert found == [f"ferry {number}" for number in range(19, 19 - kept, -1)]


# When it is saved.


def test_what_changes_it_is_marked(tmp_path):
    memory = opened(tmp_path / "kept")
    for change in (
        lambda: memory.of("mine").remember([1], [2]),
        lambda: memory.of("mine").clear(),
        lambda: memory.forget("mine"),
        memory.clear,
    ):
        change()
        assert memory.has_unsaved_changes
        memory.save()
        assert not memory.has_unsaved_changes
    memory.of("mine")
    assert not memory.has_unsaved_changes
    assert opened(memory.path).namespaces == []


def test_a_forgotten_namespace_is_gone_from_the_file_even_after_eviction(tmp_path):
    memory = opened(tmp_path / "kept")
    for name in "ABCD":
        memory.of(name).remember([1, 2], [3])
    memory.save()
    memory.of("E")  # A makes room
    memory.forget("A")
    assert memory.has_unsaved_changes
    memory.save()
    assert "A" not in opened(memory.path).namespaces


def test_a_memory_is_saved_at_intervals_and_a_save_that_fails_then_raises_nothing(tmp_path):
    memory, hindered = opened(tmp_path / "kept"), opened(tmp_path / "folder" / "kept")
    (tmp_path / "folder").touch()  # a file in the place of the folder
    for _ in range(files.SAVE_INTERVAL):
        assert not memory.path.exists()
        for one in (memory, hindered):
            one.of("").remember([1, 2], [3])
    assert opened(memory.path).stats().requests == files.SAVE_INTERVAL
    assert hindered.has_unsaved_changes
    (tmp_path / "folder").unlink()
    hindered.save()


def test_a_second_one_in_this_process_knows_what_the_first_has_not_saved(tmp_path):
    first = opened(tmp_path / "kept")
    alive = weakref.ref(first)
    first.of("").remember([1, 2], [3])
    assert opened(first.path).stats().requests == 1
    assert not first.has_unsaved_changes
    del first
    gc.collect()
    assert alive() is None, "only what has something to save is kept alive"


def test_threads_save_while_others_add(tmp_path):
    memory = opened(tmp_path / "kept")
    memory.save()
    errors, done = [], threading.Event()

    def save():
        while not done.is_set():
            memory.save()
            kept = opened(memory.path)
            errors.extend([kept.load_error] if kept.load_error else [])

    savers = [threading.Thread(target=save) for _ in range(2)]
    adders = [
        threading.Thread(target=lambda n=n: teach(memory.of(f"{n % 2}"), n, num=8))
        for n in range(4)
    ]
    for thread in savers + adders:
        thread.start()
    for thread in adders:
        thread.join()
    done.set()
    for thread in savers:
        thread.join()
    assert not errors
    memory.save()
    assert Drafts.contents(opened(memory.path)) == Drafts.contents(memory)
    assert memory.stats().requests == 32
    assert os.listdir(tmp_path) == ["kept"]


ADD = """
    import sys
    from ragaccel.drafting import Memory
    memory = Memory(path=sys.argv[1], fingerprint="model", vocab_size=60)
    memory.of("a").remember([1, 2], [3])
"""


def run(script, *args):
    """Run a script; return the lines of its log."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()


@pytest.mark.slow
def test_a_process_saves_what_changed_when_it_ends(tmp_path):
    path, folder = tmp_path / "kept", tmp_path / "folder"
    for requests in (1, 2):
        assert run(ADD, path) == []
        assert opened(path).of("a").history.num_requests == requests
    before = os.stat(path).st_ino
    assert run(ADD.replace("remember([1, 2], [3])", "is_empty"), path) == []
    assert os.stat(path).st_ino == before, "nothing changed: it would be another file"
    (error,) = run(ADD + "\n    open(sys.argv[2], 'w').close()", folder / "kept", folder)
    assert "cannot be written" in error
    (tmp_path / "diary").write_text("mine", encoding="utf-8")
    (error,) = run(ADD, tmp_path / "diary")
    assert "is not used" in error
    assert (tmp_path / "diary").read_text(encoding="utf-8") == "mine"


# The archive.


@pytest.fixture
def archive(tmp_path):
    write_archive(tmp_path / "archive", {"x": "ü"}, ARRAYS)
    return tmp_path / "archive"


def test_an_archive_is_a_safetensors_file_of_arrays_of_any_layout(archive):
    header, arrays = read_archive(archive, 1 << 20)
    assert (header, arrays.keys()) == ({"x": "ü"}, ARRAYS.keys())
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert np.array_equal(arrays[name], array)
    assert load_file(archive)["a/b"].tolist() == [0, 1, 2, 3, 4]
    with safe_open(archive, framework="np") as file:
        assert json.loads(file.metadata()["ragaccel"])["header"] == {"x": "ü"}
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    arrays = {"turned": table.T, "every second": table[:, ::2]}
    write_archive(archive, {}, arrays)
    found = read_archive(archive, 1 << 20)[1]
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())


def test_an_array_is_as_large_as_it_says(archive):
    for shape in ((10**13,), (-1,), (4,), (6,), (5, 2), (0, 10**9), (2**63, 2)):
        for end in (20, 10**12):
            declared = {"d": {"dtype": "I32", "shape": shape, "data_offsets": [0, end]}}
            header = json.dumps(declared).encode()
            archive.write_bytes(len(header).to_bytes(8, "little") + header + bytes(20))
            with pytest.raises(SafetensorError, match=r"invalid|overflow|covered"):
                read_archive(archive, 1 << 20)
