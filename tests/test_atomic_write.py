import os
import stat
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ragaccel.paths import atomic_write


def write(path, text, **options):
    with atomic_write(path, **options) as file:
        file.write(text.encode())


def write_half(path, error):
    with atomic_write(path) as file:
        file.write(b"half of the n")
        raise error


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_new_contents_take_the_place_of_the_old_ones(tmp_path):
    path = tmp_path / "a" / "b.txt"
    write(path, "one")
    write(path, "two")
    assert path.read_text() == "two"
    assert [file.name for file in path.parent.iterdir()] == ["b.txt"]


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_a_private_file_is_its_owners_alone_and_another_keeps_its_mode(tmp_path):
    secret, shown = tmp_path / "secret", tmp_path / "shown"
    write(secret, "x", private=True)
    write(shown, "x")
    assert (mode(secret), mode(shown)) == (0o600, 0o644)
    shown.chmod(0o640)
    write(shown, "y")
    assert mode(shown) == 0o640


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_the_old_contents_and_nothing_else(tmp_path, error):
    path = tmp_path / "a"
    write(path, "old")
    with pytest.raises(error):
        write_half(path, error)
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_is_not_replaced(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError):  # noqa: PT011
        write(tmp_path / "a", "x")
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_several_at_once_leave_one_whole(tmp_path):
    path = tmp_path / "a"
    texts = [str(number) * 50_000 for number in range(8)]
    threads = [threading.Thread(target=write, args=(path, text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in texts
    assert len(list(tmp_path.iterdir())) == 1


# What processes that died left behind


def start_writing(path):
    """A process in the middle of writing a file."""
    script = (
        "import sys, time; from pathlib import Path; from ragaccel.paths import atomic_write\n"
        "with atomic_write(Path(sys.argv[1])) as file:\n"
        "    file.write(b'half'); file.flush(); print('begun', flush=True); time.sleep(99)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "begun\n"
    return process


def parts(folder):
    return [file.name for file in folder.iterdir() if file.name.endswith(".part")]


def test_what_a_killed_process_left_goes_with_the_next_writing_and_nothing_else(tmp_path):
    dead, living = start_writing(tmp_path / "a"), start_writing(tmp_path / "b")
    dead.kill()
    dead.wait()
    dead.stdout.close()
    assert len(parts(tmp_path)) == 2
    (tmp_path / "notes.part").write_text("mine")
    write(tmp_path / "c", "whole")
    assert len(parts(tmp_path)) == 2  # the living one's and a stranger's
    assert living.poll() is None
    living.kill()
    living.wait()
    living.stdout.close()
    write(tmp_path / "c", "again")
    assert parts(tmp_path) == ["notes.part"]


def test_temporary_names_that_are_no_files_are_left_alone(tmp_path):
    (tmp_path / "mine").write_text("keep")
    (tmp_path / ".ragaccel-x.part").symlink_to(tmp_path / "mine")
    os.mkfifo(tmp_path / ".ragaccel-y.part")
    (tmp_path / ".ragaccel-z.part").mkdir()
    write(tmp_path / "a", "whole")
    assert (tmp_path / "a").read_text() == "whole"
    assert (tmp_path / "mine").read_text() == "keep"
    assert len(parts(tmp_path)) == 3


def test_a_file_taken_for_abandoned_at_once_is_begun_anew(tmp_path, monkeypatch):
    mkstemp, stolen = tempfile.mkstemp, []

    def steal(**arguments):
        handle, name = mkstemp(**arguments)
        if not stolen:
            stolen.append(name)
            os.unlink(name)
        return handle, name

    monkeypatch.setattr(tempfile, "mkstemp", steal)
    write(tmp_path / "a", "whole")
    assert stolen
    assert (tmp_path / "a").read_text() == "whole"


def test_writers_beside_one_another_take_nothing_from_each_other(tmp_path):
    def write_often(name):
        for number in range(60):
            write(tmp_path / name, f"{number}")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write_often, "abcdefgh"))
    assert {path.read_text() for path in tmp_path.iterdir()} == {"59"}
