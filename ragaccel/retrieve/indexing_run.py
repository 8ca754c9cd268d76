"""An indexing run: the settings of the index, what is embedded, and what is told of it."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ragaccel.errors import ConfigurationError, IndexBusyError, RagaccelError
from ragaccel.retrieve.chunking import DEFAULT_PASSAGE_TOKENS
from ragaccel.retrieve.fingerprints import (
    index_fingerprint,
    is_filled_by_program,
    refuse_filled_by_program,
)
from ragaccel.retrieve.rebuilding import rebuilding
from ragaccel.retrieve.records import embedded_text, text_hash
from ragaccel.retrieve.report import IndexReport, Progress, ProgressCallback, ignore_progress

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ragaccel.passage import Passage
    from ragaccel.retrieve.embedder import Embedder
    from ragaccel.retrieve.store import Store

_EMBED_AT_ONCE = 128
_SORTED_TOGETHER = 1024  # by length; more, and what comes first says little of what is to come
_KEPT = ("include", "exclude", "left_out")
_TITLE_SHARE = 3  # a title may take a third of what the embedder sees


@contextmanager
def start_run(
    store: Store,
    embedder: Embedder,
    progress: ProgressCallback | None,
    *,
    made_from: Path,
    rebuild: bool,
    budget: str = "",
) -> Iterator[IndexRun]:
    """Begin a run that brings an index up to date, or makes it anew beside the old one.

    A new one keeps what people said of the old one: which files to take, which to leave. It holds
    nothing but the folder or collection it is made from; a warning names what else the old one
    held. One that was interrupted is gone on with, if it was begun for the same budget of tokens a
    passage.
    """
    tell = progress or ignore_progress
    if not rebuild:
        with store.writing():
            refuse_filled_by_program(store)
            yield IndexRun(store, embedder, tell)
        return
    source = str(made_from.resolve())
    kept, warnings = _said_of(store, source)
    made_with = {
        "fingerprint": index_fingerprint(embedder.fingerprint),
        "rebuilt_from": f"{source} {budget}",
    }
    with rebuilding(store, made_with, kept) as fresh:
        run = IndexRun(fresh, embedder, tell)
        run.report.warnings += warnings
        yield run


def _said_of(store: Store, source: str) -> tuple[dict[str, str], list[str]]:
    """What people said of an index that is made anew, and warnings; little if it is damaged.

    Raises:
        IndexWriteError: A program fills it.
        IndexBusyError: Another process keeps it from being read.
    """
    nothing = dict.fromkeys(_KEPT, "[]")
    if not store.path.is_file():
        return nothing, []
    try:
        is_programs = is_filled_by_program(store)
        if not is_programs:
            kept = {key: json.dumps(store.names(key)) for key in _KEPT}
            others = [name for name in store.sources() if name != source and Path(name).exists()]
            return kept, [f"{other} is not in the new index: bring it in again" for other in others]
    except IndexBusyError:
        raise
    except RagaccelError:
        return nothing, [
            "the old index could not be read: if it was made with --include or --exclude, or files"
            " were taken out of it, say so again"
        ]
    refuse_filled_by_program(store)
    return nothing, []


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
        self.num_cut = 0

    def settle(self, passage_tokens: int | None) -> int:
        """Refuse another embedder's index, note this one's; return the budget of a passage."""
        fingerprint = index_fingerprint(self.embedder.fingerprint)
        self.store.require_fingerprint(fingerprint)
        made_with = self.store.number("passage_tokens")
        limit = self.embedder.max_tokens
        most = max(1, limit - limit // _TITLE_SHARE)
        if passage_tokens is not None and not 0 < passage_tokens <= most:
            raise ConfigurationError(
                f"passage_tokens is {passage_tokens}: the embedding model sees {limit} tokens, of"
                f" which a third is kept for titles: choose 1 to {most}"
            )
        budget = passage_tokens or made_with or min(DEFAULT_PASSAGE_TOKENS, most)
        if made_with not in (0, budget):
            self.store.refuse(f"passages of {made_with} tokens")
        self.keep("fingerprint", fingerprint)
        self.keep("passage_tokens", str(budget))
        self.keep("dimension", str(self.embedder.dimension))
        return budget

    def remember(self, key: str, patterns: Sequence[str]) -> list[str]:
        """Patterns of this run, or those of the last one when none are given."""
        if patterns:
            self.keep(key, json.dumps(list(patterns)))
            return list(patterns)
        return self.store.names(key)

    def keep(self, key: str, value: str) -> None:
        """Note a setting, unless it is noted already: an unchanged index is not written to."""
        if self.store.meta(key) != value:
            self.store.set_meta(key, value)

    def tell(self, stage: str, path: str = "") -> None:
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
            self.store.unstage(stage, but=texts)
        new = [(key, text) for key, text in texts.items() if key not in vectors]
        each = work / max(1, len(passages))
        self.passages_done += len(passages) - len(new)
        self.work_total -= each * (len(passages) - len(new))
        for part in _batches(new):
            self.tell("embedding", stage)
            rows = self._embed([text for _, text in part])
            embedded = {
                key: row.astype("<f2").tobytes() for (key, _), row in zip(part, rows, strict=True)
            }
            if stage:
                self.store.stage(stage, embedded)
            vectors |= embedded
            self.passages_done += len(part)
            self.work_done += each * len(part)
            self.report.embedded += len(part)
        return vectors

    def _embed(self, texts: list[str]) -> NDArray[np.float32]:
        sizes = self.embedder.count_tokens(texts)
        self.num_cut += sum(size > self.embedder.max_tokens for size in sizes)
        began = time.perf_counter()
        vectors = self.embedder.embed_documents(texts)
        self.report.embed_seconds += time.perf_counter() - began
        return vectors

    def finish(self) -> None:
        """Complete the report."""
        self.report.passages = self.store.count_passages()
        if self.num_cut:
            self.report.warnings.append(
                f"{self.num_cut} new passages are longer than the {self.embedder.max_tokens} tokens"
                " the embedding model sees: their vectors stand for the beginning only; full-text"
                " search covers all of each"
            )
        self.tell("done")


def _batches(new: list[tuple[bytes, str]]) -> Iterator[list[tuple[bytes, str]]]:
    """Texts of about the same length at a time, from beginning to end."""
    for first in range(0, len(new), _SORTED_TOGETHER):
        part = sorted(new[first : first + _SORTED_TOGETHER], key=lambda item: len(item[1]))
        for start in range(0, len(part), _EMBED_AT_ONCE):
            yield part[start : start + _EMBED_AT_ONCE]
