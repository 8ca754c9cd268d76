"""The trials of broken documents and hostile patterns: that they run, and see a broken promise."""

import os
import time

import pytest

from eval.robustness import documents, patterns
from eval.robustness.documents import endings, seed_documents
from ragaccel.retrieval.loaders import READERS, DocumentReader, document_from_bytes


@pytest.mark.parametrize("ending", endings())
def test_a_seed_of_every_format_is_read(ending):
    assert document_from_bytes(seed_documents()[ending], f"a{ending}").text.strip()


def test_a_few_broken_documents_of_every_format(run_trial, capsys):
    code, document = run_trial("fuzz_documents", "--count", "250")
    assert (code, document["broken"]) == (0, [])
    assert set(document["counts"]) >= set(READERS)
    assert sum(sum(found.values()) for found in document["counts"].values()) == 250


@pytest.mark.parametrize("fault", ["raises", "dies", "hangs"])
def test_a_broken_promise_of_a_reader_is_seen(run_trial, monkeypatch, capsys, fault):
    def read(self, data, name):
        if fault == "raises":
            raise KeyError("simulated")
        if fault == "hangs":
            time.sleep(60)
        if fault == "dies":
            raise documents.RagaccelError("the library that reads this format crashes on it")
        return document_from_bytes(b"some text", "a.txt")

    monkeypatch.setattr(DocumentReader, "read", read)
    monkeypatch.setattr(documents, "LIMIT_SECONDS", 0.5)
    code, document = run_trial("fuzz_documents", "--count", "1")
    assert code == 1
    assert document["raw_errors"] == (fault in ("raises", "dies"))
    assert document["hangs"] == (fault == "hangs")


needs_peaks = pytest.mark.skipif(
    not documents.forget_peak(os.getpid()), reason="this system keeps one peak of a whole process"
)


@needs_peaks
@pytest.mark.parametrize("limit", [200, 400])
def test_memory_that_a_reader_takes_for_a_moment_is_seen(run_trial, monkeypatch, capsys, limit):
    before = len(b"x" * 600_000_000)  # which this process held at one time, so that its own peak is

    def read(self, data, name):
        assert len(b"x" * (before // 2))
        return document_from_bytes(b"some text", "a.txt")

    monkeypatch.setattr(DocumentReader, "read", read)
    monkeypatch.setattr(documents, "LIMIT_MEGABYTES", limit)
    code, document = run_trial("fuzz_documents", "--count", "2")
    assert 280 <= document["peak_mb"] <= 320
    assert (code, document["over_limits"]) == ((1, 2) if limit == 200 else (0, 0))
    assert all("MB" in item["outcome"] for item in document["broken"])


@needs_peaks
def test_memory_that_the_process_beside_takes_is_seen(run_trial, monkeypatch, capsys):
    large, small = b'"' + b"x" * 100_000_000, b'"lamp'  # both end too early, and are refused
    monkeypatch.setattr(
        documents, "broken_document", lambda number, *_: ("a.ipynb", small if number else large)
    )
    monkeypatch.setattr(documents, "LIMIT_MEGABYTES", 100)
    code, document = run_trial("fuzz_documents", "--count", "2")
    assert (code, document["over_limits"]) == (1, 1)
    assert document["largest"]["number"] == document["broken"][0]["number"] == 0
    code, document = run_trial("fuzz_documents", "--count", "1", "--first", "1")
    assert (code, document["peak_mb"] < 20) == (0, True)


def test_every_format_has_patterns():
    assert len(patterns.patterns()) >= 120
    told = {name.split()[0] for name in patterns.patterns()}
    same = {
        ".xlsm": ".xlsx",
        ".htm": ".html",
        ".xhtml": ".html",
        ".tsv": ".csv",
        ".ndjson": ".jsonl",
    }
    assert {same.get(ending, ending) for ending in READERS} <= told


@pytest.mark.parametrize("size", [500])
def test_patterns_do_what_they_say(size):
    for name, work in patterns.patterns().items():
        outcome = patterns.take(work, size)["outcome"]
        assert outcome.startswith(("ok", "refused")), (name, outcome)


def test_a_pattern_that_takes_a_square_is_seen(run_trial, monkeypatch, capsys):
    def square(size):
        return sum(1 for _ in range(size * size // 4000))

    monkeypatch.setattr(patterns, "SIZES", (20_000, 200_000))
    monkeypatch.setattr(patterns, "patterns", lambda: {"a": square, "b": lambda size: " " * size})
    code, document = run_trial("fuzz_patterns")
    assert code == 1
    assert set(document["broken"]) == {"a"}
    assert document["counts"] == {"not linear": 1, "ok": 1}


def test_a_pattern_that_raises_or_takes_too_long_is_seen(run_trial, monkeypatch, capsys):
    def forever(size):
        while True:
            pass

    monkeypatch.setattr(patterns, "_LIMIT_SECONDS", 1)
    monkeypatch.setattr(patterns, "SIZES", (10, 100))
    monkeypatch.setattr(patterns, "patterns", lambda: {"a": forever, "b": lambda size: [][size]})
    code, document = run_trial("fuzz_patterns")
    assert code == 1
    assert document["counts"] == {"killed": 1, "raw": 1}
