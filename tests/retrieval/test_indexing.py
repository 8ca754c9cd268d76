"""Indexing a folder: the index matches the folder, and only new text is embedded."""

import functools
import os
import shutil
import stat

import pytest
from hash_embedder import HashEmbedder

from ragaccel import default_index_path
from ragaccel.errors import ConfigurationError, IndexUnusableError
from ragaccel.retrieval import Store, index_folder
from ragaccel.retrieval.loaders.process import ReaderProcess


def contents(store):
    return {
        path: [(p.passage_id, p.title, p.text) for p in store.passages_of(path)]
        for path in store.files()
    }


def test_first_run_indexes_everything(store, embedder, folder):
    report = index_folder(store, embedder, folder)
    assert (report.added, report.changed, report.removed, report.unchanged) == (3, 0, 0, 0)
    assert report.passages == report.embedded == len(embedder.embedded) == 4
    assert set(contents(store)) == {"lamp.md", "sub folder 🙂/boat.txt", "table.csv"}
    assert "Lamp > Wick\nThe wick is cotton." in embedder.embedded
    assert store.meta("folder") == str(folder)
    assert store.check() == []


def test_an_unchanged_folder_costs_no_embedding_and_no_writing(store, embedder, folder):
    index_folder(store, embedder, folder)
    embedder.embedded.clear()
    embedder.embed_documents = embedder.count_tokens = None
    changed_at = store.path.stat().st_mtime_ns, store.state()
    report = index_folder(store, embedder, folder)
    assert report.is_current
    assert report.unchanged == 3
    assert (store.path.stat().st_mtime_ns, store.state()) == changed_at


def test_a_touched_file_is_known_by_its_hash(store, embedder, folder):
    index_folder(store, embedder, folder)
    os.utime(folder / "lamp.md", ns=(1, 1))
    report = index_folder(store, embedder, folder)
    assert (report.changed, report.unchanged, report.embedded) == (0, 3, 0)
    assert store.files()["lamp.md"].mtime_ns == 1


def test_only_new_passages_of_a_changed_file_are_embedded(store, embedder, folder):
    index_folder(store, embedder, folder)
    kept = store.passages_of("lamp.md")[0]
    embedder.embedded.clear()
    text = (folder / "lamp.md").read_text().replace("cotton", "linen")
    (folder / "lamp.md").write_text(text)
    report = index_folder(store, embedder, folder)
    assert (report.changed, report.embedded, report.passages) == (1, 1, 4)
    assert embedder.embedded == ["Lamp > Wick\nThe wick is linen."]
    assert store.passages_of("lamp.md")[0] == kept


def test_a_moved_file_keeps_its_vectors(store, embedder, folder):
    index_folder(store, embedder, folder)
    (folder / "lamp.md").rename(folder / "light.md")
    report = index_folder(store, embedder, folder)
    assert (report.added, report.removed) == (1, 1)


def test_another_folders_files_are_not_known_by_their_times(store, embedder, folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)  # with its times
    for root in (other, folder):
        (root / "lamp.md").write_text(f"# Lamp\n\nThis is of {root.name:>9}.\n")
        os.utime(root / "lamp.md", ns=(7, 7))

    def interrupt(progress):
        if progress.stage == "reading":
            raise KeyboardInterrupt

    index_folder(store, embedder, folder)
    for root in (other, folder, other):
        with pytest.raises(KeyboardInterrupt):
            index_folder(store, embedder, root, progress=interrupt)
    index_folder(store, embedder, other)
    assert [passage.text for passage in store.passages_of("lamp.md")] == ["This is of     other."]
    assert index_folder(store, embedder, other, progress=interrupt).is_current


def test_vanished_and_newly_excluded_files_are_removed(store, embedder, folder):
    index_folder(store, embedder, folder)
    (folder / "table.csv").unlink()
    assert index_folder(store, embedder, folder, exclude=["lamp.md"]).removed == 2
    assert set(store.files()) == {"sub folder 🙂/boat.txt"}
    report = index_folder(store, embedder, folder)  # the exclusion is remembered
    assert report.is_current
    assert index_folder(store, embedder, folder, include=["*.md"], exclude=["x"]).added == 1


def test_the_index_equals_one_made_from_nothing(store, embedder, folder, tmp_path):
    index_folder(store, embedder, folder)
    (folder / "lamp.md").write_text("# New\n\nAll is new.\n")
    (folder / "more.rst").write_text("More\n====\n\nText.\n")
    (folder / "table.csv").unlink()
    index_folder(store, embedder, folder)
    with Store(tmp_path / "fresh.db") as fresh:
        index_folder(fresh, embedder, folder)
        assert contents(fresh) == contents(store)
    assert store.check() == []


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


def test_a_very_large_file_is_refused_by_size_alone(store, embedder, folder):
    with (folder / "huge.txt").open("wb") as file:
        file.truncate(200_000_000)  # sparse: nothing is written, nothing may be read
    report = index_folder(store, embedder, folder)
    assert report.failed["huge.txt"].startswith("200 MB is over the limit of 50 MB")


def test_no_permission_to_a_file_or_a_folder(store, embedder, folder, monkeypatch):
    index_folder(store, embedder, folder)
    (folder / "lamp.md").write_text("changed")
    scandir, open_ = os.scandir, os.open

    def refuse_folder(path):
        if "sub folder" in str(path):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    def refuse_file(path, *arguments, **options):
        if str(path).endswith("lamp.md"):
            raise PermissionError(13, "Permission denied")
        return open_(path, *arguments, **options)

    monkeypatch.setattr(os, "scandir", refuse_folder)
    monkeypatch.setattr(os, "open", refuse_file)
    report = index_folder(store, embedder, folder)
    assert report.failed == {
        "sub folder 🙂": "no permission to read the folder",
        "lamp.md": "no permission to read it",
    }
    assert report.removed == 0
    assert len(store.files()) == 3


