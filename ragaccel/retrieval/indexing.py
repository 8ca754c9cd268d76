"""Indexing: store the documents of a folder, or a file of passages; update only what changed."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ragaccel.errors import (
    ConfigurationError,
    DocumentError,
    IndexBusyError,
    MissingExtraError,
    RagaccelError,
    StorageError,
)
from ragaccel.passage import Passage
from ragaccel.paths import open_regular_file
from ragaccel.retrieval.chunking import (
    CHUNKER_VERSION,
    DEFAULT_PASSAGE_TOKENS,
    document_title,
    iter_passages,
    split_document,
)
from ragaccel.retrieval.embedder import as_embedder
from ragaccel.retrieval.files import list_folder
from ragaccel.retrieval.loaders import (
    MAX_FILE_BYTES,
    BinaryFileError,
    DocumentReader,
    needs_process,
    read_bytes,
    read_warning,
)
from ragaccel.retrieval.loaders.process import MAX_SECONDS, ReaderStartError
from ragaccel.retrieval.store import (
    FileRecord,
    UnreadFile,
    embedded_text,
    index_fingerprint,
    text_hash,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ragaccel.passage import Document
    from ragaccel.retrieval.embedder import AnyEmbedder, Embedder
    from ragaccel.retrieval.files import FoundFile, Listing
    from ragaccel.retrieval.store import Store


_JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class PassageFile:
    """The result of scanning a collection file: its sha256, how many passages, how many empty."""

    sha256: str
    num_passages: int
    num_empty: int


def scan_passages(path: Path) -> PassageFile:
    """Check that every line of a collection file is a passage and that no id occurs twice.

    Raises:
        DocumentError: A line is not a passage or repeats an id; the message names the line.
    """
    first_lines: dict[str, int] = {}
    empty = 0
    digest = hashlib.sha256()
    for number, passage in _numbered_passages(path, digest.update):
        if passage.passage_id in first_lines:
            raise DocumentError(
                f"{path}, line {number}: the id {passage.passage_id!r} is already used on"
                f" line {first_lines[passage.passage_id]}: give each passage an id of its own"
            )
        first_lines[passage.passage_id] = number
        empty += not passage.text
    return PassageFile(digest.hexdigest(), len(first_lines) - empty, empty)


def read_passages(path: Path) -> Iterator[Passage]:
    """Yield the passages of a TSV or JSON Lines file, unchanged, without empty ones."""
    return (passage for _, passage in _numbered_passages(path) if passage.text)


def _numbered_passages(
    path: Path, on_line: Callable[[bytes], None] = lambda _: None
) -> Iterator[tuple[int, Passage]]:
    parse = _json_passage if path.suffix.lower() in _JSON_LINES else _tsv_passage
    columns = ["id", "text"]
    try:
        with open_regular_file(path) as file:
            for number, line in enumerate(file, 1):
                on_line(line)
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if number == 1 and {"id", "text"} <= set(text.split("\t")):
                    columns = text.split("\t")
                elif text.strip():
                    yield number, parse(text, columns)
    except UnicodeDecodeError:
        raise DocumentError(f"{path}, line {number}: not UTF-8: convert the file first") from None
    except OSError as error:
        raise DocumentError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DocumentError(f"{path}, line {number}: {error}") from None


def _tsv_passage(line: str, columns: list[str]) -> Passage:
    cells = line.split("\t", len(columns) - 1)
    named = dict(zip(columns, cells, strict=False))
    if len(cells) < 2 or not named.get("id", "").strip():
        raise ValueError("not of the form id<TAB>text")
    return _passage(named["id"].strip(), named.get("title", ""), named.get("text", ""))


def _json_passage(line: str, _: list[str]) -> Passage:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg})") from None
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    name = value.get("id", value.get("_id")) if isinstance(value, dict) else None
    if isinstance(name, bool) or not isinstance(name, (str, int)) or name == "":
        raise ValueError('not of the form {"id": …, "title": …, "text": …}')
    title, text = value.get("title") or "", value.get("text")
    if not isinstance(text, str) or not isinstance(title, str):
        raise ValueError('"text" and "title" must be strings')
    return _passage(str(name), title, text)


def _passage(name: str, title: str, text: str) -> Passage:
    name = name.encode("utf-8", "replace").decode()  # JSON may hold lone surrogates
    if len(name.splitlines()) > 1:
        raise ValueError("an id must be a single line")
    text = text.encode("utf-8", "replace").decode()
    text = text if text.strip() else ""
    title = title.encode("utf-8", "replace").decode()
    return Passage(passage_id=name, text=text, title=title, start=0, end=len(text))


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of an indexing run.

    ``stage`` is ``"scanning"``, ``"reading"``, ``"embedding"`` or ``"done"``. ``files_done`` and
    ``files_total`` count only files that must be read. ``passages_done`` of ``passages_total`` are
    embedded; the total grows while files are read. ``work_done`` of ``work_total`` measures the
    whole run in bytes of files to embed: it includes files that are not read yet and excludes
    unchanged text. ``path`` is the current file, or empty.
    """

    stage: str
    files_done: int = 0
    files_total: int = 0
    passages_done: int = 0
    passages_total: int = 0
    path: str = ""
    work_done: float = 0.0
    work_total: float = 0.0


