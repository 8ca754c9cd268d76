"""An untrusted index: nothing in it runs, and files beside it have no effect."""

import os
import sqlite3
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Barrier

import pytest

from ragaccel import default_index_path
from ragaccel.errors import IndexBusyError, IndexUnusableError, RagaccelError, StorageError
from ragaccel.retrieval import Collection, Retriever, Store, index_folder


@pytest.fixture
def shipped(folder, embedder):
    """A folder with an index from somebody else."""
    place = default_index_path(folder)
    with Store(place) as store:
        index_folder(store, embedder, folder)
    return place


def alter(place, script):
    connection = sqlite3.connect(place, isolation_level=None)
    connection.execute("PRAGMA writable_schema = ON")
    connection.executescript(script)
    connection.close()


def mended(place, folder, embedder):
    with Store(place) as store:
        report = index_folder(store, embedder, folder, rebuild=True)
        assert store.check() == []
        return report.added


@pytest.mark.parametrize(
    "script",
    [
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
    ],
)
def test_a_schema_with_anything_else_in_it_is_refused_and_made_anew(
    shipped, folder, embedder, script
):
    alter(shipped, script)
    (folder / "new.md").write_text("a new text.")
    with Store(shipped) as store:
        with pytest.raises(IndexUnusableError, match="--rebuild"):
            index_folder(store, embedder, folder)
        with pytest.raises(IndexUnusableError, match="--rebuild"):
            Retriever(store, embedder).search("lamp")
    assert mended(shipped, folder, embedder) == 4


def test_comments_and_spaces_in_a_schema_mean_nothing(shipped, folder, embedder):
    alter(
        shipped,
        "UPDATE sqlite_master SET sql = replace(sql, 'kind TEXT', 'kind  /* its */ TEXT -- x\n')",
    )
    with Store(shipped) as store:
        assert index_folder(store, embedder, folder).is_current


def refused(use):
    """Return whether one of our errors is raised; any other fails the test."""
    try:
        use()
    except RagaccelError:
        return True
    return False


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
        "UPDATE passage SET passage_id = CAST(passage_id AS BLOB)",
        "DELETE FROM words_data",
        "UPDATE words_config SET v = 99",
    ],
)
def test_invalid_contents_are_reported_as_damage(shipped, folder, embedder, change):
    alter(shipped, change)
    with Store(shipped) as store:
        uses = (
            lambda: Retriever(store, embedder).search("lamp oil"),
            lambda: index_folder(store, embedder, folder),
            store.files,
            store.left_out,
            lambda: [store.passages_of(path) for path in store.files()],
            lambda: list(store.vectors()),
            store.check,
        )
        refusals = [refused(use) for use in uses]
    assert any(refusals)
    assert mended(shipped, folder, embedder) == 3


def test_metadata_of_another_kind_is_damage(tmp_path, embedder):
    from ragaccel.passage import Passage

    with Collection(tmp_path / "kept.db") as kept:
        kept.put([Passage("a", "text")], embedder.embed_documents(["text"]), [{"n": 1}])
    for written in ("'[1]'", "'{'", "x'00'", f"'{'[' * 100_000}'"):
        alter(tmp_path / "kept.db", f"UPDATE passage SET metadata = {written}")
        with (
            Collection(tmp_path / "kept.db") as kept,
            pytest.raises(IndexUnusableError, match="metadata"),
        ):
            kept.get(["a"])


