"""Readers of every format: the text, title, pages and lines that they return."""

import io
import json

import pytest
from hypothesis import given, strategies as st

from ragaccel.errors import DocumentError, MissingExtraError
from ragaccel.retrieval import index_folder
from ragaccel.retrieval.loaders import (
    BinaryFileError,
    decode_text,
    document_from_bytes,
    looks_binary,
    read_document,
)

POLISH = "Zażółć gęślą jaźń. "
GERMAN = "Über den Wölkchen – „Grüße“. "


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]
)
def test_unicode_encodings_are_detected(encoding):
    data = (GERMAN * 20).encode(encoding)
    assert not looks_binary(data)
    assert decode_text(data)[0] == GERMAN * 20


def test_western_encodings_are_the_fallback():
    assert decode_text(GERMAN.encode("cp1252")) == (GERMAN, "cp1252")
    assert decode_text(b"caf\xe9 \x81")[1] == "latin-1"


@given(st.binary(max_size=200))
def test_decoding_never_fails(data):
    text, _ = decode_text(data)
    assert "\r" not in text


@given(st.text(max_size=200))
def test_utf8_is_read_as_it_is(text):
    expected = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.startswith("\ufeff") and "\0" not in text:
        assert decode_text(text.encode("utf-8", "ignore"))[0] == expected.encode(
            "utf-8", "ignore"
        ).decode("utf-8")


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", bytes(range(256)) * 4])
def test_binary_files_are_distinguished_from_text(data):
    with pytest.raises(BinaryFileError):
        document_from_bytes(data, "picture")


def test_markdown_front_matter_gives_the_title():
    text = "---\nauthor: me\ntitle: 'The Guide'\n---\n# Start\nText."
    document = document_from_bytes(text.encode(), "a.md")
    assert (document.title, document.text, document.markup) == ("The Guide", text, "markdown")


def test_code_and_unknown_endings_are_kept_exactly():
    text = "def f():\n\treturn 1\n"
    assert document_from_bytes(text.encode(), "x/a.py").text == text
    assert document_from_bytes(text.encode(), "Makefile").markup == ""


def test_html():
    page = """<html><head><title>The  Light</title><style>p {}</style></head><body>
<nav>Home</nav><h1>Lamps &amp; lenses</h1>
<p>A lamp <b>burns</b>
here.</p><ul><li>one</li><li><p>two</p></li></ul>
<pre>x = 1

y = 2</pre>
<table><tr><th>Name</th><th>Year</th></tr><tr><td>Ada</td><td>1815</td></tr></table>
<script>alert()</script><p>End.</p></body></html>"""
    document = document_from_bytes(page.encode(), "a.html")
    assert document.title == "The Light"
    assert document.text.strip().split("\n\n") == [
        "# Lamps & lenses",
        "A lamp burns here.",
        "- one\n- two",
        "```\nx = 1",
        "y = 2\n```",
        "Name | Year\nAda | 1815",
        "End.",
    ]
    assert document.line_at(document.text.index("A lamp")) == 3
    assert document.line_at(document.text.index("y = 2")) == 7
    assert document.line_at(document.text.index("Ada |")) == 8


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>a < b && c</p>", "a < b && c"),
        ("<p title='x > y'>a</p>", "a"),
        ("<p title=it's>a</p><p>b</p>", "a b"),
        ('<p title="a>b</p><p>c</p>', "b c"),
        ("<p>a<!-- > --!>b<!-->c<!--->d</p>", "abcd"),
        ("<p>a<!-- b</p><p>c</p>", "a<!-- b c"),
        ("<p>a<?php x ?>b<![CDATA[ > ]]>c<!x>d</></p>", "abcd"),
        ("<P>a<BR/>b<br>c", "a b c"),
        ("a<script>if (a</b>) '</p>'</SCRIPT >b<script src=x/>c</script>d", "abd"),
        ("a<script>b", "a"),
        ("<title>a <b>&amp; c</title>d<title>e", "de"),
        ("a&lt;b&#65;&#99999999999999999999999;&eacute;&nope;", "a<bA\ufffdé&nope;"),
        ("a<", "a<"),
        ("a</", "a</"),
        ("a<b", "a<b"),
        ("<svg><title>x</title><p>y</p></svg>z", "z"),
        ("<select/>x", "x"),
    ],
)
def test_html_as_it_is_found(page, text):
    found = document_from_bytes(page.encode(), "a.html").text
    assert " ".join(found.split()) == text


def test_html_declares_its_encoding():
    page = '<meta charset="iso-8859-2"><p>Zażółć</p>'
    assert document_from_bytes(page.encode("iso-8859-2"), "a.htm").text.strip() == "Zażółć"