@pytest.mark.parametrize("kind", ["pipe", "device", "link", "folder behind a link"])
def test_what_is_swapped_in_after_the_listing_is_not_read(store, embedder, folder, tmp_path, kind):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "boat.txt").write_text("a secret text.")

    def swap(progress):
        if progress.stage != "reading" or (folder / "sub folder 🙂").is_symlink():
            return
        boat = folder / "sub folder 🙂/boat.txt"
        if boat.exists() and stat.S_ISREG(boat.lstat().st_mode):
            boat.unlink()
            if kind == "pipe":
                os.mkfifo(boat)
            elif kind == "device":
                boat.symlink_to("/dev/zero")
            elif kind == "link":
                boat.symlink_to(secret / "boat.txt")
            else:
                boat.parent.rmdir()
                boat.parent.symlink_to(secret, target_is_directory=True)

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


def test_an_empty_folder_and_no_folder(store, embedder, tmp_path):
    (tmp_path / "empty").mkdir()
    assert index_folder(store, embedder, tmp_path / "empty").passages == 0
    with pytest.raises(ConfigurationError, match="does not exist"):
        index_folder(store, embedder, tmp_path / "missing")
    with pytest.raises(ConfigurationError, match="is a file"):
        index_folder(store, embedder, store.path)


def test_another_embedder_is_refused_until_rebuilt(embedder, folder):
    with Store(default_index_path(folder)) as store:
        index_folder(store, embedder, folder)
        with pytest.raises(IndexUnusableError, match=r"ragaccel index .*docs --rebuild"):
            index_folder(store, HashEmbedder("another"), folder)
        assert index_folder(store, HashEmbedder("another"), folder, rebuild=True).added == 3
        assert index_folder(store, HashEmbedder("another"), folder).is_current


def test_another_passage_size_is_refused(store, embedder, folder):
    index_folder(store, embedder, folder, passage_tokens=4)
    assert index_folder(store, embedder, folder).is_current
    with pytest.raises(IndexUnusableError, match="passages of 4 tokens"):
        index_folder(store, embedder, folder, passage_tokens=5)
    with pytest.raises(ConfigurationError, match="choose 1 to 171"):
        index_folder(store, embedder, folder, passage_tokens=200)


def test_passages_beyond_the_embedders_limit_are_warned_of(store, folder):
    class Narrow(HashEmbedder):
        max_tokens = 3

    report = index_folder(store, Narrow(), folder)
    assert "longer than the 3 tokens" in report.warnings[0]


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


def test_an_interruption_keeps_finished_batches(store, embedder, folder, monkeypatch):
    monkeypatch.setattr("ragaccel.retrieval.indexing._BATCH_PASSAGES", 1)

    def interrupt(progress):
        if progress.stage == "reading" and progress.files_done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index_folder(store, embedder, folder, progress=interrupt)
    assert len(store.files()) == 2
    assert store.check() == []
    assert index_folder(store, embedder, folder).added == 1


def test_an_error_inside_a_batch_rolls_it_back(store, embedder, folder, monkeypatch):
    def fail(*_):
        raise RuntimeError("simulated")

    monkeypatch.setattr(store, "put_passages", fail)
    with pytest.raises(RuntimeError):
        index_folder(store, embedder, folder)
    assert store.files() == {}


def test_another_folders_files_are_not_trusted_by_their_times(store, embedder, folder, tmp_path):
    index_folder(store, embedder, folder)
    other = tmp_path / "other"
    other.mkdir()
    text = (folder / "lamp.md").read_text().replace("oil", "gas")
    (other / "lamp.md").write_text(text)
    status = (folder / "lamp.md").stat()
    os.utime(other / "lamp.md", ns=(status.st_atime_ns, status.st_mtime_ns))
    (warning,) = index_folder(store, embedder, other).warnings
    assert str(folder) in warning
    assert "gas" in store.passages_of("lamp.md")[0].text
    assert index_folder(store, embedder, other).is_current


def test_an_index_among_the_documents_is_no_document(embedder, folder):
    with Store(folder / "my.db") as store:
        index_folder(store, embedder, folder)
        assert index_folder(store, embedder, folder).is_current
        assert sorted(store.files()) == ["lamp.md", "sub folder 🙂/boat.txt", "table.csv"]


def test_files_that_ask_for_too_much_are_named_and_the_others_indexed(
    store, embedder, folder, monkeypatch
):
    (folder / "slow.csv").write_text("a,b\n" + "1,2\n" * 1_500_000)
    (folder / "parts.md").write_text("# a\n\nx\n\n" * 2_000)
    (folder / "page.html").write_text("<p>A page.</p>")
    bounded = functools.partial(ReaderProcess, 1)
    monkeypatch.setattr("ragaccel.retrieval.loaders.ReaderProcess", bounded)
    monkeypatch.setattr("ragaccel.retrieval.chunking.MAX_PASSAGES", 1_000)
    report = index_folder(store, embedder, folder)
    assert report.added == 4
    assert report.failed == {
        "parts.md": "has more than 1,000 passages: split the file",
        "slow.csv": "takes more than 1 s to read",
    }
    assert {"page.html", "lamp.md"} <= set(contents(store))
