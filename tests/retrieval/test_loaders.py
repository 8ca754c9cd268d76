"""Every format: the text, title, pages and lines of its documents, and what is refused."""

import contextlib
import datetime
import io
import json
import re
import sys
import time
from email.message import EmailMessage
from email.mime.message import MIMEMessage

import pytest

from eval.robustness.documents import pdf, seed_documents, zipped
from ragaccel.errors import DocumentError, MissingExtraError
from ragaccel.passage import split_sentences
from ragaccel.retrieval import index_folder, split_document
from ragaccel.retrieval.loaders import (
    READERS,
    BinaryFileError,
    document_from_bytes,
    read_document,
)
from ragaccel.retrieval.loaders.mail import read_eml
from ragaccel.retrieval.loaders.pdf import join_lines

OFFICE = sorted({".docx", ".pptx", ".xlsx", ".xlsm", ".odt", ".odp", ".ods", ".epub", ".rtf"})


def read(data, name):
    return document_from_bytes(data.encode() if isinstance(data, str) else data, name)


def blocks(document):
    return [block for block in document.text.split("\n\n") if block.strip()]


def lines(document, *texts):
    return [document.line_at(document.text.index(text)) for text in texts]


def pages(document, *texts):
    return [document.page_at(document.text.index(text)) for text in texts]


def passages_of(data, name, tokens=12):
    document = read(data, name)
    found = split_document(document, lambda texts: [len(t.split()) for t in texts], tokens)
    assert all(document.text[p.start : p.end] == p.text for p in found)
    return [(p.title, p.text, p.citation) for p in found]


def archive(members):
    return zipped({name: c.encode() if isinstance(c, str) else c for name, c in members.items()})


def saved(file):
    buffer = io.BytesIO()
    file.save(buffer)
    return buffer.getvalue()


# Text, HTML and data


def test_text_is_kept_exactly_and_front_matter_gives_the_title():
    text = "---\nauthor: me\ntitle: 'The Guide'\n---\n# Start\nText."
    document = read(text, "a.md")
    assert (document.title, document.text, document.markup) == ("The Guide", text, "markdown")
    code = "def f():\n\treturn 1\n"
    assert read(code, "x/a.py").text == code
    assert read(code, "Makefile").markup == ""
    for data in (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", bytes(range(256)) * 4):
        with pytest.raises(BinaryFileError):
            read(data, "picture")


def test_html():
    document = read(
        """<html><head><title>The  Light</title><style>p {}</style></head><body>
<nav>Home</nav><h1>Lamps &amp; lenses</h1>
<p>A lamp <b>burns</b>
here.</p><ul><li>one</li><li><p>two</p></li></ul>
<pre>x = 1

y = 2</pre>
<table><tr><th>Name</th><th>Year</th></tr><tr><td>Ada</td><td>1815</td></tr></table>
<script>alert()</script><p>End.</p></body></html>""",
        "a.html",
    )
    assert document.title == "The Light"
    assert document.text.strip().split("\n\n") == [
        "# Lamps & lenses",
        "A lamp burns here.",
        "- one\n- two",
        "```\nx = 1",
        "y = 2\n```",
        "Name: Ada; Year: 1815.",
        "End.",
    ]
    assert lines(document, "A lamp", "y = 2", "Name: Ada") == [3, 7, 8]


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
        ("<table><tr><td><p>a</p><td>b<tr><td>c</table>", "a | b c"),
    ],
)
def test_html_as_it_is_found(page, text):
    assert " ".join(read(page, "a.html").text.split()) == text


def html_table(*rows):
    """Return a table; a cell that begins with # is a head."""

    def cell(text):
        tag = "th" if text.startswith("#") else "td"
        return f"<{tag}>{text.lstrip('#')}</{tag}>"

    return f"<table>{''.join('<tr>' + ''.join(map(cell, row)) + '</tr>' for row in rows)}</table>"


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([("#Boat", "#Crew"), ("Tern", "five")], "Boat: Tern; Crew: five."),
        ([("#Boat", "#2025"), ("A", "5"), ("M", "6")], "Boat: A; 2025: 5.\nBoat: M; 2025: 6."),
        ([("#", "#Crew"), ("Tern", "5<br>or 6"), ("", "")], "Tern; Crew: 5 or 6."),
        ([("A", "b", "c"), ("D", "5", "e"), ("F", "6", "")], "A: D; b: 5; c: e.\nA: F; b: 6."),
        ([("Home", "Help", "-"), ("T", "5", "L")], "Home | Help | -\nT | 5 | L"),
        ([("Home", "Help", "-"), ("T", "5", "L" * 70), ("G", "6" * 70, "L")],
         f"Home | Help | -\nT | 5 | {'L' * 70}\nG | {'6' * 70} | L"),
        ([("A", "b", "c"), ("D", "b", "9"), ("E", "f", "8")], "A | b | c\nD | b | 9\nE | f | 8"),
        ([("#Fleet", "#", "#"), ("T", "5", "L")], "Fleet | |\nT | 5 | L"),
        ([("#Boat:", "#Tern"), ("#Crew:", "5")], "Boat: | Tern\nCrew: | 5"),
        ([("Boat", "Crew"), ("Tern", "5")], "Boat | Crew\nTern | 5"),
        ([("A", "b", "c"), ("D", "1", "e"), ("F", "g", "2")], "A | b | c\nD | 1 | e\nF | g | 2"),
        ([("#Boat", "Tern"), ("#Crew", "5")], "Boat | Tern\nCrew | 5"),
        ([("Tern", "5", "Lund"), ("Gull", "6", "Holm")], "Tern | 5 | Lund\nGull | 6 | Holm"),
        ([("#Boat", "#Crew"), ("Tern", "5"), ("all",)], "Boat | Crew\nTern | 5\nall"),
        ([("#Boat", "#Crew"), ("Tern", "<ul><li>5</ul>")], "Boat | Crew\nTern |\n- 5"),
        ([("#Boat", "#Boat"), ("Tern", "5")], "Boat | Boat\nTern | 5"),
        ([("#" + "Boat " * 13, "#Crew"), ("Tern", "5")], "Boat " * 13 + "| Crew\nTern | 5"),
        ([("#Boat", "#Crew")], "Boat | Crew"),
    ],
)  # fmt: skip
def test_a_row_of_a_table_names_its_columns_if_the_first_row_does(rows, text):
    assert read(html_table(*rows), "a.html").text.strip() == text


