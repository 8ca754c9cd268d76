"""Scanners: they find what plain regular expressions find, in linear time and memory."""

import contextlib
import io
import re
import time
import tracemalloc

import pytest
from hypothesis import given, strategies as st

from eval.robustness.documents import members_of, zipped
from ragaccel.errors import DocumentError
from ragaccel.passage import Document, is_heading, split_sentences
from ragaccel.retrieval import chunking, sections, split_document
from ragaccel.retrieval.loaders import document_from_bytes
from ragaccel.retrieval.loaders.pdf import join_lines

WORDS = "# a bc [ ] ( ) ! {# } <a > </a> = - * _ ` | : + ~ ``` ' \" .".split()
REPEATED = ["# a", "[", "![](", "{#", "<a ", "- ", "|-", "=", "---\n", "\n", "x\n", " ", "`"]
LINE = st.lists(st.sampled_from([*WORDS, " ", "\t", "  "]), max_size=30).map("".join)


def count(texts):
    return [text.count(" ") + 1 + len(text) // 20 for text in texts]


def markdown(text):
    return Document("a.md", text, markup="markdown")


@contextlib.contextmanager
def within(seconds):
    began = time.process_time()
    yield
    assert time.process_time() - began < seconds


@given(LINE)
def test_headings_rules_and_titles_are_what_plain_expressions_find(line):
    """Compare with backtracking expressions, which are slow but clear; these lines are short."""
    heading = re.match(r"[ ]{0,3}(#{1,6})[ \t]+(.+?)[ \t]*#*[ \t]*$", line)
    expected = []
    if heading:
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading.group(2))
        words = re.sub(r"\s*(?:\{#[^}]*\}|\[\[[^\]]*\]\]|<a\b[^>]*>|</a>)\s*", " ", words)
        bare = re.sub(r"[*_`]{1,3}(?=\S)|(?<=\S)[*`]{1,3}", "", words).strip() or words.strip()
        expected = [(len(heading.group(1)), bare)]
    found = [s.heading for s in sections(markdown(line)) if s.heading]
    assert [(heading.level, heading.words) for heading in found] == expected
    rule = re.fullmatch(r"[ \t]*(?:[|:+ \t]*-{3,}[-|:+ \t]*|={3,}|~{3,}|\*{3,}|_{3,})[ \t]*", line)
    text = f"Words above it.\n{line}"
    if not line.startswith(("#", " #")) and re.match(r"\w|[=~*_|:+ \t-]*$", line):
        assert is_heading(text, 0, len(text)) == bool(rule)
    pattern = r"^title:[ \t]*(?P<quote>[\"']?)(.+?)(?P=quote)[ \t]*$"
    title = re.search(pattern, f"title:{line}", re.MULTILINE)
    document = document_from_bytes(f"---\ntitle:{line}\n---\n".encode(), "a.md")
    assert document.title == (title.group(2).strip() if title else "")


FILES = [
    *(("a.html", piece) for piece in ("<!--", "<![CDATA[", "<a x='", "</b", "<div></b>")),
    *(("a.html", piece) for piece in ("<script>", "<textarea></", "<title>", '<a x="">">"')),
    ("a.html", "&#" + "9" * 5000),
    *(("a.json", "["), ("a.json", '"\\'), ("a.jsonl", "[[1],"), ("a.csv", ",'a")),
]


@pytest.mark.parametrize("start", ["", "# a", "---\ntitle: a"])
def test_time_grows_with_the_text(start):
    texts = [(name, start, piece) for piece in REPEATED for name in ("a.md", "a.rst")]
    for name, first, piece in texts if start else [*texts, *((n, "", p) for n, p in FILES)]:
        data = (first + piece * (100_000 // len(piece)) + ">").encode()
        with within(5), contextlib.suppress(DocumentError):
            split_document(document_from_bytes(data, name), count)


def test_long_pages_and_long_headings_are_read_in_time():
    with within(5):
        assert join_lines("1 Abc def\n" * 100_000).count("Abc") == 100_000
    text = f"# {'a ' * 5000}\n\ntext\n" + "## b\n\ntext\n" * 3000
    with within(5):
        assert len(split_document(markdown(text), count)) == 3001
    assert split_sentences(text)


@pytest.mark.parametrize(
    ("xml", "reason"),
    [
        (b" " * 2_000_000, "unpacks to more than 2 MB"),
        (
            b'<w:tbl><w:tr><w:tc><w:tcPr><w:gridSpan w:val="100000000"/></w:tcPr><w:p/></w:tc>'
            b"</w:tr></w:tbl>",
            None,
        ),
        (b"<w:p><w:r><w:t>y</w:t></w:r></w:p>" * 20_000, None),
    ],
)
def test_a_word_file_takes_what_its_xml_takes(xml, reason, monkeypatch):
    docx = pytest.importorskip("docx")
    monkeypatch.setattr("ragaccel.retrieval.loaders.office.MAX_UNPACKED_BYTES", 2_000_000)
    saved = io.BytesIO()
    docx.Document().save(saved)
    members = members_of(saved.getvalue())
    changed = {n: data.replace(b"<w:body>", b"<w:body>" + xml) for n, data in members.items()}
    refused = pytest.raises(DocumentError, match=reason) if reason else contextlib.nullcontext()
    with within(5), refused:
        document_from_bytes(zipped(changed), "a.docx")


def test_a_table_whose_columns_have_long_names_is_refused(monkeypatch):
    monkeypatch.setattr("ragaccel.retrieval.loaders.process.MAX_TEXT_BYTES", 1_000_000)
    with pytest.raises(DocumentError, match="more than 1 MB of text"):
        document_from_bytes(b"a" * 1000 + b",b\n" + b"1,2\n" * 2000, "a.csv")


@pytest.mark.parametrize("text", ["word " * 40_000, "a" * 300_000, "a b. " * 30_000])
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
    text = markdown("# a\n\nx\n\n" * 2000)
    with pytest.raises(DocumentError, match=r"takes more than 0\.001 s"):
        split_document(text, count, max_seconds=0.001)
    monkeypatch.setattr(chunking, "MAX_PASSAGES", 1000)
    with pytest.raises(DocumentError, match="more than 1,000 passages"):
        split_document(text, count)
