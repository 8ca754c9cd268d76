"""Every error becomes one line that says what to do, and an exit code; help is quick."""

from __future__ import annotations

import errno
import io

import pytest
import typer

from ragaccel.cli.main import make_command, run
from ragaccel.cli.terminal import Terminal, UsageError
from ragaccel.errors import (
    CapacityError,
    ConfigurationError,
    EmptyIndexError,
    IndexBusyError,
    MissingExtraError,
    ModelNotFoundError,
    StorageError,
)

HEAVY = ("torch", "transformers", "numpy", "faiss", "sentence_transformers", "sqlite3")
COMMANDS = "ask chat index search ls rm stats logs doctor config train".split()


@pytest.fixture
def fails(capsys):
    """Run a command that raises an error; return its exit code and stderr."""

    def call(error, *options):
        def broken(terminal):
            raise error

        app = typer.Typer(add_completion=False)
        app.command()(make_command(broken))
        with pytest.raises(SystemExit) as ended:
            app(args=list(options))
        captured = capsys.readouterr()
        assert captured.out == ""
        return ended.value.code, captured.err

    return call


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("x"), 2, "x"),
        (ConfigurationError(), 2, "ConfigurationError"),
        (CapacityError("prompt (9)\n  exceeds 8"), 1, "prompt (9) exceeds 8"),
        (EmptyIndexError("x"), 3, "x"),
        (IndexBusyError("x"), 1, "x"),
        (ModelNotFoundError("word " * 100), 1, "word word"),
        (MissingExtraError("faiss", "retrieval"), 1, "pip install 'ragaccel[retrieval]'"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "disk is full"),
        (OSError(errno.ENAMETOOLONG, "Too long", "x" * 99), 1, f"file system: {'x' * 60}…"),
        (StorageError("keep the index elsewhere with path=FILE"), 1, "with --index PATH"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "no permission: /x"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/x"), 1, "folder: /x"),
        (MemoryError(), 1, "out of memory"),
        (ZeroDivisionError("by zero"), 1, "ZeroDivisionError: by zero (--debug"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_is_one_line_on_stderr_and_a_code(fails, error, code, said):
    ended, shown = fails(error)
    assert ended == code
    assert shown.startswith("error: ")
    assert said in shown
    assert shown.count("\n") == 1


def test_ctrl_c_and_a_closed_pipe_are_no_errors(fails):
    assert fails(KeyboardInterrupt()) == (130, "interrupted\n")
    assert fails(BrokenPipeError(errno.EPIPE, "Broken pipe")) == (1, "")


class FullDisk(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_that_cannot_be_written_is_one_line_too(argument, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout", FullDisk())
    with pytest.raises(SystemExit) as ended:
        run([argument])
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("error: the disk is full")


def test_json_needs_no_stdout(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)  # `>&-` in a shell
    Terminal().json({"documents": []})


def test_debug_shows_the_traceback(fails, monkeypatch):
    assert "def broken" in fails(ZeroDivisionError("by zero"), "--debug")[1]
    monkeypatch.setenv("RAGACCEL_DEBUG", "1")
    assert "ZeroDivisionError" in fails(ZeroDivisionError("by zero"))[1].splitlines()[-1]


@pytest.mark.parametrize("arguments", [["ask", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments, spawn):
    script = (
        "import sys\n"
        "from ragaccel.cli.main import run\n"
        "try:\n    run(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    process = spawn("-c", script, *arguments)
    _, modules = process.communicate(timeout=60)
    assert process.returncode == 0, modules
    assert not {name.split(".")[0] for name in modules.split()} & set(HEAVY)


def test_help_names_every_command_and_the_exit_codes(cli):
    ended = cli("--help")
    assert ended.code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in ended.out
        assert "Usage: ragaccel" in cli(command, "--help").out
    assert "5 not answered" in ended.out
    assert "130 interrupted" in ended.out


WRONG = """
askk
ask --no-such-flag
ask
ask no-such-folder question?
ask . q --temperature -1
ask . q -k none
ask . q -k 0
ask . q --compare --no-accel
ask . q --drafter tree
index no-such-folder
index --passages no-such-file
index . --index .
search .
rm .
rm . --all
logs -n 9999999999999999999999999
config nothing
config set k 3
train nothing
train space no-such-file --out there
train space no-such-file
train space no-such-file --out there --mode other
"""


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_wrong_usage_ends_with_2_and_says_why(cli, line):
    ended = cli(*line.split())
    assert (ended.code, ended.out) == (2, "")
    assert "rror" in ended.err
    assert "Traceback" not in ended.err
