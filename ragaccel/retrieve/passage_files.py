"""Passage files: collections that come cut already, as MS MARCO and BEIR have them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragaccel.errors import DocumentError
from ragaccel.passage import Passage
from ragaccel.regular_files import open_regular_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class PassageFile:
    """What a first reading of a collection finds: its sha256, how many passages, how many empty."""

    sha256: str
    num_passages: int
    num_empty: int


def scan_passages(path: Path) -> PassageFile:
    """Read a collection through, checking every line and that no id comes twice.

    Raises:
        DocumentError: With the number of the line that is no passage.
    """
    first_lines: dict[str, int] = {}
    empty = 0
    digest = hashlib.sha256()
    for number, passage in _numbered(path, digest.update):
        if passage.passage_id in first_lines:
            raise DocumentError(
                f"{path}, line {number}: the id {passage.passage_id!r} stands on line"
                f" {first_lines[passage.passage_id]} already"
            )
        first_lines[passage.passage_id] = number
        empty += not passage.text
    return PassageFile(digest.hexdigest(), len(first_lines) - empty, empty)


def read_passages(path: Path) -> Iterator[Passage]:
    """Yield the passages of a TSV or JSON Lines file that are not empty, as they are."""
    return (passage for _, passage in _numbered(path) if passage.text)


def _numbered(
    path: Path, take: Callable[[bytes], None] = lambda _: None
) -> Iterator[tuple[int, Passage]]:
    parse = _json_passage if path.suffix.lower() in _JSON_LINES else _tsv_passage
    columns = ["id", "text"]
    try:
        with open_regular_file(path) as file:
            for number, line in enumerate(file, 1):
                take(line)
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if number == 1 and {"id", "text"} <= set(text.split("\t")):
                    columns = text.split("\t")
                elif text.strip():
                    yield number, parse(text, columns)
    except UnicodeDecodeError:
        raise DocumentError(f"{path}, line {number}: not UTF-8: convert the file first") from None
    except OSError as error:
        raise DocumentError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DocumentError(f"{path}, line {number}: {error}") from None


def _tsv_passage(line: str, columns: list[str]) -> Passage:
    cells = line.split("\t", len(columns) - 1)
    named = dict(zip(columns, cells, strict=False))
    if len(cells) < 2 or not named.get("id", "").strip():
        raise ValueError("not of the form id<TAB>text")
    return _passage(named["id"].strip(), named.get("title", ""), named.get("text", ""))


def _json_passage(line: str, _: list[str]) -> Passage:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg})") from None
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    name = value.get("id", value.get("_id")) if isinstance(value, dict) else None
    if isinstance(name, bool) or not isinstance(name, (str, int)) or name == "":
        raise ValueError('not of the form {"id": …, "title": …, "text": …}')
    title, text = value.get("title") or "", value.get("text")
    if not isinstance(text, str) or not isinstance(title, str):
        raise ValueError('"text" and "title" must be strings')
    return _passage(str(name), title, text)


def _passage(name: str, title: str, text: str) -> Passage:
    name = name.encode("utf-8", "replace").decode()  # JSON can say what nothing can store
    if len(name.splitlines()) > 1:
        raise ValueError("an id must be a single line")
    text = text.encode("utf-8", "replace").decode()
    text = text if text.strip() else ""
    title = title.encode("utf-8", "replace").decode()
    return Passage(passage_id=name, text=text, title=title, start=0, end=len(text))
