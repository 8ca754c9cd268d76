"""Indexing a folder: the index matches the folder, and only new text is embedded."""

import functools
import os
import shutil
import stat

import pytest
from hash_embedder import HashEmbedder

from ragaccel import default_index_path
from ragaccel.errors import ConfigurationError, IndexUnusableError
from ragaccel.retrieval import Retriever, Store, index_folder
from ragaccel.retrieval.loaders import DocumentReader


def contents(store):
    return {
        path: [(p.passage_id, p.title, p.text) for p in store.passages_of(path)]
        for path in store.files()
    }


def is_reading(progress):
    return progress.stage == "reading"


@pytest.fixture
def small_batches(monkeypatch):
    for name, number in (("_BATCH_PASSAGES", 3), ("_EMBED_BATCH", 4), ("_SORT_WINDOW", 8)):
        monkeypatch.setattr(f"ragaccel.retrieval.indexing.{name}", number)


def test_first_run_indexes_everything(store, embedder, folder):
    report = index_folder(store, embedder, folder)
    assert (report.added, report.changed, report.removed, report.unchanged) == (3, 0, 0, 0)
    assert report.passages == report.embedded == len(embedder.embedded) == 4
    assert set(contents(store)) == {"lamp.md", "sub folder 🙂/boat.txt", "table.csv"}
    assert "Lamp > Wick\nThe wick is cotton." in embedder.embedded
    assert store.meta("folder") == str(folder)
    assert store.check() == []


