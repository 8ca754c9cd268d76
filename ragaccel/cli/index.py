"""The index of a source: find, update, open and check the index, and report unreadable files."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragaccel.cli.terminal import UsageError, explain, indexing_progress, printable
from ragaccel.errors import EmptyIndexError, IndexBusyError, IndexUnusableError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ragaccel.cli.settings import Settings
    from ragaccel.cli.terminal import Terminal
    from ragaccel.retrieval.embedder import Embedder
    from ragaccel.retrieval.indexing import IndexReport
    from ragaccel.retrieval.retriever import Retriever
    from ragaccel.retrieval.store import Store, UnreadFile


_MAX_NAMED = 5  # unreadable files that indexing names; `ls --failed` lists all
_MAX_LISTED = 20  # skipped files that `ls --failed` lists one by one; more are only counted


def print_unread(terminal: Terminal, source: Source, report: IndexReport, *, always: bool) -> None:
    """Print which files could not be read, have an uncertain encoding or were skipped.

    Args:
        terminal: Receives warnings and notes.
        source: What was indexed.
        report: What indexing reported.
        always: Also name failures that an earlier run has named.
    """
    before = set() if always else report.reported_before
    failed = {path: why for path, why in report.failed.items() if path not in before}
    doubtful = {p: why for p, why in report.doubtful.items() if p not in report.reported_before}
    command = source.command("ls", "--failed")
    for files, what in ((failed, "could not be read"), (doubtful, "have an uncertain encoding")):
        for path, reason in list(files.items())[:_MAX_NAMED]:
            terminal.warn(f"{one_line(path)}: {reason}")
        if len(files) > _MAX_NAMED:
            more = len(files) - _MAX_NAMED
            terminal.warn(f"{more:,} more files {what}: `{command}` lists them")
    passed = {p: why for p, why in report.passed_over.items() if p not in report.reported_before}
    if passed:
        shown = _list_names(passed) if len(passed) <= _MAX_NAMED else _count_kinds(passed)
        terminal.note(f"skipped: {', '.join(shown)} (`{command}` lists all)")


def list_unread(terminal: Terminal, store: Store) -> None:
    """Print the files that failed, are doubtful or were skipped.

    If many were skipped, print their numbers by name ending and reason instead.
    """
    unread = store.unread().values()
    for file in unread:
        if file.kind != "skipped":
            terminal.write(f"{file.kind:8}  {one_line(file.path)}: {one_line(file.reason)}\n")
    passed = {file.path: file.reason for file in unread if file.kind == "skipped"}
    for shown in _list_names(passed) if len(passed) <= _MAX_LISTED else _count_kinds(passed):
        terminal.write(f"{'skipped':8}  {shown}\n")


def unread_json(store: Store) -> list[dict[str, Any]]:
    """Return the files that failed, are doubtful or were skipped, as JSON."""
    return [_unread_file_json(file) for file in store.unread().values()]


def files_json(store: Store) -> list[dict[str, Any]]:
    """Return as JSON the files in an index, then those that its last run failed on or skipped."""
    unread = store.unread()
    files: list[dict[str, Any]] = []
    for path, record in store.files().items():
        why = unread.pop(path, None)
        files.append({**asdict(record), "reason": why.reason if why else ""})
    return [*files, *map(_unread_file_json, unread.values())]


def count_unread(store: Store) -> tuple[int, int]:
    """Return how many files could not be read and how many were skipped."""
    kinds = Counter(file.kind for file in store.unread().values())
    return kinds["failed"], kinds["skipped"]


def one_line(text: str) -> str:
    """Return a text on one line: line feeds and control characters are replaced."""
    return printable(text.replace("\n", "\0"))


def _unread_file_json(file: UnreadFile) -> dict[str, Any]:
    return {"path": file.path, "status": file.kind, "reason": file.reason, "size": file.size}


def _list_names(passed: Mapping[str, str]) -> Iterator[str]:
    return (f"{one_line(path)}: {reason}" for path, reason in passed.items())


def _count_kinds(passed: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each name ending and reason of skipped files, with their number."""
    kinds = Counter((reason, os.path.splitext(path)[1].lower()) for path, reason in passed.items())
    for (reason, ending), number in kinds.most_common():
        yield f"{number:,} {one_line(ending) or 'without an extension'}: {reason}"