def test_a_table_within_a_table_has_its_own_columns():
    inner = html_table(("#Boat", "#Crew"), ("Tern", "5"))
    page = html_table(("#Left", "#Right"), ("a", f"see{inner}"), ("c", "d"))
    text = read(page, "a.html").text
    assert "Boat: Tern; Crew: 5." in text
    assert "Left" in text
    assert "Left:" not in text


def test_paragraphs_of_a_cell_are_apart_and_in_a_long_cell_lines():
    code = "<pre>x<br>y</pre>"
    text = read(html_table(("<p>a</p><p>b</p>c", "d<div>e</div>f"), (code,)), "a.html").text
    assert text == "a b c | d e f\n\n```\nx\ny\n```\n"
    nested = f"<table><tr><td>{html_table(('a', 'b'))}after<td>next</table>"
    assert read(nested, "a.html").text.strip().split("\n") == ["a | b", "", "after | next"]
    for mark in ("<br>", "<p>"):
        said = f"{mark}\n".join(f"boat {number:03} lands." for number in range(99))
        document = read(f"<table><tr><td>Menu<td>{said}</table>", "a.html")
        assert lines(document, "boat 080") == [81]


@pytest.mark.parametrize(
    "first",
    [
        "<th>Boat<th>Crew<th><ul><li>Home</ul>",
        "<th><h4>Boat</h4><th><h4>Crew</h4><th><h4>Home</h4>",
        "<th colspan='2'>Boat<th>Crew<th>Home",
        "<th rowspan = 10>Fleet<th>Crew<th>Home",
        "Fleet<th>Boat<th>Crew<th>Home",
        "<th>Boat<th>Crew<th><table><tr><td>Home</table>",
        "<th>Boat<th>Crew<th>Home<tr><th>Port<th>Depth<th>Tide",
    ],
)
def test_no_row_names_columns_if_one_is_no_plain_row_of_cells(first):
    rows = "<tr><td>Tern<td>a<td>Lund<tr><td>Gull<td>6<td>Holm<tr><td>Erne<td>7<td>Wick"
    text = read(f"<table><tr>{first}{rows}</table>", "a.html").text
    assert "Tern | a | Lund\nGull | 6 | Holm\nErne | 7 | Wick" in text
    assert all(word in text for word in re.findall("[A-Z][a-z]+", first))


@pytest.mark.parametrize("declared", ["utf-16", "utf-32", "punycode", "undefined", "base64", "no"])
def test_a_page_that_declares_an_encoding_it_cannot_be_in_is_read(declared):
    page = f'<meta charset="{declared}"><title>Bj\xf6rn</title><p>Bj\xf6rn sails.</p>'
    for data in (page.encode(), page.encode() + b" ", page.encode("cp1252")):
        document = read(data, "a.html")
        assert (document.title, document.text.strip()) == ("Bj\xf6rn", "Bj\xf6rn sails.")
    right = '<meta charset="iso-8859-2"><p>Zażółć</p>'.encode("iso-8859-2")
    assert read(right, "a.htm").text.strip() == "Zażółć"


def test_csv_rows_stand_on_their_lines():
    table = 'name;year_built;note\nGannet;1874;"two\nlines"\n\nWether;1911;Far.\n'
    document = read(table, "a.csv")
    assert document.markup == "rows"
    assert document.text == (
        "name: Gannet; year built: 1874; note: two lines.\n"
        "name: Wether; year built: 1911; note: Far."
    )
    assert lines(document, "name: Gannet", "name: Wether") == [2, 5]
    assert read(b"1,2\n3,4\n", "a.csv").text.startswith("column 1: 1; column 2: 2.")
    assert read(b"name\tyear\n", "a.tsv").text == "Columns: name, year."
    assert read(b"", "a.csv").text == ""


