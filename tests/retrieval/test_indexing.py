"""Indexing folders and files of passages: the index matches them, only new text is embedded."""

import functools
import json
import os
import shutil
import stat
from functools import partial

import pytest
from hash_embedder import HashEmbedder

from ragaccel.errors import ConfigurationError, DocumentError, IndexUnusableError
from ragaccel.retrieval import (
    Retriever,
    Store,
    index_folder,
    index_passages,
    read_passages,
    scan_passages,
)


def passages(store, path):
    return [item.passage for item in store.document(path)]


def staged(store):
    return {row[0] for row in store.rows("SELECT text_hash FROM staged")}


def assert_as_made_at_once(store, docs, tmp_path, **options):
    def all_of(store):
        packed = store.rows("SELECT passage_id, text, vector FROM passage ORDER BY passage_id")
        return packed, sorted(store.files().items())

    assert store.check() == []
    assert staged(store) == set()
    with Store(tmp_path / "clean.db") as clean:
        index_folder(clean, HashEmbedder(), docs, **options)
        assert all_of(clean) == all_of(store)


def is_reading(progress):
    return progress.stage == "reading"


@pytest.fixture
def small_batches(monkeypatch):
    for name, number in (("_BATCH_PASSAGES", 3), ("_SORT_WINDOW", 8)):
        monkeypatch.setattr(f"ragaccel.retrieval.indexing.{name}", number)


def test_first_run_indexes_everything(store, embedder, folder):
    told = []
    report = index_folder(store, embedder, folder, progress=told.append)
    assert (report.added, report.changed, report.removed, report.unchanged) == (3, 0, 0, 0)
    assert report.passages == report.embedded == len(embedder.embedded) == 4
    assert set(store.files()) == {"lamp.md", "sub folder 🙂/boat.txt", "table.csv"}
    assert "Lamp > Wick\nThe wick is cotton." in embedder.embedded
    assert store.check() == []
    last = told[-1]
    assert (told[0].stage, last.stage) == ("scanning", "done")
    assert (last.files_done, last.files_total) == (3, 3)
    assert (last.passages_done, last.passages_total) == (4, 4)
    assert {"reading", "embedding"} < {progress.stage for progress in told}
    assert all(p.passages_done <= p.passages_total for p in told)


