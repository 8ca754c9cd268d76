"""Locations: every sentence of a passage has the page or line that it has in the file."""

import json

import pytest
from hash_embedder import HashEmbedder

from ragaccel import CompressingRetriever
from ragaccel.passage import Document, Passage, sentence_spans
from ragaccel.retrieval import Retriever, index_folder, split_document
from ragaccel.retrieval.loaders import DocumentReader, document_from_bytes


def count(texts):
    return [len(text.split()) for text in texts]


def document_of(*pages, **more):
    starts, text = [], ""
    for page in pages:
        starts.append(len(text))
        text += f"{page}\n\n" if page else ""
    return Document("guide.pdf", text, page_starts=tuple(starts), **more)


PAGES = ("The ferry leaves at six.", "", "It carries cars. The fare is", "nine crowns. Ask Mina.")


@pytest.mark.parametrize("tokens", [3, 6, 12, 100])
def test_each_sentence_names_its_page(tokens):
    document = document_of(*PAGES)
    for passage in split_document(document, count, tokens):
        for start, end in sentence_spans(passage.text):
            expected = document.page_at(passage.start + start)
            assert passage.citation_at(start) == f"guide.pdf:{expected}"
            cut = passage.cut(start, end)
            assert (cut.page, cut.line, cut.text) == (expected, None, passage.text[start:end])
            assert document.text[cut.start : cut.end] == cut.text


def test_each_line_of_a_format_with_lines_of_its_own_names_its_line():
    page = "<p>One.</p>\n\n\n<p>Two\ntwo.</p>\n<ul><li>a<li>b</ul>\n\n\n\n<p>Three.</p><p>Four.</p>"
    values = {"name": "Ada", "born": {"year": 1815, "place": "London"}, "tags": ["x", "y"]}
    for document in (
        document_from_bytes(page.encode(), "a.html"),
        document_from_bytes(json.dumps(values, indent=3).encode(), "a.json"),
    ):
        for tokens in (2, 100):
            for passage in split_document(document, count, tokens):
                for at in range(len(passage.text)):
                    line = document.line_at(passage.start + at)
                    assert passage.cut(at, len(passage.text)).line == line


def test_lines_of_plain_text_need_no_locations():
    (passage,) = split_document(Document("a.txt", "\n\none\ntwo\n\nthree"), count, 100)
    assert passage.locations == ()
    assert [passage.citation_at(at) for at in (0, 4, 9)] == ["a.txt:3", "a.txt:4", "a.txt:6"]
    assert Passage("p7", "One. Two.").cut(5, 9).citation == "p7"


def test_locations_are_kept_in_an_index(store, embedder, tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "guide.pdf").write_bytes(b"any")
    monkeypatch.setattr(DocumentReader, "read", lambda *_: document_of(*PAGES))
    index_folder(store, embedder, tmp_path / "docs")
    (item,) = store.document("guide.pdf")
    assert item.passage.locations == ((26, 2), (26, 3), (56, 4))
    found = CompressingRetriever(Retriever(store, HashEmbedder()), sentences=1)
    (cut,) = found.search("Ask Mina.", 1)
    assert (cut.text, cut.citation) == ("Ask Mina.", "guide.pdf:4")