def test_json_reads_as_records_with_the_files_lines():
    value = {"title": "Museum", "items": [{"name": "Oars", "year": 1869}, {"name": "Watch"}]}
    document = read(json.dumps(value, indent=1), "a.json")
    assert document.title == "Museum"
    assert "name: Oars; year: 1869." in document.text
    assert lines(document, "name: Oars", "name: Watch") == [5, 9]
    nested = {"a": {"b": {"c": "deep", "d": ["x", "y"]}, "long": "one\n\ntwo"}, "e": None, "f": []}
    text = read(json.dumps(nested), "a.json").text
    for part in ("# a", "## b", "c: deep.", "d: x, y.", "long:\n\none\n\ntwo"):
        assert part in text
    assert read('{"a": 1,', "a.json").text == '{"a": 1,'
    assert read(b"[" * 100_000, "a.json").text.startswith("[[")


def test_json_lines_and_lone_surrogates():
    document = read(b'{"a": "x", "b": 2}\nnot json\n{"a": "\\ud83d"}\n', "a.jsonl")
    assert document.text == "a: x; b: 2.\nnot json\na: \ufffd."
    assert lines(document, "not json") == [2]
    assert read(b'{"title": "half \\ud83d", "b": {"c": 1}}', "a.json").title == "half \ufffd"


def test_notebook_cells_are_pages():
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "Prose."]},
        {"cell_type": "code", "source": "print(1)", "outputs": [{"text": ["1\n"]}]},
        {"cell_type": "code", "source": "", "outputs": [{"data": {"image/png": "AAAA"}}]},
        {"cell_type": "markdown", "source": "End."},
    ]
    notebook = {"cells": cells, "metadata": {"kernelspec": {"language": "python"}}}
    document = read(json.dumps(notebook), "a.ipynb")
    assert "```python\nprint(1)\n```\n\n```\n1\n```" in document.text
    assert pages(document, "print", "End.") == [2, 4]
    for broken, reason in ((b"{}", "cells"), (b"{", "broken ipynb")):
        with pytest.raises(DocumentError, match=reason):
            read(broken, "a.ipynb")


# Mail


def test_a_message_is_its_headers_and_its_text_decoded():
    message = EmailMessage()
    message["From"], message["Subject"] = "Ada <ada@example.org>", "Öl für die Lampe"
    message.set_content("Das Öl kommt am Dienstag — früh.\n", cte="base64")
    message.add_alternative("<p>Das Öl kommt.</p>", subtype="html")
    message.add_attachment(b"\0lamp", maintype="image", subtype="png", filename="lampe.png")
    document = document_from_bytes(bytes(message), "a.eml")
    assert document.title == "Öl für die Lampe"
    assert document.text == (
        "From: Ada <ada@example.org>\nSubject: Öl für die Lampe\nAttachments: lampe.png\n\n"
        "Das Öl kommt am Dienstag — früh."
    )


def test_a_message_of_a_page_alone_is_read_in_the_encoding_of_its_header():
    head = b"Subject: Boat\r\nContent-Type: text/html; charset=iso-8859-1\r\n\r\n"
    page = '<meta charset="iso-8859-1"><h1>Café</h1>\r\n<p>At <b>nine</b>.</p>'.encode("latin-1")
    assert read_eml(head + page, "a.eml").text == "Subject: Boat\n\n# Café\n\nAt nine."
    head = b"Content-Type: text/html\n\n"
    assert read_eml(head + page, "a.eml").text.endswith("# Café\n\nAt nine.")


def test_all_texts_of_a_message_are_read_and_one_of_those_that_say_the_same():
    message = EmailMessage()
    message.set_content("First.")
    message.add_attachment("Second.", filename="second.txt", disposition="inline")
    message.add_attachment("Apart.", filename="apart.txt")
    inner = EmailMessage()
    inner["From"], inner["Subject"] = "ewan@example.org", "Boat"
    inner.set_content(" \n")
    inner.add_alternative("<p>The boat sails.</p>", subtype="html")
    message.attach(inner_part := MIMEMessage(inner))
    inner_part.add_header("Content-Disposition", "attachment", filename="boat.eml")
    assert read_eml(bytes(message), "a.eml").text == (
        "Attachments: apart.txt\n\nFirst.\n\nSecond.\n\n"
        "From: ewan@example.org\nSubject: Boat\n\nThe boat sails."
    )


def test_a_quoted_sentence_of_a_message_or_markdown_is_whole():
    text = (
        "On Monday Ada wrote:\n> The lamp of the pier burns\n> all night long.\n>\n"
        ">> It was bought\n> > in May.\nThank you.\n"
    )
    for name, head in (("a.eml", "Subject: Lamp\n\n"), ("a.md", "")):
        document = document_from_bytes(f"{head}{text}".encode(), name)
        *_, asked, lamp, bought, thanks = split_sentences(document.text)
        assert (asked, lamp) == (
            "On Monday Ada wrote:",
            "The lamp of the pier burns\nall night long.",
        )
        assert (bought, thanks) == ("It was bought\nin May.", "Thank you.")
        assert document.text.strip().count("\n") == f"{head}{text}".strip().count("\n")


