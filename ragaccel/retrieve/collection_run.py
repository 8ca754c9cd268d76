"""A file of ready-made passages compared with the index, and the differences brought in."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ragaccel.errors import DocumentError
from ragaccel.retrieve.passage_files import read_passages, scan_passages
from ragaccel.retrieve.records import FileRecord, text_hash

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ragaccel.retrieve.indexing_run import IndexRun

_BATCH_PASSAGES = 512


class CollectionRun:
    """Goes through a collection batch by batch; interrupted, the next run goes on from there."""

    def __init__(self, run: IndexRun, file: Path) -> None:
        self.run = run
        self.file = file
        self.name = str(file.resolve())

    def bring_in(self) -> None:
        """Check the whole file first, then bring in what is new or changed, then drop the rest."""
        run, store = self.run, self.run.store
        try:
            status = self.file.stat()
        except OSError as error:
            raise DocumentError(f"{self.file} cannot be read: {error.strerror}") from error
        files = store.files()
        state = (status.st_size, status.st_mtime_ns)
        known = files.get(self.name) or self._moved(files, state)
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
            self._bring_in_passages(FileRecord(self.name, *state, "", kind="collection"))
            run.report.added, run.report.changed = int(known is None), int(known is not None)
        with store.transaction():
            store.put_file(record)

    def _bring_in_passages(self, partial: FileRecord) -> None:
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

    def _moved(self, files: Mapping[str, FileRecord], state: tuple[int, int]) -> FileRecord | None:
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
            owners = self.run.store.owners([passage.passage_id for passage in batch])
            for passage_id, path in owners.items():
                if path != self.name:
                    raise DocumentError(
                        f"the id {passage_id!r} of {self.file} is in the index already, from"
                        f" {path}: keep the two collections in indexes of their own with"
                        " --index PATH"
                    )
