"""The loader of PDF files."""

from __future__ import annotations

import io
import logging
import re

from ragaccel.errors import DocumentError
from ragaccel.passage import Document
from ragaccel.retrieval.loaders import document_of_pages

_LIST_ITEM = re.compile(r"\s*(?:[-*•▪◦‣–]|\d{1,3}[.)]|[a-z]\))\s")
_NUMBERED_HEADING = re.compile(r"\d{1,2}(?:\.\d{1,2})*\.? [A-Z][^.!?:;]{2,60}")
_FULL_LINE_SHARE = 0.7
_GENERATED_TITLE = re.compile(r"(?i)^(?:untitled|microsoft |.*\.(?:docx?|pptx?|tex|indd|pdf)$)")


def read_pdf(data: bytes, name: str) -> Document:
    """Read a PDF with its page numbers.

    Raises:
        DocumentError: The file needs a password, or it has no text, as a scan has none.
    """
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # its errors are raised as DocumentError
    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        raise DocumentError("the PDF is encrypted: save a copy without a password")
    pages = [join_lines(page.extract_text()) for page in reader.pages]
    if not any(pages):
        raise DocumentError("the PDF has no text: if it is a scan, run text recognition first")
    return document_of_pages(name, pages, _title(reader.metadata), markup="")


def join_lines(text: str) -> str:
    """Return a page's text without line breaks inside paragraphs.

    A line that is much shorter than the page's longest one, or stands before a list item, ends its
    paragraph. A hyphen at a line's end before a lower-case letter is removed.
    """
    lines = [line.strip() for line in text.replace("\xa0", " ").replace("\xad", "").split("\n")]
    full = max(map(len, lines), default=0) * _FULL_LINE_SHARE
    joined: list[str] = []  # lines and separators; adding to one string would take square time
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if joined and _NUMBERED_HEADING.fullmatch(line):
            while joined and not joined[-1].strip():
                joined.pop()
            joined.append("\n\n")
        continues = bool(following) and not _LIST_ITEM.match(following)
        if continues and _hyphenated(line, following):
            joined.append(line[:-1])
        elif continues and line and (len(line) >= full or following[0].islower()):
            joined += [line, " "]
        else:
            joined += [line, "\n\n" if len(line) < full and line and line[-1] in ".!?" else "\n"]
    return re.sub(r"\n{3,}", "\n\n", "".join(joined)).strip()


def _hyphenated(line: str, following: str) -> bool:
    return len(line) > 1 and line[-1] == "-" and line[-2].isalpha() and following[0].islower()


def _title(metadata: object) -> str:
    title = str(getattr(metadata, "title", None) or "").strip()
    return "" if _GENERATED_TITLE.match(title) else title
