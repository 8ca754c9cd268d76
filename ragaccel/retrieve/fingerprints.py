"""Fingerprints: what made the vectors of an index, and whether an embedder is that."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from ragaccel.errors import IndexMismatchError, IndexWriteError
from ragaccel.retrieve.chunking import CHUNKER_VERSION

if TYPE_CHECKING:
    from pathlib import Path

    from ragaccel.retrieve.store import Store

_PROGRAM = "program"
_WAIT_SECONDS = 5.0


def index_fingerprint(embedder: str) -> str:
    """What must be the same for indexing to go on: the embedder (its fingerprint), the chunker."""
    return hashlib.sha256(f"{embedder}\0{CHUNKER_VERSION}".encode()).hexdigest()


def require_embedder(store: Store, embedder: str) -> None:
    """Refuse an index whose vectors an embedder of another fingerprint made, as far as is known.

    Raises:
        IndexMismatchError: With what to do.
    """
    if not is_filled_by_program(store):
        store.require_fingerprint(index_fingerprint(embedder))
        return
    made_with = store.meta("embedder")
    if made_with not in ("", embedder):
        raise IndexMismatchError(
            f"{store.path} holds vectors of another embedding model, {made_with!r}, not of"
            f" {embedder!r}: open it with that model, or put the passages into a new file"
        )


def require_dimension(path: Path, given: int, held: int) -> None:
    """Refuse vectors of another length than those an index holds, if any.

    Raises:
        IndexMismatchError: With both.
    """
    if held not in (0, given):
        raise IndexMismatchError(
            f"{path} holds vectors of {held} numbers, not of {given}: use the embedding model that"
            " made them, or put the passages into a new file"
        )


def mark_filled_by_program(store: Store, embedder: str) -> None:
    """Note that passages are put into a store one by one, and who makes their vectors."""
    store.set_meta("embedder", embedder)
    store.set_meta("filled_by", _PROGRAM)


def is_filled_by_program(store: Store) -> bool:
    """Whether a program puts passages in one by one, so that no run of indexing may touch them."""
    return store.meta("filled_by") == _PROGRAM


def open_for_program(store: Store, embedder: str) -> None:
    """Make a file if there is none; refuse one that another embedder's vectors are in.

    Raises:
        IndexMismatchError: As :func:`require_embedder`.
        IndexWriteError, IndexCorruptError: It cannot be made, or is none of ours.
    """
    if _is_blank(store):
        with store.writing(wait_seconds=_WAIT_SECONDS):
            if _is_blank(store):  # another may have been first
                mark_filled_by_program(store, embedder)
    if embedder and store.count_passages():
        require_embedder(store, embedder)


def refuse_indexed(store: Store) -> None:
    """Keep a program from changing what runs of indexing keep.

    Raises:
        IndexWriteError: It is an index of those.
    """
    if not is_filled_by_program(store):
        raise IndexWriteError(
            f"{store.path} is kept by `ragaccel index`, whose next run would undo this: change the"
            " documents and index again, or put passages into another file"
        )


def take_vectors(store: Store, embedder: str, dimension: int) -> None:
    """Refuse vectors unlike those held; when none are held, whoever comes first may choose.

    Raises:
        IndexMismatchError: As :func:`require_embedder` and :func:`require_dimension`.
    """
    held = store.number("dimension")
    if not store.count_passages():
        if dimension != held:
            forget_vectors(store, embedder)
        mark_filled_by_program(store, embedder)
        store.set_meta("dimension", str(dimension))
        return
    if embedder:
        require_embedder(store, embedder)
    require_dimension(store.path, dimension, held)


def forget_vectors(store: Store, embedder: str) -> None:
    """Let vectors of another length follow; a new epoch tells whoever holds the old ones."""
    mark_filled_by_program(store, embedder)
    store.set_meta("dimension", "0")
    store.renew()


def refuse_filled_by_program(store: Store) -> None:
    """Keep a run of indexing from a store whose passages exist nowhere else.

    Raises:
        IndexWriteError: A program fills it.
    """
    if store.path.is_file() and is_filled_by_program(store):
        raise IndexWriteError(
            f"{store.path} holds passages that a program put in, which indexing would lose: index"
            " into another file with --index PATH"
        )


def _is_blank(store: Store) -> bool:
    """Whether there is no index yet, or one that nobody has begun to fill."""
    if not store.path.exists() or not store.path.stat().st_size:
        return True
    return not (is_filled_by_program(store) or store.meta("fingerprint"))
