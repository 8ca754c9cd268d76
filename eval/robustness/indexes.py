"""A fuzzer of the index: damaged indexes are searched, checked and rebuilt."""

from __future__ import annotations

import random
import shutil
import sqlite3
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from eval import cli
from eval.robustness.fuzzer import describe, fuzzer, in_child
from eval.robustness.stand_ins import HashEmbedder
from eval.runner import note, result
from ragaccel import default_index_path
from ragaccel.errors import RagaccelError
from ragaccel.retrieval import Retriever, Store, index_folder

Files = dict[str, bytes]  # by ending: "" is the index, "-wal" its log
Damage = Callable[[Files, random.Random], None]

LIMIT_SECONDS = 30.0
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


# Damages


def flip_bytes(files: Files, rng: random.Random) -> None:
    """Change bytes of the index or its log: single ones, or 8 or 64 in a row."""
    ending = rng.choice([name for name in ("", "", "-wal") if name in files])
    data = bytearray(files[ending])
    for _ in range(rng.choice((1, 1, 3, 10, 100))):
        at = rng.randrange(100) if rng.random() < 0.15 else rng.randrange(len(data))
        kind = rng.random()
        if kind < 0.6:
            data[at] = rng.randrange(256)
        elif kind < 0.8:
            data[at : at + 8] = rng.randbytes(len(data[at : at + 8]))
        elif kind < 0.9:
            data[at : at + 64] = bytes(len(data[at : at + 64]))
        else:
            data[at] ^= 1 << rng.randrange(8)
    files[ending] = bytes(data)


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
    "bytes": (flip_bytes, 0.55),
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


# Trials


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

    def steps(self) -> dict[str, Callable[[Store], object]]:
        """Return the operations to try on an index, by name, in order."""
        return {
            "search": lambda store: Retriever(store, self.embedder).search("word1 word2", 4),
            "list": _list,
            "index": lambda store: index_folder(store, self.embedder, self.folder),
            "check": lambda store: store.check(),
            "rebuild": self._rebuild,
        }

    def _rebuild(self, store: Store) -> None:
        index_folder(store, self.embedder, self.folder, rebuild=True)
        if _passages(store) != self.wanted or store.check():
            raise AssertionError("a rebuilt index differs from one made from nothing")

    def outcomes(self, files: Files) -> Iterator[tuple[str, str]]:
        """Yield each step's name and outcome: ok, refused, or a text that begins with the fault.

        The fault is ``raw`` for a foreign error and ``unmendable`` for a rebuild that failed.
        """
        self.put(files)
        for name, step in self.steps().items():
            yield name, self._outcome(step, must_work=name == "rebuild")

    def _outcome(self, step: Callable[[Store], object], *, must_work: bool) -> str:
        try:
            with Store(self.place) as store:
                step(store)
        except RagaccelError as error:
            return f"unmendable: {error}" if must_work else "refused"
        except Exception as error:
            return f"{'unmendable:' if must_work else 'raw'} {describe(error)}"
        return "ok"


def _passages(store: Store) -> list[tuple[Any, ...]]:
    return sorted(store.rows("SELECT passage_id, title, text, vector FROM passage"))


def _list(store: Store) -> None:
    for path in store.files():
        store.document(path)
    store.unread(), store.sources(), store.left_out()
    list(store.vectors())


# Many trials


def run_in_child(trial: Trial, batch: list[Files]) -> Iterator[list[tuple[str, str]]]:
    """Yield the outcomes of each damaged index; continue in a new child if one hangs or dies."""

    def try_all(tell: Callable[[Any], object]) -> None:
        for files in batch:
            tell(list(trial.outcomes(files)))

    while batch:
        told, ended = in_child(try_all, LIMIT_SECONDS)
        if len(told) < len(batch):
            told.append([("any", "hang" if ended == "hang" else "raw the process died")])
        yield from told
        batch = batch[len(told) :]


@fuzzer(300, cli.integer("--batch", 25, "how many a process tries"))
def run_fuzz_indexes(options: Namespace) -> dict[str, Any]:
    """Damaged indexes: is each searched, refused with one of our errors, or mended by a rebuild?

        python -m eval fuzz_indexes --out eval/results

    Copies of an index are damaged: bytes of the file or of its log, files beside it, its contents
    and its schema. Each is then searched, listed, updated, checked and rebuilt, in a process that
    is killed if it takes too long. Three things are promised: no errors except ragaccel's own, no
    hang, and ``rebuild`` gives the contents of a new index. The run exits with 1 if a promise is
    broken.
    """
    rng = random.Random(options.seed)
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in DAMAGES}
    broken: list[dict[str, Any]] = []
    kinds, weights = list(DAMAGES), [weight for _, weight in DAMAGES.values()]
    started = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="ragaccel-fuzz-"))
    try:
        trial = Trial(folder)
        for first in range(0, options.count, options.batch):
            chosen = rng.choices(kinds, weights, k=min(options.batch, options.count - first))
            batch = [_damaged(trial, kind, rng) for kind in chosen]
            for number, outcomes in enumerate(run_in_child(trial, batch)):
                for step, outcome in outcomes:
                    counts[chosen[number]][f"{step} {outcome.split()[0].rstrip(':')}"] += 1
                    if outcome not in ("ok", "refused"):
                        where = {"number": first + number, "damage": chosen[number]}
                        broken.append({**where, "step": step, "outcome": outcome[:300]})
            note(f"{first + len(batch)} of {options.count}, {len(broken)} promises broken")
    finally:
        shutil.rmtree(folder)
    return result(
        "fuzz_indexes",
        {"count": options.count, "seed": options.seed, "sqlite": sqlite3.sqlite_version},
        counts={kind: dict(sorted(found.items())) for kind, found in counts.items()},
        raw_errors=sum(item["outcome"].startswith("raw") for item in broken),
        hangs=sum(item["outcome"] == "hang" for item in broken),
        unmendable=sum(item["outcome"].startswith("unmendable") for item in broken),
        broken=broken,
        seconds=round(time.perf_counter() - started, 1),
    )


def _damaged(trial: Trial, kind: str, rng: random.Random) -> Files:
    files = dict(trial.logged if rng.random() < 0.25 and kind != "values" else trial.whole)
    DAMAGES[kind][0](files, rng)
    return files
