"""The data directory, files replaced as a whole, and reads of regular files alone."""

import os
import pwd
import socket
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ragaccel import paths
from ragaccel.paths import (
    NotRegularError,
    TooLargeError,
    atomic_write,
    data_dir,
    latency_file,
    open_regular_file,
    read_regular_file,
)

# The data directory


def test_where_data_is_kept_on_linux(monkeypatch):
    for variables, folder in (
        ({}, "/home/me/.local/share/ragaccel"),
        ({"XDG_DATA_HOME": "/data"}, "/data/ragaccel"),
        ({"XDG_DATA_HOME": "/data", "RAGACCEL_HOME": "~/elsewhere"}, "/home/me/elsewhere"),
    ):
        monkeypatch.delenv("RAGACCEL_HOME", raising=False)
        monkeypatch.delenv("XDG_DATA_HOME", raising=False)
        for name, value in {"HOME": "/home/me", **variables}.items():
            monkeypatch.setenv(name, value)
        assert data_dir() == Path(folder)


def test_nothing_is_kept_in_the_current_folder_for_a_user_without_a_home(monkeypatch):
    def unknown(*_):
        raise KeyError

    for name in ("RAGACCEL_HOME", "XDG_DATA_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="home directory"):
            data_dir()
        assert latency_file("key") is None
        # as earlier releases of platformdirs answer
        monkeypatch.setattr("platformdirs.user_data_dir", lambda *_, **__: "~/.local/share/x")


# Atomic writes


def write(path, text, **options):
    with atomic_write(path, **options) as file:
        file.write(text.encode())


def test_new_contents_take_the_place_of_the_old_ones_or_an_error_changes_nothing(tmp_path):
    path = tmp_path / "a" / "b.txt"
    write(path, "one")
    write(path, "two")
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), atomic_write(path) as file:  # noqa: PT012
            file.write(b"half of the n")
            raise error
        assert path.read_text() == "two"
        assert names(path.parent) == ["b.txt"]
    with pytest.raises(OSError):  # noqa: PT011
        write(path.parent, "a folder is not replaced")
    assert names(tmp_path) == ["a"]


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_a_private_file_is_its_owners_alone_and_another_keeps_its_mode(tmp_path):
    secret, shown = tmp_path / "secret", tmp_path / "shown"
    write(secret, "x", private=True)
    write(shown, "x")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (secret, shown)]
    assert modes == [0o600, 0o644]
    shown.chmod(0o640)
    write(shown, "y")
    assert stat.S_IMODE(shown.stat().st_mode) == 0o640


def names(folder, ending=""):
    return sorted(file.name for file in folder.iterdir() if file.name.endswith(ending))


def test_writers_at_once_leave_whole_files_and_take_nothing_from_each_other(tmp_path):
    texts = [str(number) * 50_000 for number in range(8)]

    def write_often(number):
        write(tmp_path / "one", texts[number])
        for at in range(60):
            write(tmp_path / f"own{number}", f"{at}")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write_often, range(8)))
    assert (tmp_path / "one").read_text() in texts
    assert {(tmp_path / f"own{number}").read_text() for number in range(8)} == {"59"}
    assert len(names(tmp_path)) == 9


def start_writing(path):
    """Start a process in the middle of writing a file."""
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


def test_what_a_killed_process_left_goes_with_the_next_writing_and_nothing_else(tmp_path):
    (tmp_path / "mine").write_text("keep")
    (tmp_path / "notes.part").write_text("mine")
    (tmp_path / ".ragaccel-x.part").symlink_to(tmp_path / "mine")
    os.mkfifo(tmp_path / ".ragaccel-y.part")
    (tmp_path / ".ragaccel-z.part").mkdir()
    others = names(tmp_path, ".part")
    dead, living = start_writing(tmp_path / "a"), start_writing(tmp_path / "b")
    for process, left in ((dead, 1), (living, 0)):
        process.kill()
        process.wait()
        process.stdout.close()
        assert len(names(tmp_path, ".part")) == len(others) + left + 1
        write(tmp_path / "c", "whole")
        assert len(names(tmp_path, ".part")) == len(others) + left
    assert names(tmp_path, ".part") == others
    assert (tmp_path / "mine").read_text() == "keep"


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


# Reads of regular files


@pytest.mark.parametrize("step_by_step", [True, False])
def test_no_link_below_the_folder_is_followed(tmp_path, monkeypatch, step_by_step):
    monkeypatch.setattr(paths, "_HAS_DIR_FD", step_by_step and paths._HAS_DIR_FD)
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    (folder / "sub").mkdir(parents=True)
    (outside / "key.md").write_text("secret")
    (folder / "sub/own.md").write_text("text")
    (folder / "link.md").symlink_to(outside / "key.md")
    (folder / "more").symlink_to(outside, target_is_directory=True)
    for name in ("link.md", "more/key.md", "sub/../../outside/key.md"):
        with pytest.raises(NotRegularError):
            open_regular_file(folder / name, inside=folder)
    assert read_regular_file(folder / "link.md", 9) == b"secret"
    (tmp_path / "link").symlink_to(folder, target_is_directory=True)
    for root in (folder, tmp_path / "link"):  # which may be behind a link itself
        assert read_regular_file(root / "sub/own.md", 9, inside=root) == b"text"


def test_what_is_no_regular_file_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.md")
    with socket.socket(socket.AF_UNIX) as ours:
        ours.bind("socket.md")
    os.mkdir("folder.md")
    os.symlink("/dev/zero", "device.md")
    before = len(os.listdir("/dev/fd"))
    for name in (*os.listdir(), "missing", "pipe.md/b"):
        for inside in (None, tmp_path):
            with pytest.raises(OSError) as refused:  # noqa: PT011
                read_regular_file(tmp_path / name, 10, inside=inside)
            expected = (NotRegularError, IsADirectoryError, FileNotFoundError, NotADirectoryError)
            assert isinstance(refused.value, expected), name
    assert len(os.listdir("/dev/fd")) == before


def test_no_more_than_the_limit_is_read(tmp_path):
    path = tmp_path / "a.md"
    path.write_bytes(b"x" * 100_000)
    assert len(read_regular_file(path, 100_000)) == 100_000
    with pytest.raises(TooLargeError) as caught:
        read_regular_file(path, 99_999)
    assert caught.value.size == 100_000
    if os.path.exists("/proc/self/maps"):  # a file that claims to be empty
        with pytest.raises(TooLargeError):
            read_regular_file(Path("/proc/self/maps"), 10)
