"""Indexing: a folder or a file of passages brought into the store; only what is new is embedded."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from ragaccel.errors import ConfigurationError
from ragaccel.retrieve.collection_run import CollectionRun
from ragaccel.retrieve.documents import MAX_FILE_BYTES
from ragaccel.retrieve.folder import list_folder
from ragaccel.retrieve.folder_run import FolderRun
from ragaccel.retrieve.indexing_run import start_run
from ragaccel.retrieve.report import IndexReport, Progress, ProgressCallback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.retrieve.embedder import Embedder
    from ragaccel.retrieve.store import Store


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
        IndexMismatchError: The index was made with other settings.
        IndexCorruptError: The index is damaged.
        IndexWriteError: The disk is full, or the place cannot be written to.
    """
    folder = Path(folder)
    if not folder.is_dir():
        problem = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ConfigurationError(f"{folder} {problem}: give the folder that holds the documents")
    started = time.perf_counter()
    budget = str(passage_tokens or "")
    run_of = start_run(store, embedder, progress, made_from=folder, rebuild=rebuild, budget=budget)
    with run_of as run:
        tokens = run.settle(passage_tokens)
        patterns = run.remember("include", include), run.remember("exclude", exclude)
        run.progress(Progress("scanning"))
        listing = list_folder(folder, *patterns, follow_links=follow_links)
        left_out = set(run.store.left_out())
        listing.pass_over("taken out", lambda file: file.name in left_out)
        listing.pass_over("index", lambda file: store.owns(file.path))
        FolderRun(
            run,
            listing,
            max_file_bytes,
            tokens,
            folder=str(folder.resolve()),
            retry_failed=retry_failed,
        ).bring_in()
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
        IndexMismatchError: The index was made with other settings.
    """
    file = Path(file)
    started = time.perf_counter()
    with start_run(store, embedder, progress, made_from=file, rebuild=rebuild) as run:
        run.settle(None)
        run.progress(Progress("scanning", path=str(file)))
        CollectionRun(run, file).bring_in()
        run.finish()
    run.report.seconds = time.perf_counter() - started
    return run.report
