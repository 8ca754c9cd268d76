"""Workbooks, OpenDocument, EPUB and Rich Text: passages in order, bounded time and memory."""

import contextlib
import datetime
import io
import sys
import time
import zipfile

import pytest

from ragaccel.errors import DocumentError, MissingExtraError
from ragaccel.retrieval import index_folder, split_document
from ragaccel.retrieval.loaders import READERS, DocumentReader, document_from_bytes

NAMESPACES = " ".join(
    f'xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"'
    for name in ("office", "text", "table", "draw", "presentation", "meta")
)
DC = 'xmlns:dc="http://purl.org/dc/elements/1.1/"'


def count(texts):
    return [len(text.split()) for text in texts]


def passages_of(data, name, tokens=12):
    document = document_from_bytes(data, name)
    found = split_document(document, count, tokens)
    assert all(document.text[p.start : p.end] == p.text for p in found)
    return [(p.title, p.text, p.citation) for p in found]


def archive(**members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return buffer.getvalue()


def office(body, *, title="", prolog="", kind="text"):
    content = (
        f"<?xml version='1.0'?>{prolog}<office:document-content {NAMESPACES}><office:body>"
        f"<office:{kind}>{body}</office:{kind}></office:body></office:document-content>"
    )
    meta = f"<office:document-meta {NAMESPACES} {DC}><dc:title>{title}</dc:title>"
    return archive(**{"content.xml": content, "meta.xml": f"{meta}</office:document-meta>"})


# Workbooks


def workbook(**sheets):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.remove(book.active)
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(row)
    buffer = io.BytesIO()
    book.save(buffer)
    return buffer.getvalue()


def test_each_row_of_a_workbook_says_its_columns_under_its_sheet():
    day = datetime.datetime(2024, 5, 17)
    data = workbook(
        Boats=[
            ["Fleet of 2024"],
            [],
            ["Name", "Length", "Built", "Sound"],
            ["Petrel", 12.5, day, True],
            ["Gannet", 9, None, False],
            [None] * 4,
        ],
        Crew=[["Who", "Role"], ["Mina", "cook"], [], ["Port", "Depth", "Tide"], ["Lund", 3, 0.1]],
        Empty=[],
    )
    assert passages_of(data, "fleet_list.xlsx", 10) == [
        ("fleet list > Boats", "Fleet of 2024.", "fleet_list.xlsx:1"),
        (
            "fleet list > Boats",
            "Name: Petrel; Length: 12.5; Built: 2024-05-17; Sound: yes.",
            "fleet_list.xlsx:4",
        ),
        ("fleet list > Boats", "Name: Gannet; Length: 9; Sound: no.", "fleet_list.xlsx:5"),
        (
            "fleet list > Crew",
            "Who: Mina; Role: cook.\nPort: Lund; Depth: 3; Tide: 0.1.",
            "fleet_list.xlsx:2",
        ),
    ]


def test_percentages_are_written_as_such():
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.active.append(["what", "share"])
    book.active.append(["rent", 0.155])
    book.active["B2"].number_format = "0.0%"
    buffer = io.BytesIO()
    book.save(buffer)
    assert "rent; share: 15.5%." in document_from_bytes(buffer.getvalue(), "a.xlsx").text


def rewritten(data, member, content):
    """Replace the XML of a workbook's first sheet."""
    with zipfile.ZipFile(io.BytesIO(data)) as old:
        return archive(**{n: content if n == member else old.read(n) for n in old.namelist()})


@pytest.mark.parametrize(
    "rows",
    [
        '<row r="99999999999"><c r="A99999999999"><v>1</v></c></row>',
        "".join(f'<row r="{n}"><c r="XFD{n}"><v>1</v></c></row>' for n in range(1, 1000)),
    ],
)
def test_a_workbook_that_says_it_is_huge_is_refused_soon(rows):
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    sheet = f'<worksheet xmlns="{main}"><sheetData>{rows}</sheetData></worksheet>'
    data = rewritten(workbook(S=[[1]]), "xl/worksheets/sheet1.xml", sheet)
    began = time.process_time()
    with pytest.raises(DocumentError, match="export what matters"):
        document_from_bytes(data, "a.xlsx")
    assert time.process_time() - began < 20


# OpenDocument


def test_an_opendocument_text_keeps_headings_lists_and_tables():
    body = (
        '<text:h text:outline-level="1">Lamp</text:h>'
        "<text:table-of-content><text:p>Lamp 1</text:p></text:table-of-content>"
        "<text:p>It burns<text:s/>oil<text:line-break/>and <text:span>tallow</text:span>."
        "<text:note><text:note-citation>1</text:note-citation><text:note-body>"
        "<text:p>Or wax.</text:p></text:note-body></text:note> Always.</text:p>"
        '<text:h text:outline-level="2">Parts</text:h>'
        "<text:list><text:list-item><text:p>wick</text:p></text:list-item>"
        "<text:list-item><text:p>glass</text:p></text:list-item></text:list>"
        "<table:table><table:table-row><table:table-cell><text:p>part</text:p></table:table-cell>"
        "<table:table-cell><text:p>price</text:p><text:p>in crowns</text:p></table:table-cell>"
        "</table:table-row><table:table-row><table:table-cell><text:p>wick</text:p>"
        "</table:table-cell><table:table-cell><text:p>3</text:p></table:table-cell>"
        "</table:table-row></table:table>"
    )
    document = document_from_bytes(office(body, title="The Lamp Book"), "a.odt")
    assert document.title == "The Lamp Book"
    assert document.text.split("\n\n") == [
        "# Lamp",
        "Or wax.",
        "It burns oil and tallow. Always.",
        "## Parts",
        "- wick",
        "- glass",
        "part | price in crowns\nwick | 3\n",
    ]
    found = passages_of(office(body, title="The Lamp Book"), "a.odt", 40)
    assert [title for title, _, _ in found] == [
        "The Lamp Book > Lamp",
        "The Lamp Book > Lamp > Parts",
    ]


def test_an_opendocument_presentation_has_slides():
    slide = (
        '<draw:page><draw:frame presentation:class="title"><draw:text-box><text:p>{}</text:p>'
        "</draw:text-box></draw:frame><draw:frame><draw:text-box><text:p>{}</text:p>"
        "</draw:text-box></draw:frame></draw:page>"
    )
    body = slide.format("Winds", "They blow.") + slide.format("Tides", "They turn.")
    found = passages_of(office(body, kind="presentation"), "talk.odp")
    assert [(text, place) for _, text, place in found] == [
        ("They blow.", "talk.odp:1"),
        ("They turn.", "talk.odp:2"),
    ]


def test_an_opendocument_workbook_repeats_what_is_meant_to_be_read():
    def row(*cells, more=""):
        inner = "".join(
            f"<table:table-cell {how}>{f'<text:p>{text}</text:p>' if text else ''}"
            "</table:table-cell>"
            for text, how in cells
        )
        return f"<table:table-row {more}>{inner}</table:table-row>"

    many = 'table:number-columns-repeated="{}"'.format
    body = (
        '<table:table table:name="Tides">'
        + row(("port", ""), ("high", ""), ("low", ""))
        + row(("Lund", ""), ("4", many(2)), ("", many(16000)))
        + row(("", many(16384)), more='table:number-rows-repeated="1048000"')
        + row(("Holm", ""), ("5", ""), ("1", ""))
        + "</table:table>"
    )
    text = document_from_bytes(office(body, kind="spreadsheet"), "t.ods").text
    assert "port: Lund; high: 4; low: 4." in text
    assert "port: Holm; high: 5; low: 1." in text


@pytest.mark.parametrize("ending", ["odt", "odp", "ods"])
def test_entities_are_never_resolved(ending, tmp_path):
    (tmp_path / "secret").write_text("SECRET")
    for entity in (f'SYSTEM "file://{tmp_path}/secret"', '"SECRET"', 'SYSTEM "http://localhost/"'):
        prolog = f"<!DOCTYPE a [<!ENTITY x {entity}>]>"
        data = office("<text:p>It is &x;.</text:p>", prolog=prolog)
        with pytest.raises(DocumentError, match="document type"):
            document_from_bytes(data, f"a.{ending}")


def test_encrypted_files_are_named_as_such():
    data = archive(**{"content.xml": b"\x01", "META-INF/manifest.xml": "<m><encryption-data/></m>"})
    with pytest.raises(DocumentError, match="encrypted"):
        document_from_bytes(data, "a.odt")
    for name in ("a.xlsx", "a.docx", "a.odt"):
        with pytest.raises(DocumentError, match="encrypted"):
            document_from_bytes(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" * 100, name)


# Books


def book(chapters, *, version=3, encryption="", package_extra=""):
    manifest = "".join(
        f'<item id="c{n}" href="text/{name}" media-type="application/xhtml+xml"/>'
        for n, (name, _, _) in enumerate(chapters)
    )
    spine = "".join(f'<itemref idref="c{n}"/>' for n in range(len(chapters)))
    links = [(f"text/{name}#top", title) for name, title, _ in chapters if title]
    if version == 3:
        manifest += (
            '<item id="n" href="nav.xhtml" properties="nav" media-type="application/xhtml+xml"/>'
        )
        spine = f'<itemref idref="n"/>{spine}'
        entries = "".join(f"<li><a href='{link}'>{title}</a></li>" for link, title in links)
        contents = {"OPS/nav.xhtml": f"<html><body><nav><ol>{entries}</ol></nav></body></html>"}
    else:
        manifest += '<item id="n" href="toc.ncx" media-type="application/x-dtbncx+xml"/>'
        entries = "".join(
            f"<navPoint><navLabel><text>{t}</text></navLabel><content src='{h}'/></navPoint>"
            for h, t in links
        )
        contents = {"OPS/toc.ncx": f"<ncx><navMap>{entries}</navMap></ncx>"}
    package = (
        f"<package {DC}>{package_extra}<metadata><dc:title>The Tide Book</dc:title></metadata>"
        f'<manifest>{manifest}</manifest><spine toc="n">{spine}</spine></package>'
    )
    container = '<container><rootfiles><rootfile full-path="OPS/b.opf"/></rootfiles></container>'
    if encryption:
        contents["META-INF/encryption.xml"] = encryption
    return archive(
        **{"META-INF/container.xml": container, "OPS/b.opf": package, **contents},
        **{f"OPS/text/{name}": f"<html><body>{text}</body></html>" for name, _, text in chapters},
    )


CHAPTERS = [
    ("two.xhtml", "Of Springs", "<p>Springs come with the moon.</p>"),
    ("one.xhtml", "Unused", "<h2>Of Neaps</h2><p>Neaps come between.</p>"),
    ("end.xhtml", "", "<p>The end.</p>"),
]


@pytest.mark.parametrize("version", [2, 3])
def test_a_book_is_read_in_its_order_under_its_titles(version):
    found = passages_of(book(CHAPTERS, version=version), "tides.epub")
    assert found == [
        ("The Tide Book > Of Springs", "Springs come with the moon.", "tides.epub:1"),
        ("The Tide Book > Of Neaps", "Neaps come between.", "tides.epub:2"),
        ("The Tide Book > end", "The end.", "tides.epub:3"),
    ]


def test_a_protected_or_broken_book_says_so():
    locked = (
        "<encryption><EncryptedData><CipherData><CipherReference URI='OPS/text/one.xhtml'/>"
        "</CipherData></EncryptedData></encryption>"
    )
    with pytest.raises(DocumentError, match="protected"):
        document_from_bytes(book(CHAPTERS, encryption=locked), "a.epub")
    font = locked.replace("text/one.xhtml", "font.otf")
    assert "moon" in document_from_bytes(book(CHAPTERS, encryption=font), "a.epub").text
    with pytest.raises(DocumentError, match="container"):
        document_from_bytes(archive(**{"a.txt": "x"}), "a.epub")
    with pytest.raises(DocumentError, match="no text"):
        document_from_bytes(book([("a.xhtml", "", "<img/>")]), "a.epub")


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
    document = document_from_bytes(source.encode("ascii"), "a.rtf")
    assert document.title == "The Lamp"
    assert [block for block in document.text.split("\n\n") if block] == [
        "# Parts",
        "The wick costs 3€ and burns.",
        "Маяк. ё",
        "part | price\nwick | 3",
        "See there.\n",
    ]
    with pytest.raises(DocumentError, match="does not begin"):
        document_from_bytes(b"hello", "a.rtf")


@pytest.mark.parametrize(
    "piece",
    [
        r"{\field{\*\fldinst{",
        r"{\pict 89504e47",
        "{",
        "}",
        r"\'e9",
        r"{\title ",
        r"\outlinelevel1",
        "ab12 ",
        "a|",
        r"\bin9",
        r"{\fonttbl{\f1\fcharset",
        r"HYPERLINK \"",
    ],
)
def test_rich_text_takes_time_by_its_length_alone(piece):
    seconds = []
    for size in (20_000, 160_000):
        data = (r"{\rtf1\pict\bin0 {\fonttbl" + piece * (size // len(piece))).encode()
        began = time.process_time()
        with contextlib.suppress(DocumentError):
            document_from_bytes(data, "a.rtf")
        seconds.append(time.process_time() - began)
    assert seconds[1] < max(0.2, 20 * seconds[0])


def test_the_pictures_of_rich_text_cost_next_to_nothing():
    picture = "{\\pict\\pngblip " + ("89504e47" * 16 + "\n") * 60_000 + "}"
    began = time.process_time()
    document = document_from_bytes((r"{\rtf1 Before.\par " + picture + "After.}").encode(), "a.rtf")
    assert document.text.split() == ["Before.", "After."]
    assert time.process_time() - began < 2


# All of them

SAMPLES = {
    ".odt": lambda: office("<text:p>The lamp burns.</text:p>"),
    ".odp": lambda: office("<draw:page><text:p>The lamp burns.</text:p></draw:page>"),
    ".ods": lambda: office(
        '<table:table table:name="S"><table:table-row><table:table-cell><text:p>The lamp burns.'
        "</text:p></table:table-cell></table:table-row></table:table>"
    ),
    ".epub": lambda: book([("a.xhtml", "", "<p>The lamp burns.</p>")]),
    ".rtf": lambda: rb"{\rtf1 The lamp burns.\par}",
    ".xlsx": lambda: workbook(S=[["The lamp burns."]]),
    ".xlsm": lambda: workbook(S=[["The lamp burns."]]),
}


def test_all_are_read_by_the_process_beside_this_one(store, embedder, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    for ending, make in SAMPLES.items():
        (docs / f"a{ending}").write_bytes(make())
        assert ending in READERS
    report = index_folder(store, embedder, docs)
    assert (report.added, report.failed, report.passed_over) == (len(SAMPLES), {}, {})
    for ending in SAMPLES:
        assert any("The lamp burns." in p.text for p in store.passages_of(f"a{ending}")), ending


@pytest.mark.parametrize("ending", sorted(SAMPLES))
def test_a_broken_file_is_one_clear_failure(ending):
    data = SAMPLES[ending]()
    with DocumentReader() as reader:
        for cut in (0, 10, len(data) // 2, len(data) - 30):
            with contextlib.suppress(DocumentError):
                reader.read(data[:cut], f"a{ending}")
        assert "burns" in reader.read(data, f"a{ending}").text


@pytest.mark.parametrize(
    ("ending", "module"),
    [
        ("xlsx", "openpyxl"),
        ("odt", "lxml.etree"),
        ("epub", "lxml.etree"),
        ("rtf", "striprtf.striprtf"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(ending, module, monkeypatch):
    data = SAMPLES[f".{ending}"]()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"ragaccel\[office\]"):
        document_from_bytes(data, f"a.{ending}")


@pytest.mark.parametrize("ending", ["odt", "epub", "xlsx", "ods"])
def test_what_unpacks_to_too_much_is_refused(ending):
    data = archive(**{"content.xml": b"\0" * 210_000_000})
    with pytest.raises(DocumentError, match="unpacks"):
        document_from_bytes(data, f"a.{ending}")


def test_old_office_files_are_passed_over_with_the_remedy(store, embedder, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "old.doc").write_bytes(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(500))
    report = index_folder(store, embedder, docs)
    assert "save it as .docx" in report.passed_over["old.doc"]
    assert "save it as .docx" in index_folder(store, embedder, docs).passed_over["old.doc"]
