"""Help imports nothing heavy, every command has help, and wrong usage is explained."""

from __future__ import annotations

import pytest

HEAVY = ("torch", "transformers", "numpy", "faiss", "sentence_transformers", "sqlite3")
COMMANDS = (
    "ask",
    "chat",
    "index",
    "search",
    "ls",
    "rm",
    "stats",
    "logs",
    "doctor",
    "config",
    "train",
)


@pytest.mark.parametrize("arguments", [["--help"], ["ask", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments, spawn):
    script = (
        "import sys\n"
        "from ragaccel.cli.main import run\n"
        "try:\n    run(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code\n"
        "print(*sorted(sys.modules), sep='\\n', file=sys.stderr)"
    )
    process = spawn("-c", script, *arguments)
    _, modules = process.communicate(timeout=60)
    assert process.returncode == 0, modules
    loaded = {name.split(".")[0] for name in modules.split()}
    assert "typer" in loaded
    assert loaded.isdisjoint(HEAVY), loaded & set(HEAVY)


def test_help_names_every_command_and_the_exit_codes(cli):
    ended = cli("--help")
    assert ended.code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in ended.out
    assert "5 not answered" in ended.out
    assert "130 interrupted" in ended.out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(cli, command):
    ended = cli(command, "--help")
    assert ended.code == 0
    assert "Usage: ragaccel" in ended.out


@pytest.mark.parametrize(
    "arguments",
    [
        ["askk"],
        ["ask", "--no-such-flag"],
        ["ask"],
        ["ask", "no-such-folder", "question?"],
        ["ask", "What is this?"],
        ["ask", ".", "q", "--temperature", "-1"],
        ["ask", ".", "q", "-k", "none"],
        ["ask", ".", "q", "-k", "0"],
        ["ask", ".", "q", "--compare", "--no-accel"],
        ["index", "no-such-folder"],
        ["index", "--passages", "no-such-file"],
        ["index", ".", "--index", "."],
        ["search", "."],
        ["rm", "."],
        ["rm", ".", "--all"],
        ["config", "nothing"],
        ["train", "nothing"],
        ["train", "space", "no-such-file", "--out", "there"],
        ["train", "space", "no-such-file"],
        ["train", "space", "no-such-file", "--out", "there", "--mode", "other"],
    ],
)
def test_wrong_usage_ends_with_2_and_says_why(cli, arguments):
    ended = cli(*arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert "rror" in ended.err
    assert "Traceback" not in ended.err
