"""EPUB books read as text: their chapters in reading order, under the titles of the contents."""

from __future__ import annotations

import io
import posixpath
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ragaccel.errors import DocumentError, MissingExtraError
from ragaccel.passage import Document
from ragaccel.retrieve.html_text import read_html
from ragaccel.retrieve.plain_text import spoken_name
from ragaccel.retrieve.zip_limits import require_modest

if TYPE_CHECKING:
    from collections.abc import Iterator

_CONTAINER, _ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
_MAX_CONTENTS_BYTES = 10_000_000
_MAX_CHAPTERS = 20_000


@dataclass(frozen=True, slots=True)
class _Item:
    """A file of a book, by its place in the archive."""

    path: str
    media_type: str
    is_contents: bool


def read_epub(data: bytes, name: str) -> Document:
    """Read a book; the page of an offset is the 1-based number of its chapter file."""
    try:
        import lxml  # noqa: F401
    except ImportError:
        raise MissingExtraError("lxml, which reads EPUB books,", "office") from None
    require_modest(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        package_path = _package_path(archive)
        package = _xml(archive, package_path)
        title = _first_text(package, "title")
        items = _items(package, posixpath.dirname(package_path))
        titles = _titles(archive, package, items)
        locked = _locked(archive)
        pieces: list[str] = []
        starts: list[int] = []
        length = 0
        for item in _spine(package, items):
            if item.path in locked:
                raise DocumentError("the book is protected (DRM): only its shop's reader opens it")
            starts.append(length)
            text = _chapter(archive, item, titles.get(item.path, ""), book=title)
            pieces.append(text)
            length += len(text)
    text = "".join(pieces)
    if not text.strip():
        raise DocumentError("the book has no text: it may be made of pictures")
    return Document(name, text, title=title, page_starts=tuple(starts), markup="markdown")


def _chapter(archive: zipfile.ZipFile, item: _Item, title: str, *, book: str) -> str:
    """A chapter under a heading of the first level, so that it is not of the one before."""
    try:
        content = archive.read(item.path)
    except KeyError:
        raise DocumentError(f"broken epub file: {item.path} is missing") from None
    page = read_html(content, item.path)
    text = page.text.strip()
    if not text:
        return ""
    if text.startswith("#"):
        return f"# {text.lstrip('#').lstrip()}\n\n"
    own = page.title if page.title != book else ""
    return f"# {title or own or spoken_name(item.path)}\n\n{text}\n\n"


def _package_path(archive: zipfile.ZipFile) -> str:
    for element in _named(_xml(archive, _CONTAINER), "rootfile"):
        return unquote(str(element.get("full-path", "")))
    raise DocumentError("broken epub file: it names no package")


def _items(package: Any, folder: str) -> dict[str, _Item]:
    """The files of the book by their ids."""
    return {
        str(element.get("id")): _Item(
            _joined(folder, element.get("href", "")),
            str(element.get("media-type", "")),
            "nav" in str(element.get("properties", "")).split(),
        )
        for element in _named(package, "item")
    }


def _spine(package: Any, items: dict[str, _Item]) -> Iterator[_Item]:
    """The chapters, each once, in reading order."""
    seen = set()
    for element in _named(package, "itemref"):
        item = items.get(str(element.get("idref")))
        if item is None or item.is_contents or item.path in seen or "htm" not in item.media_type:
            continue
        seen.add(item.path)
        if len(seen) > _MAX_CHAPTERS:
            raise DocumentError(f"has more than {_MAX_CHAPTERS:,} chapters")
        yield item


def _titles(archive: zipfile.ZipFile, package: Any, items: dict[str, _Item]) -> dict[str, str]:
    """What the contents call each file: those of EPUB 3, else those of EPUB 2."""
    for item in items.values():
        if item.is_contents:
            return _titles_in(archive, item.path, "a", "href")
    for spine in _named(package, "spine"):
        contents = items.get(str(spine.get("toc")))
        if contents is not None:
            return _titles_in(archive, contents.path, "navPoint", "src")
    return {}


def _titles_in(archive: zipfile.ZipFile, path: str, tag: str, link: str) -> dict[str, str]:
    titles: dict[str, str] = {}
    if path not in archive.namelist():
        return titles
    folder = posixpath.dirname(path)
    for entry in _named(_xml(archive, path), tag):
        target, title = entry.get(link), entry
        if tag == "navPoint":  # its own label and link, not those of the entries within
            own = {_local(child): child for child in entry}
            if "content" not in own or "navLabel" not in own:
                continue
            target, title = own["content"].get(link), own["navLabel"]
        said = " ".join("".join(title.itertext()).split())
        if target and said:
            titles.setdefault(_joined(folder, str(target).partition("#")[0]), said)
    return titles


def _locked(archive: zipfile.ZipFile) -> set[str]:
    """The files that are encrypted; fonts that are merely disguised do not matter here."""
    if _ENCRYPTION not in archive.namelist():
        return set()
    references = _named(_xml(archive, _ENCRYPTION), "CipherReference")
    return {unquote(str(reference.get("URI", ""))) for reference in references}


def _xml(archive: zipfile.ZipFile, path: str) -> Any:
    """A small XML file of the book as a tree; entities and document types stay unread."""
    from lxml import etree

    try:
        with archive.open(path) as file:
            content = file.read(_MAX_CONTENTS_BYTES + 1)
    except KeyError:
        raise DocumentError(f"broken epub file: {path} is missing") from None
    if len(content) > _MAX_CONTENTS_BYTES:
        raise DocumentError(f"broken epub file: {path} is larger than any list of contents")
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False)
    return etree.fromstring(content, parser)


def _named(tree: Any, name: str) -> Iterator[Any]:
    return (element for element in tree.iter(f"{{*}}{name}"))


def _first_text(tree: Any, name: str) -> str:
    return next((" ".join((e.text or "").split()) for e in _named(tree, name)), "")


def _local(element: Any) -> str:
    return str(element.tag).rpartition("}")[2]


def _joined(folder: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(folder, unquote(link)))
