"""Indexing: folders and collections into a store, incrementally, with a report."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ragaccel.errors import (
    ConfigurationError,
    DocumentError,
    IndexBusyError,
    MissingExtraError,
    RagaccelError,
)
from ragaccel.passage import Passage
from ragaccel.paths import open_regular_file
from ragaccel.retrieval.chunking import DEFAULT_PASSAGE_TOKENS, document_title, split_document
from ragaccel.retrieval.files import list_folder
from ragaccel.retrieval.loaders import (
    MAX_FILE_BYTES,
    BinaryFileError,
    DocumentReader,
    is_documents_only,
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
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ragaccel.retrieval.embedder import Embedder
    from ragaccel.retrieval.files import FoundFile, Listing
    from ragaccel.retrieval.store import Store


_JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class PassageFile:
    """What a first reading of a collection finds: its sha256, how many passages, how many empty."""

    sha256: str
    num_passages: int
    num_empty: int


def scan_passages(path: Path) -> PassageFile:
    """Read a collection through, checking every line and that no id comes twice.

    Raises:
        DocumentError: With the number of the line that is no passage.
    """
    first_lines: dict[str, int] = {}
    empty = 0
    digest = hashlib.sha256()
    for number, passage in _numbered_passages(path, digest.update):
        if passage.passage_id in first_lines:
            raise DocumentError(
                f"{path}, line {number}: the id {passage.passage_id!r} stands on line"
                f" {first_lines[passage.passage_id]} already"
            )
        first_lines[passage.passage_id] = number
        empty += not passage.text
    return PassageFile(digest.hexdigest(), len(first_lines) - empty, empty)


def read_passages(path: Path) -> Iterator[Passage]:
    """Yield the passages of a TSV or JSON Lines file that are not empty, as they are."""
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
    name = name.encode("utf-8", "replace").decode()  # JSON can say what nothing can store
    if len(name.splitlines()) > 1:
        raise ValueError("an id must be a single line")
    text = text.encode("utf-8", "replace").decode()
    text = text if text.strip() else ""
    title = title.encode("utf-8", "replace").decode()
    return Passage(passage_id=name, text=text, title=title, start=0, end=len(text))


_BATCH_PASSAGES = 512


class CollectionRun:
    """Goes through a collection batch by batch; interrupted, the next run goes on from there."""

    def __init__(self, run: IndexRun, file: Path) -> None:
        self.run = run
        self.file = file
        self.name = str(file.resolve())

    def update_index(self) -> None:
        """Check the whole file first, then bring in what is new or changed, then drop the rest."""
        run, store = self.run, self.run.store
        try:
            status = self.file.stat()
        except OSError as error:
            raise DocumentError(f"{self.file} cannot be read: {error.strerror}") from error
        files = store.files()
        state = (status.st_size, status.st_mtime_ns)
        known = files.get(self.name) or self._find_moved(files, state)
        if known and known.sha256 and (known.size, known.mtime_ns) == state:
            run.report.unchanged = 1
            return
        scanned = scan_passages(self.file)
        if scanned.num_empty:
            run.report.skip_reasons["empty passage"] = scanned.num_empty
        record = FileRecord(self.name, *state, scanned.sha256, kind="collection")
        if known and known.sha256 == scanned.sha256:
            run.report.unchanged = 1
        else:
            if len(files) > bool(known):
                self._require_own_ids()
            run.passages_total, run.files_total = scanned.num_passages, 1
            run.work_total = scanned.num_passages
            self._index_passages(FileRecord(self.name, *state, "", kind="collection"))
            run.report.added, run.report.changed = int(known is None), int(known is not None)
        with store.transaction():
            store.put_file(record)

    def _index_passages(self, partial: FileRecord) -> None:
        store = self.run.store
        held = store.hashes_of(self.name)
        with store.transaction():
            row = store.put_file(partial)
        passages = read_passages(self.file)
        while batch := list(islice(passages, _BATCH_PASSAGES)):
            new = [p for p in batch if held.get(p.passage_id) != text_hash(p)]
            self.run.passages_done += len(batch) - len(new)
            self.run.work_total -= len(batch) - len(new)
            vectors = self.run.vectors_for(new, work=len(new))
            with store.transaction():
                store.drop_ids(p.passage_id for p in new if p.passage_id in held)
                store.put_passages(row, new, vectors)
            for passage in batch:
                held.pop(passage.passage_id, None)
        with store.transaction():
            store.drop_ids(held)
        self.run.files_done = 1

    def _find_moved(
        self, files: Mapping[str, FileRecord], state: tuple[int, int]
    ) -> FileRecord | None:
        """The record of this very file under an earlier path, where nothing is any more."""
        for record in files.values():
            before = Path(record.path)
            is_same = before.name == self.file.name and (record.size, record.mtime_ns) == state
            if record.kind == "collection" and is_same and not before.exists():
                self.run.store.rename(record.path, self.name)
                return replace(record, path=self.name)
        return None

    def _require_own_ids(self) -> None:
        """Refuse a collection that shares an id with another one in the index."""
        passages = read_passages(self.file)
        while batch := list(islice(passages, _BATCH_PASSAGES)):
            owners = self.run.store.paths_of([passage.passage_id for passage in batch])
            for passage_id, path in owners.items():
                if path != self.name:
                    raise DocumentError(
                        f"the id {passage_id!r} of {self.file} is in the index already, from"
                        f" {path}: keep the two collections in indexes of their own with"
                        " --index PATH"
                    )


_SMALL_BYTES = 100_000


@dataclass(frozen=True, slots=True)
class _ReadFile:
    """A file that was read: what the index will know of it, and its passages (None: as before)."""

    record: FileRecord
    passages: list[Passage] | None


class FolderRun:
    """A folder's files compared with the index, and the differences brought in."""

    def __init__(
        self,
        run: IndexRun,
        listing: Listing,
        max_bytes: int,
        budget: int,
        *,
        folder: str,
        retry_failed: bool,
    ) -> None:
        self.run = run
        made_from = run.store.meta("folder")
        if made_from not in ("", folder):  # of its files, size and time tell nothing
            run.store.reset_times()
            if Path(made_from).is_dir():
                run.report.warnings.append(
                    f"this index was made from {made_from}; from now on it holds {folder}"
                )
        run.save_setting("folder", folder)
        self.listing = listing
        self.max_bytes = max_bytes
        self.budget = budget
        self.retry_failed = retry_failed
        self.reader = DocumentReader()
        self.known = {
            path: record for path, record in run.store.files().items() if record.kind == "document"
        }
        self.previously_unread = run.store.unread()
        self.unread: dict[str, UnreadFile] = {}

    def update_index(self) -> None:
        """Remove what vanished, read what changed, and write it batch by batch, small files first.

        A file of more than a batch is written alone, when all of it is embedded.
        """
        self._record_listing()
        self._remove_deleted()
        pending = [file for file in self.listing.files if not self._is_unchanged(file)]
        # the process that reads some of them starts while the others are read
        pending.sort(key=lambda f: (f.size > _SMALL_BYTES, is_documents_only(f.name), f.size))
        self.run.files_total = len(pending)
        self.run.work_total = sum(file.size for file in pending)
        with self.reader:
            self.reader.prepare(file.name for file in pending)
            self._index_pending(pending)

    def _index_pending(self, pending: list[FoundFile]) -> None:
        batch: list[_ReadFile] = []
        num_waiting = 0
        for file in pending:
            self.run.report_progress("reading", file.name)
            read = self._read(file)
            num_passages = len(read.passages or ()) if read else 0
            self.run.passages_total += num_passages
            if read is not None and num_passages > _BATCH_PASSAGES:
                self._write(batch)
                batch, num_waiting = [], 0
                self._write([read], stage=file.name)
            elif read is not None:
                batch.append(read)
                num_waiting += num_passages
            else:
                self.run.work_total -= file.size
            self.run.files_done += 1
            if num_waiting >= _BATCH_PASSAGES:
                self._write(batch)
                batch, num_waiting = [], 0
        self._write(batch)
        self.run.store.unstage()  # of files that are gone, or can no longer be read
        self.run.store.put_unread(self.unread)

    def _record_listing(self) -> None:
        """Note what the listing says of files that are not to be read."""
        listing, report = self.listing, self.run.report
        report.skip_reasons.update(listing.skipped)
        for path, reason in listing.failed.items():
            self._record_unread(UnreadFile(path, "failed", reason))
        for path, reason in listing.passed_over.items():
            self._record_unread(UnreadFile(path, "skipped", reason))
        for root in listing.unreadable:  # of what is in there nothing is known now
            inside = f"{root}/" if root else ""
            for path, unread in self.previously_unread.items():
                if path.startswith(inside) and path not in self.unread:
                    self.unread[path] = unread

    def _record_unread(self, unread: UnreadFile) -> None:
        report = self.run.report
        self.unread[unread.path] = unread
        by_path = {"failed": report.failed, "doubtful": report.doubtful}
        by_path.get(unread.kind, report.passed_over)[unread.path] = unread.reason
        before = self.previously_unread.get(unread.path)
        if before is not None and (before.kind, before.reason) == (unread.kind, unread.reason):
            report.reported_before.add(unread.path)

    def _remove_deleted(self) -> None:
        present = {file.name for file in self.listing.files} | set(self.listing.failed)
        unseen = [f"{name}/" if name else "" for name in self.listing.unreadable]
        gone = [
            path
            for path in self.known
            if path not in present and not any(path.startswith(root) for root in unseen)
        ]
        if gone:
            self.run.report.removed = self.run.store.remove(gone)

    def _is_unchanged(self, file: FoundFile) -> bool:
        """Whether size and time of change are as in the last run; counts the file if so."""
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
        self.run.report.unchanged += 1
        if unread is not None and unread.kind == "doubtful":
            self._record_unread(unread)

    def _skip_binary(self, path: str, reason: str) -> None:
        reasons = self.run.report.skip_reasons
        reasons["binary"] = reasons.get("binary", 0) + 1
        self._record_unread(UnreadFile(path, "skipped", reason))

    def _read(self, file: FoundFile) -> _ReadFile | None:
        """Read and cut a file; None, and a reason in the report, where that cannot be done."""
        record = FileRecord(file.name, file.size, file.mtime_ns, "")
        try:
            data = read_bytes(file.path, self.max_bytes, inside=self.listing.inside)
            record = replace(record, sha256=hashlib.sha256(data).hexdigest())
            known = self.known.get(file.name)
            if known is not None and known.sha256 == record.sha256:
                self._count_unchanged(known)
                return _ReadFile(replace(record, status=known.status, title=known.title), None)
            document = self.reader.read(data, file.name)
            passages = split_document(
                document,
                self.run.embedder.count_tokens,
                self.budget,
                max_seconds=MAX_SECONDS - self.reader.seconds,
            )
        except BinaryFileError as error:
            self._skip_binary(file.name, str(error))
            return _ReadFile(replace(record, status="binary"), [])
        except (DocumentError, MissingExtraError) as error:
            # what is in the file stays; a permission, or what is installed, may change
            may_change = not record.sha256 or isinstance(
                error, (MissingExtraError, ReaderStartError)
            )
            state = (0, 0) if may_change else (file.size, file.mtime_ns)
            self._record_unread(UnreadFile(file.name, "failed", str(error), *state))
            return None
        if warning := read_warning(data, file.name):
            self._record_unread(UnreadFile(file.name, "doubtful", warning))
        return _ReadFile(replace(record, title=document_title(document)), passages)

    def _write(self, batch: list[_ReadFile], *, stage: str = "") -> None:
        """Embed what is new in a batch of files, then replace them in one transaction.

        With ``stage``, the name of the one file there is, what is embedded outlives a run that is
        interrupted.
        """
        fresh = [passage for file in batch for passage in file.passages or ()]
        work = sum(file.record.size for file in batch)
        vectors = self.run.vectors_for(fresh, work=work, stage=stage)
        store = self.run.store
        if not batch:
            return
        with store.transaction():
            for file in batch:
                row = store.put_file(file.record)
                if file.passages is not None:
                    store.drop_passages(row)
                    store.put_passages(row, file.passages, vectors)
            if stage:
                store.unstage(stage)
        self._count_written(batch)

    def _count_written(self, batch: Iterable[_ReadFile]) -> None:
        for file in batch:
            if file.passages is None or file.record.status == "binary":
                continue
            if file.record.path in self.known:
                self.run.report.changed += 1
            else:
                self.run.report.added += 1