def test_a_folder_is_indexed_into_memory(embedder, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Store() as store:
        assert index_folder(store, embedder, folder).added == 3
        assert index_folder(store, embedder, folder).is_current
        assert "Petrel" in Retriever(store, embedder).search("the boat", 1)[0].text
        for change in (
            lambda: index_folder(store, embedder, folder, rebuild=True),
            store.discard,
        ):
            with pytest.raises(ConfigurationError, match="in memory has no file"):
                change()
        assert store.check() == []
    assert list(tmp_path.iterdir()) == [folder]


def test_an_unchanged_folder_costs_no_embedding_and_no_writing(indexed, embedder, folder):
    embedder.embed_documents = embedder.count_tokens = None
    changed_at = indexed.path.stat().st_mtime_ns, indexed.state()
    report = index_folder(indexed, embedder, folder)
    assert report.is_current
    assert report.unchanged == 3
    assert (indexed.path.stat().st_mtime_ns, indexed.state()) == changed_at
    os.utime(folder / "lamp.md", ns=(1, 1))  # touched: known by its hash
    report = index_folder(indexed, HashEmbedder(), folder)
    assert (report.changed, report.unchanged, report.embedded) == (0, 3, 0)
    assert indexed.files()["lamp.md"].mtime_ns == 1


def test_only_new_passages_of_a_changed_file_are_embedded(indexed, embedder, folder):
    kept = indexed.passages_of("lamp.md")[0]
    text = (folder / "lamp.md").read_text().replace("cotton", "linen")
    (folder / "lamp.md").write_text(text)
    report = index_folder(indexed, embedder, folder)
    assert (report.changed, report.embedded, report.passages) == (1, 1, 4)
    assert embedder.embedded == ["Lamp > Wick\nThe wick is linen."]
    assert indexed.passages_of("lamp.md")[0] == kept
    (folder / "lamp.md").rename(folder / "light.md")
    report = index_folder(indexed, embedder, folder)
    assert (report.added, report.removed) == (1, 1)


def test_another_folders_files_are_not_known_by_their_times(
    store, embedder, folder, tmp_path, interrupted
):
    other = tmp_path / "other"
    shutil.copytree(folder, other)  # with its times
    for root in (other, folder):
        (root / "lamp.md").write_text(f"# Lamp\n\nThis is of {root.name:>9}.\n")
        os.utime(root / "lamp.md", ns=(7, 7))
    index_folder(store, embedder, folder)
    for root in (other, folder, other):
        interrupted(functools.partial(index_folder, store, embedder, root), is_reading)
    index_folder(store, embedder, other)
    assert [passage.text for passage in store.passages_of("lamp.md")] == ["This is of     other."]
    assert index_folder(store, embedder, other).is_current
    (warning,) = index_folder(store, embedder, folder).warnings
    assert f"was made from {other}" in warning
    assert [passage.text for passage in store.passages_of("lamp.md")] == ["This is of      docs."]


def test_vanished_and_newly_excluded_files_are_removed(indexed, embedder, folder):
    (folder / "table.csv").unlink()
    assert index_folder(indexed, embedder, folder, exclude=["lamp.md"]).removed == 2
    assert set(indexed.files()) == {"sub folder 🙂/boat.txt"}
    report = index_folder(indexed, embedder, folder)  # the exclusion is remembered
    assert report.is_current
    assert index_folder(indexed, embedder, folder, include=["*.md"], exclude=["x"]).added == 1


def test_the_index_equals_one_made_from_nothing(indexed, embedder, folder, tmp_path):
    (folder / "lamp.md").write_text("# New\n\nAll is new.\n")
    (folder / "more.rst").write_text("More\n====\n\nText.\n")
    (folder / "table.csv").unlink()
    index_folder(indexed, embedder, folder)
    with Store(tmp_path / "fresh.db") as fresh:
        index_folder(fresh, embedder, folder)
        assert contents(fresh) == contents(indexed)
    assert indexed.check() == []


# Files that are not read


def test_failures_are_reported_and_keep_what_was_indexed(store, embedder, folder):
    (folder / "broken.pdf").write_bytes(b"%PDF-1.7 broken")
    (folder / "noise.dat").write_bytes(bytes(range(256)) * 8)
    report = index_folder(store, embedder, folder, max_file_bytes=1_000_000)
    assert set(report.failed) == {"broken.pdf"}
    assert report.skip_reasons == {"binary": 1}
    assert report.added == 3
    (folder / "lamp.md").write_bytes(b"x" * 2000)
    again = index_folder(store, embedder, folder, max_file_bytes=1000)
    assert "over the limit" in again.failed["lamp.md"]
    assert again.skipped == 1
    assert len(store.passages_of("lamp.md")) == 2
    with (folder / "huge.txt").open("wb") as file:
        file.truncate(200_000_000)  # sparse: nothing is written, nothing may be read
    report = index_folder(store, embedder, folder)
    assert report.failed["huge.txt"].startswith("200 MB is over the limit of 50 MB")


def test_no_permission_to_a_file_or_a_folder(indexed, embedder, folder, monkeypatch):
    (folder / "lamp.md").write_text("changed")
    scandir, open_ = os.scandir, os.open

    def refuse(name, allowed):
        def run(path, *arguments, **options):
            if name in str(path):
                raise PermissionError(13, "Permission denied")
            return allowed(path, *arguments, **options)

        return run

    monkeypatch.setattr(os, "scandir", refuse("sub folder", scandir))
    monkeypatch.setattr(os, "open", refuse("lamp.md", open_))
    report = index_folder(indexed, embedder, folder)
    assert report.failed == {
        "sub folder 🙂": "no permission to read the folder",
        "lamp.md": "no permission to read it",
    }
    assert report.removed == 0
    assert len(indexed.files()) == 3


@pytest.mark.parametrize("kind", ["pipe", "device", "link", "folder behind a link"])
def test_what_is_swapped_in_after_the_listing_is_not_read(store, embedder, folder, tmp_path, kind):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "boat.txt").write_text("a secret text.")
    boat = folder / "sub folder 🙂/boat.txt"

    def swap(progress):
        if not is_reading(progress) or boat.parent.is_symlink() or not boat.exists():
            return
        if stat.S_ISREG(boat.lstat().st_mode):
            boat.unlink()
            if kind == "pipe":
                os.mkfifo(boat)
            elif kind == "folder behind a link":
                boat.parent.rmdir()
                boat.parent.symlink_to(secret, target_is_directory=True)
            else:
                boat.symlink_to("/dev/zero" if kind == "device" else secret / "boat.txt")

    report = index_folder(store, embedder, folder, progress=swap)
    assert "cannot be read" in report.failed["sub folder 🙂/boat.txt"]
    assert report.added == 2
    assert not any("secret" in text for text in embedder.embedded)


def test_links_out_are_reported_once_and_followed_only_on_demand(store, embedder, folder, tmp_path):
    (tmp_path / "passwd").write_text("root is the first.")
    (folder / "notes.txt").symlink_to(tmp_path / "passwd")
    first = index_folder(store, embedder, folder)
    assert "--follow-links" in first.passed_over["notes.txt"]
    assert "notes.txt" not in first.reported_before
    assert "notes.txt" in index_folder(store, embedder, folder).reported_before
    assert index_folder(store, embedder, folder, follow_links=True).added == 1
    assert "root" in store.passages_of("notes.txt")[0].text
    assert index_folder(store, embedder, folder).removed == 1


