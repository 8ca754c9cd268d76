"""Scanners: they find what plain regular expressions find, in linear time."""

import contextlib
import io
import re
import time
import tracemalloc
import zipfile

import pytest
from hypothesis import given, strategies as st

from ragaccel.errors import DocumentError
from ragaccel.passage import Document, is_heading, split_sentences
from ragaccel.retrieval import chunking, sections, split_document
from ragaccel.retrieval.loaders import document_from_bytes
from ragaccel.retrieval.loaders.pdf import join_lines

WORDS = "# a bc [ ] ( ) ! {# } <a > </a> = - * _ ` | : + ~ ``` ' \" .".split()
MARKS = st.lists(st.sampled_from([*WORDS, " ", "\t", "\n", "\n\n"]), max_size=30).map("".join)
LINE = MARKS.map(lambda text: text.replace("\n", " "))
SEED = [
    b"# a",
    b"[",
    b"![](",
    b"{#",
    b"<a ",
    b"- ",
    b"|-",
    b"=",
    b"---\n",
    b"\n",
    b"x\n",
    b" ",
    b"`",
]


def count(texts):
    return [text.count(" ") + 1 + len(text) // 20 for text in texts]


@given(LINE)
def test_a_heading_has_the_level_and_words_that_markdown_gives_it(line):
    """Compare with backtracking expressions, which are slow but clear; these lines are short."""
    plain = re.match(r"[ ]{0,3}(#{1,6})[ \t]+(.+?)[ \t]*#*[ \t]*$", line)
    found = [s.heading for s in sections(Document("a.md", line, markup="markdown")) if s.heading]
    if plain is None:
        assert not found
        return
    words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", plain.group(2))
    words = re.sub(r"\s*(?:\{#[^}]*\}|\[\[[^\]]*\]\]|<a\b[^>]*>|</a>)\s*", " ", words)
    bare = re.sub(r"[*_`]{1,3}(?=\S)|(?<=\S)[*`]{1,3}", "", words).strip() or words.strip()
    assert [(heading.level, heading.words) for heading in found] == [(len(plain.group(1)), bare)]


@given(LINE)
def test_a_line_of_marks_is_a_rule(line):
    plain = re.fullmatch(r"[ \t]*(?:[|:+ \t]*-{3,}[-|:+ \t]*|={3,}|~{3,}|\*{3,}|_{3,})[ \t]*", line)
    text = f"Words above it.\n{line}"
    if not line.startswith(("#", " #")) and re.match(r"\w|[=~*_|:+ \t-]*$", line):
        assert is_heading(text, 0, len(text)) == bool(plain)


@given(LINE)
def test_front_matter_names_the_title(line):
    plain = re.search(
        r"^title:[ \t]*(?P<quote>[\"']?)(.+?)(?P=quote)[ \t]*$", f"title:{line}", re.MULTILINE
    )
    document = document_from_bytes(f"---\ntitle:{line}\n---\n".encode(), "a.md")
    assert document.title == (plain.group(2).strip() if plain else "")


@pytest.mark.parametrize("start", ["", "# a", "---\ntitle: a"])
@pytest.mark.parametrize("repeated", SEED)
def test_time_grows_with_the_text(start, repeated):
    text = start.encode() + repeated * (100_000 // len(repeated)) + b"x"
    for name in ("a.md", "a.rst"):
        began = time.process_time()
        split_document(document_from_bytes(text, name), count)
        assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("name", "repeated"),
    [
        ("a.html", b"<!--"),
        ("a.html", b"<![CDATA["),
        ("a.html", b"<a x='"),
        ("a.html", b"</b"),
        ("a.html", b"<div></b>"),
        ("a.html", b"<script>"),
        ("a.html", b"<textarea></"),
        ("a.html", b"<title>"),
        ("a.html", b'<a x="">">"'),
        ("a.html", b"&#" + b"9" * 5000),
        ("a.json", b"["),
        ("a.json", b'"\\'),
        ("a.jsonl", b"[[1],"),
        ("a.csv", b",'a"),
    ],
)
def test_time_grows_with_the_file(name, repeated):
    data = repeated * (200_000 // len(repeated)) + b">"
    began = time.process_time()
    with contextlib.suppress(DocumentError):
        split_document(document_from_bytes(data, name), count)
    assert time.process_time() - began < 5


def test_lines_of_a_page_are_joined_in_time():
    page = "1 Abc def\n" * 100_000
    began = time.process_time()
    assert join_lines(page).count("Abc") == 100_000
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("kind", "xml", "reason"),
    [
        ("spaces", b" " * 2_000_000, "unpacks to more than 2 MB"),
        (
            "span",
            b'<w:tbl><w:tr><w:tc><w:tcPr><w:gridSpan w:val="100000000"/></w:tcPr><w:p/></w:tc>'
            b"</w:tr></w:tbl>",
            None,
        ),
        ("paragraphs", b"<w:p><w:r><w:t>y</w:t></w:r></w:p>" * 20_000, None),
    ],
)
def test_a_word_file_takes_what_its_xml_takes(kind, xml, reason, monkeypatch):
    docx = pytest.importorskip("docx")
    monkeypatch.setattr("ragaccel.retrieval.loaders.office.MAX_UNPACKED_BYTES", 2_000_000)
    saved, changed = io.BytesIO(), io.BytesIO()
    docx.Document().save(saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(changed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data.replace(b"<w:body>", b"<w:body>" + xml))
    began = time.process_time()
    if reason:
        with pytest.raises(DocumentError, match=reason):
            document_from_bytes(changed.getvalue(), "a.docx")
    else:
        assert document_from_bytes(changed.getvalue(), "a.docx").path == "a.docx"
    assert time.process_time() - began < 5


def test_a_table_whose_columns_have_long_names_is_refused(monkeypatch):
    monkeypatch.setattr("ragaccel.retrieval.loaders.process.MAX_TEXT_BYTES", 1_000_000)
    table = b"a" * 1000 + b",b\n" + b"1,2\n" * 2000
    with pytest.raises(DocumentError, match="more than 1 MB of text"):
        document_from_bytes(table, "a.csv")


@pytest.mark.parametrize("text", ["word " * 100_000, "a" * 500_000, "a b. " * 100_000])
def test_memory_stays_near_the_size_of_the_text(text):
    document = Document("a.txt", text)
    tracemalloc.start()
    try:
        passages = split_document(document, count)
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert passages[-1].end == len(text.rstrip())
    assert most - held < 2 * len(text) + 2_000_000


def test_a_text_that_takes_too_long_or_makes_too_much_is_refused(monkeypatch):
    text = Document("a.md", "# a\n\nx\n\n" * 2000, markup="markdown")
    with pytest.raises(DocumentError, match=r"takes more than 0\.001 s"):
        split_document(text, count, max_seconds=0.001)
    monkeypatch.setattr(chunking, "MAX_PASSAGES", 1000)
    with pytest.raises(DocumentError, match="more than 1,000 passages"):
        split_document(text, count)


def test_a_heading_of_a_book_is_cut():
    text = f"# {'a ' * 5000}\n\ntext\n" + "## b\n\ntext\n" * 3000
    began = time.process_time()
    passages = split_document(Document("a.md", text, markup="markdown"), count)
    assert time.process_time() - began < 5
    assert len(passages) == 3001
    assert split_sentences(text)