def test_csv_rows_stand_on_their_lines():
    table = 'name;year_built;note\nGannet;1874;"two\nlines"\n\nWether;1911;Far.\n'
    document = document_from_bytes(table.encode(), "a.csv")
    assert document.markup == "rows"
    assert document.text == (
        "name: Gannet; year built: 1874; note: two lines.\n"
        "name: Wether; year built: 1911; note: Far."
    )
    assert document.line_at(document.text.index("name: Wether")) == 5


def test_csv_without_a_head_and_with_nothing_else():
    assert document_from_bytes(b"1,2\n3,4\n", "a.csv").text.startswith("column 1: 1; column 2: 2.")
    assert document_from_bytes(b"name\tyear\n", "a.tsv").text == "Columns: name, year."
    assert document_from_bytes(b"", "a.csv").text == ""


def test_json_reads_as_records_with_the_files_lines():
    value = {"title": "Museum", "items": [{"name": "Oars", "year": 1869}, {"name": "Watch"}]}
    document = document_from_bytes(json.dumps(value, indent=1).encode(), "a.json")
    assert document.title == "Museum"
    assert "name: Oars; year: 1869." in document.text
    assert document.line_at(document.text.index("name: Oars")) == 5
    assert document.line_at(document.text.index("name: Watch")) == 9


def test_json_nested_and_broken():
    nested = {"a": {"b": {"c": "deep", "d": ["x", "y"]}, "long": "one\n\ntwo"}, "e": None, "f": []}
    text = document_from_bytes(json.dumps(nested).encode(), "a.json").text
    assert "# a" in text
    assert "## b" in text
    assert "c: deep." in text
    assert "d: x, y." in text
    assert "long:\n\none\n\ntwo" in text
    broken = '{"a": 1,'
    assert document_from_bytes(broken.encode(), "a.json").text == broken
    assert document_from_bytes(b"[" * 100_000, "a.json").text.startswith("[[")


@pytest.mark.parametrize("declared", ["utf-16", "utf-32", "punycode", "undefined", "base64", "no"])
def test_a_page_that_declares_an_encoding_it_cannot_be_in_is_read(declared):
    page = f'<meta charset="{declared}"><title>Bj\xf6rn</title><p>Bj\xf6rn sails.</p>'
    for data in (page.encode(), page.encode() + b" ", page.encode("cp1252")):
        document = document_from_bytes(data, "a.html")
        assert (document.title, document.text.strip()) == ("Bj\xf6rn", "Bj\xf6rn sails.")


def test_a_folder_with_a_lone_surrogate_in_a_title_is_indexed(tmp_path, store, embedder):
    (tmp_path / "a.json").write_text('{"title": "half \\ud83d", "b": {"c": {"d": 1}}}')
    assert index_folder(store, embedder, tmp_path).failed == {}
    assert store.passages_of("a.json")[0].title == "half \ufffd"


def test_json_lines_and_lone_surrogates():
    document = document_from_bytes(b'{"a": "x", "b": 2}\nnot json\n{"a": "\\ud83d"}\n', "a.jsonl")
    assert document.text == "a: x; b: 2.\nnot json\na: \ufffd."
    assert document.line_at(document.text.index("not json")) == 2


def test_notebook_cells_are_pages():
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "Prose."]},
        {"cell_type": "code", "source": "print(1)", "outputs": [{"text": ["1\n"]}]},
        {"cell_type": "code", "source": "", "outputs": [{"data": {"image/png": "AAAA"}}]},
        {"cell_type": "markdown", "source": "End."},
    ]
    data = json.dumps({"cells": cells, "metadata": {"kernelspec": {"language": "python"}}}).encode()
    document = document_from_bytes(data, "a.ipynb")
    assert "```python\nprint(1)\n```\n\n```\n1\n```" in document.text
    assert document.page_at(document.text.index("print")) == 2
    assert document.page_at(document.text.index("End.")) == 4
    with pytest.raises(DocumentError, match="cells"):
        document_from_bytes(b"{}", "a.ipynb")
    with pytest.raises(DocumentError, match="broken ipynb"):
        document_from_bytes(b"{", "a.ipynb")


def test_docx_headings_lists_and_tables():
    docx = pytest.importorskip("docx")
    file = docx.Document()
    file.add_heading("The rules", 1)
    file.add_paragraph("First rule.")
    file.add_paragraph("an item", style="List Bullet")
    table = file.add_table(rows=1, cols=2)
    table.rows[0].cells[0].text, table.rows[0].cells[1].text = "a", "b"
    document = document_from_bytes(_saved(file), "a.docx")
    assert document.text.split("\n\n") == ["# The rules", "First rule.", "- an item", "a | b\n"]
    assert document.line_at(document.text.index("First")) == 2


