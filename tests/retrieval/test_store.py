"""The store: damage, strangers' files, locks, rebuilds, a full disk and databases of others."""

import os
import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from threading import Barrier

import pytest

from ragaccel import default_index_path
from ragaccel.errors import (
    EmptyIndexError,
    IndexBusyError,
    IndexUnusableError,
    RagaccelError,
    StorageError,
)
from ragaccel.retrieval import (
    SCHEMA_VERSION,
    Collection,
    Retriever,
    Store,
    index_command,
    index_folder,
    index_passages,
)

JUNK = [b"not a database at all" * 100, b"SQLite format 3\0" + b"x" * 9999]


def mended(place, folder, embedder):
    """Rebuild an index and return how many files it then holds."""
    with Store(place) as store:
        report = index_folder(store, embedder, folder, rebuild=True)
        assert store.check() == []
        assert index_folder(store, embedder, folder).is_current
    return report.added


# Damage and untrusted files: nothing in them runs, all is reported, a rebuild mends all


SCHEMAS = [
    "CREATE TRIGGER evil AFTER INSERT ON passage BEGIN"
    " UPDATE passage SET text = 'INJECTED' WHERE id = new.id; END",
    "CREATE TEMP TRIGGER t AFTER INSERT ON main.meta BEGIN SELECT 1; END;"
    "CREATE TRIGGER evil AFTER UPDATE ON meta BEGIN DELETE FROM file; END",
    "CREATE VIEW evil AS SELECT * FROM passage",
    "ALTER TABLE meta RENAME TO held;CREATE VIEW meta AS SELECT key, value FROM held",
    "CREATE TABLE more (x)",
    "CREATE VIRTUAL TABLE more USING fts5(x)",
    "ALTER TABLE file ADD COLUMN more AS (hex(path))",
    "ALTER TABLE file ADD COLUMN more DEFAULT 7",
    "CREATE INDEX evil ON file (upper(path))",
    "DROP INDEX passage_by_text;"
    "CREATE INDEX passage_by_text ON passage (text_hash) WHERE text_hash IS NOT NULL",
    "UPDATE sqlite_master SET sql = sql || printf('%4000s', 'WHERE title > 7')"
    " WHERE name = 'passage_by_text'; REINDEX passage_by_text",
    "DROP TRIGGER passage_added",
    "DROP TRIGGER passage_removed; CREATE TRIGGER passage_removed AFTER DELETE ON passage"
    " BEGIN DELETE FROM file; END",
    "DROP TABLE words; CREATE VIRTUAL TABLE words USING fts5 (title, text)",
    "DROP TABLE meta",
    "ANALYZE",
    "UPDATE sqlite_master SET sql = replace(sql, 'DEFAULT ''''', 'DEFAULT (zeroblob(9))')",
    *(f"PRAGMA user_version = {n}" for n in (1, SCHEMA_VERSION - 1, SCHEMA_VERSION + 1, 99)),
]


@pytest.mark.parametrize("damage", [*SCHEMAS, *JUNK])
def test_a_file_that_is_not_exactly_an_index_is_refused_left_as_it_is_and_mended(
    shipped, folder, embedder, alter, damage
):
    if isinstance(damage, bytes):
        shipped.write_bytes(damage)
    else:
        alter(shipped, damage)
    before = shipped.read_bytes()
    (folder / "new.md").write_text("a new text.")
    for use in (
        lambda store: index_folder(store, embedder, folder),
        lambda store: Retriever(store, embedder).search("lamp"),
        lambda store: Collection(store.path),
    ):
        with Store(shipped) as store, pytest.raises(IndexUnusableError, match="docs --rebuild"):
            use(store)
    assert shipped.read_bytes() == before
    assert mended(shipped, folder, embedder) == 4


def refusal(use):
    """Return the message of our error, if one is raised; any other fails the test."""
    try:
        use()
    except RagaccelError as error:
        return [str(error)]
    return []


