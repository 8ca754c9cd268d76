"""Documents: a file of any supported format, read into one text with exact offsets."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ragaccel.errors import DocumentError, MissingExtraError
from ragaccel.passage import Document
from ragaccel.regular_files import TooLargeError, read_regular_file
from ragaccel.retrieve import data_text, html_text, notebook_text, office_text, pdf_text
from ragaccel.retrieve.plain_text import decode_text, looks_binary

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_FILE_BYTES = 50_000_000

_MARKDOWN_ENDINGS = ".md .mdx .markdown .mkd .qmd .rmd"
_CODE_ENDINGS = (
    ".py .pyi .js .jsx .mjs .ts .tsx .java .kt .scala .c .h .cc .cpp .hpp .cs .go .rs .rb .php .pl"
    " .swift .m .r .jl .lua .sh .bash .zsh .fish .ps1 .sql .css .scss .less .vue .toml .yaml .yml"
    " .ini .cfg .conf .env .properties .gradle .cmake .mk .dockerfile .proto .graphql .tf .tex"
    " .bib .xml .xsd"
)
_MARKDOWN = frozenset(_MARKDOWN_ENDINGS.split())
_CODE = frozenset(_CODE_ENDINGS.split())
_READERS: dict[str, Callable[[bytes, str], Document]] = {
    ".html": html_text.read_html,
    ".htm": html_text.read_html,
    ".xhtml": html_text.read_html,
    ".csv": data_text.read_csv,
    ".tsv": data_text.read_csv,
    ".json": data_text.read_json,
    ".jsonl": data_text.read_json_lines,
    ".ndjson": data_text.read_json_lines,
    ".ipynb": notebook_text.read_notebook,
    ".pdf": pdf_text.read_pdf,
    ".docx": office_text.read_docx,
    ".pptx": office_text.read_pptx,
}
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
_FRONT_TITLE = re.compile(r"^title:[ \t]*(?P<quote>[\"']?)(.+?)(?P=quote)[ \t]*$", re.MULTILINE)


class BinaryFileError(DocumentError):
    """A file that holds no text: passed over and counted, not reported as a failure."""


def read_document(
    path: str | Path, *, name: str | None = None, max_bytes: int = MAX_FILE_BYTES
) -> Document:
    """Read a file into a document.

    Args:
        path: The file.
        name: What the document is called, e.g. its path inside a folder; the path itself if None.
        max_bytes: Files larger than this are refused.

    Raises:
        DocumentError: The file is missing, unreadable, broken or too large; the message says why.
        BinaryFileError: The file is no text, and of no format that is read otherwise.
        MissingExtraError: The format needs an optional dependency.
    """
    path = Path(path)
    return document_from_bytes(read_bytes(path, max_bytes), name or str(path))


def read_bytes(path: Path, max_bytes: int = MAX_FILE_BYTES, *, inside: Path | None = None) -> bytes:
    """Read a file whole; a DocumentError says why it cannot be.

    With ``inside``, a folder above the file, no link below that folder is followed.
    """
    try:
        return read_regular_file(path, max_bytes, inside=inside)
    except TooLargeError as error:
        raise DocumentError(
            f"{error.size / 1e6:,.0f} MB is over the limit of {max_bytes / 1e6:,.0f} MB a file:"
            " split it, exclude it, or raise max_file_bytes"
        ) from None
    except PermissionError:
        raise DocumentError("no permission to read it") from None
    except OSError as error:
        raise DocumentError(f"cannot be read: {error.strerror or error}") from error


def document_from_bytes(data: bytes, name: str) -> Document:
    """Make a document of a file's bytes; the ending of its name tells the format."""
    suffix = Path(name).suffix.lower()
    reader = _READERS.get(suffix)
    if reader is None:
        return _read_text(data, name, suffix)
    try:
        document = reader(data, name)
    except (DocumentError, MissingExtraError):
        raise
    except Exception as error:  # parsers of foreign formats fail in any way they like
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DocumentError(f"broken {suffix[1:]} file: {reason}") from error
    if _LONE_SURROGATE.search(document.text):  # JSON can say them; nothing can store them
        document = replace(document, text=_LONE_SURROGATE.sub("\ufffd", document.text))
    return document


def _read_text(data: bytes, name: str, suffix: str) -> Document:
    if looks_binary(data):
        raise BinaryFileError("a binary file")
    text, _ = decode_text(data)
    if suffix in _MARKDOWN:
        return Document(path=name, text=text, title=_front_title(text), markup="markdown")
    if suffix == ".rst":
        return Document(path=name, text=text, markup="rst")
    if suffix in _CODE:
        return Document(path=name, text=text, title=name, markup="code")
    return Document(path=name, text=text)


def _front_title(text: str) -> str:
    front = _FRONT_MATTER.match(text)
    title = _FRONT_TITLE.search(front.group(1)) if front else None
    return title.group(2).strip() if title else ""