TABLE = "| Part \\| kind | Price |\n|:--|--:|\n| Lamp | 9 |\n| Rope | |"


def test_rows_of_a_markdown_table_have_the_names_of_their_columns():
    document = read(
        f"Prices:\n\n{TABLE}\n\n> Day | Tide\n> --- | ---\n> Monday | 4 m\n\nEnd.", "a.md"
    )
    assert [line for line in document.text.split("\n") if line] == [
        "Prices:", "Part | kind: Lamp; Price: 9.", "Part | kind: Rope.", "Day: Monday; Tide: 4 m.",
        "End.",
    ]  # fmt: skip
    assert lines(document, "Lamp", "Rope", "Monday", "End") == [5, 6, 10, 12]


@pytest.mark.parametrize(
    "text",
    [
        f"```\n{TABLE}\n```",
        "    " + TABLE.replace("\n", "\n    "),
        f"{TABLE}\n| Lens | 1 | 2 |",
        f"{TABLE}\nNo row.",
        f"{TABLE}\n| | |",
        "| | |\n|---|---|\n| Lamp | 9 |",
        "| a | a |\n|---|---|\n| Lamp | 9 |\n| | |",
        "| Part | Price |\n|---|---|",
        "|---|---|",
        "Long | Short\n---\na | b",
        f"| {'a' * 59} | b |\n|-|-|\n" + "|c|d|\n" * 99,
    ],
)
def test_other_tables_and_code_in_markdown_stay_as_they_are(text):
    assert read(text, "a.md").text == text


def test_code_and_quoted_headings_keep_the_marks_of_quotes():
    text = "```\n> x\n```\n\n> # Head\n> It is a > b.\n\na > b"
    assert document_from_bytes(text.encode(), "a.md").text == text.replace("> It", "It")
    assert document_from_bytes(text.encode(), "a.txt").text == text


@pytest.mark.parametrize("start", ["", "\ufeff", "\r\n"])
def test_headers_need_not_be_encoded_nor_come_first(start):
    text = f"{start}Subject: Öl für die Lampe\nContent-Type: text/plain; charset=utf-8\n\nÖl.\n"
    document = read_eml(text.encode(), "a.eml")
    assert (document.title, document.text) == (
        "Öl für die Lampe", "Subject: Öl für die Lampe\n\nÖl.",
    )  # fmt: skip


def test_odd_messages_are_read_as_far_as_they_go():
    unknown = b"Content-Type: text/plain; charset=none-such\n\nThe lamp burns."
    assert read_eml(unknown, "a.eml").text.endswith("The lamp burns.")
    assert read_eml(b"The lamp burns.\n", "a.eml").text.endswith("The lamp burns.")
    assert read_eml(b"", "a.eml").text.strip() == ""
    cut = b"Content-Type: multipart/mixed; boundary=x\n\n--x\nContent-Type: text/plain\n\nThe lamp"
    assert read_eml(cut, "a.eml").text.endswith("The lamp")
    with pytest.raises(BinaryFileError):
        read_eml(b"\0\1\2" * 100, "a.eml")


# PDF


def pdf_of(*texts, password=None):
    pypdf = pytest.importorskip("pypdf")
    writer, buffer = pypdf.PdfWriter(), io.BytesIO()
    for text in texts:
        page = pdf(b"BT /F1 12 Tf 50 700 Td (%s) Tj ET" % text.encode())
        writer.append(pypdf.PdfReader(io.BytesIO(page)))
    if password is not None:
        writer.encrypt(password, owner_password="owner", algorithm="RC4-128")
    writer.write(buffer)
    return buffer.getvalue()


def test_pdf_pages_and_passwords():
    document = read(pdf_of("One page.", "Another page."), "a.pdf")
    assert pages(document, "One", "Another") == [1, 2]
    assert read(pdf_of("Hello there.", password=""), "a.pdf").text.strip() == "Hello there."
    for data, reason in ((pdf_of(""), "no text"), (pdf_of("x", password="secret"), "encrypted")):
        with pytest.raises(DocumentError, match=reason):
            read(data, "a.pdf")


def test_lines_of_a_page_are_joined():
    page = (
        "2. Clothing\nHelmets are used on every land-\ning, and under every crane that is in use\n"
        "now. Shoes have caps.\n• one\n• two"
    )
    assert join_lines(page) == (
        "2. Clothing\nHelmets are used on every landing, and under every crane that is in use now."
        " Shoes have caps.\n\n• one\n• two"
    )
    assert join_lines("Ten letter\nHas 7 in\nTen letter\nSeven l\nEnd") == (
        "Ten letter Has 7 in Ten letter Seven l End"  # a line of 7 in 10 characters is full
    )


# Word and PowerPoint


