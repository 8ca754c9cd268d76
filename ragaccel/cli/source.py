"""Source: what is asked, a folder of documents or an index by itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ragaccel.cli.exits import UsageError

_INDEX_ENDINGS = (".db", ".sqlite", ".sqlite3")


@dataclass(frozen=True, slots=True)
class Source:
    """An index file, and the folder or the collection of passages that it is made from.

    With neither, the index is used as it is.
    """

    index: Path
    folder: Path | None = None
    collection: Path | None = None

    @property
    def name(self) -> str:
        """What this source is called in messages and in the history: an absolute path."""
        return str((self.folder or self.collection or self.index).resolve())

    @property
    def label(self) -> str:
        """What this source is called in a line about it."""
        return str(self.folder or self.collection or self.index)

    @property
    def argument(self) -> str:
        """How this source is written on a command line."""
        import shlex

        if self.folder is not None:
            return shlex.quote(str(self.folder))
        return f"--index {shlex.quote(str(self.index))}"

    def command(self, verb: str, *options: str) -> str:
        """The command that does something with this source, ready to be pasted."""
        import shlex

        where = [self.argument]
        if self.folder is not None and self.index != _default_index(self.folder):
            where.append(f"--index {shlex.quote(str(self.index))}")
        return " ".join(["ragaccel", verb, *where, *options])

    def index_command(self, *, rebuild: bool = False) -> str:
        """The command that makes this index, or makes it anew."""
        from ragaccel.retrieval.store import index_command

        folder, collection = str(self.folder or ""), str(self.collection or "")
        return index_command(self.index, folder=folder, collection=collection, rebuild=rebuild)


def locate(target: str | Path | None, index: Path | None) -> Source:
    """Find out what DIR and --index stand for.

    DIR may also be an index file, or a collection of passages that was indexed by
    ``ragaccel index --passages``.

    Raises:
        UsageError: neither is given, or there is no such folder.
    """
    if target is None:
        if index is None:
            raise UsageError("which documents? give a folder, or an index with --index PATH")
        return Source(index)
    path = Path(target).expanduser()
    if os.path.isdir(path):  # no to a name that no file system takes, such as a long question
        return Source(index or _default_index(path), folder=path)
    if path.suffix in _INDEX_ENDINGS and index is None and os.path.exists(path):
        return Source(path)
    if os.path.isfile(path):
        collection = _collection_index(path)
        if index is None and collection.exists():
            return Source(collection, collection=path)
        raise UsageError(
            f"{path} is a file: give the folder it is in, or, if it is a collection of passages,"
            f" run first: ragaccel index --passages {path}"
        )
    hint = f" (a question goes behind the folder: ragaccel ask DIR {str(path)!r})" * _asks(path)
    raise UsageError(f"there is no folder {str(path)!r}{hint}")


def locate_passages(collection: Path, index: Path | None) -> Source:
    """The source of a ready-made collection of passages.

    Raises:
        UsageError: there is no such file.
    """
    if not collection.is_file():
        raise UsageError(f"there is no file {str(collection)!r}")
    return Source(index or _collection_index(collection), collection=collection)


def _asks(path: Path) -> bool:
    return " " in str(path).strip() or str(path).endswith("?")


def _default_index(folder: Path) -> Path:
    from ragaccel.retrieval.store import default_index_path

    return default_index_path(folder)


def _collection_index(collection: Path) -> Path:
    from ragaccel.retrieval.store import default_collection_path

    return default_collection_path(collection)
