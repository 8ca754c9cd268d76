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


@pytest.mark.parametrize("row", ANSWERED, ids=lambda row: row["file"])
def test_an_answer_is_a_sentence_that_stands_once_in_its_file(row):
    found = document(DOCUMENTS / row["file"])
    assert found.text.count(row["answer"]) == 1
    assert found.page_at(found.text.find(row["answer"])) == row["page"]
    (holding,) = [one for one in split_sentences(found.text) if row["answer"] in one]
    assert holding == row["answer"] or row["file"].endswith((".csv", ".json"))  # there it is a row


def test_sentences_are_short_enough_to_quote_and_in_one_document_alone():
    place: dict[str, Path] = {}
    for path in FILES:
        for sentence in split_sentences(document(path).text):
            if len(sentence.split()) > 7:
                assert place.setdefault(sentence, path) == path
            row = re.match(r"[\w ]+: .*; [\w ]+: ", sentence)
            underlined = set(sentence.split("\n")[-1]) <= set("=-")  # a heading
            assert row or underlined or (len(sentence.split()) <= 40 and "\n" not in sentence)
