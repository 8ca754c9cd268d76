"""The demo documents hold the answers to their questions."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from ragaccel.passage import Document, split_sentences
from ragaccel.retrieval.loaders import read_document

DEMOS = Path(__file__).parents[2] / "demos"
DOCUMENTS = DEMOS / "documents"
LINES = (DEMOS / "questions.jsonl").read_text(encoding="utf-8").splitlines()
QUESTIONS = [json.loads(line) for line in LINES]
ANSWERED = [row for row in QUESTIONS if row["answer"]]
FILES = sorted(
    path for path in DOCUMENTS.rglob("*.*") if ".ragaccel" not in path.parts and path.is_file()
)
EXTRA_OF = {".pdf": "pypdf", ".docx": "docx"}


@cache
def document(path: Path) -> Document:
    """Read a document once; a test that needs a missing extra is skipped."""
    if path.suffix in EXTRA_OF:
        pytest.importorskip(EXTRA_OF[path.suffix])
    return read_document(path)


def test_there_are_twenty_answered_and_four_unanswerable_questions():
    assert len(ANSWERED) == 20
    assert len(QUESTIONS) == 24
    assert len({row["question"] for row in QUESTIONS}) == 24


@pytest.mark.parametrize("row", ANSWERED, ids=lambda row: row["file"])
def test_an_answer_is_a_sentence_that_stands_once_in_its_file(row):
    found = document(DOCUMENTS / row["file"])
    assert found.text.count(row["answer"]) == 1
    assert found.page_at(found.text.find(row["answer"])) == row["page"]
    holding = [one for one in split_sentences(found.text) if row["answer"] in one]
    assert len(holding) == 1
    if not row["file"].endswith((".csv", ".json")):  # there a sentence is a row
        assert holding == [row["answer"]]


def test_questions_span_the_formats():
    endings = {Path(row["file"]).suffix for row in ANSWERED}
    assert endings == {".md", ".txt", ".rst", ".html", ".pdf", ".docx", ".csv", ".json"}


def test_there_are_thirty_pages():
    words = sum(len(document(path).text.split()) for path in FILES)
    assert words >= 15_000  # a page of print holds about 500
    assert sum(path.stat().st_size for path in FILES) < 400_000


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_sentences_are_clean_and_short_enough_to_quote(path):
    sentences = split_sentences(document(path).text)
    prose = [s for s in sentences if not re.match(r"[\w ]+: .*; [\w ]+: ", s) and not is_heading(s)]
    assert all(len(sentence.split()) <= 40 for sentence in prose)
    assert not [sentence for sentence in prose if "\n" in sentence]


def is_heading(sentence: str) -> bool:
    """A heading of reStructuredText keeps its underline."""
    return set(sentence.split("\n")[-1]) <= set("=-")


def test_no_sentence_stands_in_two_documents():
    place: dict[str, Path] = {}
    for path in FILES:
        for sentence in split_sentences(document(path).text):
            if len(sentence.split()) > 7:
                assert place.setdefault(sentence, path) == path
