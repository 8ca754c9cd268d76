"""The index of a source: find, update, open and check it, and the commands index, ls, rm, stats."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from ragaccel.cli.answer_view import is_name
from ragaccel.cli.settings import Index, Json, Settings, Target
from ragaccel.cli.terminal import (
    ExitCode,
    Terminal,
    UsageError,
    duration,
    explain,
    indexing_progress,
    printable,
)
from ragaccel.errors import EmptyIndexError, IndexBusyError, IndexUnusableError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ragaccel.retrieval.embedder import Embedder
    from ragaccel.retrieval.indexing import IndexReport
    from ragaccel.retrieval.retriever import Retriever
    from ragaccel.retrieval.store import Store, UnreadFile


_INDEX_ENDINGS = (".db", ".sqlite", ".sqlite3")


@dataclass(frozen=True, slots=True)
class Source:
    """An index file and the folder or collection of passages that it is made from.

    Without either, the index is used as it is.
    """

    index: Path
    folder: Path | None = None
    collection: Path | None = None

    def __post_init__(self) -> None:
        if os.path.isdir(self.index):
            raise UsageError(
                f"{self.index} is a folder, not an index: name a file with --index PATH"
            )

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
        if self.folder is not None:
            return shlex.quote(str(self.folder))
        return f"--index {shlex.quote(str(self.index))}"

    def command(self, subcommand: str, *options: str) -> str:
        """Return the ``ragaccel`` command line of a subcommand for this source, to be pasted."""
        from ragaccel.retrieval.store import default_index_path

        where = [self.argument]
        if self.folder is not None and self.index != default_index_path(self.folder):
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
    """
    from ragaccel.retrieval.store import default_collection_path, default_index_path

    if target is None:
        if index is None:
            raise UsageError("which documents? give a folder, or an index with --index PATH")
        return Source(index)
    path = Path(target).expanduser()
    if os.path.isdir(path):  # False for a text too long for a file name, such as a question
        return Source(index or default_index_path(path), folder=path)
    if path.suffix in _INDEX_ENDINGS and index is None and os.path.exists(path):
        return Source(path)
    if os.path.isfile(path):
        collection = default_collection_path(path)
        if index is None and collection.exists():
            return Source(collection, collection=path)
        raise UsageError(
            f"{path} is a file: give the folder that it is in, or, if it is a collection of"
            f" passages, first run `ragaccel index --passages {path}`"
        )
    hint = ""
    if " " in str(path).strip() or str(path).endswith("?"):
        hint = f" (the folder comes before the question: ragaccel ask DIR {str(path)!r})"
    raise UsageError(f"there is no folder {str(path)!r}{hint}")


def resolve_collection(collection: Path, index: Path | None) -> Source:
    """Return the source of a ready-made collection of passages."""
    from ragaccel.retrieval.store import default_collection_path

    if not collection.is_file():
        raise UsageError(f"there is no file {str(collection)!r}")
    return Source(index or default_collection_path(collection), collection=collection)


_MAX_NAMED = 5  # unreadable files that indexing names; `ls --failed` lists all
_MAX_LISTED = 20  # skipped files that `ls --failed` lists one by one; more are only counted


def _print_unread(terminal: Terminal, source: Source, report: IndexReport, *, always: bool) -> None:
    """Print which files could not be read, have an uncertain encoding or were skipped.

    An earlier run has named those of ``report.reported_before``: print them only if they failed and
    ``always`` is set. --quiet prints none: the exit code of ``index`` and ``ls --failed`` tell.
    """
    if terminal.quiet:
        return

    def new(files: Mapping[str, str]) -> dict[str, str]:
        return {p: why for p, why in files.items() if p not in report.reported_before}

    failed = report.failed if always else new(report.failed)
    command = source.command("ls", "--failed")
    for files, what in (
        (failed, "could not be read"),
        (new(report.doubtful), "have an uncertain encoding"),
    ):
        for path, reason in list(files.items())[:_MAX_NAMED]:
            terminal.warn(f"{one_line(path)}: {reason}")
        if (more := len(files) - _MAX_NAMED) > 0:
            terminal.warn(f"{more:,} more files {what}: `{command}` lists them")
    if passed := new(report.passed_over):
        shown = _list_names(passed, _MAX_NAMED)
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
    for shown in _list_names(passed, _MAX_LISTED):
        terminal.write(f"{'skipped':8}  {shown}\n")