@dataclass(frozen=True, slots=True)
class Progress:
    """Where indexing stands.

    ``stage`` is ``"scanning"``, ``"reading"``, ``"embedding"`` or ``"done"``. Files are those that
    must be read; ``passages_done`` of ``passages_total`` are embedded, where the total grows while
    files are read. ``work_done`` of ``work_total`` says how far embedding is in all, in bytes of
    the files: it knows those that are not read yet, and leaves out what need not be embedded.
    """

    stage: str
    files_done: int = 0
    files_total: int = 0
    passages_done: int = 0
    passages_total: int = 0
    path: str = ""
    work_done: float = 0.0
    work_total: float = 0.0


class ProgressCallback(Protocol):
    """What may be given to be told of progress; called often, so it should be quick."""

    def __call__(self, progress: Progress, /) -> None:
        """Take note of where indexing stands."""


@dataclass(slots=True)
class IndexReport:
    """What an indexing run did: files by what became of them, and passages.

    ``failed`` gives the reason by path; what the index had of a failed file it keeps. ``skipped``
    counts what was passed over and ``skip_reasons`` says why; ``passed_over`` names those of them
    that no rule or pattern named. ``doubtful`` are files that were read by a guess, which the
    reason names. Failed and doubtful files that an earlier run told of, for the same reason, are
    in ``reported_before``. ``passages`` is how many the index
    has now, ``embedded`` how many of them are new to it. ``warnings`` are for people to read.
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
    warnings: list[str] = field(default_factory=list)

    @property
    def skipped(self) -> int:
        """How many files and folders were passed over."""
        return sum(self.skip_reasons.values())

    @property
    def is_current(self) -> bool:
        """Whether there was nothing to do."""
        return not (self.added or self.changed or self.removed)


def ignore_progress(progress: Progress, /) -> None:
    """Take no note."""


_EMBED_BATCH = 128
_SORT_WINDOW = 1024  # by length; more, and what comes first says little of what is to come
_SAVED_SETTINGS = ("include", "exclude", "left_out")
_TITLE_SHARE = 3  # a title may take a third of what the embedder sees


class IndexRun:
    """One run of indexing: the settings of the index, its report, and embedding with progress."""

    def __init__(self, store: Store, embedder: Embedder, progress: ProgressCallback) -> None:
        self.store = store
        self.embedder = embedder
        self.progress = progress
        self.report = IndexReport()
        self.files_done = self.files_total = 0
        self.passages_done = self.passages_total = 0
        self.work_done = self.work_total = 0.0
        self.num_truncated = 0

    @classmethod
    @contextmanager
    def start(
        cls,
        store: Store,
        embedder: Embedder,
        progress: ProgressCallback | None,
        *,
        made_from: Path,
        rebuild: bool,
        budget: str = "",
    ) -> Iterator[IndexRun]:
        """Begin a run that brings an index up to date, or makes it anew beside the old one.

        A new one keeps what people said of the old one: which files to take, which to leave. It
        holds nothing but the folder or collection it is made from; a warning names what else the
        old one held. One that was interrupted is gone on with, if it was begun for the same budget
        of tokens a passage.
        """
        callback = progress or ignore_progress
        if not rebuild:
            with store.writing():
                store.require_filled_by_indexing()
                yield cls(store, embedder, callback)
            return
        source = str(made_from.resolve())
        kept, warnings = cls._saved_settings(store, source)
        made_with = {
            "fingerprint": index_fingerprint(embedder.fingerprint),
            "rebuilt_from": f"{source} {budget}",
        }
        with store.rebuild(made_with, kept) as fresh:
            run = cls(fresh, embedder, callback)
            run.report.warnings += warnings
            yield run

    @staticmethod
    def _saved_settings(store: Store, source: str) -> tuple[dict[str, str], list[str]]:
        """What people said of an index that is made anew, and warnings; little if it is damaged.

        Raises:
            StorageError: A program fills it.
            IndexBusyError: Another process keeps it from being read.
        """
        no_settings = dict.fromkeys(_SAVED_SETTINGS, "[]")
        if not store.path.is_file():
            return no_settings, []
        try:
            is_programs = store.is_filled_by_program()
            if not is_programs:
                kept = {key: json.dumps(store.meta_list(key)) for key in _SAVED_SETTINGS}
                others = [
                    name for name in store.sources() if name != source and Path(name).exists()
                ]
                return kept, [
                    f"{other} is not in the new index: bring it in again" for other in others
                ]
        except IndexBusyError:
            raise
        except RagaccelError:
            return no_settings, [
                "the old index could not be read: if it was made with --include or --exclude, or"
                " files were taken out of it, say so again"
            ]
        store.require_filled_by_indexing()
        return no_settings, []

    def configure(self, passage_tokens: int | None) -> int:
        """Refuse another embedder's index, note this one's; return the budget of a passage."""
        fingerprint = index_fingerprint(self.embedder.fingerprint)
        self.store.require_fingerprint(fingerprint)
        made_with = self.store.meta_number("passage_tokens")
        limit = self.embedder.max_tokens
        most = max(1, limit - limit // _TITLE_SHARE)
        if passage_tokens is not None and not 0 < passage_tokens <= most:
            raise ConfigurationError(
                f"passage_tokens is {passage_tokens}: the embedding model sees {limit} tokens, of"
                f" which a third is kept for titles: choose 1 to {most}"
            )
        budget = passage_tokens or made_with or min(DEFAULT_PASSAGE_TOKENS, most)
        if made_with not in (0, budget):
            self.store.raise_mismatch(f"passages of {made_with} tokens")
        self.save_setting("fingerprint", fingerprint)
        self.save_setting("passage_tokens", str(budget))
        self.save_setting("dimension", str(self.embedder.dimension))
        return budget

    def resolve_patterns(self, key: str, patterns: Sequence[str]) -> list[str]:
        """Patterns of this run, or those of the last one when none are given."""
        if patterns:
            self.save_setting(key, json.dumps(list(patterns)))
            return list(patterns)
        return self.store.meta_list(key)

    def save_setting(self, key: str, value: str) -> None:
        """Note a setting, unless it is noted already: an unchanged index is not written to."""
        if self.store.meta(key) != value:
            self.store.set_meta(key, value)

    def report_progress(self, stage: str, path: str = "") -> None:
        """Say where the run stands."""
        files = (self.files_done, self.files_total)
        passages = (self.passages_done, self.passages_total)
        work = (self.work_done, self.work_total)
        self.progress(Progress(stage, *files, *passages, path, *work))

    def vectors_for(
        self, passages: Sequence[Passage], *, work: float = 0.0, stage: str = ""
    ) -> dict[bytes, bytes]:
        """The float16 vectors of passages by text hash; only what the index lacks is embedded.

        Args:
            passages: Of one file or of several.
            work: How much of ``work_total`` they are.
            stage: A file that what is embedded is kept for until all of it is there.
        """
        texts = {text_hash(passage): embedded_text(passage) for passage in passages}
        vectors = self.store.known_vectors(list(texts))
        if stage:  # an interrupted run may have read another version of it
            self.store.unstage(stage, keep=texts)
        new = [(key, text) for key, text in texts.items() if key not in vectors]
        work_per_passage = work / max(1, len(passages))
        self.passages_done += len(passages) - len(new)
        self.work_total -= work_per_passage * (len(passages) - len(new))
        for part in _batches(new):
            self.report_progress("embedding", stage)
            rows = self._embed([text for _, text in part])
            embedded = {
                key: row.astype("<f2").tobytes() for (key, _), row in zip(part, rows, strict=True)
            }
            if stage:
                self.store.stage(stage, embedded)
            vectors |= embedded
            self.passages_done += len(part)
            self.work_done += work_per_passage * len(part)
            self.report.embedded += len(part)
        return vectors

    def _embed(self, texts: list[str]) -> NDArray[np.float32]:
        sizes = self.embedder.count_tokens(texts)
        self.num_truncated += sum(size > self.embedder.max_tokens for size in sizes)
        began = time.perf_counter()
        vectors = self.embedder.embed_documents(texts)
        self.report.embed_seconds += time.perf_counter() - began
        return vectors

    def finish(self) -> None:
        """Complete the report."""
        self.report.passages = self.store.count_passages()
        if self.num_truncated:
            self.report.warnings.append(
                f"{self.num_truncated} new passages are longer than the"
                f" {self.embedder.max_tokens} tokens the embedding model sees: their vectors stand"
                " for the beginning only; full-text search covers all of each"
            )
        self.report_progress("done")


def _batches(new: list[tuple[bytes, str]]) -> Iterator[list[tuple[bytes, str]]]:
    """Texts of about the same length at a time, from beginning to end."""
    for first in range(0, len(new), _SORT_WINDOW):
        part = sorted(new[first : first + _SORT_WINDOW], key=lambda item: len(item[1]))
        for start in range(0, len(part), _EMBED_BATCH):
            yield part[start : start + _EMBED_BATCH]


def index_folder(
    store: Store,
    embedder: Embedder,
    folder: str | Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    progress: ProgressCallback | None = None,
    rebuild: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
    passage_tokens: int | None = None,
    retry_failed: bool = True,
    follow_links: bool = False,
) -> IndexReport:
    """Bring a folder's files into the index; afterwards the index says what the folder says.

    Unchanged files are known by size and time of change, else by sha256; of changed ones only new
    passages are embedded; what vanished is removed. Each batch of files is one transaction, so an
    interrupted run keeps what it finished and the next one goes on from there. Small files come
    first; of a large one what is embedded is kept apart, and is found when all of it is there.

    Args:
        store: The index; created if there is none.
        embedder: Not asked to embed, nor loaded, when nothing changed.
        folder: Where the documents are.
        include: Patterns as in .gitignore: only such files. None given: as in the last run.
        exclude: Patterns as in .gitignore: not these. None given: as in the last run.
        progress: Told where indexing stands.
        rebuild: Make the index anew, which also mends a damaged one; it takes the old one's place
            when it is whole. Patterns and files taken out are remembered.
        max_file_bytes: Larger files are reported as failed.
        passage_tokens: The budget of a passage's text; 128, or what the index was made with.
        follow_links: Read what links lead to outside of the folder, too.
        retry_failed: Try again to read files that could not be read and have not changed since.

    Raises:
        ConfigurationError: The folder is none.
        IndexBusyError: Another process is indexing.
        IndexUnusableError: The index was made with other settings.
        IndexUnusableError: The index is damaged.
        StorageError: The disk is full, or the place cannot be written to.
    """
    folder = Path(folder)
    if not folder.is_dir():
        problem = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ConfigurationError(f"{folder} {problem}: give the folder that holds the documents")
    started = time.perf_counter()
    budget = str(passage_tokens or "")
    run_of = IndexRun.start(
        store, embedder, progress, made_from=folder, rebuild=rebuild, budget=budget
    )
    with run_of as run:
        tokens = run.configure(passage_tokens)
        patterns = (
            run.resolve_patterns("include", include),
            run.resolve_patterns("exclude", exclude),
        )
        run.progress(Progress("scanning"))
        listing = list_folder(folder, *patterns, follow_links=follow_links)
        left_out = set(run.store.left_out())
        listing.drop("taken out", lambda file: file.name in left_out)
        listing.drop("index", lambda file: store.owns(file.path))
        FolderRun(
            run,
            listing,
            max_file_bytes,
            tokens,
            folder=str(folder.resolve()),
            retry_failed=retry_failed,
        ).update_index()
        run.finish()
    run.report.seconds = time.perf_counter() - started
    return run.report


def index_passages(
    store: Store,
    embedder: Embedder,
    file: str | Path,
    *,
    progress: ProgressCallback | None = None,
    rebuild: bool = False,
) -> IndexReport:
    """Bring a ready-made collection of passages into the index, each as it is, ids kept.

    Args:
        store: The index; created if there is none.
        embedder: Not asked to embed, nor loaded, when nothing changed.
        file: TSV with ``id<TAB>text``, or JSON Lines with ``{"id", "title", "text"}``.
        progress: Told where indexing stands.
        rebuild: Make the index anew; it takes the old one's place when it is whole.

    Raises:
        DocumentError: The file cannot be read, or a line is no passage; nothing was changed then.
        IndexBusyError: Another process is indexing.
        IndexUnusableError: The index was made with other settings.
    """
    file = Path(file)
    started = time.perf_counter()
    with IndexRun.start(store, embedder, progress, made_from=file, rebuild=rebuild) as run:
        run.configure(None)
        run.progress(Progress("scanning", path=str(file)))
        CollectionRun(run, file).update_index()
        run.finish()
    run.report.seconds = time.perf_counter() - started
    return run.report
