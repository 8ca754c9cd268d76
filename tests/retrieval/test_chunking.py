"""The chunker: passages that are exactly the text, within the budget, under titles, located."""

import json
import re

import pytest
from hash_embedder import HashEmbedder
from hypothesis import given, settings, strategies as st

from ragaccel import CompressingRetriever
from ragaccel.answer import citations
from ragaccel.passage import Document, Passage, sentence_spans
from ragaccel.retrieval import MAX_TITLE_CHARS, Retriever, index_folder, split_document
from ragaccel.retrieval.loaders import DocumentReader, document_from_bytes

PIECES = [
    "# One\n", "## Two\n", "### Three three three\n", "Setext\n======\n", "\n", "\n\n", "Words. ",
    "a much longer sentence that goes on and on and on and on and on. ", "- item\n", "x" * 50 + " ",
    "```py\ncode\n\n# no heading\n```\n", "| a | b |\n", "===\nOver\n===\n", "~~~\n", "é🙂 ", "\t",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=40).map("".join)


def count_words(texts):
    return [len(text.split()) for text in texts]


def count_characters(texts):
    return [len(text) for text in texts]


def split(text, markup="markdown", count=count_words, budget=12, **fields):
    return split_document(Document("notes.md", text, markup=markup, **fields), count, budget)


@settings(max_examples=300, deadline=None)
@given(
    texts,
    st.sampled_from(["markdown", "rst", "code", "rows", ""]),
    st.sampled_from([count_words, count_characters]),
    st.integers(1, 20),
)
def test_passages_are_exact_ordered_and_within_budget(text, markup, count, budget):
    position = 0
    ids = set()
    for passage in split(text, markup, count, budget):
        assert text[passage.start : passage.end] == passage.text == passage.text.strip() != ""
        assert position <= passage.start
        assert count([passage.text])[0] <= budget
        assert passage.line == text.count("\n", 0, passage.start) + 1
        assert passage.title
        assert len(passage.title) <= MAX_TITLE_CHARS
        position = passage.end
        ids.add(passage.passage_id)
    assert len(ids) == len(split(text, markup, count, budget))


@settings(max_examples=200, deadline=None)
@given(texts, st.sampled_from(["code", "rows", "markdown", "rst", ""]), st.integers(1, 20))
def test_every_word_is_in_a_passage_or_a_heading(text, markup, budget):
    passages = split(text, markup, count_words, budget)
    covered = set()
    for passage in passages:
        covered.update(range(passage.start, passage.end))
    left = "".join(c if i not in covered else " " for i, c in enumerate(text))
    for line in left.split("\n"):
        heading = markup in ("markdown", "rst", "") and (
            line.lstrip().startswith("#") or line.strip() in text
        )
        assert heading or not re.search(r"\w", line)


def test_headings_cut_and_become_titles():
    text = (
        "# Guide\n\nIntro.\n\n## Installing `it`\n\nRun [pip](x).\n\n### Linux\n\nUse apt.\n\n"
        "## End\nBye."
    )
    assert [(p.title, p.text, p.citation) for p in split(text)] == [
        ("Guide", "Intro.", "notes.md:3"),
        ("Guide > Installing it", "Run [pip](x).", "notes.md:7"),
        ("Guide > Installing it > Linux", "Use apt.", "notes.md:11"),
        ("Guide > End", "Bye.", "notes.md:14"),
    ]
    rst = (
        "=====\nTitle\n=====\n\nIntro.\n\nPart\n----\n\nBody.\n\nDeep\n~~~~\n\nMore.\n\n"
        "Next\n----\n\nEnd."
    )
    titles = ["Title", "Title > Part", "Title > Part > Deep", "Title > Next"]
    assert [p.title for p in split(rst, "rst")] == titles, "levels follow the order of styles"


FOUR = [f"name: N{i}; year: {i}." for i in range(4)]
LONG = "Six seven eight nine."


@pytest.mark.parametrize(
    ("text", "options", "passages"),
    [
        ("---\ntitle: x\n---\n```\n# no\n\nmore\n```\n", {}, ["```\n# no\n\nmore\n```"]),
        (
            "<!--\n\nRights.-->\n\n# Title\n\n<!-- note -->\nBody.\n```\n<!-- code -->\n```\n",
            {},
            ["Body.\n```\n<!-- code -->\n```"],
        ),
        # a heading with nothing under it is kept
        ("# Only", {}, ["# Only"]),
        ("# A\n## B\n## C\ntext", {}, ["## B", "text"]),
        # paragraphs are packed, long ones are cut between sentences, rows are kept whole
        (
            "one two three\n\nfour five\n\n" + f"{LONG}\n" * 3 + "\nend",
            {"budget": 6},
            ["one two three\n\nfour five", LONG, LONG, f"{LONG}\n\nend"],
        ),
        (
            "\n".join(FOUR),
            {"markup": "rows", "budget": 8},
            ["\n".join(FOUR[:2]), "\n".join(FOUR[2:])],
        ),
        ("x" * 10, {"count": count_characters, "budget": 3}, ["xx", "xxx", "xx", "xxx"]),
    ],
)
def test_what_the_passages_of_a_text_are(text, options, passages):
    assert [p.text for p in split(text, **options)] == passages


def test_titles():
    for fields, title in (({"title": "Own"}, "Own"), ({}, "my file name")):
        document = Document("a/my-file_name.txt", "text", **fields)
        assert split_document(document, count_words, 5)[0].title == title
    text = "".join(f"{'#' * i} {'heading ' * 4}{i}\n" for i in range(1, 6)) + "text"
    (passage,) = split(text)  # a long title loses its middle
    assert len(passage.title) <= MAX_TITLE_CHARS
    assert passage.title.endswith("5")
    heading = "a much longer heading that goes on and on and on and on and on and on"
    titles = [p.title for p in split(f"# {heading}\n\n## {heading}\n\nText.\n", budget=20)]
    assert 100 < max(map(len, titles)) <= MAX_TITLE_CHARS


def test_ids_survive_an_edit_further_down():
    before, after = split("# A\nfirst\n# B\nsecond"), split("# A\nfirst\n# B\nchanged")
    assert before[0].passage_id == after[0].passage_id
    assert before[1].passage_id != after[1].passage_id


def test_pages_and_mapped_lines():
    paged = split("page one\n\npage two", budget=2, page_starts=(0, 10))
    assert [(p.page, p.line) for p in paged] == [(1, None), (2, None)]
    mapped = split("row\n\nrow", "rows", budget=1, line_numbers=(3, 4, 9))
    assert [p.line for p in mapped] == [3, 9]


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
    for passage in split_document(document, count_words, tokens):
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
            for passage in split_document(document, count_words, tokens):
                for at in range(len(passage.text)):
                    line = document.line_at(passage.start + at)
                    assert passage.cut(at, len(passage.text)).line == line


def test_lines_of_plain_text_need_no_locations():
    (passage,) = split_document(Document("a.txt", "\n\none\ntwo\n\nthree"), count_words, 100)
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


def test_a_copied_sentence_is_cited_by_its_own_page():
    (passage,) = split_document(document_of(*PAGES), count_words, 100)
    answer = "They told me to ask Mina, and that it carries cars. The fare is high."
    (told,) = citations(answer, [passage])
    assert (told["text"], told["citation"]) == ("It carries cars. The fare is"[3:], "guide.pdf:3")
