"""The store: one SQLite file that holds text, vectors, full-text search and file hashes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ragaccel.errors import IndexCorruptError, IndexMismatchError
from ragaccel.passage import Passage
from ragaccel.retrieve.database import Database
from ragaccel.retrieve.records import FileRecord, UnreadFile, text_hash
from ragaccel.retrieve.schema import damaged, index_command, is_own_place, new_token

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

_VECTORS_AT_ONCE = 20_000
_BESIDE = re.compile(r"(\.(lock|new|rebuilt))*(-(wal|shm|journal))?")
PASSAGE_COLUMNS = """p.id, p.passage_id, p.text, p.title,
    CASE f.kind WHEN 'collection' THEN '' ELSE f.path END,
    p.start, p.end, p.page, p.line, p.places"""
PASSAGE_TABLES = "passage AS p JOIN file AS f ON f.id = p.file_id"
_NUMBER = (int, type(None))
_PASSAGE_KINDS = (int, str, str, str, str, int, int, _NUMBER, _NUMBER, str)
_FILE_KINDS = (str, int, int, str, str, str, str, int)
_MOST_DIGITS = 6
_PASSAGE = f"SELECT {PASSAGE_COLUMNS} FROM {PASSAGE_TABLES}"


class Store:
    """An index file. Reading is safe from several threads and while another process writes.

    Opening is put off until something is asked, so that a damaged file can be reset.

    Args:
        path: The file; ``with store.writing()`` creates it, reading does not.
        shared: Whether other users of this machine may read a file that is made, or that is
            written to; else one that is made is its owner's alone.
    """

    def __init__(self, path: str | Path, *, shared: bool = False) -> None:
        self.path = Path(path)
        self.shared = shared
        self._database = Database(self.path, shared=shared)
        self.rows = self._database.rows
        self.reading = self._database.reading
        self.writing = self._database.writing
        self.transaction = self._database.transaction
        self.replacing = self._database.replacing
        self.discard = self._database.discard
        self.close = self._database.close
        self.copy_to = self._database.copy_to

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing

    def put_file(self, record: FileRecord) -> int:
        """Add or replace what is known of a file, its passages untouched; return its row."""
        values = (record.path, record.kind, record.size, record.mtime_ns, record.sha256)
        self.rows(
            "INSERT INTO file (path, kind, size, mtime_ns, sha256, status, title)"
            " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (path) DO UPDATE SET"
            " kind = excluded.kind, size = excluded.size, mtime_ns = excluded.mtime_ns,"
            " sha256 = excluded.sha256, status = excluded.status, title = excluded.title",
            (*values, record.status, record.title),
        )
        return int(self.rows("SELECT id FROM file WHERE path = ?", (record.path,))[0][0])

    def put_passages(
        self, file_id: int, passages: Sequence[Passage], vectors: Mapping[bytes, bytes]
    ) -> None:
        """Add passages to a file; ``vectors`` are given by :func:`text_hash`, as float16 bytes."""
        given = ((file_id, p, vectors[text_hash(p)], "") for p in passages)
        self.put_rows(given)

    def put_rows(self, rows: Iterable[tuple[int, Passage, bytes, str]]) -> None:
        """Add passages, each as (file, passage, vector as float16 bytes, metadata as JSON)."""
        self._database.run_many(
            "INSERT INTO passage (file_id, passage_id, start, end, page, line, title, text,"
            " places, text_hash, vector, metadata) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            ((file_id, *_columns(p), vector, metadata) for file_id, p, vector, metadata in rows),
        )

    def drop_passages(self, file_id: int) -> None:
        """Remove the passages of a file."""
        self.rows("DELETE FROM passage WHERE file_id = ?", (file_id,))

    def drop_ids(self, passage_ids: Iterable[str]) -> None:
        """Remove passages by their ids."""
        self._database.run_many(
            "DELETE FROM passage WHERE passage_id = ?", ((name,) for name in passage_ids)
        )

    def remove(self, paths: Iterable[str]) -> int:
        """Remove files and their passages, in one transaction; return how many there were."""
        removed = 0
        with self.transaction() as connection:
            for path in paths:
                found = connection.execute("SELECT id FROM file WHERE path = ?", (path,)).fetchone()
                if found:
                    self.drop_passages(found[0])
                    connection.execute("DELETE FROM file WHERE id = ?", found)
                    removed += 1
        return removed

    def forget_times(self) -> None:
        """Let the next run of indexing look into every document, whatever its size and time."""
        with self.transaction() as connection:
            connection.execute("UPDATE file SET mtime_ns = -1 WHERE kind = 'document'")
            connection.execute("UPDATE unread SET mtime_ns = -1")

    def put_unread(self, unread: Mapping[str, UnreadFile]) -> None:
        """Note which files are not in the index as they stand, instead of those noted before."""
        if unread == self.unread():
            return
        with self.transaction() as connection:
            connection.execute("DELETE FROM unread")
            rows = ((f.path, f.kind, f.reason, f.size, f.mtime_ns) for f in unread.values())
            self._database.run_many("INSERT INTO unread VALUES (?, ?, ?, ?, ?)", rows)

    def stage(self, path: str, vectors: Mapping[bytes, bytes]) -> None:
        """Keep vectors for a file that is not whole yet; no search sees them."""
        marks = ",".join(["(?, ?, ?)"] * len(vectors))  # one statement: all of them or none
        values = [value for key, vector in vectors.items() for value in (key, path, vector)]
        self.rows(f"INSERT OR REPLACE INTO staged VALUES {marks}", values)

    def unstage(self, path: str | None = None, *, but: Container[bytes] = ()) -> None:
        """Let go of vectors staged for a file, or of all, but those of the given texts."""
        chosen, values = ("", ()) if path is None else (" WHERE path = ?", (path,))
        staged = self.rows(f"SELECT text_hash FROM staged{chosen}", values)
        gone = [row for row in staged if row[0] not in but]
        if gone and len(gone) == len(staged):
            self.rows(f"DELETE FROM staged{chosen}", values)
        elif gone:
            with self.transaction():
                self._database.run_many("DELETE FROM staged WHERE text_hash = ?", iter(gone))

    def rename(self, old: str, new: str) -> None:
        """Know a file by another path from now on."""
        with self.transaction() as connection:
            connection.execute("UPDATE file SET path = ? WHERE path = ?", (new, old))

    def leave_out(self, paths: Sequence[str], *, undo: bool = False) -> None:
        """Keep documents out from the next run of indexing on; with ``undo``, no longer."""
        known = dict.fromkeys(self.left_out())
        if undo:
            known = dict.fromkeys(path for path in known if path not in set(paths))
        else:
            known |= dict.fromkeys(paths)
        self.set_meta("left_out", json.dumps(list(known)))

    def set_meta(self, key: str, value: str) -> None:
        """Keep a setting of the index."""
        self.rows("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def renew(self) -> None:
        """Let whoever holds the vectors read them anew, as if the index was made anew."""
        self.set_meta("epoch", new_token())

    # Reading

    def meta(self, key: str, default: str = "") -> str:
        """A setting of the index, e.g. ``folder``, ``fingerprint``."""
        found = self.rows("SELECT value FROM meta WHERE key = ?", (key,))
        return str(found[0][0]) if found else default

    def number(self, key: str) -> int:
        """A setting that is a number; 0 where it was never set.

        Raises:
            IndexCorruptError: It is none, or beyond reason.
        """
        written = self.meta(key, "0")
        if not (written.isascii() and written.isdigit() and len(written) <= _MOST_DIGITS):
            raise damaged(self.path, f"its {key} is {written[:20]!r}")
        return int(written)

    def names(self, key: str) -> list[str]:
        """A setting that is a list of texts; empty where it was never set.

        Raises:
            IndexCorruptError: It is none.
        """
        try:
            found = json.loads(self.meta(key, "[]"))
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise damaged(self.path, f"its {key} is no list of names")
        return found

    def require_fingerprint(self, fingerprint: str) -> None:
        """Refuse an index whose vectors another embedder or chunker made.

        Raises:
            IndexMismatchError: With the command that makes it anew.
        """
        made_with = self.meta("fingerprint")
        if made_with and made_with != fingerprint:
            self.refuse("another embedding model or version")

    def refuse(self, made_with: str) -> NoReturn:
        """Say what else the index was made with, and how to make it anew."""
        folder = collection = ""
        if not is_own_place(self.path):  # which tells by itself, of a folder that moved as well
            sources = self.sources()
            folder = next((name for name in sources if Path(name).is_dir()), "")
            files = (name for name in sources if Path(name).is_file())
            collection = "" if folder else next(files, "")
        command = index_command(self.path, folder=folder, collection=collection, rebuild=True)
        raise IndexMismatchError(
            f"{self.path} was made with {made_with}: make it anew with `{command}`, or use the"
            " settings it was made with"
        )

    def sources(self) -> list[str]:
        """The folder and the collections that the index is made from, as absolute paths."""
        folder = self.meta("folder")
        files = self.files().items()
        collections = [path for path, file in files if file.kind == "collection"]
        return [folder, *collections] if folder else collections

    def left_out(self) -> list[str]:
        """Paths of documents that were taken out and shall stay out (:meth:`leave_out`)."""
        return self.names("left_out")

    def owns(self, path: Path) -> bool:
        """Whether a file is the index, or one of those that SQLite and we keep beside it."""
        rest = path.name.removeprefix(self.path.name)
        is_ours = path.name.startswith(self.path.name) and _BESIDE.fullmatch(rest)
        return bool(is_ours) and path.parent.resolve() == self.path.parent.resolve()

    def files(self) -> dict[str, FileRecord]:
        """Every file of the index by its path."""
        rows = self.rows(
            "SELECT path, size, mtime_ns, sha256, status, kind, title,"
            " (SELECT count(*) FROM passage WHERE file_id = file.id) FROM file ORDER BY path"
        )
        for row in rows:
            self._require_kinds(row, _FILE_KINDS, "file")
        return {row[0]: FileRecord(*row) for row in rows}

    def unread(self) -> dict[str, UnreadFile]:
        """The files that are not in the index as they stand, by their paths."""
        rows = self.rows("SELECT path, kind, reason, size, mtime_ns FROM unread ORDER BY path")
        for row in rows:
            self._require_kinds(row, (str, str, str, int, int), "file")
        return {row[0]: UnreadFile(*row) for row in rows}

    def state(self) -> tuple[str, str]:
        """(epoch, change): the one is new when the index is made anew, the other at any change.

        Raises:
            NothingIndexedError: The index was deleted since it was opened.
        """
        self._database.follow()
        return self.meta("epoch"), self.meta("change")

    def count_passages(self) -> int:
        """How many passages there are."""
        return int(self.rows("SELECT count(*) FROM passage")[0][0])

    def passages(self, keys: Sequence[int]) -> dict[int, Passage]:
        """Passages by their rows; those that are gone are left out."""
        marks = ",".join("?" * len(keys))
        rows = self.rows(f"{_PASSAGE} WHERE p.id IN ({marks})", keys)
        return {row[0]: self.passage_of(row) for row in rows}

    def hashes_of(self, path: str) -> dict[str, bytes]:
        """The :func:`text_hash` of every passage of a file, by passage id."""
        return dict(
            self.rows(
                "SELECT passage_id, text_hash FROM passage WHERE file_id ="
                " (SELECT id FROM file WHERE path = ?)",
                (path,),
            )
        )

    def owners(self, passage_ids: Sequence[str]) -> dict[str, str]:
        """The path of the file that each of the passage ids belongs to, where it is known."""
        marks = ",".join("?" * len(passage_ids))
        return dict(
            self.rows(
                "SELECT p.passage_id, f.path FROM passage AS p JOIN file AS f ON f.id = p.file_id"
                f" WHERE p.passage_id IN ({marks})",
                passage_ids,
            )
        )

    def passages_of(self, path: str) -> list[Passage]:
        """The passages of a file, in its order."""
        rows = self.rows(f"{_PASSAGE} WHERE f.path = ? ORDER BY p.start, p.id", (path,))
        return [self.passage_of(row) for row in rows]

    def passage(self, passage_id: str) -> Passage | None:
        """The passage of an id, or None."""
        rows = self.rows(f"{_PASSAGE} WHERE p.passage_id = ?", (passage_id,))
        return self.passage_of(rows[0]) if rows else None

    def known_vectors(self, hashes: Sequence[bytes]) -> dict[bytes, bytes]:
        """Vectors of texts that are in the index already, or staged, by :func:`text_hash`."""
        known: dict[bytes, bytes] = {}
        for first in range(0, len(hashes), 500):
            part = hashes[first : first + 500]
            marks = ",".join("?" * len(part))
            for table in ("staged", "passage"):
                query = f"SELECT text_hash, vector FROM {table} WHERE text_hash IN ({marks})"
                known.update(self.rows(query, part))
        return known

    def keys(self) -> NDArray[np.int64]:
        """The rows of all passages, ascending."""
        rows = self.rows("SELECT id FROM passage")  # in the order of a narrower index, by file
        return np.sort(np.array([key for (key,) in rows], dtype=np.int64))

    def vectors(
        self, keys: Sequence[int] | None = None
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Yield (rows, vectors) of all passages, or of the given ones, some thousands at a time."""
        wanted = self.keys().tolist() if keys is None else sorted(keys)
        for first in range(0, len(wanted), _VECTORS_AT_ONCE):
            part = wanted[first : first + _VECTORS_AT_ONCE]
            allowed = "" if keys is None else f" AND id IN ({','.join(map(str, part))})"
            rows = self.rows(
                f"SELECT id, vector FROM passage WHERE id BETWEEN ? AND ?{allowed}",
                (part[0], part[-1]),
            )
            if not rows:  # taken out since
                continue
            found = np.array([row[0] for row in rows], dtype=np.int64)
            yield found, self.unpacked([row[1] for row in rows])

    def passage_of(self, row: Sequence[Any]) -> Passage:
        """The passage of a row of :data:`PASSAGE_COLUMNS`.

        Raises:
            IndexCorruptError: Something else is written there than goes there.
        """
        self._require_kinds(row, _PASSAGE_KINDS, "passage")
        passage = Passage(*row[1:9])
        try:
            return replace(passage, places=_places(row[9])) if row[9] else passage
        except ValueError:
            raise damaged(self.path, f"the places of passage {row[1]!r}") from None

    def _require_kinds(self, row: Sequence[Any], kinds: Sequence[Any], what: str) -> None:
        """Refuse a row with values of other types, which SQLite would keep in any column."""
        if not all(isinstance(value, kind) for value, kind in zip(row, kinds, strict=True)):
            raise damaged(self.path, f"a {what} is written otherwise than any is")

    def unpacked(self, packed: Sequence[bytes]) -> NDArray[np.float32]:
        """Vectors [N, D] from the bytes that are kept of them.

        Raises:
            IndexCorruptError: One is not of the length that all have.
        """
        size = 2 * self.number("dimension")
        if not size or any(not isinstance(one, bytes) or len(one) != size for one in packed):
            raise damaged(self.path, "a vector of the wrong size")
        flat = np.frombuffer(b"".join(packed), dtype="<f2")
        return flat.reshape(len(packed), -1).astype(np.float32)

    def check(self) -> list[str]:
        """Look for damage, reading everything; return what is wrong, nothing when all is well."""
        problems = [str(row[0]) for row in self.rows("PRAGMA integrity_check")]
        problems = [problem for problem in problems if problem != "ok"]
        size = 2 * self.number("dimension")
        odd = self.rows("SELECT count(*) FROM passage WHERE length(vector) != ?", (size,))[0][0]
        if odd:
            problems.append(f"{odd} passages have a vector of the wrong size")
        try:
            self.rows("INSERT INTO words (words, rank) VALUES ('integrity-check', 1)")
        except IndexCorruptError:
            problems.append("the full-text search does not match the passages")
        return problems


def _columns(p: Passage) -> tuple[str | int | bytes | None, ...]:
    places = " ".join(f"{offset}:{number}" for offset, number in p.places)
    return (p.passage_id, p.start, p.end, p.page, p.line, p.title, p.text, places, text_hash(p))


def _places(text: str) -> tuple[tuple[int, int], ...]:
    pairs = (place.partition(":") for place in text.split())
    return tuple((int(offset), int(number)) for offset, _, number in pairs)
