"""Large files: staged vectors survive an interruption; the file is found when complete."""

import pytest
from hash_embedder import HashEmbedder

from ragaccel.retrieval import Retriever, Store, index_folder

NUM_PARTS = 40


def part(number, word="buoy"):
    return f"# Part {number}\n\nHere is {word} number {number}.\n"


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr("ragaccel.retrieval.indexing._BATCH_PASSAGES", 3)
    monkeypatch.setattr("ragaccel.retrieval.indexing._EMBED_BATCH", 4)
    monkeypatch.setattr("ragaccel.retrieval.indexing._SORT_WINDOW", 8)


@pytest.fixture
def docs(tmp_path):
    root = tmp_path / "large"
    root.mkdir()
    write(root, "buoy")
    (root / "zebra.txt").write_text("A zebra is small here.\n")
    return root


def write(root, word, numbers=range(NUM_PARTS)):
    (root / "atlas.md").write_text("\n".join(part(number, word) for number in numbers))


def staged(store):
    return {row[0] for row in store.rows("SELECT text_hash FROM staged")}


def found_files(store, embedder, query):
    return {passage.path for passage in Retriever(store, embedder).search(query, 50)}


def interrupted_at(number):
    def tell(progress):
        if progress.stage == "embedding" and progress.passages_done >= number:
            raise KeyboardInterrupt

    return tell


def contents(store):
    packed = store.rows("SELECT passage_id, text, vector FROM passage ORDER BY passage_id")
    return packed, sorted(store.files().items())


def assert_as_made_at_once(store, docs, tmp_path):
    assert store.check() == []
    assert staged(store) == set()
    with Store(tmp_path / "clean.db") as clean:
        index_folder(clean, HashEmbedder(), docs)
        assert contents(clean) == contents(store)


def test_an_interrupted_large_file_resumes(store, embedder, docs, tmp_path):
    for moment in (14, 27):
        with pytest.raises(KeyboardInterrupt):
            index_folder(store, embedder, docs, progress=interrupted_at(moment))
        assert set(store.files()) == {"zebra.txt"}, "the small file came first"
        assert found_files(store, embedder, "buoy number 3") == {"zebra.txt"}
    kept = len(staged(store))
    assert kept >= 24
    embedder.embedded.clear()
    report = index_folder(store, embedder, docs)
    assert report.embedded == len(embedder.embedded) == NUM_PARTS - kept
    assert found_files(store, embedder, "buoy number 3") >= {"atlas.md"}
    assert_as_made_at_once(store, docs, tmp_path)


def test_the_old_version_is_found_until_the_new_one_is_whole(store, embedder, docs, tmp_path):
    index_folder(store, embedder, docs)
    old = store.passages_of("atlas.md")
    write(docs, "lighthouse")
    with pytest.raises(KeyboardInterrupt):
        index_folder(store, embedder, docs, progress=interrupted_at(20))
    assert staged(store)
    assert store.passages_of("atlas.md") == old
    texts = [p.text for p in Retriever(store, embedder).search("lighthouse number 3", 50)]
    assert not [text for text in texts if "lighthouse" in text]
    index_folder(store, embedder, docs)
    assert_as_made_at_once(store, docs, tmp_path)


def test_staged_vectors_of_text_that_changed_meanwhile_are_dropped(store, embedder, docs, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        index_folder(store, embedder, docs, progress=interrupted_at(20))
    before = staged(store)
    write(docs, "wreck")
    with pytest.raises(KeyboardInterrupt):
        index_folder(store, embedder, docs, progress=interrupted_at(8))
    assert staged(store)
    assert not before & staged(store)
    index_folder(store, embedder, docs)
    assert_as_made_at_once(store, docs, tmp_path)


@pytest.mark.parametrize("fate", ["gone", "short", "broken"])
def test_nothing_stays_staged_of_a_file_that_is_no_longer_to_come(
    store, embedder, docs, tmp_path, fate
):
    with pytest.raises(KeyboardInterrupt):
        index_folder(store, embedder, docs, progress=interrupted_at(20))
    (docs / "atlas.md").unlink()
    if fate == "short":
        (docs / "atlas.md").write_text("Short.")
    elif fate == "broken":
        (docs / "atlas.md").write_bytes(bytes(range(256)))
    index_folder(store, embedder, docs)
    assert_as_made_at_once(store, docs, tmp_path)


def test_a_reader_never_sees_half_a_file(store, embedder, docs):
    seen = set()

    def look(progress):
        if progress.stage == "embedding":
            with Store(store.path) as reader:
                found = Retriever(reader, HashEmbedder()).search("buoy number 3", 99)
                seen.add(sum(passage.path == "atlas.md" for passage in found))

    index_folder(store, embedder, docs / ".", progress=lambda progress: None)
    write(docs, "buoy", range(NUM_PARTS // 2))
    index_folder(store, embedder, docs)
    write(docs, "reef")
    index_folder(store, embedder, docs, progress=look)
    assert seen == {NUM_PARTS // 2}


def test_a_rebuild_resumes_inside_a_large_file(store, embedder, docs, tmp_path):
    index_folder(store, embedder, docs)
    with pytest.raises(KeyboardInterrupt):
        index_folder(store, embedder, docs, rebuild=True, progress=interrupted_at(20))
    assert len(store.passages_of("atlas.md")) == NUM_PARTS
    report = index_folder(store, embedder, docs, rebuild=True)
    assert 0 < report.embedded < NUM_PARTS
    assert_as_made_at_once(store, docs, tmp_path)


def test_progress_knows_the_work_that_is_left(store, embedder, docs):
    with pytest.raises(KeyboardInterrupt):
        index_folder(store, embedder, docs, progress=interrupted_at(20))
    told = []
    index_folder(store, embedder, docs, progress=told.append)
    shares = [(p.work_done, p.work_total) for p in told if p.stage == "embedding"]
    assert shares[0][0] == 0, "what was embedded before is no work of this run"
    assert all(done <= total for done, total in shares)
    assert [done for done, _ in shares] == sorted(done for done, _ in shares)
    assert told[-1].work_done == pytest.approx(told[-1].work_total)
    assert told[-1].work_done < (docs / "atlas.md").stat().st_size