def test_an_index_among_the_documents_is_no_document(embedder, folder):
    with Store(folder / "my.db") as store:
        index_folder(store, embedder, folder)
        assert index_folder(store, embedder, folder).is_current
        assert sorted(store.files()) == ["lamp.md", "sub folder 🙂/boat.txt", "table.csv"]


@pytest.mark.slow
def test_files_that_ask_for_too_much_are_named_and_the_others_indexed(
    store, embedder, folder, monkeypatch
):
    (folder / "slow.csv").write_text("a,b\n" + "1,2\n" * 1_500_000)
    (folder / "parts.md").write_text("# a\n\nx\n\n" * 2_000)
    (folder / "page.html").write_text("<p>A page.</p>")
    bounded = functools.partial(DocumentReader, 1)
    monkeypatch.setattr("ragaccel.retrieval.indexing.DocumentReader", bounded)
    monkeypatch.setattr("ragaccel.retrieval.chunking.MAX_PASSAGES", 1_000)
    report = index_folder(store, embedder, folder)
    assert report.added == 4
    assert report.failed == {
        "parts.md": "has more than 1,000 passages: split the file",
        "slow.csv": "takes more than 1 s to read",
    }
    assert {"page.html", "lamp.md"} <= set(contents(store))


# Settings


def test_an_empty_folder_and_no_folder(store, embedder, tmp_path):
    (tmp_path / "empty").mkdir()
    assert index_folder(store, embedder, tmp_path / "empty").passages == 0
    for place, problem in ((tmp_path / "missing", "does not exist"), (store.path, "is a file")):
        with pytest.raises(ConfigurationError, match=problem):
            index_folder(store, embedder, place)


def test_another_embedder_is_refused_until_rebuilt(shipped, folder):
    other = HashEmbedder("another")
    assert shipped == default_index_path(folder)
    with Store(shipped) as store:
        with pytest.raises(IndexUnusableError, match=r"ragaccel index .*docs --rebuild"):
            index_folder(store, other, folder)
        assert index_folder(store, other, folder, rebuild=True).added == 3
        assert index_folder(store, other, folder).is_current


def test_another_passage_size_is_refused(store, embedder, folder):
    index_folder(store, embedder, folder, passage_tokens=4)
    assert index_folder(store, embedder, folder).is_current
    with pytest.raises(IndexUnusableError, match="passages of 4 tokens"):
        index_folder(store, embedder, folder, passage_tokens=5)
    for tokens in (0, 172):
        with pytest.raises(ConfigurationError, match="choose 1 to 171"):
            index_folder(store, embedder, folder, passage_tokens=tokens)


def test_passages_beyond_the_embedders_limit_are_warned_of(store, embedder, folder):
    embedder.max_tokens = 3
    report = index_folder(store, embedder, folder)
    assert "longer than the 3 tokens" in report.warnings[0]


# Batches, interruptions and large files: their vectors are staged, searches find them when complete


NUM_PARTS = 40


@pytest.fixture
def docs(tmp_path):
    root = tmp_path / "large"
    root.mkdir()
    write(root, "buoy")
    (root / "zebra.txt").write_text("A zebra is small here.\n")
    return root


def write(root, word, number=NUM_PARTS):
    parts = (f"# Part {n}\n\nHere is {word} number {n}.\n" for n in range(number))
    (root / "atlas.md").write_text("\n".join(parts))


def staged(store):
    return {row[0] for row in store.rows("SELECT text_hash FROM staged")}


@pytest.fixture
def stopped(store, embedder, docs, interrupted, small_batches):
    """Index the large folder until a number of passages is embedded."""

    def run(number, **options):
        work = functools.partial(index_folder, store, embedder, docs, **options)
        interrupted(work, lambda p: p.stage == "embedding" and p.passages_done >= number)

    return run


def assert_as_made_at_once(store, docs, tmp_path):
    def all_of(store):
        packed = store.rows("SELECT passage_id, text, vector FROM passage ORDER BY passage_id")
        return packed, sorted(store.files().items())

    assert store.check() == []
    assert staged(store) == set()
    with Store(tmp_path / "clean.db") as clean:
        index_folder(clean, HashEmbedder(), docs)
        assert all_of(clean) == all_of(store)


