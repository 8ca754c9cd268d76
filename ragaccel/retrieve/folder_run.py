"""A folder's files compared with the index, and the differences brought in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ragaccel.errors import DocumentError, MissingExtraError
from ragaccel.retrieve.chunking import document_title, split_document
from ragaccel.retrieve.documents import BinaryFileError, document_from_bytes, read_bytes
from ragaccel.retrieve.records import FileRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ragaccel.passage import Passage
    from ragaccel.retrieve.folder import FoundFile, Listing
    from ragaccel.retrieve.indexing_run import IndexRun

_BATCH_PASSAGES = 512


@dataclass(frozen=True, slots=True)
class _ReadFile:
    """A file that was read: what the index will know of it, and its passages (None: as before)."""

    record: FileRecord
    passages: list[Passage] | None


class FolderRun:
    """A folder's files compared with the index, and the differences brought in."""

    def __init__(
        self, run: IndexRun, listing: Listing, max_bytes: int, budget: int, *, folder: str
    ) -> None:
        self.run = run
        made_from = run.store.meta("folder")
        # size and time tell nothing of the files of another folder
        self.trusts_times = made_from in ("", folder)
        if not self.trusts_times and Path(made_from).is_dir():
            run.report.warnings.append(
                f"this index was made from {made_from}; from now on it holds {folder}"
            )
        run.keep("folder", folder)
        self.listing = listing
        self.max_bytes = max_bytes
        self.budget = budget
        self.known = {
            path: record for path, record in run.store.files().items() if record.kind == "document"
        }

    def bring_in(self) -> None:
        """Remove what vanished, read what changed, and write it batch by batch."""
        report = self.run.report
        report.failed.update(self.listing.failed)
        report.skip_reasons.update(self.listing.skipped)
        self._remove_vanished()
        pending = [file for file in self.listing.files if not self._same_state(file)]
        self.run.files_total = len(pending)
        batch: list[_ReadFile] = []
        waiting = 0
        for file in pending:
            self.run.tell("reading", file.name)
            read = self._read(file)
            if read is not None:
                batch.append(read)
                waiting += len(read.passages or ())
                self.run.passages_total += len(read.passages or ())
            self.run.files_done += 1
            if waiting >= _BATCH_PASSAGES:
                self._write(batch)
                batch, waiting = [], 0
        self._write(batch)

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
        """Whether size and time of change are as in the index; counts the file if so."""
        record = self.known.get(file.name)
        if record is None or not self.trusts_times:
            return False
        if (record.size, record.mtime_ns) != (file.size, file.mtime_ns):
            return False
        self._count_same(record)
        return True

    def _count_same(self, record: FileRecord) -> None:
        report = self.run.report
        if record.status == "binary":
            report.skip_reasons["binary"] = report.skip_reasons.get("binary", 0) + 1
        else:
            report.unchanged += 1

    def _read(self, file: FoundFile) -> _ReadFile | None:
        """Read and cut a file; None, and a reason in the report, where that cannot be done."""
        record = FileRecord(file.name, file.size, file.mtime_ns, "")
        try:
            data = read_bytes(file.path, self.max_bytes)
            record = replace(record, sha256=hashlib.sha256(data).hexdigest())
            known = self.known.get(file.name)
            if known is not None and known.sha256 == record.sha256:
                self._count_same(known)
                return _ReadFile(replace(record, status=known.status, title=known.title), None)
            document = document_from_bytes(data, file.name)
        except BinaryFileError:
            reasons = self.run.report.skip_reasons
            reasons["binary"] = reasons.get("binary", 0) + 1
            return _ReadFile(replace(record, status="binary"), [])
        except (DocumentError, MissingExtraError) as error:
            self.run.report.failed[file.name] = str(error)
            return None
        passages = split_document(document, self.run.embedder.count_tokens, self.budget)
        return _ReadFile(replace(record, title=document_title(document)), passages)

    def _write(self, batch: list[_ReadFile]) -> None:
        """Embed what is new in a batch of files, then replace them in one transaction."""
        fresh = [passage for file in batch for passage in file.passages or ()]
        vectors = self.run.vectors_for(fresh)
        store = self.run.store
        if not batch:
            return
        with store.transaction():
            for file in batch:
                row = store.put_file(file.record)
                if file.passages is not None:
                    store.drop_passages(row)
                    store.put_passages(row, file.passages, vectors)
        self._count_written(batch)

    def _count_written(self, batch: Iterable[_ReadFile]) -> None:
        for file in batch:
            if file.passages is None or file.record.status == "binary":
                continue
            if file.record.path in self.known:
                self.run.report.changed += 1
            else:
                self.run.report.added += 1