def files_json(store: Store) -> list[dict[str, Any]]:
    """Return as JSON the files in an index, then those that its last run failed on or skipped."""
    unread = store.unread()
    files: list[dict[str, Any]] = []
    for path, record in store.files().items():
        why = unread.pop(path, None)
        files.append({**asdict(record), "reason": why.reason if why else ""})
    return [*files, *map(_unread_json, unread.values())]


def count_unread(store: Store) -> tuple[int, int]:
    """Return how many files could not be read and how many were skipped."""
    kinds = Counter(file.kind for file in store.unread().values())
    return kinds["failed"], kinds["skipped"]


def one_line(text: str) -> str:
    """Return a text on one line: line feeds and control characters are replaced."""
    return printable(text.replace("\n", "\0"))


def _unread_json(file: UnreadFile) -> dict[str, Any]:
    return {"path": file.path, "status": file.kind, "reason": file.reason, "size": file.size}


def _list_names(passed: Mapping[str, str], limit: int) -> Iterator[str]:
    """Yield a line for each skipped file; above the limit, one for each name ending and reason."""
    if len(passed) <= limit:
        yield from (f"{one_line(path)}: {reason}" for path, reason in passed.items())
        return
    kinds = Counter((reason, os.path.splitext(path)[1].lower()) for path, reason in passed.items())
    for (reason, ending), number in kinds.most_common():
        yield f"{number:,} {one_line(ending) or 'without an extension'}: {reason}"


def load_embedder(settings: Settings) -> Embedder:
    """Load the embedding model of the settings."""
    from ragaccel.retrieval.embedder import load_embedder as load

    return load(settings.embedder)


@contextmanager
def open_store(source: Source) -> Iterator[Store]:
    """Open an existing index to read it."""
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
    rebuild: bool = False,
    max_seconds: float | None = None,
    **folder_options: Any,
) -> IndexReport:
    """Update an index from its folder or collection, with progress on stderr.

    ``folder_options`` are those of ``index_folder``.
    """
    from ragaccel.retrieval.indexing import index_folder, index_passages
    from ragaccel.retrieval.store import Store

    embedder = load_embedder(settings)
    opened = Store(source.index, shared=settings.shared)
    options: dict[str, Any] = {"rebuild": rebuild, "max_seconds": max_seconds}
    with opened as store, indexing_progress(terminal, source.command("index")) as progress:
        if source.collection is not None:
            return index_passages(store, embedder, source.collection, progress=progress, **options)
        if source.folder is None:
            raise UsageError("which documents? give a folder to index")
        return index_folder(
            store,
            embedder,
            source.folder,
            progress=progress,
            follow_links=settings.follow_links,
            **options,
            **folder_options,
        )


