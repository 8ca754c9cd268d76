"""Files of ready-made passages: indexed unchanged, with their ids, and updated."""

import json
from functools import partial

import pytest

from ragaccel.errors import DocumentError
from ragaccel.retrieval import (
    Retriever,
    Store,
    index_folder,
    index_passages,
    read_passages,
    scan_passages,
)


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def collection(tmp_path):
    return write(tmp_path / "c.tsv", [f"{i}\tPassage {i} about thing{i}." for i in range(10)])


def test_tsv_and_json_lines_are_kept_exactly(tmp_path):
    long = "Word. " * 500 + "with\ttab \u2029 and \x85 separators"
    tsv = write(tmp_path / "a.tsv", [f"7\t{long}", "8\t  spaced  "])
    assert [(p.passage_id, p.text) for p in read_passages(tsv)] == [
        ("7", long),
        ("8", "  spaced  "),
    ]
    rows = [{"id": 5, "title": "T", "text": long}, {"_id": "\ud800x", "text": "y"}]
    jsonl = write(tmp_path / "a.jsonl", map(json.dumps, rows))
    assert [(p.passage_id, p.title, p.text) for p in read_passages(jsonl)] == [
        ("5", "T", long),
        ("?x", "", "y"),  # an id that nothing can store is mended
    ]
    headed = write(tmp_path / "h.tsv", ["id\ttext\ttitle", "1\tbody\thead"])
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
    write(collection, [*lines[:4], "4\tanother text", *lines[6:], "new\tone more", "empty\t "])
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
    copy = write(tmp_path / "copy.tsv", lines)  # which clashes after some batches
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
    other = write(collection, ["other\tof the same name"])
    index_passages(store, embedder, other)
    assert store.count_passages() == 11