def test_docx_headings_lists_tables_runs_and_links():
    docx = pytest.importorskip("docx")
    file = docx.Document()
    file.add_heading("The rules", 1)
    file.add_paragraph("First rule.")
    file.add_paragraph("an item", style="List Bullet")
    table = file.add_table(rows=1, cols=2)
    table.rows[0].cells[0].text, table.rows[0].cells[1].text = "a", "b"
    paragraph = file.add_paragraph("a\tb\nc")
    paragraph.add_run(" d").bold = True
    for inserted in ("w:hyperlink", "w:ins"):
        element = docx.oxml.OxmlElement(inserted)
        element.append(file.add_paragraph(f" {inserted}").runs[0]._r)
        paragraph._p.append(element)
    document = read(saved(file), "a.docx")
    assert [block.strip("\n") for block in blocks(document)] == [
        *("# The rules", "First rule.", "- an item", "a | b"),
        "a b c d w:hyperlink",
    ]
    assert lines(document, "First", "a | b") == [2, 4]


def test_docx_cells_that_span_are_said_once_and_merged_ones_in_each_row():
    docx = pytest.importorskip("docx")
    file = docx.Document()
    table = file.add_table(rows=3, cols=3)
    for row in range(3):
        for column in range(3):
            table.cell(row, column).text = f"{row}{column}"
    assert read(saved(file), "a.docx").text == "00 | 01 | 02\n10 | 11 | 12\n20 | 21 | 22\n"
    for column, name in enumerate(("Boat", "Crew", "Home")):
        table.cell(0, column).text = name
    named = "Boat: 10; Crew: 11; Home: 12.\nBoat: 20; Crew: 21; Home: 22.\n"
    assert read(saved(file), "a.docx").text == named
    table.cell(0, 2).text = "02"
    table.cell(0, 0).merge(table.cell(0, 1)).text = "wide"
    table.cell(1, 2).merge(table.cell(2, 2)).text = "tall"
    assert read(saved(file), "a.docx").text == "wide | 02\n10 | 11 | tall\n20 | 21 | tall\n"


def test_docx_tables_name_columns_only_in_a_grid_whose_first_row_is_a_header():
    docx = pytest.importorskip("docx")
    rows = [("Boat", "Crew"), ("Tern", "5"), ("Gull", "6")]
    file = docx.Document()
    table = file.add_table(rows=3, cols=2)
    for row, texts in zip(table.rows, rows, strict=True):
        for cell, text in zip(row.cells, texts, strict=True):
            cell.text = text
    header = docx.oxml.OxmlElement("w:tblHeader")
    table.rows[0]._tr.get_or_add_trPr().append(header)
    assert read(saved(file), "a.docx").text == "Boat: Tern; Crew: 5.\nBoat: Gull; Crew: 6.\n"
    header.set(docx.oxml.ns.qn("w:val"), "0")  # as Google Docs marks rows that are none
    plain = "Boat | Crew\nTern | 5\nGull | 6\n"
    assert read(saved(file), "a.docx").text == plain
    del header.attrib[docx.oxml.ns.qn("w:val")]
    table.cell(1, 0)._tc.grid_span = 2
    assert read(saved(file), "a.docx").text == plain