@contextmanager
def open_index(terminal: Terminal, source: Source, settings: Settings) -> Iterator[Retriever]:
    """Index what is new in a folder or collection and open its index for questions.

    An index without a folder or collection is used as it is. An index that cannot be written now is
    also used as it is, with a warning: another process is writing, the disk is full or permission
    is missing.
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
        if update_error is not None:
            terminal.warn(f"{explain(update_error)} (this answer is from the index as it is)")
        yield Retriever(store, embedder)


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
    """Read all of an index; return a line with its numbers of files and passages."""
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
        for what in ("added", "changed", "removed", "unchanged", "skipped")
        if (number := getattr(report, what))
    ]
    if always or not report.is_current:
        what = ", ".join(changes) or "no files"
        taken = f"in {report.seconds:.1f} s"
        terminal.note(f"indexed {source.label}: {what}; {report.passages:,} passages {taken}")
    if report.files_left:
        files = "1 file is" if report.files_left == 1 else f"{report.files_left:,} files are"
        terminal.note(
            f"the time is over: {files} left, about {duration(report.seconds_left)};"
            f" `{source.index_command()}` goes on"
        )
    for warning in report.warnings:
        terminal.warn(warning)
    _print_unread(terminal, source, report, always=always)


def _print_kept_patterns(terminal: Terminal, source: Source) -> None:
    """Say which patterns of an earlier run still hold, and how to drop them."""
    with open_store(source) as store:
        patterns = {name: store.meta_list(name) for name in ("include", "exclude")}
    kept = [f"--{name} {pattern}" for name, given in patterns.items() for pattern in given]
    if kept:
        terminal.note(
            f"as in an earlier run: {' '.join(kept)} (delete {source.index} to drop them)"
        )


def _report_json(source: Source, report: IndexReport) -> dict[str, Any]:
    document = {"index": str(source.index), **asdict(report), "skipped": report.skip_reasons}
    del document["skip_reasons"], document["reported_before"]
    return document


def index(
    terminal: Terminal,
    target: Target = None,
    index: Index = None,
    include: Annotated[
        list[str] | None,
        Option("--include", metavar="GLOB", help="Index only files that match; may be repeated."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        Option("--exclude", metavar="GLOB", help="Leave out files that match; may be repeated."),
    ] = None,
    rebuild: Annotated[bool, Option("--rebuild", help="Build the index anew.")] = False,
    passages: Annotated[
        Path | None,
        Option(
            "--passages",
            metavar="FILE",
            help="Index ready-made passages: TSV `id<TAB>text` or JSONL {id, title, text}.",
        ),
    ] = None,
    max_time: Annotated[
        str | None,
        Option(
            "--for",
            metavar="TIME",
            help="Stop after TIME, e.g. 30s, 2m or 1h, in good order; the next run goes on.",
        ),
    ] = None,
    strict: Annotated[
        bool, Option("--strict", help="Exit with 1, not 4, if a file cannot be read.")
    ] = False,
    json: Json = False,
    *,
    settings: Settings,
) -> ExitCode | None:
    """Index the documents of a folder.

    New and changed files are read, unchanged ones skipped and deleted ones dropped. Links that lead
    out of the folder are skipped. A rebuilt index replaces the old one only when it is
    complete.
    """
    if passages is not None and target is not None:
        raise UsageError("give DIR or --passages FILE, not both")
    max_seconds = parse_duration(max_time) if max_time else None
    if max_seconds and rebuild:
        raise UsageError("a rebuild cannot stop early: give --for or --rebuild, not both")
    source = resolve_collection(passages, index) if passages else resolve_source(target, index)
    report = index_source(
        terminal,
        source,
        settings,
        include=include or (),
        exclude=exclude or (),
        rebuild=rebuild,
        max_seconds=max_seconds,
    )
    if json:
        terminal.json(_report_json(source, report))
    else:
        print_report(terminal, source, report, always=True)
        if not (include or exclude):
            _print_kept_patterns(terminal, source)
    if not report.failed:
        return None
    return ExitCode.FAILED if strict else ExitCode.PARTIAL


_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600}


def parse_duration(text: str) -> float:
    """Return the seconds of a time such as 30s, 2m or 1h."""
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None or not (seconds := float(found[1]) * _UNIT_SECONDS[found[2]]):
        raise UsageError(f"{text!r} is not a time: write it as 30s, 2m or 1h")
    return seconds


_NO_PATH = "(of no document)"  # stands for passages that a program added without a path


def ls(
    terminal: Terminal,
    target: Target = None,
    index: Index = None,
    failed: Annotated[
        bool, Option("--failed", help="List files that could not be read or were skipped.")
    ] = False,
    json: Json = False,
) -> None:
    """List the files of an index and how many passages each has.

    --failed lists other files instead, each with the reason: files that could not be read, whose
    encoding is uncertain, or that are not documents.
    """
    source = resolve_source(target, index)
    with open_store(source) as store:
        if json:
            unread = map(_unread_json, store.unread().values())
            terminal.json(list(unread) if failed else files_json(store))
            return
        if failed:
            list_unread(terminal, store)
            return
        records = list(store.files().values())
        num_failed, num_skipped = count_unread(store)
    for record in records:
        if record.status != "indexed":
            continue
        line = Text(f"{record.num_passages:7,}  ", style="dim")
        line.append(one_line(record.path or _NO_PATH))
        if record.title and not is_name(record.title, record.path):
            line.append(f"  {one_line(record.title)}", style="dim")
        terminal.write(line, end="\n")
    if num_failed or num_skipped:
        counts = f"files that could not be read: {num_failed:,}, that were skipped: {num_skipped:,}"
        terminal.note(f"{counts}; `{source.command('ls', '--failed')}` lists them")


def rm(
    terminal: Terminal,
    target: Target = None,
    files: Annotated[
        list[str] | None,
        Argument(
            metavar="FILE", help="Files as `ls` shows them, or glob patterns.", show_default=False
        ),
    ] = None,
    index: Index = None,
    everything: Annotated[
        bool, Option("--all", help="Delete the whole index; the documents stay.")
    ] = False,
    undo: Annotated[bool, Option("--undo", help="Let removed files be indexed again.")] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> ExitCode | None:
    """Remove files from an index; the files themselves stay.

    Removed files stay out of the index, also of a rebuilt one, until `rm --undo` names them.
    """
    if index is not None and target is not None and not Path(target).expanduser().is_dir():
        files, target = [target, *(files or [])], None
    source = resolve_source(target, index)
    if everything == bool(files):
        raise UsageError("name the files to remove, or give --all to delete the whole index")
    if undo and not files:
        raise UsageError("--undo needs the names of files: those to be indexed again")
    if files:
        return _leave_out(terminal, source, files, undo=undo)
    if not (yes or _confirms(terminal, source)):
        raise UsageError("nothing was deleted: confirm with y in a terminal, or give --yes")
    _delete(source)
    terminal.note(f"deleted {source.index}; the documents are unchanged")
    return None


def _leave_out(
    terminal: Terminal, source: Source, patterns: Sequence[str], *, undo: bool
) -> ExitCode | None:
    """Remove the files that match a pattern, for good; or let removed ones be indexed again."""
    with open_store(source) as store, store.writing():
        files = store.files()
        known = store.left_out() if undo else list(files)
        chosen = [path for path in known if any(_matches(path, one) for one in patterns)]
        if undo:
            store.leave_out(chosen, undo=True)
        else:
            store.leave_out([path for path in chosen if files[path].kind == "document"])
            store.remove(chosen)
    unknown = [one for one in patterns if not any(_matches(path, one) for path in known)]
    for pattern in unknown:
        terminal.fail(
            f"{pattern!r} was not removed: `{source.command('stats')}` lists the removed files"
            if undo
            else f"no file {pattern!r} in the index: `{source.command('ls')}` lists its files"
        )
    count = "1 file" if len(chosen) == 1 else f"{len(chosen):,} files"
    again = f"`{source.index_command()}` will index {count} again"
    terminal.note(again if undo else f"removed {count} from the index")
    return ExitCode.FAILED if unknown else None


def _matches(path: str, pattern: str) -> bool:
    return path == pattern or fnmatchcase(path, pattern)


def _confirms(terminal: Terminal, source: Source) -> bool:
    if not sys.stdin.isatty():
        return False
    answer = terminal.err.input(f"delete {source.index}? y/n ", markup=False)
    return answer.strip().lower() in ("y", "yes")


def _delete(source: Source) -> None:
    from ragaccel.retrieval.store import Store

    if not source.index.exists():
        raise EmptyIndexError(f"there is no index at {source.index}")
    Store(source.index).discard()


def stats(
    terminal: Terminal, target: Target = None, index: Index = None, json: Json = False
) -> None:
    """Show how large an index is and what it was made from."""
    with open_store(resolve_source(target, index)) as store:
        values = index_stats(store)
    if json:
        terminal.json(values)
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    terminal.show(table)
