"""Documents: a file of any supported format, read into one text with exact offsets."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ragaccel.errors import DocumentError, MissingExtraError
from ragaccel.passage import Document
from ragaccel.regular_files import TooLargeError, read_regular_file
from ragaccel.retrieve.plain_text import decode_text, encoding_doubt, looks_binary
from ragaccel.retrieve.reader_process import ReaderProcess

if TYPE_CHECKING:
    from collections.abc import Iterable

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
_TEXT_ENDINGS = frozenset(".html .htm .xhtml .csv .tsv .json .jsonl .ndjson .ipynb".split())
_DECLARED_WITHIN = 4096
_BINARIES = {
    ".doc": "Word's format before 2007: save it as .docx",
    ".xls": "Excel's format before 2007: save it as .xlsx",
    ".ppt": "PowerPoint's format before 2007: save it as .pptx",
    ".xlsb": "a binary workbook: save it as .xlsx",
    ".mobi": "a Kindle book: convert it to .epub",
    ".azw3": "a Kindle book: convert it to .epub",
}
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
_FRONT_TITLE = re.compile(r"^title:(.*\S.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Reader:
    """What reads a format: a function of (bytes, name), by its module in this package.

    ``bounded`` says that it takes time and memory in proportion to the file alone, so that it may
    run in this process; any other runs in a :class:`ReaderProcess`. ``library`` is what it imports
    to read a file.
    """

    module: str
    function: str
    library: str = ""
    bounded: bool = False

    def read(self, data: bytes, name: str) -> Document:
        """Read a file in this process."""
        function = getattr(import_module(f"{__package__}.{self.module}"), self.function)
        document: Document = function(data, name)
        return document


_HTML = Reader("html_text", "read_html")
_CSV = Reader("data_text", "read_csv")
_JSON_LINES = Reader("data_text", "read_json_lines")
_XLSX = Reader("sheet_text", "read_xlsx", "openpyxl")
READERS = {
    ".html": _HTML,
    ".htm": _HTML,
    ".xhtml": _HTML,
    ".csv": _CSV,
    ".tsv": _CSV,
    ".json": Reader("data_text", "read_json"),
    ".jsonl": _JSON_LINES,
    ".ndjson": _JSON_LINES,
    ".ipynb": Reader("notebook_text", "read_notebook"),
    ".pdf": Reader("pdf_text", "read_pdf", "pypdf"),
    ".docx": Reader("office_text", "read_docx", "docx"),
    ".pptx": Reader("office_text", "read_pptx", "pptx"),
    ".xlsx": _XLSX,
    ".xlsm": _XLSX,
    ".odt": Reader("opendocument_text", "read_odt", "lxml.etree"),
    ".odp": Reader("opendocument_text", "read_odp", "lxml.etree"),
    ".ods": Reader("opendocument_text", "read_ods", "lxml.etree"),
    ".epub": Reader("epub_text", "read_epub", "lxml.etree"),
    ".rtf": Reader("rtf_text", "read_rtf", "striprtf.striprtf"),
}


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
    with DocumentReader() as reader:
        return reader.read(read_bytes(path, max_bytes), name or str(path))


class DocumentReader:
    """Reads the bytes of files, one after another; close it at the end.

    Text and Markdown are read at once; formats whose readers nothing bounds, in one process beside
    this one, which starts with the first of them or by :meth:`prepare`. Threads may share it.
    ``seconds`` is the CPU time that the last document took.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._process = ReaderProcess()

    def __enter__(self) -> DocumentReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process beside this one, if there is one."""
        self._process.close()

    def prepare(self, names: Iterable[str]) -> None:
        """Start the process beside this one if one of the files is for it, and do not wait."""
        found = (_reader_apart(name) for name in names)
        readers = dict.fromkeys(reader for reader in found if reader)
        libraries = [reader.library for reader in readers if reader.library]
        if readers:
            self._process.prepare(libraries)

    def read(self, data: bytes, name: str) -> Document:
        """Make a document of a file's bytes; the ending of its name tells the format.

        Raises:
            DocumentError: It is broken, or takes more time or memory than a file may.
            BinaryFileError: It is no text, and of no format that is read otherwise.
            MissingExtraError: The format needs an optional dependency.
        """
        if _reader_apart(name) is None:
            began = time.thread_time()
            document = document_from_bytes(data, name)
            self.seconds = time.thread_time() - began
        else:
            document = self._process.read(data, name)
            self.seconds = self._process.seconds
        return document


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
    """Make a document of a file's bytes in this process, whatever time and memory that takes.

    For files that are known; any other goes through a :class:`DocumentReader`.
    """
    suffix = _suffix(name)
    reader = READERS.get(suffix)
    if reader is None:
        return _read_text(data, name, suffix)
    try:
        document = reader.read(data, name)
    except (DocumentError, MissingExtraError, MemoryError):
        raise
    except Exception as error:  # parsers of foreign formats fail in any way they like
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        if "allocation failed" in reason:  # how libxml2 says it
            raise MemoryError from error
        raise DocumentError(f"broken {suffix[1:]} file: {_storable(reason)}") from error
    return replace(document, text=_storable(document.text), title=_storable(document.title))


def _storable(text: str) -> str:
    """A text without lone surrogates: JSON can say them; nothing can store them."""
    return _LONE_SURROGATE.sub("\ufffd", text)


def doubt_about(data: bytes, name: str) -> str:
    """Why a file may be read wrong though it was read, for people; empty where all is certain."""
    suffix = _suffix(name)
    if suffix in READERS and suffix not in _TEXT_ENDINGS:
        return ""
    declares = READERS.get(suffix) is _HTML and b"charset" in data[:_DECLARED_WITHIN]
    return "" if declares else encoding_doubt(data)


def reads_apart(name: str) -> bool:
    """Whether a file is read in a process of its own, which takes a moment to start."""
    return _reader_apart(name) is not None


def _reader_apart(name: str) -> Reader | None:
    reader = READERS.get(_suffix(name))
    return None if reader is None or reader.bounded else reader


def _suffix(name: str) -> str:
    return Path(name).suffix.lower()


def _read_text(data: bytes, name: str, suffix: str) -> Document:
    if looks_binary(data):
        raise BinaryFileError(_BINARIES.get(suffix, "a binary file"))
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
    found = _FRONT_TITLE.search(front.group(1)) if front else None
    title = found.group(1).strip() if found else ""
    is_quoted = len(title) > 2 and title[0] in "\"'" and title[-1] == title[0]
    return title[1:-1].strip() if is_quoted else title
