import pwd
from pathlib import Path

import pytest

from ragaccel.paths import data_dir, latency_file


@pytest.fixture(autouse=True)
def no_choice(monkeypatch):
    for name in ("RAGACCEL_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_it_is_where_linux_keeps_data(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert data_dir() == Path("/home/me/.local/share/ragaccel")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert data_dir() == Path("/data/ragaccel")


def test_a_named_folder_comes_first(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.setenv("RAGACCEL_HOME", "~/elsewhere")
    assert data_dir() == Path("/home/me/elsewhere")


@pytest.mark.parametrize("found", [None, "~/.local/share/ragaccel"])
def test_nothing_is_kept_in_the_current_folder_for_a_user_without_a_home(monkeypatch, found):
    def unknown(*_):
        raise KeyError

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    if found:  # as earlier releases of platformdirs answer
        monkeypatch.setattr("platformdirs.user_data_dir", lambda *_, **__: found)
    with pytest.raises(RuntimeError, match="home directory"):
        data_dir()
    assert latency_file("key") is None
