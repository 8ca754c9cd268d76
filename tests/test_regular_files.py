"""Only regular files below their folder and within the size limit are read."""

import os
import socket
import threading

import pytest

from ragaccel import paths as regular_files
from ragaccel.paths import (
    NotRegularError,
    TooLargeError,
    open_regular_file,
    read_regular_file,
)


@pytest.fixture(params=[True, False], ids=["step by step", "checked afterwards"])
def _both_ways(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(regular_files, "_HAS_DIR_FD", False)


def within(seconds, call):
    """Return what a call raised or returned; fail if it takes longer."""
    outcome = []

    def run():
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, "the call does not return"
    return outcome[0]


def place(kind, path, tmp_path):
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as ours:
            ours.bind(os.path.relpath(path))
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "file": __file__}[kind])


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "device"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    place(kind, tmp_path / "x.md", tmp_path)
    for inside in (None, tmp_path):
        found = within(
            5, lambda inside=inside: read_regular_file(tmp_path / "x.md", 10, inside=inside)
        )
        assert isinstance(found, (NotRegularError, IsADirectoryError))


@pytest.mark.usefixtures("_both_ways")
def test_no_link_below_the_folder_is_followed(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    (folder / "sub").mkdir(parents=True)
    (outside / "key.md").write_text("secret")
    (folder / "sub/own.md").write_text("text")
    (folder / "link.md").symlink_to(outside / "key.md")
    (folder / "more").symlink_to(outside, target_is_directory=True)
    assert read_regular_file(folder / "sub/own.md", 9, inside=folder) == b"text"
    for name in ("link.md", "more/key.md", "sub/../../outside/key.md"):
        with pytest.raises(NotRegularError):
            open_regular_file(folder / name, inside=folder)
    assert read_regular_file(folder / "link.md", 9) == b"secret"


@pytest.mark.usefixtures("_both_ways")
def test_the_folder_itself_may_be_behind_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/a.md").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "real", target_is_directory=True)
    assert read_regular_file(tmp_path / "link/a.md", 9, inside=tmp_path / "link") == b"text"


def test_no_more_than_the_limit_is_read(tmp_path):
    path = tmp_path / "a.md"
    path.write_bytes(b"x" * 100_000)
    assert len(read_regular_file(path, 100_000)) == 100_000
    with pytest.raises(TooLargeError) as caught:
        read_regular_file(path, 99_999)
    assert caught.value.size == 100_000


@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="needs /proc")
def test_a_file_that_claims_to_be_empty_is_bounded_too(tmp_path):
    with pytest.raises(TooLargeError):
        read_regular_file(tmp_path.__class__("/proc/self/maps"), 10)


def test_handles_are_closed_whatever_happens(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a").mkdir()
    before = len(os.listdir("/dev/fd"))
    for name in ("pipe", "missing", "a/b/c"):
        with pytest.raises(OSError):  # noqa: PT011
            read_regular_file(tmp_path / name, 10, inside=tmp_path)
    assert len(os.listdir("/dev/fd")) == before