def test_a_folder_is_indexed_into_memory(embedder, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Store() as store:
        assert index_folder(store, embedder, folder).added == 3
        assert index_folder(store, embedder, folder).is_current
        assert "Petrel" in Retriever(store, embedder).search("the boat", 1)[0].text
        for change in (lambda: index_folder(store, embedder, folder, rebuild=True), store.discard):
            with pytest.raises(ConfigurationError, match="in memory has no file"):
                change()
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
    kept = passages(indexed, "lamp.md")[0]
    text = (folder / "lamp.md").read_text().replace("cotton", "linen")
    (folder / "lamp.md").write_text(text)
    report = index_folder(indexed, embedder, folder)
    assert (report.changed, report.embedded, report.passages) == (1, 1, 4)
    assert embedder.embedded == ["Lamp > Wick\nThe wick is linen."]
    assert passages(indexed, "lamp.md")[0] == kept
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
    assert [passage.text for passage in passages(store, "lamp.md")] == ["This is of     other."]
    assert index_folder(store, embedder, other).is_current
    (warning,) = index_folder(store, embedder, folder).warnings
    assert f"was made from {other}" in warning
    assert [passage.text for passage in passages(store, "lamp.md")] == ["This is of      docs."]


def test_vanished_and_newly_excluded_files_are_removed(indexed, embedder, folder, tmp_path):
    (folder / "table.csv").unlink()
    assert index_folder(indexed, embedder, folder, exclude=["lamp.md"]).removed == 2
    assert set(indexed.files()) == {"sub folder 🙂/boat.txt"}
    assert index_folder(indexed, embedder, folder).is_current, "the exclusion is remembered"
    assert index_folder(indexed, embedder, folder, include=["*.md"], exclude=["x"]).added == 1
    (folder / "lamp.md").write_text("# New\n\nAll is new.\n")
    (folder / "more.md").write_text("More\n====\n\nText.\n")
    index_folder(indexed, embedder, folder)
    assert_as_made_at_once(indexed, folder, tmp_path, include=["*.md"], exclude=["x"])


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
    assert len(passages(store, "lamp.md")) == 2


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


def test_an_index_among_the_documents_is_no_document(embedder, folder):
    with Store(folder / "my.db") as store:
        index_folder(store, embedder, folder)
        assert index_folder(store, embedder, folder).is_current
        assert sorted(store.files()) == ["lamp.md", "sub folder 🙂/boat.txt", "table.csv"]


# Settings


def test_another_passage_size_or_no_folder_is_refused(store, embedder, folder, tmp_path):
    for place, problem in ((tmp_path / "missing", "does not exist"), (__file__, "is a file")):
        with pytest.raises(ConfigurationError, match=problem):
            index_folder(store, embedder, place)
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


@pytest.fixture
def stopped(store, embedder, docs, interrupted, small_batches):
    """Index the large folder until a number of passages is embedded."""

    def run(number, **options):
        work = functools.partial(index_folder, store, embedder, docs, **options)
        interrupted(work, lambda p: p.stage == "embedding" and p.passages_done >= number)

    return run


def test_an_interruption_keeps_finished_batches(store, embedder, folder, interrupted, monkeypatch):
    monkeypatch.setattr("ragaccel.retrieval.indexing._BATCH_PASSAGES", 1)
    run = functools.partial(index_folder, store, embedder, folder)
    interrupted(run, lambda p: is_reading(p) and p.files_done == 2)
    assert len(store.files()) == 2
    assert store.check() == []
    assert run().added == 1


def test_an_interrupted_large_file_resumes(store, embedder, docs, tmp_path, stopped):
    for moment in (14, 27):
        stopped(moment)
        assert set(store.files()) == {"zebra.txt"}, "the small file came first"
        assert len(Retriever(store, embedder).search("buoy number 3", 50)) == 1
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


@pytest.mark.usefixtures("small_batches")
def test_a_run_stops_when_its_time_is_over_and_the_next_one_goes_on(store, docs, tmp_path):
    report = index_folder(store, HashEmbedder(), docs, max_seconds=0.0)
    assert (report.added, report.files_left) == (1, 1)
    assert report.seconds_left > 0
    assert set(store.files()) == {"zebra.txt"}
    num_embedded = [report.embedded - 1]
    while report.files_left:
        embedder = HashEmbedder()
        report = index_folder(store, embedder, docs, max_seconds=0.0)
        num_embedded.append(len(embedder.embedded))
    assert min(num_embedded[1:]) > 0, "every run gets on, however short"
    assert len(num_embedded) > 5
    assert sum(num_embedded) == NUM_PARTS
    assert_as_made_at_once(store, docs, tmp_path)
    with pytest.raises(ConfigurationError, match="a rebuild cannot stop early"):
        index_folder(store, HashEmbedder(), docs, max_seconds=1.0, rebuild=True)


@pytest.mark.usefixtures("small_batches")
def test_a_large_file_is_embedded_while_it_is_split(store, embedder, docs):
    told = []
    index_folder(store, embedder, docs, progress=told.append)
    totals = [p.passages_total for p in told if p.stage == "embedding" and p.path == "atlas.md"]
    assert totals[0] < NUM_PARTS / 2
    assert totals[-1] > NUM_PARTS


def test_a_collection_stops_when_its_time_is_over(store, embedder, collection, monkeypatch):
    monkeypatch.setattr("ragaccel.retrieval.indexing._BATCH_PASSAGES", 3)
    left = [index_passages(store, embedder, collection, max_seconds=0.0) for _ in range(4)]
    assert [report.passages for report in left] == [3, 6, 9, 10]
    assert [report.files_left for report in left] == [1, 1, 1, 0]


def test_staged_vectors_of_text_that_changed_meanwhile_are_dropped(store, docs, tmp_path, stopped):
    stopped(20)
    before = staged(store)
    write(docs, "wreck")
    stopped(8)
    assert before < staged(store)
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
    old = passages(store, "atlas.md")
    write(docs, "lighthouse")
    stopped(20)
    assert staged(store)
    assert passages(store, "atlas.md") == old
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
    stopped(20, rebuild=True)
    assert 0 < index_folder(store, embedder, docs, rebuild=True).embedded < NUM_PARTS
    assert_as_made_at_once(store, docs, tmp_path)


def write_lines(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def collection(tmp_path):
    return write_lines(tmp_path / "c.tsv", [f"{i}\tPassage {i} about thing{i}." for i in range(10)])


def test_tsv_and_json_lines_are_kept_exactly(tmp_path):
    long = "Word. " * 500 + "with\ttab \u2029 and \x85 separators"
    tsv = write_lines(tmp_path / "a.tsv", [f"7\t{long}", "8\t  spaced  "])
    assert [(p.passage_id, p.text) for p in read_passages(tsv)] == [
        ("7", long),
        ("8", "  spaced  "),
    ]
    rows = [{"id": 5, "title": "T", "text": long}, {"_id": "\ud800x", "text": "y"}]
    jsonl = write_lines(tmp_path / "a.jsonl", map(json.dumps, rows))
    assert [(p.passage_id, p.title, p.text) for p in read_passages(jsonl)] == [
        ("5", "T", long),
        ("?x", "", "y"),  # an id that nothing can store is mended
    ]
    headed = write_lines(tmp_path / "h.tsv", ["id\ttext\ttitle", "1\tbody\thead"])
    assert [(p.passage_id, p.title, p.text) for p in read_passages(headed)] == [
        ("1", "head", "body")
    ]
    assert scan_passages(headed).num_passages == 1


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.tsv", "1\tok\nno tab\n", "line 2: not of the form id<TAB>text"),
        ("a.tsv", "1\tok\n2\tok\n1\tagain\n", "line 3: the id '1' is already used on line 1"),
        ("a.tsv", b"1\tcaf\xe9\n", "line 1: not UTF-8"),
        ("a.jsonl", '{"id": 1, "text": "x"}\n{\n', "line 2: not JSON"),
        ("a.jsonl", '{"text": "x"}\n', "line 1: not of the form"),
        ("a.jsonl", '{"id": "1", "text": 3}\n', "must be strings"),
        ("a.jsonl", '{"id": "1\\n2", "text": "x"}\n', "single line"),
        ("a.jsonl", "[" * 200_000, "line 1: JSON nested too deeply"),
        ("missing.tsv", None, "cannot be read"),
    ],
)
def test_bad_files_are_named_and_nothing_changes(
    tmp_path, store, embedder, collection, name, content, reason
):
    index_passages(store, embedder, collection)
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for rebuild in (False, True):
        with pytest.raises(DocumentError, match=reason):
            index_passages(store, embedder, tmp_path / name, rebuild=rebuild)
        assert store.count_passages() == 10