def test_docx_cells_that_span_are_said_once_and_merged_ones_in_each_row():
    docx = pytest.importorskip("docx")
    file = docx.Document()
    table = file.add_table(rows=3, cols=3)
    for row in range(3):
        for column in range(3):
            table.cell(row, column).text = f"{row}{column}"
    table.cell(0, 0).merge(table.cell(0, 1)).text = "wide"
    table.cell(1, 2).merge(table.cell(2, 2)).text = "tall"
    text = document_from_bytes(_saved(file), "a.docx").text
    assert text == "wide | 02\n10 | 11 | tall\n20 | 21 | tall\n"


def test_docx_text_of_runs_and_links():
    docx = pytest.importorskip("docx")
    file = docx.Document()
    paragraph = file.add_paragraph("a\tb\nc")
    paragraph.add_run(" d").bold = True
    for inserted in ("w:hyperlink", "w:ins"):
        element = docx.oxml.OxmlElement(inserted)
        element.append(file.add_paragraph(f" {inserted}").runs[0]._r)
        paragraph._p.append(element)
    assert document_from_bytes(_saved(file), "a.docx").text.strip() == "a b c d w:hyperlink"


def test_pptx_slides_are_pages():
    pptx = pytest.importorskip("pptx")
    file = pptx.Presentation()
    for title in ("First", "Second"):
        slide = file.slides.add_slide(file.slide_layouts[1])
        slide.shapes.title.text = title
        slide.placeholders[1].text = "point one\npoint two"
        slide.notes_slide.notes_text_frame.text = "Say it loud."
    document = document_from_bytes(_saved(file), "a.pptx")
    assert document.text.startswith("# First\n\n- point one\n- point two\n\nSay it loud.")
    assert document.page_at(document.text.index("# Second")) == 2


@pytest.mark.parametrize("ending", ["pdf", "docx", "pptx"])
def test_broken_office_files_say_so(ending):
    with pytest.raises(DocumentError, match=f"broken {ending}"):
        document_from_bytes(b"%PDF-1.4 nothing here", f"a.{ending}")


@pytest.mark.parametrize(
    ("ending", "module"), [("pdf", "pypdf"), ("docx", "docx"), ("pptx", "pptx")]
)
def test_missing_extras_name_their_install_line(ending, module, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(MissingExtraError, match="pip install"):
        document_from_bytes(b"", f"a.{ending}")


def test_pdf_pages_and_paragraphs():
    pytest.importorskip("pypdf")
    document = document_from_bytes(make_pdf(["One page.", "Another page."]), "a.pdf")
    assert document.page_at(document.text.index("Another")) == 2
    assert document.page_at(0) == 1
    with pytest.raises(DocumentError, match="no text"):
        document_from_bytes(make_pdf([""]), "a.pdf")


@pytest.mark.parametrize("password", ["secret", ""])
def test_encrypted_pdf(password):
    pypdf = pytest.importorskip("pypdf")
    writer = pypdf.PdfWriter()
    writer.append(pypdf.PdfReader(io.BytesIO(make_pdf(["Hello there."]))))
    writer.encrypt(password, owner_password="owner", algorithm="RC4-128")
    buffer = io.BytesIO()
    writer.write(buffer)
    if password:
        with pytest.raises(DocumentError, match="encrypted"):
            document_from_bytes(buffer.getvalue(), "a.pdf")
    else:
        assert document_from_bytes(buffer.getvalue(), "a.pdf").text.strip() == "Hello there."


def test_lines_of_a_page_are_joined():
    from ragaccel.retrieval.loaders.pdf import join_lines

    page = (
        "2. Clothing\nHelmets are used on every land-\ning, and under every crane that is in use\n"
        "now. Shoes have caps.\n• one\n• two"
    )
    assert join_lines(page) == (
        "2. Clothing\nHelmets are used on every landing, and under every crane that is in use now."
        " Shoes have caps.\n\n• one\n• two"
    )


def test_reading_a_path(tmp_path):
    path = tmp_path / "ünï 🙂 name.md"
    path.write_text("# Hello\nWorld.", encoding="utf-8")
    assert read_document(path).path == str(path)
    assert read_document(path, name="x.md").path == "x.md"
    with pytest.raises(DocumentError, match="over the limit"):
        read_document(path, max_bytes=3)
    with pytest.raises(DocumentError, match="cannot be read"):
        read_document(tmp_path / "missing.md")


def _saved(file):
    buffer = io.BytesIO()
    file.save(buffer)
    return buffer.getvalue()


def make_pdf(pages):
    """Write a PDF by hand, with one line of Helvetica per page."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, text in enumerate(pages):
        stream = f"BT /F1 12 Tf 50 700 Td ({text}) Tj ET"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * i} 0 R"
            " /Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    body, offsets = "%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(body))
        body += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{offset:010d} 00000 n \n" for offset in offsets)
    trailer = f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(body)}\n%%EOF"
    return f"{body}xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{trailer}".encode()
