"""Knowledge: an index that is up to date, and what searches it."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragaccel.cli.exits import UsageError, explain
from ragaccel.cli.progress import indexing_progress
from ragaccel.cli.unread import count_unread, tell_unread
from ragaccel.errors import (
    IndexBusyError,
    IndexCorruptError,
    IndexWriteError,
    NothingIndexedError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ragaccel.cli.settings import Settings
    from ragaccel.cli.source import Source
    from ragaccel.cli.terminal import Terminal
    from ragaccel.retrieval.embedder import Embedder
    from ragaccel.retrieval.indexing import IndexReport
    from ragaccel.retrieval.retriever import Retriever
    from ragaccel.retrieval.store import Store


@dataclass(frozen=True, slots=True)
class Knowledge:
    """An open index: what searches it, what embeds for it, and how many passages to ask for."""

    retriever: Retriever
    embedder: Embedder
    k: int


def load_embedder(settings: Settings) -> Embedder:
    """The embedding model that the settings name."""
    from ragaccel.retrieval.embedder import load_embedder as load

    return load(settings.embedder)


@contextmanager
def open_store(source: Source) -> Iterator[Store]:
    """Open an index to look into it.

    Raises:
        NothingIndexedError: there is none; the message says how to make one.
    """
    from ragaccel.retrieval.store import Store

    if not source.index.exists():
        raise NothingIndexedError(
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
    """Bring an index up to date with its folder or collection, progress on stderr.

    The index remembers ``include`` and ``exclude``; where none are given, those hold.
    ``retry_failed`` tries again to read what could not be read.
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
            raise UsageError("which documents? give the folder to index")
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
def open_knowledge(terminal: Terminal, source: Source, settings: Settings) -> Iterator[Knowledge]:
    """Index what is new in a folder or collection and open its index for questions.

    An index without either is used as it is. So is one that cannot be written to now, because
    another process is at it or there is no room or permission; stderr says so.

    Raises:
        NothingIndexedError: there is no passage in it.
    """
    from ragaccel.retrieval.retriever import Retriever
    from ragaccel.retrieval.store import Store

    hindrance = None
    if source.folder is not None or source.collection is not None:
        hindrance = _bring_up_to_date(terminal, source, settings)
    embedder = load_embedder(settings)
    with Store(source.index) as store:
        if not source.index.exists() or not store.count_passages():
            raise hindrance or NothingIndexedError(_nothing(source))
        yield Knowledge(Retriever(store, embedder), embedder, settings.k)


def _bring_up_to_date(
    terminal: Terminal, source: Source, settings: Settings
) -> IndexBusyError | IndexWriteError | None:
    """Index what is new; or return what is in the way of that."""
    try:
        report = index_source(terminal, source, settings, retry_failed=False)
        tell_report(terminal, source, report)
    except (IndexBusyError, IndexWriteError) as error:
        if not source.index.is_file():
            raise
        terminal.warn(f"{explain(error)} (this answer is from the index as it is)")
        return error
    return None


def _nothing(source: Source) -> str:
    if source.folder is not None:
        return f"{source.folder} holds no document that can be read: add some, or see `ragaccel ls`"
    if source.collection is not None:
        return f"{source.collection} holds no passage with text in it"
    state = "is empty: fill it" if source.index.exists() else "is not there: make it"
    return f"the index {source.index} {state} with `{source.index_command()}`"


def store_figures(store: Store) -> dict[str, Any]:
    """What there is to know of an index in a few figures."""
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
        "files passed over": num_skipped,
        "passages": store.count_passages(),
        "dimensions": store.number("dimension"),
        "bytes": size,
        "fingerprint": store.meta("fingerprint")[:16],
        "only": ", ".join(store.names("include")),
        "not": ", ".join(store.names("exclude")),
        "taken out": ", ".join(store.left_out()),
    }


def index_health(source: Source, settings: Settings) -> str:
    """Read an index through and say how it is.

    Raises:
        IndexCorruptError, IndexMismatchError: it is damaged, or of another embedding model.
    """
    from ragaccel.retrieval.store import require_embedder

    with open_store(source) as store:
        if problems := store.check():
            again = source.index_command(rebuild=True)
            raise IndexCorruptError(
                f"{store.path} is damaged ({problems[0]}): make it anew with `{again}`"
            )
        require_embedder(store, load_embedder(settings).fingerprint)
        figures = store_figures(store)
    return f"{figures['files']:,} files, {figures['passages']:,} passages, undamaged"


def tell_report(
    terminal: Terminal, source: Source, report: IndexReport, *, always: bool = False
) -> None:
    """Say what indexing changed, and which files could not be read if that is news.

    ``always`` says it even if nothing changed and an earlier run has named them.
    """
    changes = [
        f"{number:,} {what}"
        for number, what in (
            (report.added, "added"),
            (report.changed, "changed"),
            (report.removed, "removed"),
            (report.unchanged, "unchanged"),
            (report.skipped, "passed over"),
        )
        if number
    ]
    if always or not report.is_current:
        what = ", ".join(changes) or "no files"
        taken = f"in {report.seconds:.1f} s"
        terminal.note(f"indexed {source.label}: {what}; {report.passages:,} passages {taken}")
    for warning in report.warnings:
        terminal.warn(warning)
    tell_unread(terminal, source, report, always=always)


def report_document(source: Source, report: IndexReport) -> dict[str, Any]:
    """What indexing did, as JSON."""
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
