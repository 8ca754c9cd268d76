"""Unread files: what an index does not hold as it stands, named with reasons."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ragaccel.cli.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ragaccel.cli.source import Source
    from ragaccel.cli.terminal import Terminal
    from ragaccel.retrieval.indexing import IndexReport
    from ragaccel.retrieval.store import Store, UnreadFile

_TOLD = 5  # files that indexing names; `ls --failed` names all that failed
_LISTED = 20  # passed-over files that `ls --failed` names one by one


def tell_unread(terminal: Terminal, source: Source, report: IndexReport, *, always: bool) -> None:
    """Say which files could not be read, which by a guess, and which were passed over.

    Args:
        terminal: Where to.
        source: What was indexed.
        report: What came of it.
        always: Name failures that an earlier run has named, too.
    """
    before = set() if always else report.told_before
    failed = {path: why for path, why in report.failed.items() if path not in before}
    doubtful = {p: why for p, why in report.doubtful.items() if p not in report.told_before}
    command = source.command("ls", "--failed")
    for files, what in ((failed, "could not be read"), (doubtful, "were read by a guess")):
        for path, reason in list(files.items())[:_TOLD]:
            terminal.warn(f"{one_line(path)}: {reason}")
        if len(files) > _TOLD:
            more = len(files) - _TOLD
            terminal.warn(f"and {more:,} more files {what}: `{command}` names them")
    passed = {p: why for p, why in report.passed_over.items() if p not in report.told_before}
    if passed:
        shown = _by_name(passed) if len(passed) <= _TOLD else _by_kind(passed)
        terminal.note(f"passed over: {', '.join(shown)} (`{command}` names all)")


def list_unread(terminal: Terminal, store: Store) -> None:
    """Name on stdout what is not in an index as it stands; very many passed over by their kind."""
    unread = store.unread().values()
    for file in unread:
        if file.kind != "skipped":
            terminal.write(f"{file.kind:8}  {one_line(file.path)}: {one_line(file.reason)}\n")
    passed = {file.path: file.reason for file in unread if file.kind == "skipped"}
    for shown in _by_name(passed) if len(passed) <= _LISTED else _by_kind(passed):
        terminal.write(f"{'skipped':8}  {shown}\n")


def unread_documents(store: Store) -> list[dict[str, Any]]:
    """What is not in an index as it stands, as JSON."""
    return [_document(file) for file in store.unread().values()]


def file_documents(store: Store) -> list[dict[str, Any]]:
    """Every file of an index, as JSON, and those that it does not hold."""
    unread = store.unread()
    files: list[dict[str, Any]] = []
    for path, record in store.files().items():
        why = unread.pop(path, None)
        files.append({**asdict(record), "reason": why.reason if why else ""})
    return [*files, *map(_document, unread.values())]


def count_unread(store: Store) -> tuple[int, int]:
    """How many files could not be read, and how many were passed over."""
    kinds = Counter(file.kind for file in store.unread().values())
    return kinds["failed"], kinds["skipped"]


def one_line(text: str) -> str:
    """A name or a reason as it can be printed within a line."""
    return printable(text.replace("\n", "\0"))


def _document(file: UnreadFile) -> dict[str, Any]:
    return {"path": file.path, "status": file.kind, "reason": file.reason, "size": file.size}


def _by_name(passed: Mapping[str, str]) -> Iterator[str]:
    return (f"{one_line(path)}: {reason}" for path, reason in passed.items())


def _by_kind(passed: Mapping[str, str]) -> Iterator[str]:
    """How many there are of each ending, for each reason."""
    kinds = Counter((reason, os.path.splitext(path)[1].lower()) for path, reason in passed.items())
    for (reason, ending), number in kinds.most_common():
        yield f"{number:,} {one_line(ending) or 'without an ending'}: {reason}"