@dataclass(slots=True)
class IndexReport:
    """The result of an indexing run.

    ``added``, ``changed``, ``removed`` and ``unchanged`` count files. ``failed`` maps paths to
    reasons; the index keeps the earlier content of a failed file. ``skipped`` counts skipped files
    and folders and ``skip_reasons`` counts them by reason; ``passed_over`` maps those that no rule
    or pattern excludes to reasons. ``doubtful`` maps files whose encoding is uncertain to a
    warning. ``reported_before`` names the files of ``failed``, ``passed_over`` and ``doubtful``
    that an earlier run reported for the same reason. ``passages`` is the number of passages in the
    index now, ``embedded`` the number of newly embedded ones. ``seconds`` is the time of the run,
    ``embed_seconds`` that of embedding. ``files_left`` is the number of files that a run did not
    finish in its time, ``seconds_left`` an estimate of the time for them. ``warnings`` are messages
    for people.
    """

    added: int = 0
    changed: int = 0
    removed: int = 0
    unchanged: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    skip_reasons: dict[str, int] = field(default_factory=dict)
    passed_over: dict[str, str] = field(default_factory=dict)
    doubtful: dict[str, str] = field(default_factory=dict)
    reported_before: set[str] = field(default_factory=set)
    passages: int = 0
    embedded: int = 0
    seconds: float = 0.0
    embed_seconds: float = 0.0
    files_left: int = 0
    seconds_left: float = 0.0
    warnings: list[str] = field(default_factory=list)

    @property
    def skipped(self) -> int:
        """The number of skipped files and folders."""
        return sum(self.skip_reasons.values())

    @property
    def is_current(self) -> bool:
        """Whether the run found no file added, changed or removed."""
        return not (self.added or self.changed or self.removed)


_BATCH_PASSAGES = 128  # embedded and written together: what an interruption loses
_SORT_WINDOW = 1024  # sorted by length; a larger window would distort the estimate of time left
_SMALL_BYTES = 100_000
_LARGE_BYTES = 1_000_000  # before it reads a file this large, a run writes the files before it
_SAVED_SETTINGS = ("include", "exclude", "left_out")
_TITLE_SHARE = 3  # a title may take a third of the embedder's tokens


class _OutOfTimeError(Exception):
    """The time of a run is over; what it finished is stored."""


