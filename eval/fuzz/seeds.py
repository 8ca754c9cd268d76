"""A small document of every format that is read, to be changed into broken ones."""

from __future__ import annotations

import io
import json
import zipfile
from functools import partial
from typing import TYPE_CHECKING

from ragaccel.retrieval.loaders import READERS

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT_ENDINGS = (".md", ".rst", ".txt", ".py")
"""Endings that no reader of its own is for, each with rules of its own."""


def endings() -> list[str]:
    """Every ending that is read by rules of its own, as the package registers them."""
    return [*TEXT_ENDINGS, *sorted(READERS)]


def seed_documents() -> dict[str, bytes]:
    """A document for every ending; text for one that no document is known of here."""
    made: dict[Callable[[], bytes], bytes] = {}
    documents = {}
    for ending in endings():
        make = _MAKERS.get(ending, _text)
        if make not in made:
            made[make] = make()
        documents[ending] = made[make]
    return documents


def has_seed(ending: str) -> bool:
    """Whether there is a document of that very format."""
    return ending in _MAKERS


def zipped(members: dict[str, bytes]) -> bytes:
    """An archive of files, packed."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return made.getvalue()


def members_of(data: bytes) -> dict[str, bytes]:
    """The files of an archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def pdf(content: bytes, *, more: bytes = b"", kids: bytes = b"3 0 R", count: int = 1) -> bytes:
    """A PDF of one page with a stream of drawing commands; ``more`` is said of the stream."""
    objects = (
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, count),
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
        b" /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d%s >>\nstream\n%s\nendstream" % (len(content), more, content),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    )
    made, places = b"%PDF-1.4\n", []
    for number, thing in enumerate(objects, 1):
        places.append(len(made))
        made += b"%d 0 obj\n%s\nendobj\n" % (number, thing)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return (
        made
        + b"xref\n0 6\n0000000000 65535 f \n"
        + table
        + b"trailer << /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % len(made)
    )


def _text() -> bytes:
    return "Ein Text. Noch einer! Sí? 。日本語。\n\nTwo\n".encode()


def _markdown() -> bytes:
    return (
        b"---\ntitle: X\n---\n# Head {#a}\n\nText [one](x). Text two.\n\n```py\ncode\n```\n\n"
        b"<!-- c -->\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nSetext\n======\n\n- item\n1. two\n"
    )


def _rst() -> bytes:
    return b"Title\n=====\n\nText. More text.\n\nSub\n---\n\n.. code::\n\n   x\n"


def _code() -> bytes:
    return b"def f():\n    return 1\n\nclass A:\n    '''doc'''\n"


def _html() -> bytes:
    return (
        b"<!doctype html><html><head><title>T</title><meta charset='utf-8'></head><body>"
        b"<h1>Head</h1><!-- c --><p class=a>Para one &amp; two.</p><pre>code\n x</pre><ul><li>a"
        b"</li></ul><table><tr><td>1</td><td>2</td></tr></table><script>x()</script></body></html>"
    )


def _csv() -> bytes:
    return b'name;born;note\nAda;1815;"a;b\nc"\nBob;1900;x\n'


def _tsv() -> bytes:
    return b"name\tborn\nAda\t1815\n"


def _json() -> bytes:
    items = [{"name": "a", "v": [1, 2, None]}, {"id": 3, "t": "l\nm"}]
    return json.dumps({"title": "x", "items": items, "n": 1.5}).encode()


def _json_lines() -> bytes:
    return b'{"a": 1, "b": "x"}\n[1,2]\n"t"\nnot json\n'


def _notebook() -> bytes:
    code = {"cell_type": "code", "source": "1+1", "outputs": [{"text": ["2"]}]}
    prose = {"cell_type": "markdown", "source": ["# H\n", "t"]}
    kernel = {"kernelspec": {"language": "python"}}
    return json.dumps({"metadata": kernel, "cells": [prose, code]}).encode()


def _pdf() -> bytes:
    return pdf(b"BT /F1 12 Tf 72 720 Td (Hello world. This is) Tj 0 -14 Td (text.) Tj ET")


def _docx() -> bytes:
    import docx

    file, saved = docx.Document(), io.BytesIO()
    file.add_heading("Head", 1)
    file.add_paragraph("Para. Two.")
    table = file.add_table(3, 3)
    table.cell(0, 0).merge(table.cell(0, 1)).text = "x"
    file.save(saved)
    return saved.getvalue()


