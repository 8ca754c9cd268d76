import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest
from filled_memory import drafts, opened, saved, teach
from safetensors import safe_open

from ragaccel.drafting import Memory, memory as files
from ragaccel.errors import ConfigurationError, StorageError


@pytest.fixture
def path(tmp_path):
    return saved(tmp_path / "memory")


def test_drafts_are_the_same_after_a_round_trip(path, tmp_path):
    memory, other = opened(path), opened(path)
    assert memory.load_error == ""
    assert memory.namespaces == ["mine", "theirs"]
    taught = Memory(vocab_size=60)
    teach(taught.of("mine"), 1)
    teach(taught.of("theirs"), 2)
    for namespace in ("mine", "theirs"):
        assert drafts(memory.of(namespace)) == drafts(taught.of(namespace))
        assert memory.of(namespace).stats() == taught.of(namespace).stats()
        teach(memory.of(namespace), 3)
        teach(other.of(namespace), 3)
        assert drafts(memory.of(namespace)) == drafts(other.of(namespace))
    assert drafts(memory.of("mine")) != drafts(memory.of("theirs"))
    assert drafts(memory.of("mine")) != drafts(Memory().of("mine"))


def test_what_was_learned_of_chances_is_kept(path):
    assert np.any(opened(path).of("mine").calibration.odds != 1)


def test_equal_memories_make_equal_files(path, tmp_path):
    memory = opened(path)
    memory.path = tmp_path / "copy"
    memory.save()
    assert memory.path.read_bytes() == path.read_bytes()


def test_the_order_of_namespaces_is_kept_and_too_many_are_left_out(path):
    memory = opened(path)
    memory.of("mine")
    memory.save()
    one = opened(path, max_namespaces=1)
    assert one.namespaces == ["mine"]
    assert one.stats().evicted_namespaces == 1
    assert drafts(one.of("mine")) == drafts(memory.of("mine"))


def test_a_smaller_memory_takes_in_the_newest_requests(path):
    small, again = opened(path, max_bytes=1 << 14), opened(path, max_bytes=1 << 14)
    assert small.load_error == ""
    assert small.num_bytes <= 1 << 14
    for one, other in ((small, again), (again, opened(path))):
        mine, theirs = one.of("mine").history.state(), other.of("mine").history.state()
        kept = mine["token_ids"]
        assert np.array_equal(kept, theirs["token_ids"][-len(kept) :])
    assert drafts(small.of("mine")) == drafts(again.of("mine"))


def test_a_missing_file_is_a_new_one_and_its_folder_is_made(tmp_path, caplog):
    path = tmp_path / "a" / "b" / "memory"
    memory = opened(path)
    assert memory.load_error == ""
    assert not caplog.records
    assert not path.parent.exists(), "nothing is made before something is saved"
    memory.of("").remember([1], [2])
    memory.save()
    assert opened(path).of("").history.num_requests == 1


def test_the_home_folder_and_links_are_followed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    memory = Memory(path="~/link")
    memory.save()
    assert (tmp_path / "real").is_file()
    assert (tmp_path / "link").is_symlink()


def test_without_a_path_nothing_can_be_saved():
    with pytest.raises(ConfigurationError, match="path="):
        Memory().save()


