"""Damaged indexes: searched, listed, updated, checked and rebuilt."""

from __future__ import annotations

import random
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from eval.robustness.fuzz import Case, Kind, Make, OutcomeError, changed_bytes
from eval.robustness.stand_ins import HashEmbedder
from ragaccel import default_index_path
from ragaccel.errors import RagaccelError
from ragaccel.retrieval import Retriever, Store, index_folder

Files = dict[str, bytes]  # by ending: "" is the index, "-wal" its log
Damage = Callable[[Files, random.Random], None]

_BESIDE = ("-wal", "-shm", "-journal", ".lock", ".rebuilt", ".rebuilt-wal", ".new", ".rebuilt.lock")
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
_WILD = ("NULL", "-1", "0", "1e308", "9223372036854775807", "x'ff00c3'", "'\ufffd'", "'[[[['", "''")
_COLUMNS = {
    "meta": ("value",),
    "file": ("path", "kind", "size", "mtime_ns", "sha256", "status", "title"),
    "passage": (
        "passage_id",
        "file_id",
        "start",
        "end",
        "page",
        "line",
        "title",
        "text",
        "text_hash",
        "vector",
        "metadata",
        "places",
    ),
    "words_data": ("block",),
    "words_config": ("v",),
}
_SCHEMAS = (
    "CREATE TRIGGER more AFTER INSERT ON passage BEGIN DELETE FROM file; END",
    "CREATE VIEW more AS SELECT * FROM passage",
    "CREATE INDEX more ON file (upper(path))",
    "CREATE TABLE more (x DEFAULT (random()))",
    "DROP TABLE words",
    "DROP TRIGGER passage_removed",
    "DELETE FROM sqlite_master WHERE name = 'passage_of_file'",
    "UPDATE sqlite_master SET sql = 'CREATE TABLE ' WHERE name = 'meta'",
    "UPDATE sqlite_master SET rootpage = 99999 WHERE name = 'file'",
    "UPDATE sqlite_master SET rootpage = 2",
    "PRAGMA user_version = 1",
    "PRAGMA application_id = 7",
)


def change_bytes(files: Files, rng: random.Random) -> None:
    """Change bytes of the index or its log; often in the file's header."""
    ending = rng.choice([name for name in ("", "", "-wal") if name in files])
    data, head = files[ending], rng.choice((0, 0, 0, 0, 0, 0, 100))
    changed = changed_bytes(data[:head] or data, rng)
    files[ending] = changed + data[head:] if head else changed


def truncate(files: Files, rng: random.Random) -> None:
    """Cut off the end of the index or of its log."""
    ending = rng.choice([name for name in ("", "-wal") if name in files])
    files[ending] = files[ending][: rng.randrange(len(files[ending]))]


def litter(files: Files, rng: random.Random) -> None:
    """Put files with random bytes or a damaged copy beside the index, under names it may use."""
    for ending in rng.sample(_BESIDE, rng.choice((1, 1, 2))):
        nonsense = rng.randbytes(rng.choice((0, 7, 5000)))
        half = bytearray(files[""])
        half[rng.randrange(len(half))] ^= 255
        files[ending] = rng.choice((nonsense, _JOURNAL_MAGIC + nonsense, bytes(half)))


def write_wild_values(files: Files, rng: random.Random) -> None:
    """Write invalid values into random columns of the index."""
    statements = []
    for _ in range(rng.choice((1, 1, 3))):
        table = rng.choice(list(_COLUMNS))
        column = rng.choice(_COLUMNS[table])
        some = rng.choice(("", " WHERE random() % 3 = 0"))
        statements.append(f"UPDATE OR IGNORE {table} SET {column} = {rng.choice(_WILD)}{some}")
    _run_sql(files, statements)


def change_schema(files: Files, rng: random.Random) -> None:
    """Add something to the schema, remove something from it, or make it wrong."""
    _run_sql(files, [rng.choice(_SCHEMAS)])


DAMAGES: dict[str, tuple[Damage, float]] = {
    "bytes": (change_bytes, 0.55),
    "truncated": (truncate, 0.1),
    "litter": (litter, 0.1),
    "values": (write_wild_values, 0.15),
    "schema": (change_schema, 0.1),
}


def _run_sql(files: Files, statements: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "index.db"
        place.write_bytes(files[""])
        with closing(sqlite3.connect(place, isolation_level=None)) as connection:
            connection.execute("PRAGMA writable_schema = ON")
            connection.execute("PRAGMA ignore_check_constraints = ON")
            for statement in statements:
                with suppress(sqlite3.IntegrityError):  # a NULL in a NOT NULL column
                    connection.execute(statement)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        files[""] = place.read_bytes()
        files.pop("-wal", None)


class Trial:
    """A folder with its valid index, and the operations that are tried on a damaged one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = default_index_path(folder)
        self.embedder = HashEmbedder()
        for number in range(12):
            words = " ".join(f"word{(number * 7 + i) % 50}" for i in range(120))
            (folder / f"{number}.md").write_text(f"# Title {number}\n\n{words}.\n")
        with Store(self.place) as store:
            index_folder(store, self.embedder, folder)
            self.wanted = _passages(store)
            self.logged = self.files()
            store.rows("PRAGMA wal_checkpoint(TRUNCATE)")
        self.whole = {"": self.place.read_bytes()}

    def files(self) -> Files:
        """Return the bytes of the index and of its log on disk."""
        return {
            ending: path.read_bytes()
            for ending in ("", "-wal")
            if (path := self.place.with_name(self.place.name + ending)).exists()
        }

    def put(self, files: Files) -> None:
        """Replace the index and all files beside it by the given ones."""
        for path in self.place.parent.iterdir():
            path.unlink()
        for ending, data in files.items():
            self.place.with_name(self.place.name + ending).write_bytes(data)

    def steps(self) -> list[Callable[[Store], object]]:
        """Return the operations that an index may refuse."""
        return [
            lambda store: Retriever(store, self.embedder).search("word1 word2", 4),
            _list,
            lambda store: index_folder(store, self.embedder, self.folder),
            lambda store: store.check(),
        ]

    def use(self, files: Files) -> None:
        """Do every step on a damaged index, then rebuild it, which must work."""
        self.put(files)
        for step in self.steps():
            with suppress(RagaccelError), Store(self.place) as store:
                step(store)
        try:
            with Store(self.place) as store:
                index_folder(store, self.embedder, self.folder, rebuild=True)
                if _passages(store) != self.wanted or store.check():
                    raise OutcomeError("unmendable: a rebuilt index is not a new one")
        except RagaccelError as error:
            raise OutcomeError(f"unmendable: {error}") from error


def _passages(store: Store) -> list[tuple[Any, ...]]:
    return sorted(store.rows("SELECT passage_id, title, text, vector FROM passage"))


def _list(store: Store) -> None:
    for path in store.files():
        store.document(path)
    store.unread(), store.sources(), store.left_out()
    list(store.vectors())


def open_indexes(folder: Path) -> Make:
    """Index a folder; return the function that damages copies of the index."""
    trial = Trial(folder)
    kinds, weights = list(DAMAGES), [weight for _, weight in DAMAGES.values()]

    def make(_number: int, rng: random.Random) -> Case:
        (kind,) = rng.choices(kinds, weights)
        files = dict(trial.logged if rng.random() < 0.25 and kind != "values" else trial.whole)
        DAMAGES[kind][0](files, rng)
        return kind, f"{kind} of {' '.join(files)}", lambda: trial.use(files)

    return make


KIND = Kind(open_indexes, count=300, seconds=30, batch=25)