def test_comments_and_spaces_in_a_schema_mean_nothing(shipped, folder, embedder, alter):
    spaced = "replace(sql, 'kind TEXT', 'kind  /* its */ TEXT -- x\n')"
    alter(shipped, f"UPDATE sqlite_master SET sql = {spaced}")
    with Store(shipped) as store:
        assert index_folder(store, embedder, folder).is_current


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE meta SET value = 'many' WHERE key = 'dimension'",
        f"UPDATE meta SET value = '{'9' * 5000}' WHERE key = 'dimension'",
        "UPDATE meta SET value = '0' WHERE key = 'dimension'; UPDATE passage SET vector = x''",
        "UPDATE meta SET value = '-1' WHERE key = 'passage_tokens'",
        "UPDATE meta SET value = x'ff' WHERE key = 'fingerprint'",
        "INSERT OR REPLACE INTO meta VALUES ('include', '{')",
        f"INSERT OR REPLACE INTO meta VALUES ('include', '{'[' * 100_000}')",
        "INSERT OR REPLACE INTO meta VALUES ('left_out', '[1]')",
        "INSERT OR REPLACE INTO meta VALUES ('exclude', '7')",
        "UPDATE file SET path = x'ff' || path",
        "UPDATE file SET size = 'large'",
        "UPDATE file SET title = CAST(x'c328' AS TEXT)",
        "UPDATE passage SET text = x'00'",
        "UPDATE passage SET start = 'first'",
        "UPDATE passage SET line = 'first'",
        "UPDATE passage SET places = 'here'",
        "UPDATE passage SET vector = 'no vector'",
        "UPDATE passage SET vector = x'00', text = 'other' WHERE id = 1",
        *(f"UPDATE passage SET metadata = {more}" for more in ("'[1]'", "'{'", "x'00'")),
        f"UPDATE passage SET metadata = '{'[' * 100_000}'",
        "UPDATE passage SET passage_id = CAST(passage_id AS BLOB)",
        "DELETE FROM words_data",
        "UPDATE words_config SET v = 99",
        1 / 4,
        3 / 4,
    ],
)
def test_invalid_contents_are_reported_as_damage_and_mended(
    shipped, folder, embedder, alter, change
):
    if isinstance(change, float):  # a part of a file
        data = shipped.read_bytes()
        shipped.write_bytes(data[: int(len(data) * change)])
    else:
        alter(shipped, change)
    refusals, problems = [], []
    with Store(shipped) as store:
        for use in (
            lambda: Retriever(store, embedder).search("lamp oil"),
            lambda: index_folder(store, embedder, folder),
            store.files,
            store.left_out,
            lambda: [store.document(path) for path in store.files()],
            lambda: list(store.vectors()),
        ):
            refusals += refusal(use)
        refusals += refusal(lambda: problems.extend(store.check())) + problems
    assert any("--rebuild" in told or "passages" in told for told in refusals)
    assert mended(shipped, folder, embedder) == 3


def test_a_check_finds_silent_damage(indexed):
    with indexed.transaction():
        indexed.rows("UPDATE passage SET vector = x'00', text = 'other' WHERE id = 1")
    assert indexed.check() == [
        "1 passages have a vector of the wrong size",
        "the full-text search does not match the passages",
    ]