def test_docx_tables_in_cells_and_text_in_content_controls_are_read():
    docx = pytest.importorskip("docx")
    file = docx.Document()
    table = file.add_table(rows=2, cols=2)
    for at, text in enumerate(("Boat", "Crew", "Tern", "5")):
        table.cell(at // 2, at % 2).text = text
    inner = table.cell(0, 0).add_table(rows=2, cols=1)
    inner.cell(0, 0).text, inner.cell(1, 0).text = "deep", "er"
    contents, last = file.add_paragraph("Lamp 1"), file.add_paragraph("Last.")
    for element in (table.cell(1, 0)._tc, table.rows[1]._tr, last._p, contents._p):
        control, content = map(docx.oxml.OxmlElement, ("w:sdt", "w:sdtContent"))
        element.addprevious(control)
        control.append(content)
        content.append(element)
    properties = docx.oxml.OxmlElement("w:sdtPr")
    properties.append(docx.oxml.OxmlElement("w:docPartObj"))
    control.insert(0, properties)
    assert blocks(read(saved(file), "a.docx")) == ["Boat deep; er | Crew\nTern | 5", "Last.\n"]


def test_pptx_slides_are_pages():
    pptx = pytest.importorskip("pptx")
    file = pptx.Presentation()
    for title in ("First", "Second"):
        slide = file.slides.add_slide(file.slide_layouts[1])
        slide.shapes.title.text = title
        slide.placeholders[1].text = "point one\npoint two"
        slide.notes_slide.notes_text_frame.text = "Say it loud."
    document = read(saved(file), "a.pptx")
    assert document.text.startswith("# First\n\n- point one\n- point two\n\nSay it loud.")
    assert pages(document, "# Second") == [2]
    table = slide.shapes.add_table(2, 2, 0, 0, 1, 1).table
    for at, text in enumerate(("Boat", "Crew", "Tern", "5")):
        table.cell(at // 2, at % 2).text = text
    assert "Boat: Tern; Crew: 5." in read(saved(file), "a.pptx").text
    table.cell(1, 0).merge(table.cell(1, 1))
    assert "Boat | Crew\nTern 5 | " in read(saved(file), "a.pptx").text


# Workbooks


def workbook(**sheets):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.remove(book.active)
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(row)
        for cells in sheet.iter_rows():
            for cell in cells:
                if cell.value == 0.155:
                    cell.number_format = "0.0%"
    return saved(book)


def test_each_row_of_a_workbook_says_its_columns_under_its_sheet():
    day = datetime.datetime(2024, 5, 17)
    boats = [["Fleet of 2024"], [], ["Name", "Length", "Built", "Sound"]]
    boats += [["Petrel", 12.5, day, True], ["Gannet", 9, None, False], [None] * 4]
    crew = [["Who", "Role"], ["Mina", "cook"], [], ["Port", "Depth", "Tide"], ["Lund", 3, 0.155]]
    title, file = "fleet list > {}".format, "fleet_list.xlsx"
    petrel = "Name: Petrel; Length: 12.5; Built: 2024-05-17; Sound: yes."
    mina = "Who: Mina; Role: cook.\nPort: Lund; Depth: 3; Tide: 15.5%."
    assert passages_of(workbook(Boats=boats, Crew=crew, Empty=[]), file, 10) == [
        (title("Boats"), "Fleet of 2024.", f"{file}:1"),
        (title("Boats"), petrel, f"{file}:4"),
        (title("Boats"), "Name: Gannet; Length: 9; Sound: no.", f"{file}:5"),
        (title("Crew"), mina, f"{file}:2"),
    ]


# OpenDocument

NAMESPACES = " ".join(
    f'xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"'
    for name in ("office", "text", "table", "draw", "presentation", "meta")
)
DC = 'xmlns:dc="http://purl.org/dc/elements/1.1/"'


def office(body, *, title="", prolog="", kind="text"):
    content = (
        f"<?xml version='1.0'?>{prolog}<office:document-content {NAMESPACES}><office:body>"
        f"<office:{kind}>{body}</office:{kind}></office:body></office:document-content>"
    )
    meta = f"<office:document-meta {NAMESPACES} {DC}><dc:title>{title}</dc:title>"
    return archive({"content.xml": content, "meta.xml": f"{meta}</office:document-meta>"})


def table_row(*cells, more=""):
    inner = "".join(
        f"<table:table-cell {how}>{''.join(f'<text:p>{t}</text:p>' for t in texts)}"
        "</table:table-cell>"
        for how, *texts in cells
    )
    return f"<table:table-row {more}>{inner}</table:table-row>"


def test_an_opendocument_text_keeps_headings_lists_and_tables():
    inner = f"<table:table>{table_row(('', 'deep'))}{table_row(('', 'er'))}</table:table>"
    rows = table_row(("", "part"), ("", "price", "in crowns")) + table_row(("", "wick"), ("", "3"))
    body = (
        '<text:h text:outline-level="1">Lamp</text:h>'
        "<text:table-of-content><text:p>Lamp 1</text:p></text:table-of-content>"
        "<text:p>It burns<text:s/>oil<text:line-break/>and <text:span>tallow</text:span>."
        "<text:note><text:note-citation>1</text:note-citation><text:note-body>"
        "<text:p>Or wax.</text:p></text:note-body></text:note><!-- c --> Always.</text:p>"
        '<text:h text:outline-level="2">Parts</text:h>'
        "<text:list><text:list-item><text:p>wick</text:p></text:list-item></text:list>"
        f"<table:table>{rows}<table:table-row><table:table-cell>{inner}</table:table-cell>"
        "</table:table-row></table:table>"
    )
    document = read(office(body, title="B"), "a.odt")
    assert blocks(document) == [
        *("# Lamp", "Or wax.", "It burns oil and tallow. Always.", "## Parts", "- wick"),
        "part | price in crowns\nwick | 3\ndeep; er\n",
    ]
    assert lines(document, "# Lamp", "It burns", "wick | 3") == [1, 3, 6]
    head, row = (table_row(("", a), ("", b)) for a, b in (("part", "price"), ("wick", "3")))
    tag = "table:table-header-rows"
    named = f"<table:table><{tag}>{head}</{tag}>{row}</table:table>"
    assert read(office(named), "a.odt").text == "part: wick; price: 3.\n"
    blank = f"<table:table><{tag}>{table_row(('', ''), ('', ''))}</{tag}>{head}{row}</table:table>"
    assert read(office(blank), "a.odt").text == "part | price\nwick | 3\n"
    late = f"<table:table>{row}<{tag}>{head}</{tag}></table:table>"
    assert read(office(late), "a.odt").text == "wick | 3\npart | price\n"
    merged = "<table:table-cell><text:p>none</text:p></table:table-cell><table:covered-table-cell/>"
    whole = named.replace(
        "</table:table>", f"<table:table-row>{merged}</table:table-row></table:table>"
    )
    assert read(office(whole), "a.odt").text == "part | price\nwick | 3\nnone | \n"
    outer = table_row(("", "x"), ("", "y")).replace("<text:p>y</text:p>", named)
    outer = f"<table:table><{tag}>{head}</{tag}>{outer}</table:table>"
    assert read(office(outer), "a.odt").text == "part: x; price: part | price; wick | 3.\n"
    titles = [title for title, _, _ in passages_of(office(body, title="B"), "a.odt", 40)]
    assert titles == ["B > Lamp", "B > Lamp > Parts"]


def test_an_opendocument_presentation_has_slides():
    slide = (
        '<draw:page><draw:frame presentation:class="title"><draw:text-box><text:p>{}</text:p>'
        "</draw:text-box></draw:frame><draw:frame><draw:text-box><text:p>{}</text:p>"
        "</draw:text-box></draw:frame></draw:page>"
    )
    body = slide.format("Winds", "They blow.") + slide.format("Tides", "They turn.")
    assert passages_of(office(body, kind="presentation", title="Sea"), "talk.odp") == [
        ("Sea > Winds", "They blow.", "talk.odp:1"),
        ("Sea > Tides", "They turn.", "talk.odp:2"),
    ]


def test_an_opendocument_workbook_repeats_what_is_meant_to_be_read():
    many = 'table:number-columns-repeated="{}"'.format
    rows = (
        table_row(("", "port"), ("", "high"), ("", "low")),
        table_row(("", "Lund"), (many(2), "4"), (many(16000),)),
        table_row((many(16384),), more='table:number-rows-repeated="1048000"'),
        table_row(("", "Holm"), ("", "5"), ("", "1")),
    )
    more = table_row(("", "name"), ("", "age")) + table_row(("", "Mina"), ("", "30"))
    body = "".join(
        f'<table:table table:name="{name}">{inner}</table:table>'
        for name, inner in (("Tides", "".join(rows)), ("Crew", more))
    )
    document = read(office(body, kind="spreadsheet"), "t.ods")
    assert document.text == (
        "# Tides\n\nport: Lund; high: 4; low: 4.\nport: Holm; high: 5; low: 1.\n"
        "# Crew\n\nname: Mina; age: 30."
    )
    assert lines(document, "port: Lund", "port: Holm", "name: Mina") == [2, 1_000_001, 2]


def test_entities_are_never_resolved(tmp_path):
    (tmp_path / "secret").write_text("SECRET")
    for entity in (f'SYSTEM "file://{tmp_path}/secret"', '"SECRET"', 'SYSTEM "http://localhost/"'):
        prolog = f"<!DOCTYPE a [<!ENTITY x {entity}>]>"
        data = office("<text:p>It is &x;.</text:p>", prolog=prolog)
        for ending in ("odt", "odp", "ods"):
            with pytest.raises(DocumentError, match="document type"):
                read(data, f"a.{ending}")


# Books


def book(chapters, *, version=3, encryption=""):
    """Return an EPUB; chapters are (file, title in the table of contents, body)."""
    files = {name: f"text/{name}" for name, _, _ in chapters}
    items = [(path, "application/xhtml+xml", "") for path in files.values()]
    links = [(f"text/{name}#top", title) for name, title, _ in chapters if title]
    if version == 3:
        items.insert(0, ("nav.xhtml", "application/xhtml+xml", 'properties="nav"'))
        entries = "".join(f"<li><a href='{link}'>{title}</a></li>" for link, title in links)
        contents = {"OPS/nav.xhtml": f"<html><body><nav><ol>{entries}</ol></nav></body></html>"}
    else:
        items.append(("toc.ncx", "application/x-dtbncx+xml", ""))
        entries = "".join(
            f"<navPoint><navLabel><text>{t}</text></navLabel><content src='{h}'/></navPoint>"
            for h, t in links
        )
        contents = {"OPS/toc.ncx": f"<ncx><navMap>{entries}</navMap></ncx>"}
    manifest = "".join(
        f'<item id="{path}" href="{path}" media-type="{kind}" {more}/>'
        for path, kind, more in items
    )
    spine = "".join(f'<itemref idref="{path}"/>' for path, _, _ in items)
    package = (
        f"<package {DC}><metadata><dc:title>The Tide Book</dc:title></metadata>"
        f'<manifest>{manifest}</manifest><spine toc="toc.ncx">{spine}</spine></package>'
    )
    container = '<container><rootfiles><rootfile full-path="OPS/b.opf"/></rootfiles></container>'
    contents |= {"META-INF/container.xml": container, "OPS/b.opf": package}
    contents |= {"META-INF/encryption.xml": encryption} if encryption else {}
    pages = {
        f"OPS/{files[name]}": f"<html><body>{body}</body></html>" for name, _, body in chapters
    }
    return archive({**contents, **pages})


CHAPTERS = [
    ("two.xhtml", "Of Springs", "<p>Springs come with the moon.</p>"),
    ("one.xhtml", "Unused", "<h2>Of Neaps</h2><p>Neaps come between.</p>"),
    ("end.xhtml", "", "<p>The end.</p>"),
]


@pytest.mark.parametrize("version", [2, 3])
def test_a_book_is_read_in_its_order_under_its_titles(version):
    assert passages_of(book(CHAPTERS, version=version), "tides.epub") == [
        ("The Tide Book > Of Springs", "Springs come with the moon.", "tides.epub:1"),
        ("The Tide Book > Of Neaps", "Neaps come between.", "tides.epub:2"),
        ("The Tide Book > end", "The end.", "tides.epub:3"),
    ]


def test_a_protected_or_broken_book_says_so():
    locked = (
        "<encryption><EncryptedData><CipherData><CipherReference URI='OPS/text/one.xhtml'/>"
        "</CipherData></EncryptedData></encryption>"
    )
    font = locked.replace("text/one.xhtml", "font.otf")
    assert "moon" in read(book(CHAPTERS, encryption=font), "a.epub").text
    for data, reason in (
        (book(CHAPTERS, encryption=locked), "protected"),
        (archive({"a.txt": "x"}), "container"),
        (book([("a.xhtml", "", "<img/>")]), "no text"),
    ):
        with pytest.raises(DocumentError, match=reason):
            read(data, "a.epub")


# Rich Text


def test_rich_text_keeps_headings_letters_and_tables():
    source = (
        r"{\rtf1\ansi\ansicpg1251{\fonttbl{\f0\fcharset204 Arial;}}"
        r"{\info{\title The Lamp}}{\stylesheet{\s1\outlinelevel0 heading 1;}}"
        r"\pard\outlinelevel0\b Parts\b0\par"
        r"\pard The wick costs 3\'88 and burns.\par "
        r"\'cc\'e0\'ff\'ea. \u1105?\par"
        r"\trowd\cellx1\cellx2\pard\intbl part\cell price\cell\row"
        r"\trowd\cellx1\cellx2\pard\intbl wick\cell 3\cell\row"
        r"\pard See {\field{\*\fldinst{HYPERLINK "
        r'"http://x"}}{\fldrslt there}}.\par}'
    )
    document = read(source, "a.rtf")
    assert document.title == "The Lamp"
    assert blocks(document) == [
        "# Parts",
        "The wick costs 3€ and burns.",
        "Маяк. ё",
        "part | price\nwick | 3",
        "See there.\n",
    ]
    assert lines(document, "Parts", "Маяк", "wick | 3") == [1, 3, 5]
    with pytest.raises(DocumentError, match="does not begin"):
        read(b"hello", "a.rtf")


def test_the_pictures_of_rich_text_cost_next_to_nothing():
    picture = "{\\pict\\pngblip " + ("89504e47" * 16 + "\n") * 60_000 + "}"
    began = time.process_time()
    assert read(rf"{{\rtf1 Before.\par {picture}After.}}", "a.rtf").text.split() == [
        *("Before.", "After."),
    ]
    assert time.process_time() - began < 2


# All of them


def test_all_are_read_by_the_process_beside_this_one(store, embedder, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    for ending, data in seed_documents().items():
        (docs / f"a{ending}").write_bytes(data)
    report = index_folder(store, embedder, docs)
    assert (report.added, report.failed, report.passed_over) == (len(READERS) + 4, {}, {})
    assert all(store.document(f"a{ending}") for ending in READERS)


def test_a_broken_file_is_one_clear_failure():
    for ending in (*OFFICE, ".pdf"):
        with pytest.raises(DocumentError, match=f"broken {ending[1:]}"):
            read(b"%PDF-1.4 nothing here", f"a{ending}")
        with contextlib.suppress(DocumentError):
            read(seed_documents()[ending][:-30], f"a{ending}")


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    for ending in (*OFFICE, ".pdf"):
        monkeypatch.setitem(sys.modules, READERS[ending].library, None)
        extra = "pdf" if ending == ".pdf" else "office"
        with pytest.raises(MissingExtraError, match=rf"which reads .*ragaccel\[{extra}\]"):
            read(b"", f"a{ending}")


def test_what_unpacks_to_too_much_is_refused(monkeypatch):
    monkeypatch.setattr("ragaccel.retrieval.loaders.office.MAX_UNPACKED_BYTES", 2_000_000)
    data = archive({"content.xml": b"\0" * 2_100_000})
    for ending in ("docx", "odt", "epub", "xlsx", "ods"):
        with pytest.raises(DocumentError, match="unpacks"):
            read(data, f"a.{ending}")


def test_encrypted_and_old_office_files_are_named_as_such(store, embedder, tmp_path):
    manifest = {"content.xml": b"\x01", "META-INF/manifest.xml": "<m><encryption-data/></m>"}
    old = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" * 100
    for name, data in (("a.odt", archive(manifest)), ("a.xlsx", old), ("a.docx", old)):
        with pytest.raises(DocumentError, match="encrypted"):
            read(data, name)
    (tmp_path / "old.doc").write_bytes(old)
    assert "as .docx" in index_folder(store, embedder, tmp_path).passed_over["old.doc"]


def test_reading_a_path(tmp_path):
    path = tmp_path / "ünï 🙂 name.md"
    path.write_text("# Hello\nWorld.", encoding="utf-8")
    assert read_document(path).path == str(path)
    assert read_document(path, name="x.md").path == "x.md"
    with pytest.raises(DocumentError, match="over the limit"):
        read_document(path, max_bytes=3)
    with pytest.raises(DocumentError, match="cannot be read"):
        read_document(tmp_path / "missing.md")