def test_progress_and_batches(store, embedder, folder, monkeypatch):
    monkeypatch.setattr("ragaccel.retrieval.indexing._BATCH_PASSAGES", 1)
    told = []
    index_folder(store, embedder, folder, progress=told.append)
    assert told[0].stage == "scanning"
    last = told[-1]
    assert (last.stage, last.files_done, last.files_total) == ("done", 3, 3)
    assert (last.passages_done, last.passages_total) == (4, 4)
    assert {"reading", "embedding"} < {progress.stage for progress in told}
    assert all(p.passages_done <= p.passages_total for p in told)


def test_an_interruption_keeps_finished_batches(store, embedder, folder, interrupted, monkeypatch):
    monkeypatch.setattr("ragaccel.retrieval.indexing._BATCH_PASSAGES", 1)
    run = functools.partial(index_folder, store, embedder, folder)
    interrupted(run, lambda p: is_reading(p) and p.files_done == 2)
    assert len(store.files()) == 2
    assert store.check() == []
    assert run().added == 1


def test_an_error_inside_a_batch_rolls_it_back(store, embedder, folder, monkeypatch):
    def fail(*_):
        raise RuntimeError("simulated")

    monkeypatch.setattr(store, "put_passages", fail)
    with pytest.raises(RuntimeError):
        index_folder(store, embedder, folder)
    assert store.files() == {}


def test_an_interrupted_large_file_resumes(store, embedder, docs, tmp_path, stopped):
    for moment in (14, 27):
        stopped(moment)
        assert set(store.files()) == {"zebra.txt"}, "the small file came first"
        found = Retriever(store, embedder).search("buoy number 3", 50)
        assert {passage.path for passage in found} == {"zebra.txt"}
    kept = len(staged(store))
    assert kept >= 24
    embedder.embedded.clear()
    told = []
    report = index_folder(store, embedder, docs, progress=told.append)
    assert report.embedded == len(embedder.embedded) == NUM_PARTS - kept
    assert_as_made_at_once(store, docs, tmp_path)
    shares = [(p.work_done, p.work_total) for p in told if p.stage == "embedding"]
    assert shares[0][0] == 0, "what was embedded before is no work of this run"
    assert all(done <= total for done, total in shares)
    assert [done for done, _ in shares] == sorted(done for done, _ in shares)
    assert told[-1].work_done == pytest.approx(told[-1].work_total)
    assert told[-1].work_done < (docs / "atlas.md").stat().st_size


def test_staged_vectors_of_text_that_changed_meanwhile_are_dropped(store, docs, tmp_path, stopped):
    stopped(20)
    before = staged(store)
    write(docs, "wreck")
    stopped(8)
    assert staged(store)
    assert not before & staged(store)
    index_folder(store, HashEmbedder(), docs)
    assert_as_made_at_once(store, docs, tmp_path)


@pytest.mark.parametrize("fate", [None, "Short.", bytes(range(256))])
def test_nothing_stays_staged_of_a_file_that_is_no_longer_to_come(
    store, embedder, docs, tmp_path, stopped, fate
):
    stopped(20)
    (docs / "atlas.md").unlink()
    if fate is not None:
        (docs / "atlas.md").write_bytes(fate if isinstance(fate, bytes) else fate.encode())
    index_folder(store, embedder, docs)
    assert_as_made_at_once(store, docs, tmp_path)


def test_readers_see_the_old_version_until_the_new_one_is_whole(
    store, embedder, docs, tmp_path, stopped
):
    index_folder(store, embedder, docs)
    old = store.passages_of("atlas.md")
    write(docs, "lighthouse")
    stopped(20)
    assert staged(store)
    assert store.passages_of("atlas.md") == old
    seen = set()

    def look(progress):
        if progress.stage == "embedding":
            with Store(store.path) as reader:
                found = Retriever(reader, HashEmbedder()).search("number 3", 99)
                seen.add(sum("buoy" in passage.text for passage in found))
                seen.add(sum("lighthouse" in passage.text for passage in found))

    index_folder(store, embedder, docs, progress=look)
    assert seen == {NUM_PARTS, 0}
    assert_as_made_at_once(store, docs, tmp_path)


def test_a_rebuild_resumes_inside_a_large_file(store, embedder, docs, tmp_path, stopped):
    index_folder(store, embedder, docs)
    stopped(20, rebuild=True)
    assert len(store.passages_of("atlas.md")) == NUM_PARTS
    report = index_folder(store, embedder, docs, rebuild=True)
    assert 0 < report.embedded < NUM_PARTS
    assert_as_made_at_once(store, docs, tmp_path)