@dataclass(frozen=True, slots=True)
class OpenIndex:
    """An open index: its retriever, its embedding model, and how many passages to retrieve."""

    retriever: Retriever
    embedder: Embedder
    k: int


def load_embedder(settings: Settings) -> Embedder:
    """Load the embedding model of the settings."""
    from ragaccel.retrieval.embedder import load_embedder as load

    return load(settings.embedder)


@contextmanager
def open_store(source: Source) -> Iterator[Store]:
    """Open an existing index to read it.

    Raises:
        EmptyIndexError: There is no index; the message says how to make one.
    """
    from ragaccel.retrieval.store import Store

    if not source.index.exists():
        raise EmptyIndexError(
            f"there is no index at {source.index}: make one with `{source.index_command()}`"
        )
    with Store(source.index) as store:
        yield store


def index_source(
    terminal: Terminal,
    source: Source,
    settings: Settings,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rebuild: bool = False,
    retry_failed: bool = True,
) -> IndexReport:
    """Update an index from its folder or collection, with progress on stderr.

    The index remembers ``include`` and ``exclude`` for later calls without them. ``retry_failed``
    reads files that failed before once more.
    """
    from ragaccel.retrieval.indexing import index_folder, index_passages
    from ragaccel.retrieval.store import Store

    embedder = load_embedder(settings)
    opened = Store(source.index, shared=settings.shared)
    with opened as store, indexing_progress(terminal) as progress:
        if source.collection is not None:
            return index_passages(
                store, embedder, source.collection, progress=progress, rebuild=rebuild
            )
        if source.folder is None:
            raise UsageError("which documents? give a folder to index")
        return index_folder(
            store,
            embedder,
            source.folder,
            include=include,
            exclude=exclude,
            progress=progress,
            rebuild=rebuild,
            retry_failed=retry_failed,
            follow_links=settings.follow_links,
        )


@contextmanager
def open_index(terminal: Terminal, source: Source, settings: Settings) -> Iterator[OpenIndex]:
    """Index what is new in a folder or collection and open its index for questions.

    An index without a folder or collection is used as it is. An index that cannot be written now is
    also used as it is, with a warning: another process is writing, the disk is full or permission
    is missing.

    Raises:
        EmptyIndexError: The index holds no passage.
    """
    from ragaccel.retrieval.retriever import Retriever
    from ragaccel.retrieval.store import Store

    update_error = None
    if source.folder is not None or source.collection is not None:
        update_error = _update_index(terminal, source, settings)
    embedder = load_embedder(settings)
    with Store(source.index) as store:
        if not source.index.exists() or not store.count_passages():
            raise update_error or EmptyIndexError(_empty_index_message(source))
        yield OpenIndex(Retriever(store, embedder), embedder, settings.k)


def _update_index(
    terminal: Terminal, source: Source, settings: Settings
) -> IndexBusyError | StorageError | None:
    """Index what is new; return the error if an existing index cannot be written, else None."""
    try:
        report = index_source(terminal, source, settings, retry_failed=False)
        print_report(terminal, source, report)
    except (IndexBusyError, StorageError) as error:
        if not source.index.is_file():
            raise
        terminal.warn(f"{explain(error)} (this answer is from the index as it is)")
        return error
    return None


def _empty_index_message(source: Source) -> str:
    if source.folder is not None:
        listed = source.command("ls", "--failed")
        return f"{source.folder} holds no document that can be read: add some, or see `{listed}`"
    if source.collection is not None:
        return f"{source.collection} holds no passage with text in it"
    state = "is empty: fill it" if source.index.exists() else "does not exist: make it"
    return f"the index {source.index} {state} with `{source.index_command()}`"


