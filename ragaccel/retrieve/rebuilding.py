"""Rebuilding: a new index made beside the old one, which it replaces when it is whole."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ragaccel.errors import RagaccelError
from ragaccel.retrieve.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_MADE_AS = "rebuilt_as"


@contextmanager
def rebuilding(
    store: Store, made_with: Mapping[str, str], kept: Mapping[str, str]
) -> Iterator[Store]:
    """Give a new store that takes the old one's place at the end; until then the old one stays.

    Args:
        store: The old one, which may be missing or damaged.
        made_with: Settings (:meth:`Store.meta`) of the new one. An attempt that was interrupted is
            gone on with if it was made with the same, here: one that came along with a folder
            is not believed.
        kept: Further settings, which may differ.

    Raises:
        IndexBusyError, IndexWriteError, IndexCorruptError: As from ``store.writing()``.
    """
    with store.replacing() as place, Store(place, shared=store.shared) as fresh:
        try:
            goes_on = place.is_file() and all(
                fresh.meta(key) == value
                for key, value in {**made_with, _MADE_AS: _identity(place)}.items()
            )
        except RagaccelError:
            goes_on = False
        if not goes_on:
            fresh.discard()
        with fresh.writing():
            for key, value in {**made_with, **kept, _MADE_AS: _identity(place)}.items():
                fresh.set_meta(key, value)
            yield fresh
        fresh.close()
        place.with_name(place.name + ".lock").unlink(missing_ok=True)


def _identity(place: Path) -> str:
    """What tells a file from its copies, such as one that is unpacked from somebody's archive."""
    status = place.stat()
    return f"{status.st_dev}:{status.st_ino}"
