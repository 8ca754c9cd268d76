"""Scanners: they find what plain regular expressions find, in linear time and memory."""

import contextlib
import re
import time
import tracemalloc

import pytest
from hypothesis import given, strategies as st

from eval.robustness.documents import members_of, seed_documents, zipped
from eval.robustness.patterns import patterns
from ragaccel.errors import DocumentError
from ragaccel.passage import Document, is_heading
from ragaccel.retrieval import chunking, sections, split_document
from ragaccel.retrieval.loaders import document_from_bytes

WORDS = "# a bc [ ] ( ) ! {# } <a > </a> = - * _ ` | : + ~ ``` ' \" .".split()
LINE = st.lists(st.sampled_from([*WORDS, " ", "\t", "  "]), max_size=30).map("".join)


def count(texts):
    return [text.count(" ") + 1 + len(text) // 20 for text in texts]


def markdown(text):
    return Document("a.md", text, markup="markdown")


@contextlib.contextmanager
def within(seconds, name=""):
    began = time.process_time()
    yield
    assert time.process_time() - began < seconds, name


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


def test_time_grows_with_the_text():
    """A time that grows with the square of the text is far beyond the limit at this size."""
    for name, read in patterns().items():
        with within(2, name), contextlib.suppress(DocumentError):
            read(30_000)


def test_what_says_that_it_is_huge_takes_what_is_there(monkeypatch):
    monkeypatch.setattr("ragaccel.retrieval.loaders.process.MAX_TEXT_BYTES", 1_000_000)
    with pytest.raises(DocumentError, match="more than 1 MB of text"):
        document_from_bytes(b"a" * 1000 + b",b\n" + b"1,2\n" * 2000, "a.csv")
    wide = b'<w:tbl><w:tr><w:tc><w:tcPr><w:gridSpan w:val="100000000"/></w:tcPr><w:p/></w:tc>'
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    far = '<row r="99999999999"><c r="A99999999999"><v>1</v></c></row>'
    rows = "".join(f'<row r="{n}"><c r="XFD{n}"><v>1</v></c></row>' for n in range(1, 1000))
    files = [(".docx", "word/document.xml", b"<w:body>" + wide + b"</w:tr></w:tbl>")]
    for sheet in (far, rows):
        xml = f'<worksheet xmlns="{main}"><sheetData>{sheet}</sheetData></worksheet>'
        files.append((".xlsx", "xl/worksheets/sheet1.xml", xml.encode()))
    for ending, member, xml in files:
        members = members_of(seed_documents()[ending])
        whole = ending == ".xlsx"
        members[member] = xml if whole else members[member].replace(b"<w:body>", xml)
        refused = pytest.raises(DocumentError, match="export what matters")
        with within(20, ending), refused if whole else contextlib.nullcontext():
            document_from_bytes(zipped(members), f"a{ending}")


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
        list(chunking.iter_passages(text, count, max_seconds=0.001))
    monkeypatch.setattr(chunking, "MAX_PASSAGES", 1000)
    with pytest.raises(DocumentError, match="more than 1,000 passages"):
        split_document(text, count)