def _pptx() -> bytes:
    import pptx

    file, saved = pptx.Presentation(), io.BytesIO()
    slide = file.slides.add_slide(file.slide_layouts[1])
    slide.shapes.title.text = "T"
    slide.placeholders[1].text = "one\ntwo"
    slide.notes_slide.notes_text_frame.text = "note"
    file.save(saved)
    return saved.getvalue()


def _xlsx() -> bytes:
    import openpyxl

    book, saved = openpyxl.Workbook(), io.BytesIO()
    book.active.append(["Name", "Born"])
    book.active.append(["Ada", 1815])
    book.active.merge_cells("A3:B4")
    book.save(saved)
    return saved.getvalue()


_OPEN = "urn:oasis:names:tc:opendocument:xmlns:"
_ODT = (
    '<office:text><text:h text:outline-level="1">Head</text:h>'
    '<text:p>Para<text:s text:c="3"/>one.</text:p><text:list><text:list-item><text:p>a</text:p>'
    "</text:list-item></text:list><table:table><table:table-row><table:table-cell><text:p>1"
    "</text:p></table:table-cell></table:table-row></table:table></office:text>"
)
_ODP = (
    '<office:presentation><draw:page><draw:frame presentation:class="title"><draw:text-box>'
    "<text:p>T</text:p></draw:text-box></draw:frame><text:p>one</text:p></draw:page>"
    "</office:presentation>"
)
_ODS = (
    '<office:spreadsheet><table:table table:name="S"><table:table-row><table:table-cell>'
    "<text:p>Name</text:p></table:table-cell><table:table-cell><text:p>Born</text:p>"
    '</table:table-cell></table:table-row><table:table-row table:number-rows-repeated="2">'
    '<table:table-cell table:number-columns-repeated="2"><text:p>1</text:p></table:table-cell>'
    "</table:table-row></table:table></office:spreadsheet>"
)


def _open_document(body: str) -> bytes:
    names = "".join(
        f' xmlns:{name}="{_OPEN}{name}:1.0"' for name in ("office", "text", "table", "presentation")
    )
    names += f' xmlns:draw="{_OPEN}drawing:1.0" xmlns:dc="http://purl.org/dc/elements/1.1/"'
    content = (
        f"<office:document-content{names}><office:body>{body}</office:body>"
        "</office:document-content>"
    )
    meta = (
        f"<office:document-meta{names}><office:meta><dc:title>T</dc:title></office:meta>"
        "</office:document-meta>"
    )
    manifest = f'<manifest:manifest xmlns:manifest="{_OPEN}manifest:1.0"/>'
    members = {
        "mimetype": "application/vnd.oasis.opendocument.text",
        "content.xml": content,
        "meta.xml": meta,
        "META-INF/manifest.xml": manifest,
    }
    return zipped({name: text.encode() for name, text in members.items()})


def _epub() -> bytes:
    container = (
        b'<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
        b'<rootfile full-path="book.opf"/></rootfiles></container>'
    )
    package = (
        b'<package xmlns="http://www.idpf.org/2007/opf"'
        b' xmlns:dc="http://purl.org/dc/elements/1.1/"><metadata><dc:title>T</dc:title></metadata>'
        b'<manifest><item id="a" href="a.xhtml" media-type="application/xhtml+xml"/></manifest>'
        b'<spine><itemref idref="a"/></spine></package>'
    )
    return zipped(
        {
            "mimetype": b"application/epub+zip",
            "META-INF/container.xml": container,
            "book.opf": package,
            "a.xhtml": _html(),
        }
    )


def _rtf() -> bytes:
    return (
        rb"{\rtf1\ansi\ansicpg1252{\fonttbl{\f0 Arial;}}\pard\f0 One \'e9 \u233? {\b two}.\par"
        rb"{\*\generator x;}{\pict\bin3 abc} three\tab four\par}"
    )


_MAKERS: dict[str, Callable[[], bytes]] = {
    ".md": _markdown,
    ".rst": _rst,
    ".txt": _text,
    ".py": _code,
    **dict.fromkeys((".html", ".htm", ".xhtml"), _html),
    ".csv": _csv,
    ".tsv": _tsv,
    ".json": _json,
    **dict.fromkeys((".jsonl", ".ndjson"), _json_lines),
    ".ipynb": _notebook,
    ".pdf": _pdf,
    ".docx": _docx,
    ".pptx": _pptx,
    **dict.fromkeys((".xlsx", ".xlsm"), _xlsx),
    ".odt": partial(_open_document, _ODT),
    ".odp": partial(_open_document, _ODP),
    ".ods": partial(_open_document, _ODS),
    ".epub": _epub,
    ".rtf": _rtf,
}
