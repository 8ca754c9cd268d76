"""Every error becomes one line that says what to do, and an exit code."""

from __future__ import annotations

import errno
import sqlite3

import pytest

from ragaccel.cli.main import make_command
from ragaccel.cli.terminal import ExitCode, UsageError, exit_code_of, explain
from ragaccel.errors import (
    CapacityError,
    ConfigurationError,
    EmptyIndexError,
    IndexBusyError,
    MissingExtraError,
    ModelNotFoundError,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (UsageError("x"), 2),
        (ConfigurationError("x"), 2),
        (CapacityError("x"), 1),
        (EmptyIndexError("x"), 3),
        (ModelNotFoundError("x"), 1),
        (IndexBusyError("x"), 1),
        (RuntimeError("x"), 1),
    ],
)
def test_the_code_of_an_error(error, code):
    assert exit_code_of(error) == code


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (CapacityError("prompt (9)\n  exceeds 8"), "prompt (9) exceeds 8"),
        (MissingExtraError("faiss", "retrieval"), "pip install 'ragaccel[retrieval]'"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk is full"),
        (sqlite3.OperationalError("database or disk is full"), "disk is full"),
        (sqlite3.OperationalError("database is locked"), "another process"),
        (sqlite3.OperationalError("attempt to write a readonly database"), "--index PATH"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "no permission: /x"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/x"), "/x"),
        (MemoryError(), "out of memory"),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero (--debug"),
        (ConfigurationError(), "ConfigurationError"),
    ],
)
def test_an_error_is_explained_in_one_line(error, said):
    assert said in explain(error)
    assert "\n" not in explain(error)


@pytest.fixture
def run_command(capsys):
    import typer

    def call(function):
        app = typer.Typer(add_completion=False)
        app.command()(make_command(function))
        with pytest.raises(SystemExit) as ended:
            app(args=[])
        return ended.value.code, capsys.readouterr()

    return call


def test_an_error_is_one_line_on_stderr(run_command):
    def broken(terminal):
        raise ModelNotFoundError("there is no model x: name another")

    code, captured = run_command(broken)
    assert (code, captured.out) == (1, "")
    assert captured.err == "error: there is no model x: name another\n"


def test_a_long_error_is_not_wrapped(run_command):
    def broken(terminal):
        raise ModelNotFoundError("word " * 100)

    assert run_command(broken)[1].err.count("\n") == 1


def test_ctrl_c_ends_with_130(run_command):
    def stopped(terminal):
        raise KeyboardInterrupt

    code, captured = run_command(stopped)
    assert (code, captured.err) == (130, "interrupted\n")


def test_debug_shows_the_traceback(run_command, monkeypatch):
    def broken(terminal):
        raise ZeroDivisionError("by zero")

    monkeypatch.setenv("RAGACCEL_DEBUG", "1")
    assert "ZeroDivisionError" in run_command(broken)[1].err.splitlines()[-1]
    assert "def broken" in run_command(broken)[1].err


def test_a_closed_pipe_ends_the_command_quietly(run_command):
    def writes(terminal):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    code, captured = run_command(writes)
    assert (code, captured.err) == (ExitCode.FAILED, "")