def index_stats(store: Store) -> dict[str, Any]:
    """Return the statistics of an index by name, for a table or JSON."""
    records = list(store.files().values())
    indexed = [record for record in records if record.status == "indexed"]
    num_failed, num_skipped = count_unread(store)
    size = sum(
        path.stat().st_size
        for ending in ("", "-wal")
        if (path := store.path.with_name(store.path.name + ending)).is_file()
    )
    return {
        "index": str(store.path),
        "folder": store.meta("folder"),
        "files": len(indexed),
        "files that could not be read": num_failed,
        "files skipped": num_skipped,
        "passages": store.count_passages(),
        "dimensions": store.meta_number("dimension"),
        "bytes": size,
        "fingerprint": store.meta("fingerprint")[:16],
        "include": ", ".join(store.meta_list("include")),
        "exclude": ", ".join(store.meta_list("exclude")),
        "removed": ", ".join(store.left_out()),
    }


def check_index(source: Source, settings: Settings) -> str:
    """Read all of an index; return a line with its numbers of files and passages.

    Raises:
        IndexUnusableError: The index is damaged, or another embedding model made it.
    """
    with open_store(source) as store:
        if problems := store.check():
            again = source.index_command(rebuild=True)
            raise IndexUnusableError(
                f"{store.path} is damaged ({problems[0]}): rebuild it with `{again}`"
            )
        store.require_embedder(load_embedder(settings).fingerprint)
        stats = index_stats(store)
    return f"{stats['files']:,} files, {stats['passages']:,} passages, undamaged"


def print_report(
    terminal: Terminal, source: Source, report: IndexReport, *, always: bool = False
) -> None:
    """Print what indexing changed and which files it newly failed to read.

    ``always`` prints it even if nothing changed and if an earlier run has named the files.
    """
    changes = [
        f"{number:,} {what}"
        for number, what in (
            (report.added, "added"),
            (report.changed, "changed"),
            (report.removed, "removed"),
            (report.unchanged, "unchanged"),
            (report.skipped, "skipped"),
        )
        if number
    ]
    if always or not report.is_current:
        what = ", ".join(changes) or "no files"
        taken = f"in {report.seconds:.1f} s"
        terminal.note(f"indexed {source.label}: {what}; {report.passages:,} passages {taken}")
    for warning in report.warnings:
        terminal.warn(warning)
    print_unread(terminal, source, report, always=always)


def report_json(source: Source, report: IndexReport) -> dict[str, Any]:
    """Return the report of an indexing run as JSON."""
    return {
        "index": str(source.index),
        "added": report.added,
        "changed": report.changed,
        "removed": report.removed,
        "unchanged": report.unchanged,
        "skipped": dict(report.skip_reasons),
        "failed": dict(report.failed),
        "doubtful": dict(report.doubtful),
        "passed_over": dict(report.passed_over),
        "passages": report.passages,
        "embedded": report.embedded,
        "seconds": report.seconds,
        "embed_seconds": report.embed_seconds,
        "warnings": list(report.warnings),
    }


_INDEX_ENDINGS = (".db", ".sqlite", ".sqlite3")