class _Run:
    """One indexing run: checks settings, embeds passages, reports progress and fills a report."""

    def __init__(
        self, store: Store, embedder: Embedder, progress: Callable[[Progress], None]
    ) -> None:
        self.store = store
        self.embedder = embedder
        self.progress = progress
        self.report = IndexReport()
        self.files_done = self.files_total = 0
        self.passages_done = self.passages_total = 0
        self.work_done = self.work_total = 0.0
        self._num_truncated = 0
        self._started = time.perf_counter()
        self.max_seconds: float | None = None

    def configure(self, passage_tokens: int | None = None) -> int:
        """Check and store the index's settings; return the token limit of a passage."""
        self.store.require_embedder(self.embedder.fingerprint)
        made_with = self.store.meta_number("passage_tokens")
        limit = self.embedder.max_tokens
        most = max(1, limit - limit // _TITLE_SHARE)
        if passage_tokens is not None and not 0 < passage_tokens <= most:
            raise ConfigurationError(
                f"passage_tokens is {passage_tokens}, but the embedding model reads {limit} tokens,"
                f" a third of which is reserved for titles: choose 1 to {most}"
            )
        budget = passage_tokens or made_with or min(DEFAULT_PASSAGE_TOKENS, most)
        if made_with not in (0, budget):
            self.store.raise_mismatch(f"passages of {made_with} tokens")
        self.save_setting("fingerprint", index_fingerprint(self.embedder.fingerprint))
        self.save_setting("passage_tokens", str(budget))
        self.save_setting("dimension", str(self.embedder.dimension))
        return budget

    def save_setting(self, key: str, value: str) -> None:
        """Store a setting if it differs, so that an unchanged index is not written to."""
        if self.store.meta(key) != value:
            self.store.set_meta(key, value)

    def tell(self, stage: str, path: str = "") -> None:
        """Call the progress callback with a stage, a file and the counts so far."""
        files = (self.files_done, self.files_total)
        passages = (self.passages_done, self.passages_total)
        self.progress(Progress(stage, *files, *passages, path, self.work_done, self.work_total))

    def check_time(self) -> None:
        """Raise _OutOfTimeError if the run has taken longer than ``max_seconds``."""
        taken = time.perf_counter() - self._started
        if self.max_seconds is not None and taken > self.max_seconds:
            report = self.report
            report.files_left = self.files_total - self.files_done
            rate = self.work_done / max(report.embed_seconds, 1e-9)
            report.seconds_left = (self.work_total - self.work_done) / max(rate, 1.0)
            raise _OutOfTimeError

    def embed(
        self, passages: Sequence[Passage], *, work: float, stage: str = ""
    ) -> dict[bytes, bytes]:
        """Return the float16 vectors of passages by text hash; embed only unknown texts.

        Args:
            passages: Passages of one or several files.
            work: The share of ``work_total`` that these passages stand for.
            stage: The path of a large file, whose vectors are staged until all of them are
                embedded; the run may stop between two batches of them.
        """
        texts = {text_hash(passage): embedded_text(passage) for passage in passages}
        vectors = self.store.known_vectors(list(texts))
        new = [(key, text) for key, text in texts.items() if key not in vectors]
        work_per_passage = work / max(1, len(passages))
        self.passages_done += len(passages) - len(new)
        self.work_total -= work_per_passage * (len(passages) - len(new))
        for part in _batches_by_length(new):
            if stage and self.work_done:  # every run gets on
                self.check_time()
            self.tell("embedding", stage)
            packed = self._embed_batch([text for _, text in part])
            embedded = {key: vector for (key, _), vector in zip(part, packed, strict=True)}
            if stage:
                self.store.stage(stage, embedded)
            vectors |= embedded
            self.passages_done += len(part)
            self.work_done += work_per_passage * len(part)
            self.report.embedded += len(part)
        return vectors

    def _embed_batch(self, texts: list[str]) -> list[bytes]:
        sizes = self.embedder.count_tokens(texts)
        self._num_truncated += sum(size > self.embedder.max_tokens for size in sizes)
        began = time.perf_counter()
        vectors = self.embedder.embed_documents(texts)
        self.report.embed_seconds += time.perf_counter() - began
        return [vector.tobytes() for vector in vectors.astype("<f2")]

    def finish(self) -> None:
        """Complete the report with the number of passages and a warning about truncated ones."""
        self.report.passages = self.store.count_passages()
        if self._num_truncated:
            self.report.warnings.append(
                f"{self._num_truncated} new passages are longer than the"
                f" {self.embedder.max_tokens} tokens the embedding model reads: their vectors stand"
                " for the beginning only, while full-text search covers the whole text"
            )
        self.tell("done")
        self.report.seconds = time.perf_counter() - self._started


def _batches_by_length(new: list[tuple[bytes, str]]) -> Iterator[list[tuple[bytes, str]]]:
    """Yield batches of texts of similar length, in about their original order."""
    for first in range(0, len(new), _SORT_WINDOW):
        part = sorted(new[first : first + _SORT_WINDOW], key=lambda item: len(item[1]))
        for start in range(0, len(part), _BATCH_PASSAGES):
            yield part[start : start + _BATCH_PASSAGES]


def _put(
    store: Store, file_id: int, passages: Sequence[Passage], vectors: Mapping[bytes, bytes]
) -> None:
    store.put_passages(file_id, ((p, vectors[text_hash(p)], "") for p in passages))


# Writing an index or a new one


@contextmanager
def _written(
    store: Store, source: Path, embedder: Embedder, *, rebuild: bool, budget: str = ""
) -> Iterator[tuple[Store, list[str]]]:
    """Yield the store to write, and warnings: the given store, or a new one that replaces it.

    A new index keeps the old one's patterns and excluded documents. It holds only the given folder
    or collection; a warning names the other sources of the old one. An interrupted rebuild is
    resumed if it was begun with the same number of tokens per passage.
    """
    if not rebuild:
        with store.writing():
            _require_filled_by_indexing(store)
            yield store, []
        return
    made_from = str(source.resolve())
    kept, warnings = _saved_settings(store, made_from)
    fingerprint = index_fingerprint(embedder.fingerprint)
    made_with = {"fingerprint": fingerprint, "rebuilt_from": f"{made_from} {budget}"}
    with store.rebuild(made_with, kept) as fresh:
        yield fresh, warnings


def _saved_settings(store: Store, source: str) -> tuple[dict[str, str], list[str]]:
    """Return the settings that a rebuilt index keeps from the old one, and warnings.

    A damaged index gives no settings and one warning.

    Raises:
        StorageError: A program put in the passages.
        IndexBusyError: Another process is writing to the index.
    """
    no_settings = dict.fromkeys(_SAVED_SETTINGS, "[]")
    if not store.path.is_file():
        return no_settings, []
    try:
        if not store.is_filled_by_program():
            kept = {key: json.dumps(store.meta_list(key)) for key in _SAVED_SETTINGS}
            others = [name for name in store.sources() if name != source and Path(name).exists()]
            return kept, [f"{other} is not in the new index: index it again" for other in others]
    except IndexBusyError:
        raise
    except RagaccelError:
        return no_settings, [
            "the old index could not be read: if it was made with --include or --exclude, or"
            " documents were removed from it, give these options, or remove them, again"
        ]
    _require_filled_by_indexing(store)
    return no_settings, []


def _require_filled_by_indexing(store: Store) -> None:
    """Refuse a store filled by a program: an indexing run would lose its passages."""
    if store.path.is_file() and store.is_filled_by_program():
        raise StorageError(
            f"{store.path} holds passages that a program put in and indexing would lose: index"
            " into another file with path=FILE"
        )


# A folder


def index_folder(
    store: Store,
    embedder: AnyEmbedder,
    folder: str | Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    progress: Callable[[Progress], None] | None = None,
    rebuild: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
    passage_tokens: int | None = None,
    retry_failed: bool = True,
    follow_links: bool = False,
    max_seconds: float | None = None,
) -> IndexReport:
    """Update the index to the current content of a folder.

    A file is unchanged if its size and modification time, or else its sha256, are the same. Of a
    changed file only new passages are embedded; deleted files are removed. Each batch of files is
    one transaction, so an interrupted run keeps finished batches and the next run resumes. Small
    files are indexed first; the vectors of a large file are staged, and searches find the file when
    all of them are embedded.

    Args:
        store: The index; created if it does not exist.
        embedder: Makes the vectors, in a form that ``as_embedder`` takes; its weights are not
            loaded if nothing changed.
        folder: The folder of the documents.
        include: Patterns as in .gitignore; only matching files are indexed. Empty: as in the last
            run.
        exclude: Patterns as in .gitignore; matching files are not indexed. Empty: as in the last
            run.
        progress: A function that is called often with the progress of the run.
        rebuild: Build a new index, which replaces the old one, even a damaged one, when it is
            complete. Patterns and excluded documents are kept.
        max_file_bytes: Larger files are reported as failed.
        passage_tokens: The maximum number of tokens of a passage's text; by default 128, or the
            number the index was made with.
        follow_links: Also follow links that lead out of the folder.
        retry_failed: Read files again that failed in an earlier run and have not changed since.
        max_seconds: The time after which the run stops in good order; the next run goes on. Not
            with ``rebuild``, whose new index replaces the old one only when it is complete.

    Raises:
        ConfigurationError: The folder does not exist or is a file; or ``max_seconds`` is given with
            ``rebuild``.
        IndexBusyError: Another process is indexing.
        IndexUnusableError: The index was made with other settings, or it is damaged.
        StorageError: The disk is full, or the index cannot be written.
    """
    folder = Path(os.path.expanduser(folder))
    if not folder.is_dir():
        problem = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ConfigurationError(f"{folder} {problem}: give the folder that holds the documents")
    _check_max_seconds(max_seconds, rebuild=rebuild)
    embedder = as_embedder(embedder)
    budget = str(passage_tokens or "")
    written = _written(store, folder, embedder, rebuild=rebuild, budget=budget)
    with written as (target, warnings):
        run = _FolderRun(target, embedder, progress or (lambda _: None))
        run.report.warnings += warnings
        run.max_bytes, run.retry_failed = max_file_bytes, retry_failed
        run.max_seconds = max_seconds
        run.passage_tokens = run.configure(passage_tokens)
        patterns = [run.patterns("include", include), run.patterns("exclude", exclude)]
        run.tell("scanning")
        listing = list_folder(folder, *patterns, follow_links=follow_links)
        left_out = set(target.left_out())
        listing.drop("taken out", lambda file: file.name in left_out)
        listing.drop("index", lambda file: store.owns(file.path))
        run.update_index(str(folder.resolve()), listing)
        run.finish()
    return run.report


def _check_max_seconds(max_seconds: float | None, *, rebuild: bool) -> None:
    if max_seconds is not None and rebuild:
        raise ConfigurationError(
            "a rebuild cannot stop early: its index replaces the old one only when it is complete."
            " Leave out rebuild, or max_seconds"
        )


@dataclass(frozen=True, slots=True)
class _ReadFile:
    """A file that was read: its new record, and its passages, or None if they are unchanged."""

    record: FileRecord
    passages: list[Passage] | None

    @property
    def is_staged(self) -> bool:
        """Whether the file is so large that its vectors were staged while it was split."""
        return len(self.passages or ()) > _BATCH_PASSAGES


class _FolderRun(_Run):
    """A run that compares a folder's files with the index and indexes the differences."""

    passage_tokens: int
    max_bytes: int
    retry_failed: bool

    def patterns(self, key: str, given: Sequence[str]) -> list[str]:
        """Return the given patterns and store them, or return those of the last run if empty."""
        if given:
            self.save_setting(key, json.dumps(list(given)))
            return list(given)
        return self.store.meta_list(key)

    def update_index(self, folder: str, listing: Listing) -> None:
        """Remove deleted files, then read and write changed ones batch by batch, small ones first.

        A file with more passages than a batch is written alone, once all of it is embedded.
        """
        self._adopt_folder(folder)
        self.inside = listing.inside
        self.reader = DocumentReader()
        files = self.store.files().items()
        self.known = {path: record for path, record in files if record.kind == "document"}
        self.previously_unread = self.store.unread()
        self.unread: dict[str, UnreadFile] = {}
        self._record_listing(listing)
        self._remove_deleted(listing)
        pending = [file for file in listing.files if not self._is_unchanged(file)]
        # the reading process starts while files that do not need it are read
        pending.sort(key=lambda f: (f.size > _SMALL_BYTES, needs_process(f.name), f.size))
        self.files_total = len(pending)
        self.work_total = sum(file.size for file in pending)
        with self.reader:
            self.reader.prepare_for(file.name for file in pending)
            try:
                self._index_files(pending)
            except _OutOfTimeError:
                self.unread = self.previously_unread | self.unread
            else:
                self.store.unstage()  # vectors of files that are deleted or no longer readable
        self.store.put_unread(self.unread)

    def _adopt_folder(self, folder: str) -> None:
        """Forget the times of another folder's files: equal ones may have other content."""
        made_from = self.store.meta("folder")
        if made_from not in ("", folder):
            with self.store.transaction():
                self.store.rows("UPDATE file SET mtime_ns = -1 WHERE kind = 'document'")
                self.store.rows("UPDATE unread SET mtime_ns = -1")
            if Path(made_from).is_dir():
                self.report.warnings.append(
                    f"this index was made from {made_from}; from now on it holds {folder}"
                )
        self.save_setting("folder", folder)

    def _record_listing(self, listing: Listing) -> None:
        """Record the files that the listing skipped or failed on."""
        self.report.skip_reasons.update(listing.skipped)
        for path, reason in listing.failed.items():
            self._record_unread(UnreadFile(path, "failed", reason))
        for path, reason in listing.passed_over.items():
            self._record_unread(UnreadFile(path, "skipped", reason))
        for path, unread in self.previously_unread.items():
            if _is_inside(path, listing.unreadable) and path not in self.unread:
                self.unread[path] = unread

    def _record_unread(self, unread: UnreadFile) -> None:
        report = self.report
        self.unread[unread.path] = unread
        by_path = {"failed": report.failed, "doubtful": report.doubtful}
        by_path.get(unread.kind, report.passed_over)[unread.path] = unread.reason
        before = self.previously_unread.get(unread.path)
        if before is not None and (before.kind, before.reason) == (unread.kind, unread.reason):
            report.reported_before.add(unread.path)

    def _remove_deleted(self, listing: Listing) -> None:
        present = {file.name for file in listing.files} | set(listing.failed)
        absent = [path for path in self.known if path not in present]
        gone = [path for path in absent if not _is_inside(path, listing.unreadable)]
        if gone:
            self.report.removed = self.store.remove(gone)

    def _is_unchanged(self, file: FoundFile) -> bool:
        """Return whether size and modification time are unchanged; if so, count the file."""
        record, state = self.known.get(file.name), (file.size, file.mtime_ns)
        if record is not None and (record.size, record.mtime_ns) == state:
            self._count_unchanged(record)
            return True
        unread = self.previously_unread.get(file.name)
        if self.retry_failed or unread is None or unread.kind != "failed":
            return False
        if (unread.size, unread.mtime_ns) != state:
            return False
        self._record_unread(unread)
        return True

    def _count_unchanged(self, record: FileRecord) -> None:
        unread = self.previously_unread.get(record.path)
        if record.status == "binary":
            self._skip_binary(record.path, unread.reason if unread else "binary")
            return
        self.report.unchanged += 1
        if unread is not None and unread.kind == "doubtful":
            self._record_unread(unread)

    def _skip_binary(self, path: str, reason: str) -> None:
        reasons = self.report.skip_reasons
        reasons["binary"] = reasons.get("binary", 0) + 1
        self._record_unread(UnreadFile(path, "skipped", reason))

    def _index_files(self, pending: list[FoundFile]) -> None:
        """Read files and write them in batches; a large file makes a batch of its own."""
        self.waiting: list[_ReadFile] = []
        self.num_waiting = 0  # passages
        for file in pending:
            if file.size > _LARGE_BYTES:
                self._write_waiting()
            self.tell("reading", file.name)
            read = self._read(file)
            if read is None:
                self.work_total -= file.size
            else:
                self.waiting.append(read)
                self.num_waiting += len(read.passages or ())
            self.files_done += 1
            if self.num_waiting >= _BATCH_PASSAGES:
                self._write_waiting()
            if self.work_done and self.files_done < self.files_total:  # every run gets on
                self.check_time()
        self._write_waiting()

    def _read(self, file: FoundFile) -> _ReadFile | None:
        """Read and split a file; return None and record the reason if that fails."""
        record = FileRecord(file.name, file.size, file.mtime_ns, "")
        try:
            data = read_bytes(file.path, self.max_bytes, inside=self.inside)
            record = replace(record, sha256=hashlib.sha256(data).hexdigest())
            known = self.known.get(file.name)
            if known is not None and known.sha256 == record.sha256:
                self._count_unchanged(known)
                return _ReadFile(replace(record, status=known.status, title=known.title), None)
            document = self.reader.read(data, file.name)
            passages = self._split(document, file)
        except BinaryFileError as error:
            self._skip_binary(file.name, str(error))
            return _ReadFile(replace(record, status="binary"), [])
        except (DocumentError, MissingExtraError) as error:
            # retrying unchanged content is useless; permissions and installed packages may change
            may_change = not record.sha256 or isinstance(
                error, (MissingExtraError, ReaderStartError)
            )
            state = (0, 0) if may_change else (file.size, file.mtime_ns)
            self._record_unread(UnreadFile(file.name, "failed", str(error), *state))
            return None
        if warning := read_warning(data, file.name):
            self._record_unread(UnreadFile(file.name, "doubtful", warning))
        return _ReadFile(replace(record, title=document_title(document)), passages)

    def _split(self, document: Document, file: FoundFile) -> list[Passage]:
        """Split a document; embed and stage the passages of a large one while it is split.

        A run that is interrupted in a large file so keeps what it has embedded.
        """
        max_seconds = MAX_SECONDS - self.reader.seconds
        count_tokens = self.embedder.count_tokens
        found = iter_passages(document, count_tokens, self.passage_tokens, max_seconds=max_seconds)
        passages: list[Passage] = []
        num_chars = 0
        while window := list(islice(found, _SORT_WINDOW)):
            passages += window
            self.passages_total += len(window)
            if len(passages) > _BATCH_PASSAGES:
                self._write_waiting()
                share = (window[-1].end - num_chars) / len(document.text)
                self.embed(window, work=file.size * share, stage=file.name)
                num_chars = window[-1].end
        if num_chars:  # blank text at the end is no work
            self.work_total -= file.size * (1 - num_chars / len(document.text))
        return passages

    def _write_waiting(self) -> None:
        """Embed the new passages of a batch of files, then replace the files in one transaction."""
        batch, self.waiting, self.num_waiting = self.waiting, [], 0
        if not batch:
            return
        fresh = [passage for file in batch for passage in file.passages or ()]
        stage = batch[0].record.path if batch[0].is_staged else ""
        if stage:
            vectors = self.store.known_vectors([text_hash(passage) for passage in fresh])
        else:
            vectors = self.embed(fresh, work=sum(file.record.size for file in batch))
        with self.store.transaction():
            for file in batch:
                row = self.store.put_file(file.record)
                if file.passages is not None:
                    self.store.drop_passages(row)
                    _put(self.store, row, file.passages, vectors)
            if stage:
                self.store.unstage(stage)
        written = [f for f in batch if f.passages is not None and f.record.status != "binary"]
        changed = sum(file.record.path in self.known for file in written)
        self.report.changed += changed
        self.report.added += len(written) - changed


def _is_inside(path: str, folders: Sequence[str]) -> bool:
    return any(path.startswith(f"{folder}/" if folder else "") for folder in folders)


# Texts of a program


def index_documents(
    store: Store,
    embedder: AnyEmbedder,
    documents: Sequence[Document],
    *,
    progress: Callable[[Progress], None] | None = None,
    passage_tokens: int | None = None,
) -> IndexReport:
    """Make an index hold these documents and no others, each by its ``path``.

    Only new passages are embedded.

    Args:
        store: The index; created if it does not exist.
        embedder: Makes the vectors.
        documents: The documents. Several may have one path, such as the pages of a file.
        progress: A function that is called often with the progress of the run.
        passage_tokens: The maximum number of tokens of a passage's text; by default 128.

    Raises:
        DocumentError: A document has too many passages.
        IndexBusyError: Another process is indexing.
        IndexUnusableError: The index was made with other settings, or it is damaged.
        StorageError: The file holds something else than texts, or it cannot be written.
    """
    embedder = as_embedder(embedder)
    parts: dict[str, list[Document]] = {}
    for document in documents:
        parts.setdefault(document.path, []).append(document)
    with store.writing():
        _require_only_texts(store, embedder)
        run = _Run(store, embedder, progress or (lambda _: None))
        budget = passage_tokens or DEFAULT_PASSAGE_TOKENS
        run.files_total, run.work_total = (
            len(parts),
            sum(len(d.text) for same in parts.values() for d in same),
        )
        gone = store.files().keys() - parts.keys()
        run.report.removed = store.remove(gone) if gone else 0
        for batch in _document_batches(parts, run, min(budget, embedder.max_tokens)):
            _write_documents(run, batch)
        run.finish()
    return run.report


def _require_only_texts(store: Store, embedder: Embedder) -> None:
    """Refuse a store with other contents than texts, or with vectors of another embedder."""
    if any(record.kind != "text" for record in store.files().values()) or store.sources():
        raise StorageError(
            f"{store.path} holds the documents of a folder or passages of a collection: give"
            " texts a file of their own"
        )
    if store.is_blank() or not store.count_passages():
        store.adopt(embedder.fingerprint, embedder.dimension)
    store.require_embedder(embedder.fingerprint)
    store.require_dimension(embedder.dimension)


_Split = tuple[FileRecord, list[Passage]]


def _document_batches(
    parts: Mapping[str, list[Document]], run: _Run, budget: int
) -> Iterator[list[_Split]]:
    """Yield new and changed documents with their passages, about a batch of passages at a time."""
    known = run.store.files()
    batch: list[_Split] = []
    for path, documents in parts.items():
        data = f"{CHUNKER_VERSION} {budget} {documents}".encode()
        size = sum(len(document.text) for document in documents)
        record = FileRecord(path, size, 0, hashlib.sha256(data).hexdigest(), kind="text")
        run.files_done += 1
        if (before := known.get(path)) and before.sha256 == record.sha256:
            run.report.unchanged += 1
            run.work_total -= size
            continue
        run.report.changed += before is not None
        run.report.added += before is None
        passages = {  # by id: a text that is given twice counts once
            passage.passage_id: passage
            for document in documents
            for passage in split_document(document, run.embedder.count_tokens, budget)
        }
        run.passages_total += len(passages)
        titled = replace(record, title=document_title(documents[0]))
        batch.append((titled, list(passages.values())))
        if sum(len(split) for _, split in batch) >= _BATCH_PASSAGES:
            yield batch
            batch = []
    if batch:
        yield batch


def _write_documents(run: _Run, batch: list[_Split]) -> None:
    """Embed the passages of a batch of documents and store them, in one transaction."""
    passages = [passage for _, split in batch for passage in split]
    vectors = run.embed(passages, work=sum(record.size for record, _ in batch))
    with run.store.transaction():
        for record, split in batch:
            row = run.store.put_file(record)
            run.store.drop_passages(row)
            _put(run.store, row, split, vectors)


# A file of passages


def index_passages(
    store: Store,
    embedder: AnyEmbedder,
    file: str | Path,
    *,
    progress: Callable[[Progress], None] | None = None,
    rebuild: bool = False,
    max_seconds: float | None = None,
) -> IndexReport:
    """Index a file of ready-made passages; each passage keeps its id and text.

    Args:
        store: The index; created if it does not exist.
        embedder: Makes the vectors, in a form that ``as_embedder`` takes; its weights are not
            loaded if nothing changed.
        file: TSV with ``id<TAB>text``, or JSON Lines with ``{"id", "title", "text"}``.
        progress: A function that is called often with the progress of the run.
        rebuild: Build a new index, which replaces the old one when it is complete.
        max_seconds: The time after which the run stops in good order; the next run goes on.

    Raises:
        DocumentError: The file cannot be read, or a line is not a passage; the index is unchanged.
        IndexBusyError: Another process is indexing.
        IndexUnusableError: The index was made with other settings.
    """
    _check_max_seconds(max_seconds, rebuild=rebuild)
    file, embedder = Path(os.path.expanduser(file)), as_embedder(embedder)
    with _written(store, file, embedder, rebuild=rebuild) as (target, warnings):
        run = _PassagesRun(target, embedder, progress or (lambda _: None))
        run.report.warnings += warnings
        run.configure()
        run.max_seconds = max_seconds
        run.tell("scanning", str(file))
        with suppress(_OutOfTimeError):
            run.update_index(file)
        run.finish()
    return run.report


class _PassagesRun(_Run):
    """A run that indexes a collection file in batches; the next run resumes an interrupted one."""

    def update_index(self, file: Path) -> None:
        """Check the whole file, index new and changed passages, then remove the missing ones."""
        try:
            status = file.stat()
        except OSError as error:
            raise DocumentError(f"{file} cannot be read: {error.strerror}") from error
        name, state = str(file.resolve()), (status.st_size, status.st_mtime_ns)
        files = self.store.files()
        known = files.get(name) or self._find_moved(files, name, state)
        if known and known.sha256 and (known.size, known.mtime_ns) == state:
            self.report.unchanged = 1
            return
        scanned = scan_passages(file)
        if scanned.num_empty:
            self.report.skip_reasons["empty passage"] = scanned.num_empty
        if known and known.sha256 == scanned.sha256:
            self.report.unchanged = 1
        else:
            if len(files) > bool(known):
                self._require_own_ids(file, name)
            self.passages_total, self.files_total = scanned.num_passages, 1
            self.work_total = scanned.num_passages
            self._index_passages(file, FileRecord(name, *state, "", kind="collection"))
            self.report.added, self.report.changed = int(known is None), int(known is not None)
        with self.store.transaction():
            self.store.put_file(FileRecord(name, *state, scanned.sha256, kind="collection"))

    def _index_passages(self, file: Path, partial: FileRecord) -> None:
        store = self.store
        held = store.hashes_of(partial.path)
        with store.transaction():
            row = store.put_file(partial)
        for batch in _passage_batches(file):
            new = [p for p in batch if held.get(p.passage_id) != text_hash(p)]
            self.passages_done += len(batch) - len(new)
            self.work_total -= len(batch) - len(new)
            vectors = self.embed(new, work=len(new))
            with store.transaction():
                store.drop_ids(p.passage_id for p in new if p.passage_id in held)
                _put(store, row, new, vectors)
            for passage in batch:
                held.pop(passage.passage_id, None)
            if new and self.passages_done < self.passages_total:
                self.check_time()
        with store.transaction():
            store.drop_ids(held)
        self.files_done = 1

    def _find_moved(
        self, files: Mapping[str, FileRecord], name: str, state: tuple[int, int]
    ) -> FileRecord | None:
        """Return the record of this file if it was moved, after storing its new path, or None."""
        for record in files.values():
            before = Path(record.path)
            is_same = before.name == Path(name).name and (record.size, record.mtime_ns) == state
            if record.kind == "collection" and is_same and not before.exists():
                with self.store.transaction():
                    self.store.rows("UPDATE file SET path = ? WHERE path = ?", (name, record.path))
                return replace(record, path=name)
        return None

    def _require_own_ids(self, file: Path, name: str) -> None:
        """Refuse a collection that shares a passage id with another file in the index."""
        for batch in _passage_batches(file):
            owners = self.store.paths_of(passage.passage_id for passage in batch)
            for passage_id, path in owners.items():
                if path != name:
                    raise DocumentError(
                        f"the id {passage_id!r} of {file} is in the index already, from"
                        f" {path}: keep the two collections in separate indexes with path=FILE"
                    )


def _passage_batches(file: Path) -> Iterator[list[Passage]]:
    passages = read_passages(file)
    while batch := list(islice(passages, _BATCH_PASSAGES)):
        yield batch
