"""A folder's files compared with the index, and the differences brought in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ragaccel.errors import DocumentError, MissingExtraError
from ragaccel.retrieve.chunking import document_title, split_document
from ragaccel.retrieve.documents import (
    BinaryFileError,
    DocumentReader,
    doubt_about,
    read_bytes,
    reads_apart,
)
from ragaccel.retrieve.reader_process import MAX_SECONDS, NoReaderError
from ragaccel.retrieve.records import FileRecord, UnreadFile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ragaccel.passage import Passage
    from ragaccel.retrieve.folder import FoundFile, Listing
    from ragaccel.retrieve.indexing_run import IndexRun

_BATCH_PASSAGES = 512
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
            run.store.forget_times()
            if Path(made_from).is_dir():
                run.report.warnings.append(
                    f"this index was made from {made_from}; from now on it holds {folder}"
                )
        run.keep("folder", folder)
        self.listing = listing
        self.max_bytes = max_bytes
        self.budget = budget
        self.retry_failed = retry_failed
        self.reader = DocumentReader()
        self.known = {
            path: record for path, record in run.store.files().items() if record.kind == "document"
        }
        self.unread_before = run.store.unread()
        self.unread: dict[str, UnreadFile] = {}

    def bring_in(self) -> None:
        """Remove what vanished, read what changed, and write it batch by batch, small files first.

        A file of more than a batch is written alone, when all of it is embedded.
        """
        self._note_listed()
        self._remove_vanished()
        pending = [file for file in self.listing.files if not self._same_state(file)]
        # the process that reads some of them starts while the others are read
        pending.sort(key=lambda f: (f.size > _SMALL_BYTES, reads_apart(f.name), f.size))
        self.run.files_total = len(pending)
        self.run.work_total = sum(file.size for file in pending)
        with self.reader:
            self.reader.prepare(file.name for file in pending)
            self._bring_in(pending)

    def _bring_in(self, pending: list[FoundFile]) -> None:
        batch: list[_ReadFile] = []
        waiting = 0
        for file in pending:
            self.run.tell("reading", file.name)
            read = self._read(file)
            num_passages = len(read.passages or ()) if read else 0
            self.run.passages_total += num_passages
            if read is not None and num_passages > _BATCH_PASSAGES:
                self._write(batch)
                batch, waiting = [], 0
                self._write([read], stage=file.name)
            elif read is not None:
                batch.append(read)
                waiting += num_passages
            else:
                self.run.work_total -= file.size
            self.run.files_done += 1
            if waiting >= _BATCH_PASSAGES:
                self._write(batch)
                batch, waiting = [], 0
        self._write(batch)
        self.run.store.unstage()  # of files that are gone, or can no longer be read
        self.run.store.put_unread(self.unread)

    def _note_listed(self) -> None:
        """Note what the listing says of files that are not to be read."""
        listing, report = self.listing, self.run.report
        report.skip_reasons.update(listing.skipped)
        for path, reason in listing.failed.items():
            self._note(UnreadFile(path, "failed", reason))
        for path, reason in listing.passed_over.items():
            self._note(UnreadFile(path, "skipped", reason))
        for root in listing.unreadable:  # of what is in there nothing is known now
            inside = f"{root}/" if root else ""
            for path, unread in self.unread_before.items():
                if path.startswith(inside) and path not in self.unread:
                    self.unread[path] = unread

    def _note(self, unread: UnreadFile) -> None:
        report = self.run.report
        self.unread[unread.path] = unread
        by_path = {"failed": report.failed, "doubtful": report.doubtful}
        by_path.get(unread.kind, report.passed_over)[unread.path] = unread.reason
        before = self.unread_before.get(unread.path)
        if before is not None and (before.kind, before.reason) == (unread.kind, unread.reason):
            report.told_before.add(unread.path)

    def _remove_vanished(self) -> None:
        present = {file.name for file in self.listing.files} | set(self.listing.failed)
        unseen = [f"{name}/" if name else "" for name in self.listing.unreadable]
        gone = [
            path
            for path in self.known
            if path not in present and not any(path.startswith(root) for root in unseen)
        ]
        if gone:
            self.run.report.removed = self.run.store.remove(gone)

    def _same_state(self, file: FoundFile) -> bool:
        """Whether size and time of change are as in the last run; counts the file if so."""
        record, state = self.known.get(file.name), (file.size, file.mtime_ns)
        if record is not None and (record.size, record.mtime_ns) == state:
            self._count_same(record)
            return True
        unread = self.unread_before.get(file.name)
        if self.retry_failed or unread is None or unread.kind != "failed":
            return False
        if (unread.size, unread.mtime_ns) != state:
            return False
        self._note(unread)
        return True

    def _count_same(self, record: FileRecord) -> None:
        unread = self.unread_before.get(record.path)
        if record.status == "binary":
            self._skip_binary(record.path, unread.reason if unread else "binary")
            return
        self.run.report.unchanged += 1
        if unread is not None and unread.kind == "doubtful":
            self._note(unread)

    def _skip_binary(self, path: str, reason: str) -> None:
        reasons = self.run.report.skip_reasons
        reasons["binary"] = reasons.get("binary", 0) + 1
        self._note(UnreadFile(path, "skipped", reason))

    def _read(self, file: FoundFile) -> _ReadFile | None:
        """Read and cut a file; None, and a reason in the report, where that cannot be done."""
        record = FileRecord(file.name, file.size, file.mtime_ns, "")
        try:
            data = read_bytes(file.path, self.max_bytes, inside=self.listing.inside)
            record = replace(record, sha256=hashlib.sha256(data).hexdigest())
            known = self.known.get(file.name)
            if known is not None and known.sha256 == record.sha256:
                self._count_same(known)
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
            passes = not record.sha256 or isinstance(error, (MissingExtraError, NoReaderError))
            state = (0, 0) if passes else (file.size, file.mtime_ns)
            self._note(UnreadFile(file.name, "failed", str(error), *state))
            return None
        if doubt := doubt_about(data, file.name):
            self._note(UnreadFile(file.name, "doubtful", doubt))
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