@dataclass(frozen=True, slots=True)
class Source:
    """An index file and the folder or collection of passages that it is made from.

    Without either, the index is used as it is.
    """

    index: Path
    folder: Path | None = None
    collection: Path | None = None

    @property
    def name(self) -> str:
        """The absolute path of the source, for messages and the history."""
        return str((self.folder or self.collection or self.index).resolve())

    @property
    def label(self) -> str:
        """The path of the source as it was given."""
        return str(self.folder or self.collection or self.index)

    @property
    def argument(self) -> str:
        """The source as an argument or option of a command line, quoted."""
        import shlex

        if self.folder is not None:
            return shlex.quote(str(self.folder))
        return f"--index {shlex.quote(str(self.index))}"

    def command(self, subcommand: str, *options: str) -> str:
        """Return the ``ragaccel`` command line of a subcommand for this source, to be pasted."""
        import shlex

        where = [self.argument]
        if self.folder is not None and self.index != _default_index(self.folder):
            where.append(f"--index {shlex.quote(str(self.index))}")
        return " ".join(["ragaccel", subcommand, *where, *options])

    def index_command(self, *, rebuild: bool = False) -> str:
        """Return the command line that makes or rebuilds this index."""
        from ragaccel.retrieval.store import index_command

        folder, collection = str(self.folder or ""), str(self.collection or "")
        return index_command(self.index, folder=folder, collection=collection, rebuild=rebuild)


def resolve_source(target: str | Path | None, index: Path | None) -> Source:
    """Return the source that DIR and --index name.

    DIR may also be an index file, or a collection of passages that was indexed by
    ``ragaccel index --passages``.

    Raises:
        UsageError: Neither DIR nor --index is given, or there is no such folder.
    """
    if target is None:
        if index is None:
            raise UsageError("which documents? give a folder, or an index with --index PATH")
        return Source(index)
    path = Path(target).expanduser()
    if os.path.isdir(path):  # False for a text too long for a file name, such as a question
        return Source(index or _default_index(path), folder=path)
    if path.suffix in _INDEX_ENDINGS and index is None and os.path.exists(path):
        return Source(path)
    if os.path.isfile(path):
        collection = _collection_index(path)
        if index is None and collection.exists():
            return Source(collection, collection=path)
        raise UsageError(
            f"{path} is a file: give the folder that it is in, or, if it is a collection of"
            f" passages, first run `ragaccel index --passages {path}`"
        )
    hint = (
        f" (the folder comes before the question: ragaccel ask DIR {str(path)!r})"
        * _looks_like_question(path)
    )
    raise UsageError(f"there is no folder {str(path)!r}{hint}")


def resolve_collection(collection: Path, index: Path | None) -> Source:
    """Return the source of a ready-made collection of passages.

    Raises:
        UsageError: There is no such file.
    """
    if not collection.is_file():
        raise UsageError(f"there is no file {str(collection)!r}")
    return Source(index or _collection_index(collection), collection=collection)


def _looks_like_question(path: Path) -> bool:
    return " " in str(path).strip() or str(path).endswith("?")


def _default_index(folder: Path) -> Path:
    from ragaccel.retrieval.store import default_index_path

    return default_index_path(folder)


def _collection_index(collection: Path) -> Path:
    from ragaccel.retrieval.store import default_collection_path

    return default_collection_path(collection)


_STDIN_SECONDS = 2.0  # without input, after which a note says that stdin is being read
_MAX_STDIN_BYTES = 4 << 20


def read_stdin(terminal: Terminal) -> str:
    """Read all text from stdin; return "" if it is a terminal or closed.

    Raises:
        UsageError: The input is not text, or is longer than 4 MB.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return ""
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return ""
    from ragaccel.retrieval.loaders import decode_text

    _note_if_waiting(terminal)
    raw = sys.stdin.buffer.read(_MAX_STDIN_BYTES + 1)
    if len(raw) > _MAX_STDIN_BYTES:
        raise UsageError("stdin holds more than 4 MB: save it to a file of the folder instead")
    if b"\0" in raw[:8192]:
        raise UsageError("stdin holds binary data; only text can be read from it")
    return decode_text(raw)[0].strip()


def _note_if_waiting(terminal: Terminal) -> None:
    try:
        ready, _, _ = select.select([sys.stdin], [], [], _STDIN_SECONDS)
    except (OSError, ValueError):  # this system has no select for pipes
        return
    if not ready:
        terminal.note("reading stdin until it ends (to give no input, add </dev/null)")