def test_only_changes_are_embedded(store, embedder, collection):
    report = index_passages(store, embedder, collection)
    assert (report.added, report.passages, report.embedded) == (1, 10, 10)
    found = Retriever(store, embedder).search("thing7", 1)[0]
    assert (found.passage_id, found.citation) == ("7", "7")
    assert index_passages(store, embedder, collection).unchanged == 1
    lines = collection.read_text().splitlines()
    write_lines(
        collection, [*lines[:4], "4\tanother text", *lines[6:], "new\tone more", "empty\t "]
    )
    scanned = scan_passages(collection)
    assert (scanned.num_passages, scanned.num_empty) == (10, 1)
    report = index_passages(store, embedder, collection)
    assert (report.changed, report.embedded, report.passages) == (1, 2, 10)
    assert report.skip_reasons == {"empty passage": 1}
    assert store.passages_by_id("4")["4"].passage.text == "another text"
    assert store.passages_by_id("5") == {}
    assert store.check() == []


def test_an_interrupted_collection_resumes(store, embedder, collection, monkeypatch, interrupted):
    monkeypatch.setattr("ragaccel.retrieval.indexing._BATCH_PASSAGES", 3)
    work = partial(index_passages, store, embedder, collection)
    interrupted(work, lambda progress: progress.passages_done >= 6)
    assert store.count_passages() == 6
    embedder.embedded.clear()
    assert index_passages(store, embedder, collection).passages == 10
    assert len(embedder.embedded) == 4


def test_a_folder_and_a_collection_share_an_index_but_no_ids(
    store, embedder, collection, folder, tmp_path, monkeypatch
):
    monkeypatch.setattr("ragaccel.retrieval.indexing._BATCH_PASSAGES", 2)
    index_passages(store, embedder, collection)
    index_folder(store, embedder, folder)
    assert index_folder(store, embedder, folder).is_current
    assert store.count_passages() == 14
    files = set(store.files())
    lines = [*(f"n{i}\tnew {i}" for i in range(6)), "3\tthe same id"]
    copy = write_lines(tmp_path / "copy.tsv", lines)  # which clashes after some batches
    with pytest.raises(DocumentError, match=r"'3' of .* is in the index already"):
        index_passages(store, embedder, copy)
    assert store.count_passages() == 14
    assert set(store.files()) == files
    with Store(tmp_path / "other.db") as other:
        assert index_passages(other, embedder, copy).passages == 7


def test_a_moved_collection_is_the_same_one(tmp_path, store, embedder, collection):
    index_passages(store, embedder, collection)
    (tmp_path / "elsewhere").mkdir()
    moved = collection.rename(tmp_path / "elsewhere" / collection.name)
    embedder.embedded.clear()
    assert index_passages(store, embedder, moved).unchanged == 1
    assert list(store.files()) == [str(moved)]
    assert not embedder.embedded
    moved.unlink()
    other = write_lines(collection, ["other\tof the same name"])
    index_passages(store, embedder, other)
    assert store.count_passages() == 11