def test_a_save_that_fails_leaves_the_old_file_whole(path, monkeypatch):
    before = path.read_bytes()
    memory = opened(path)
    memory.of("mine").remember([1], [2])

    def fails(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(StorageError, match=r"No space left.*free some space"):
        memory.save()
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    assert memory.has_unsaved_changes
    memory.save()
    assert not memory.has_unsaved_changes
    assert opened(path).of("mine").history.num_requests == 13


def test_what_changes_it_is_marked(path):
    memory = opened(path)
    assert not memory.has_unsaved_changes, "what was only read is not written again"
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
    assert opened(path).namespaces == []


def test_threads_save_while_others_add(tmp_path):
    memory = Memory(path=tmp_path / "memory", vocab_size=60)
    memory.of("a")
    memory.save()
    errors, done = [], threading.Event()

    def save():
        while not done.is_set():
            memory.save()
            kept = Memory(path=tmp_path / "memory", vocab_size=60)
            errors.extend([kept.load_error] if kept.load_error else [])

    def add(seed):
        teach(memory.of(f"{seed % 2}"), seed, num=8)

    savers = [threading.Thread(target=save) for _ in range(2)]
    adders = [threading.Thread(target=add, args=(seed,)) for seed in range(4)]
    for thread in savers + adders:
        thread.start()
    for thread in adders:
        thread.join()
    done.set()
    for thread in savers:
        thread.join()
    assert not errors
    memory.save()
    kept = Memory(path=tmp_path / "memory", vocab_size=60)
    for namespace in ("0", "1"):
        assert kept.of(namespace).history.num_requests == 16
        assert drafts(kept.of(namespace)) == drafts(memory.of(namespace))
    assert os.listdir(tmp_path) == ["memory"]


def run(script, *args):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout, done.stderr


ADDS = """
    import sys
    from ragaccel.drafting import Memory
    memory = Memory(path=sys.argv[1])
    memory.of("a").remember([1, 2], [3])
"""


def test_it_is_saved_when_python_exits(tmp_path):
    path = tmp_path / "memory"
    assert run(ADDS, path) == ("", "")
    assert run(ADDS, path) == ("", "")
    memory = Memory(path=path)
    assert memory.of("a").history.num_requests == 2


def test_nothing_is_written_at_exit_when_nothing_changed(path):
    before = os.stat(path)
    script = """
        import sys
        from ragaccel.drafting import Memory
        memory = Memory(path=sys.argv[1], fingerprint="model")
        assert memory.of("mine").history.num_requests == 12
    """
    assert run(script, path) == ("", "")
    assert os.stat(path).st_ino == before.st_ino, "it would be another file"


def test_an_error_at_exit_is_a_line_of_the_log(tmp_path):
    folder = tmp_path / "folder"
    script = ADDS + "\n    open(sys.argv[2], 'w').close()"  # a file in the place of the folder
    out, err = run(script, folder / "memory", folder)
    assert out == ""
    assert "cannot be written" in err
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1


def test_a_refused_file_is_warned_of_once(tmp_path):
    path = tmp_path / "memory"
    path.write_text("my diary", encoding="utf-8")
    out, err = run(ADDS, path)
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "is not used" in err
    assert path.read_text(encoding="utf-8") == "my diary"


def test_the_header_says_what_it_is(path):
    with safe_open(path, framework="np") as file:
        told = json.loads(file.metadata()["ragaccel"])
    assert told["header"] == {
        "format": "ragaccel memory",
        "version": 1,
        "fingerprint": "model",
        "namespaces": ["mine", "theirs"],
    }


def test_a_forgotten_namespace_is_gone_from_the_file_even_after_eviction(tmp_path):
    path = tmp_path / "memory"
    memory = Memory(path=path)
    for name in "ABCD":
        memory.of(name).remember([1, 2], [3])
    memory.save()
    memory.of("E")  # A makes room
    memory.forget("A")
    assert memory.has_unsaved_changes
    memory.save()
    assert "A" not in Memory(path=path).namespaces
    small = Memory(path=path, max_namespaces=1)
    assert small.has_unsaved_changes, "what was left out is still in the file"


def test_a_memory_is_saved_at_intervals(tmp_path):
    path = tmp_path / "memory"
    memory = Memory(path=path)
    for _ in range(files.SAVE_INTERVAL):
        assert not path.exists()
        memory.of("").remember([1, 2], [3])
    assert Memory(path=path).stats().requests == files.SAVE_INTERVAL


def test_a_second_one_in_this_process_knows_what_the_first_has_not_saved(tmp_path):
    path = tmp_path / "memory"
    first = Memory(path=path)
    first.of("").remember([1, 2], [3])
    assert Memory(path=path).stats().requests == 1
    assert not first.has_unsaved_changes


def test_only_what_has_something_to_save_is_kept_alive(tmp_path):
    memory = Memory(path=tmp_path / "memory")
    alive = weakref.ref(memory)
    memory.of("").remember([1, 2], [3])
    memory.save()
    del memory
    gc.collect()
    assert alive() is None


def test_a_failed_interval_save_raises_nothing(tmp_path, monkeypatch):
    memory = Memory(path=tmp_path / "memory")
    monkeypatch.setattr(files, "write_archive", lambda *a: (_ for _ in ()).throw(OSError(28, "x")))
    for _ in range(files.SAVE_INTERVAL):
        memory.of("").remember([1, 2], [3])
    assert memory.has_unsaved_changes
    files._unsaved.get().discard(memory)


def test_the_name_of_a_namespace_is_a_string():
    with pytest.raises(ConfigurationError, match="7"):
        Memory().of(7)