@pytest.mark.parametrize("beside", ["", ".lock", ".rebuilt", ".new", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("content", [b"", JUNK[1], "pipe", "link", "device"])
def test_a_rebuild_removes_whatever_lies_beside_the_index(
    shipped, folder, embedder, tmp_path, beside, content
):
    (tmp_path / "precious").write_text("keep")
    place = shipped.with_name(shipped.name + beside)
    place.unlink(missing_ok=True)
    if isinstance(content, bytes):
        place.write_bytes(content)
    elif content == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to("/dev/zero" if content == "device" else tmp_path / "precious")
    if beside in ("", ".lock") and isinstance(content, str) and (beside, content) != ("", "pipe"):
        with Store(shipped) as store, pytest.raises(StorageError, match=r"link|delete it"):
            index_folder(store, embedder, folder, rebuild=True)
    else:
        assert mended(shipped, folder, embedder) == 3
    assert (tmp_path / "precious").read_text() == "keep"


def test_a_journal_beside_an_index_is_not_played_back(shipped):
    """It may name a file of the user, which SQLite would delete."""
    shipped.with_name("index.db-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" * 99)
    with Store(shipped) as store, pytest.raises(IndexUnusableError, match="journal"):
        store.files()


def test_an_unfinished_rebuild_from_elsewhere_is_discarded(
    shipped, folder, embedder, alter, interrupted, monkeypatch
):
    monkeypatch.setattr("ragaccel.retrieval.indexing._BATCH_PASSAGES", 1)
    with Store(shipped) as store:
        rebuild = partial(index_folder, store, embedder, folder, rebuild=True)
        interrupted(rebuild, lambda p: p.stage == "reading" and p.files_done == 2)
    half = shipped.with_name(shipped.name + ".rebuilt")
    alter(half, "UPDATE passage SET text = 'INJECTED'; UPDATE words SET text = 'INJECTED'")
    packed = half.read_bytes()
    half.rename(half.with_name("elsewhere"))  # so that its number is not given to the next
    half.write_bytes(packed)
    assert mended(shipped, folder, embedder) == 3
    with Store(shipped) as store:
        assert not store.rows("SELECT * FROM passage WHERE text = 'INJECTED'")


@pytest.mark.parametrize("which", ["folder", "index"])
def test_an_index_behind_a_link_is_refused(folder, embedder, shipped, tmp_path, which):
    before, elsewhere = shipped.read_bytes(), tmp_path / "elsewhere"
    linked = shipped.parent if which == "folder" else shipped
    linked.rename(elsewhere)
    linked.symlink_to(elsewhere, target_is_directory=which == "folder")
    for use in (
        Store.files,
        lambda store: index_folder(store, embedder, folder),
        lambda store: index_folder(store, embedder, folder, rebuild=True),
    ):
        with Store(shipped) as store, pytest.raises(StorageError, match=r"link.*path=FILE"):
            use(store)
    assert shipped.read_bytes() == before


@pytest.mark.parametrize("kind", ["text", "database", "damaged"])
def test_files_of_others_are_left_alone(tmp_path, folder, embedder, kind):
    path = tmp_path / "precious"
    path.write_bytes(b"my notes " * 20 if kind == "text" else JUNK[1])
    if kind == "database":
        path.unlink()
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE meta (key)")
    before = path.read_bytes()
    uses = {
        Store.files: "not a ragaccel index|another program",
        lambda store: index_folder(store, embedder, folder): "not replaced",
        lambda store: index_folder(store, embedder, folder, rebuild=True): "not replaced",
        Store.discard: "not replaced",
        lambda store: Collection(store.path): "not a ragaccel index|another program",
        lambda store: Collection().copy_to(store.path): "not replaced",
    }
    for use, problem in uses.items():
        with Store(path) as store, pytest.raises(IndexUnusableError, match=problem):
            use(store)
    assert path.read_bytes() == before
    assert not list(tmp_path.glob("precious?*")), "nothing is left beside it"


def test_places_that_are_no_files_are_refused(tmp_path, folder, embedder):
    (tmp_path / "file").write_text("")
    for use, error, problem in (
        (lambda: Store(folder).files(), EmptyIndexError, "is a folder"),
        (lambda: index_folder(Store(folder), embedder, folder), StorageError, "is a folder"),
        (lambda: Collection(tmp_path / "file/c.db"), StorageError, "path=FILE"),
    ):
        with pytest.raises(error, match=problem):
            use()


def test_the_rebuilding_command_can_be_pasted(tmp_path):
    path, elsewhere = default_index_path(tmp_path / "my docs"), tmp_path / "x.db"
    of_set = tmp_path / ".ragaccel" / "set.tsv.db"
    for command, expected in (
        (index_command(path, rebuild=True), f"'{tmp_path}/my docs' --rebuild"),
        (index_command(path, folder=str(tmp_path / "my docs")), f"'{tmp_path}/my docs'"),
        (
            index_command(elsewhere, folder="/d", rebuild=True),
            f"/d --index {tmp_path}/x.db --rebuild",
        ),
        (index_command(elsewhere), f"FOLDER --index {tmp_path}/x.db"),
        (index_command(of_set, rebuild=True), f"--passages {tmp_path}/set.tsv --rebuild"),
        (
            index_command(elsewhere, collection="/s.tsv"),
            f"--passages /s.tsv --index {tmp_path}/x.db",
        ),
    ):
        assert command == f"ragaccel index {expected}"


# Rebuilds


def test_a_rebuilt_index_replaces_the_old_one_when_complete(indexed, embedder, folder, interrupted):
    rebuild = partial(index_folder, indexed, embedder, folder, rebuild=True)
    interrupted(rebuild, lambda p: p.stage == "embedding")
    assert indexed.count_passages() == 4
    assert rebuild().added == 3
    assert not list(indexed.path.parent.glob("*.rebuilt*"))
    interrupted(rebuild, lambda p: p.stage == "embedding")
    assert list(indexed.path.parent.glob("*.rebuilt"))
    indexed.discard()
    assert [path.name for path in indexed.path.parent.glob("index.db*")] == ["index.db.lock"]


def test_an_interrupted_rebuild_resumes_only_with_the_same_settings(
    indexed, embedder, folder, interrupted, monkeypatch
):
    monkeypatch.setattr("ragaccel.retrieval.indexing._BATCH_PASSAGES", 1)
    rebuild = partial(index_folder, indexed, embedder, folder, rebuild=True)

    def begin(**options):
        interrupted(partial(rebuild, **options), lambda p: p.files_done == 2)

    begin()
    rebuild()
    assert len(embedder.embedded) == len(set(embedder.embedded)) == 4, "nothing is embedded twice"
    begin()
    assert rebuild(passage_tokens=20).added == 3
    assert indexed.meta("passage_tokens") == "20"
    begin(exclude=["*.csv"])
    assert rebuild().passages == 4


def test_a_rebuild_without_room_leaves_the_old_index(indexed, embedder, folder):
    readers = []

    def read(progress):  # a reader of the new file keeps its log from being emptied
        if progress.stage == "done":
            readers.append(sqlite3.connect(f"{indexed.path}.rebuilt"))
            readers[0].execute("BEGIN")
            readers[0].execute("SELECT * FROM meta").fetchall()

    with pytest.raises(StorageError, match="the old index is unchanged"):
        index_folder(indexed, embedder, folder, rebuild=True, progress=read)
    readers[0].close()
    assert indexed.check() == []
    assert indexed.count_passages() == 4


def test_a_rebuild_waits_for_readers_of_the_old_index(indexed, embedder, folder, monkeypatch):
    monkeypatch.setattr("ragaccel.retrieval.store._WAIT_SECONDS", 0.05)
    indexed.close()
    indexed.leave_out(["x"])
    with closing(sqlite3.connect(indexed.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM meta").fetchall()
        indexed.leave_out(["y"])  # the log has more than the reader sees
        with pytest.raises(IndexBusyError, match="is reading"):
            index_folder(indexed, embedder, folder, rebuild=True)
    assert index_folder(indexed, embedder, folder, rebuild=True).embedded == 0


def test_a_moved_folder_is_rebuilt_where_it_is(shipped, embedder, folder):
    with Store(shipped) as store:
        store.set_meta("fingerprint", "another")
    moved = folder.rename(folder.with_name("moved docs"))
    with Store(default_index_path(moved)) as store:
        with pytest.raises(IndexUnusableError, match=r"`ragaccel index '.*moved docs' --rebuild`"):
            index_folder(store, embedder, moved)
        assert index_folder(store, embedder, moved, rebuild=True).warnings == []


def test_a_rebuilt_index_keeps_patterns_and_exclusions(store, embedder, folder, tmp_path):
    collection = tmp_path / "set.tsv"
    collection.write_text("p1\tone\n")
    index_passages(store, embedder, collection)
    index_folder(store, embedder, folder, exclude=["*.csv"])
    store.leave_out(["lamp.md"])
    store.set_meta("fingerprint", "another")
    report = index_folder(store, embedder, folder, rebuild=True)
    assert list(store.files()) == ["sub folder 🙂/boat.txt"]
    assert report.skip_reasons["taken out"] == 1
    assert [w for w in report.warnings if str(collection) in w]
    store.leave_out(["lamp.md"], undo=True)
    assert index_folder(store, embedder, folder).added == 1
    damaged = default_index_path(folder)
    damaged.parent.mkdir()
    damaged.write_bytes(JUNK[0])
    with Store(damaged) as broken:
        (warning,) = index_folder(broken, embedder, folder, rebuild=True).warnings
    assert "--exclude" in warning


# Disks


def test_a_full_disk_loses_nothing(indexed, embedder, folder):
    before = indexed.files()
    (pages,) = indexed.rows("PRAGMA page_count")[0]
    indexed.rows(f"PRAGMA max_page_count = {pages + 2}")
    for number in range(50):
        (folder / f"{number}.md").write_text(f"# {number}\n\n" + f"word{number} " * 100)
    with pytest.raises(StorageError, match="free some space"):
        index_folder(indexed, embedder, folder)
    indexed.close()
    assert indexed.files() == before
    assert indexed.check() == []
    assert index_folder(indexed, embedder, folder).added == 50


def test_an_index_on_a_read_only_place_is_read(indexed, monkeypatch):
    indexed.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    indexed.close()
    connect = sqlite3.connect

    def refuse(address, **options):
        if not options.get("uri"):
            raise sqlite3.OperationalError("unable to open database file")
        return connect(address, **options)

    monkeypatch.setattr(sqlite3, "connect", refuse)
    assert len(indexed.files()) == 3
    assert indexed.check() == []


# Who may read an index


def modes(place):
    beside = [path for path in place.parent.iterdir() if path.name.startswith(place.name)]
    return {stat.S_IMODE(path.stat().st_mode) for path in beside}


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_an_index_is_its_owners_alone_from_the_first_byte(folder, embedder, mask):
    place, seen = default_index_path(folder), []

    def look(progress):
        seen.append((modes(place), stat.S_IMODE(place.parent.stat().st_mode)))

    before = os.umask(mask)
    try:
        with Store(place) as store:
            index_folder(store, embedder, folder, progress=look)
            index_folder(store, embedder, folder, progress=look, rebuild=True)
            store.copy_to(place.with_name("index.db.copy"))
            look(None)
    finally:
        os.umask(before)
    assert all(seen == ({0o600}, 0o700) for seen in seen)


# Who may write to it


def test_only_one_writes_and_readers_go_on(indexed, embedder, folder):
    with Store(indexed.path) as second, indexed.writing():
        with pytest.raises(IndexBusyError, match="searching works meanwhile"):
            index_folder(second, embedder, folder)
        assert second.count_passages() == 4
    assert index_folder(indexed, embedder, folder).is_current


def test_a_transaction_of_another_program_is_reported(indexed, monkeypatch):
    monkeypatch.setattr("ragaccel.retrieval.store._WAIT_SECONDS", 0.05)
    indexed.close()
    busy = pytest.raises(IndexBusyError, match="another process is writing")
    with Store(indexed.path) as second, second.transaction(), busy:
        indexed.remove(["lamp.md"])
    assert indexed.remove(["lamp.md"]) == 1


def all_at_once(threads, hold):
    """Call a function from several threads at once and return their results."""
    start = Barrier(threads)

    def begin(_):
        start.wait(60)
        return hold()

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(begin, range(threads)))


@pytest.mark.parametrize("threads", [2, 8])
def test_of_threads_that_make_a_lock_at_once_exactly_one_holds_it(tmp_path, threads):
    for trial in range(10):
        place, end = tmp_path / f"{trial}.db", Barrier(threads)

        def hold(place=place, end=end):
            with Store(place) as store:
                try:
                    with store.writing():
                        end.wait(60)
                        return True
                except IndexBusyError:
                    end.wait(60)
                    return False

        assert sorted(all_at_once(threads, hold)) == [False] * (threads - 1) + [True]


def test_a_failed_attempt_to_lock_does_not_block_others(shipped):
    """Two processes that try at the same moment may block each other like this briefly."""
    with closing(sqlite3.connect(shipped.with_name("index.db.lock"))) as asking:
        asking.execute("BEGIN")
        asking.execute("SELECT * FROM sqlite_master").fetchall()
        with Store(shipped) as store, store.writing():
            pass
