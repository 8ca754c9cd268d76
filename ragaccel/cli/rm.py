"""``ragaccel rm``: take files out of an index, or the whole index away."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ragaccel.cli import options

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.source import Source
    from ragaccel.cli.terminal import Terminal


def rm(
    terminal: "Terminal",
    target: options.Target = None,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE", help="Files as ls shows them, or globs.", show_default=False
        ),
    ] = None,
    index: options.Index = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Delete the whole index; the documents stay.")
    ] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Let files that were taken out in again.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> "ExitCode":
    """Take files out of an index; the files stay.

    They are left out from then on, of a rebuilt index too, until ``rm --undo`` names them.
    """
    from pathlib import Path

    from ragaccel.cli.exits import ExitCode, UsageError
    from ragaccel.cli.source import locate

    if index is not None and target is not None and not Path(target).expanduser().is_dir():
        files, target = [target, *(files or [])], None
    source = locate(target, index)
    if everything == bool(files):
        raise UsageError("name the files to take out, or give --all to delete the whole index")
    if undo and not files:
        raise UsageError("--undo lets files in again: name them")
    if files:
        return (_let_in if undo else _take_out)(terminal, source, files)
    if not (yes or _agrees(terminal, source)):
        raise UsageError("nothing was deleted: answer y, or give --yes")
    _delete(source)
    terminal.note(f"deleted {source.index}; the documents are as they were")
    return ExitCode.OK


def _take_out(terminal: "Terminal", source: "Source", patterns: "Sequence[str]") -> "ExitCode":
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.knowledge import open_store

    with open_store(source) as store, store.writing():
        known = store.files()
        chosen = [path for pattern in patterns for path in _matching(pattern, known)]
        store.leave_out([path for path in chosen if known[path].kind == "document"])
        num_removed = store.remove(dict.fromkeys(chosen))
    unknown = [pattern for pattern in patterns if not _matching(pattern, known)]
    for pattern in unknown:
        terminal.fail(f"no file {pattern!r} in the index: ragaccel ls {source.argument} lists them")
    terminal.note(f"took {num_removed} files out of the index")
    return ExitCode.FAILED if unknown else ExitCode.OK


def _let_in(terminal: "Terminal", source: "Source", patterns: "Sequence[str]") -> "ExitCode":
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.knowledge import open_store

    with open_store(source) as store, store.writing():
        left_out = store.left_out()
        chosen = [path for path in left_out if any(_matching(p, [path]) for p in patterns)]
        store.leave_out(chosen, undo=True)
    unknown = [pattern for pattern in patterns if not _matching(pattern, left_out)]
    for pattern in unknown:
        terminal.fail(f"{pattern!r} was not taken out: ragaccel stats {source.argument} lists them")
    terminal.note(f"{len(chosen)} files come in again with the next `{source.index_command()}`")
    return ExitCode.FAILED if unknown else ExitCode.OK


def _matching(pattern: str, paths: "Iterable[str]") -> list[str]:
    from fnmatch import fnmatchcase

    return [path for path in paths if path == pattern or fnmatchcase(path, pattern)]


def _agrees(terminal: "Terminal", source: "Source") -> bool:
    if not sys.stdin.isatty():
        return False
    answer = terminal.err.input(f"delete {source.index}? y/n ", markup=False)
    return answer.strip().lower() in ("y", "yes")


def _delete(source: "Source") -> None:
    from ragaccel.errors import NothingIndexedError
    from ragaccel.retrieval.store import Store

    if not source.index.exists():
        raise NothingIndexedError(f"there is no index at {source.index}")
    Store(source.index).discard()