@pytest.mark.parametrize("beside", ["", ".lock", ".rebuilt", ".new", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("content", [b"", b"no database" * 999, b"SQLite format 3\0" + b"x" * 9999])
def test_a_rebuild_removes_any_file_beside_the_index(shipped, folder, embedder, beside, content):
    shipped.with_name(shipped.name + beside).write_bytes(content)
    assert mended(shipped, folder, embedder) == 3
    with Store(shipped) as store:
        assert index_folder(store, embedder, folder).is_current


@pytest.mark.parametrize("beside", [".rebuilt", ".new", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("kind", ["pipe", "link", "device"])
def test_a_rebuild_removes_pipes_and_links_beside_the_index(
    shipped, folder, embedder, tmp_path, beside, kind
):
    (tmp_path / "precious").write_text("keep")
    place = shipped.with_name(shipped.name + beside)
    place.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to("/dev/zero" if kind == "device" else tmp_path / "precious")
    assert mended(shipped, folder, embedder) == 3
    assert (tmp_path / "precious").read_text() == "keep"


def test_an_unfinished_rebuild_from_elsewhere_is_discarded(shipped, folder, embedder):
    def interrupt(progress):
        if progress.stage == "reading" and progress.files_done == 2:
            raise KeyboardInterrupt

    with Store(shipped) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr("ragaccel.retrieval.indexing._BATCH_PASSAGES", 1)
        with pytest.raises(KeyboardInterrupt):
            index_folder(store, embedder, folder, rebuild=True, progress=interrupt)
    half = shipped.with_name(shipped.name + ".rebuilt")
    alter(half, "UPDATE passage SET text = 'INJECTED'; UPDATE words SET text = 'INJECTED'")
    packed = half.read_bytes()
    half.rename(half.with_name("elsewhere"))  # so that its number is not given to the next
    half.write_bytes(packed)
    with Store(shipped) as store:
        assert index_folder(store, embedder, folder, rebuild=True).added == 3
        assert not store.rows("SELECT * FROM passage WHERE text = 'INJECTED'")


def test_a_journal_beside_an_index_is_not_played_back(shipped, folder, embedder, tmp_path):
    """It may name a file of the user, which SQLite would delete."""
    shipped.with_name("index.db-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" * 99)
    with Store(shipped) as store, pytest.raises(IndexUnusableError, match="journal"):
        store.files()
    assert mended(shipped, folder, embedder) == 3
    assert not shipped.with_name("index.db-journal").exists()


@pytest.mark.parametrize("which", ["folder", "index"])
def test_an_index_behind_a_link_is_refused(folder, embedder, tmp_path, which):
    other = tmp_path / "other"
    (other / "docs").mkdir(parents=True)
    (other / "docs/mine.md").write_text("my own text.")
    theirs = default_index_path(other / "docs")
    with Store(theirs) as store:
        index_folder(store, embedder, other / "docs")
    before = theirs.read_bytes()
    place = default_index_path(folder)
    if which == "folder":
        place.parent.symlink_to(theirs.parent, target_is_directory=True)
    else:
        place.parent.mkdir()
        place.symlink_to(theirs)
    for rebuild in (False, True):
        with Store(place) as store, pytest.raises(StorageError, match="link"):
            index_folder(store, embedder, folder, rebuild=rebuild)
    with Store(place) as store, pytest.raises(StorageError, match=r"link.*--index"):
        store.files()
    assert theirs.read_bytes() == before


def test_a_lock_that_is_a_link_is_refused(shipped, folder, embedder, tmp_path):
    lock = shipped.with_name("index.db.lock")
    lock.unlink(missing_ok=True)
    (tmp_path / "precious").write_text("keep")
    lock.symlink_to(tmp_path / "precious")
    with Store(shipped) as store, pytest.raises(StorageError, match="delete it"):
        index_folder(store, embedder, folder)
    assert (tmp_path / "precious").read_text() == "keep"


# Who may read an index


def modes(place):
    beside = [path for path in place.parent.iterdir() if path.name.startswith(place.name)]
    return {stat.S_IMODE(path.stat().st_mode) for path in beside}


@pytest.fixture(params=[0o000, 0o022, 0o077])
def _mask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_mask")
def test_an_index_is_its_owners_alone_from_the_first_byte(folder, embedder, monkeypatch):
    place = default_index_path(folder)
    seen = []

    def look(progress):
        seen.append((modes(place), stat.S_IMODE(place.parent.stat().st_mode)))

    with Store(place) as store:
        index_folder(store, embedder, folder, progress=look)
        index_folder(store, embedder, folder, progress=look, rebuild=True)
        store.copy_to(place.with_name("index.db.copy"))
        look(None)
    assert all(seen == ({0o600}, 0o700) for seen in seen)


def test_an_index_is_shared_where_that_is_asked_for(folder, embedder):
    place = default_index_path(folder)
    before = os.umask(0o022)
    try:
        with Store(place) as store:
            index_folder(store, embedder, folder)
        with Store(place, shared=True) as store:
            index_folder(store, embedder, folder)
            assert (modes(place), stat.S_IMODE(place.parent.stat().st_mode)) == ({0o644}, 0o755)
        with Store(place) as store:  # a shared index stays shared until it is rebuilt
            index_folder(store, embedder, folder)
            store.files()
            assert modes(place) == {0o644}
            index_folder(store, embedder, folder, rebuild=True)
            assert stat.S_IMODE(place.stat().st_mode) == 0o600
            assert mended(place, folder, embedder) == 3
        with Store(place, shared=True) as store:
            index_folder(store, embedder, folder, rebuild=True)
            assert stat.S_IMODE(place.stat().st_mode) == 0o644
    finally:
        os.umask(before)


# Who may write to it


def all_at_once(threads, hold):
    """Call a function from several threads at once and return their results."""
    start = Barrier(threads)

    def begin(_):
        start.wait(60)
        return hold()

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(begin, range(threads)))


@pytest.mark.parametrize("threads", [2, 8])
def test_of_threads_that_make_a_lock_at_once_exactly_one_holds_it(folder, embedder, threads):
    place = default_index_path(folder)
    for _ in range(10):
        for path in place.parent.glob("*"):
            path.unlink()
        end = Barrier(threads)

        def hold(end=end):
            with Store(place) as store:
                try:
                    with store.writing():
                        end.wait(60)
                        return True
                except IndexBusyError:
                    end.wait(60)
                    return False

        assert sorted(all_at_once(threads, hold)) == [False] * (threads - 1) + [True]
        with Store(place) as store, store.writing():
            pass


def test_threads_that_wait_for_a_lock_hold_it_one_after_another(folder, embedder):
    place = default_index_path(folder)
    holding = []

    def hold():
        with Store(place) as store, store.writing(wait_seconds=60):
            holding.append(None)
            alone = len(holding) == 1
            time.sleep(0.01)
            holding.pop()
            return alone

    assert all_at_once(8, hold) == [True] * 8


def test_a_failed_attempt_to_lock_does_not_block_others(shipped):
    """Two processes that try at the same moment may block each other like this briefly."""
    with closing(sqlite3.connect(shipped.with_name("index.db.lock"))) as asking:
        asking.execute("BEGIN")
        asking.execute("SELECT * FROM sqlite_master").fetchall()
        with Store(shipped) as store, store.writing():
            pass
