"""The loader of Markdown."""

from __future__ import annotations

import re

from ragaccel.passage import Document, fenced_spans
from ragaccel.retrieval.loaders import decode_text
from ragaccel.retrieval.loaders.tabular import table_lines

_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
_FRONT_TITLE = re.compile(r"^title:(.*\S.*)$", re.MULTILINE)
_QUOTE_MARKS = re.compile(r"^ {0,3}(?:> ?)+(?![ \t]*#)", re.MULTILINE)
_BAR = re.compile(r"(?<!\\)\|")
_RULE_CELL = re.compile(":?-+:?")
_MAX_GROWTH = 5  # of a table whose names are long, and repeated in every row


def read_markdown(data: bytes, name: str) -> Document:
    """Read Markdown; only tables and quotes outside of fenced code change, line by line."""
    text, _ = decode_text(data)
    pieces, position = [], 0
    for start, end in fenced_spans(text):
        pieces += [_plain(text[position:start]), text[start:end]]
        position = end
    read = "".join([*pieces, _plain(text[position:])])
    return Document(path=name, text=read, title=_front_title(text), markup="markdown")


def _plain(text: str) -> str:
    return _with_named_cells(without_quote_marks(text))


def without_quote_marks(text: str) -> str:
    """Return a text whose quoted lines (``> ``) have no marks, so that sentences go on in the next.

    The number of lines stays. Quoted headings, which are none of the document, keep their marks.
    """
    return _QUOTE_MARKS.sub("", text)


def _with_named_cells(text: str) -> str:
    """Return a text with the rows of its tables as ``table_lines`` has them, and blank heads.

    A table whose head does not name all cells of its rows is left as it is.
    """
    lines = text.split("\n")
    rule = 1
    while rule < len(lines) - 1:
        end = rule + 1
        if _is_rule(lines[rule]):
            while end < len(lines) and lines[end].strip():
                end += 1
            table = [lines[rule - 1], *lines[rule + 1 : end]]
            lines[rule - 1 : end] = _named(table, lines[rule]) or lines[rule - 1 : end]
        rule = end
    return "\n".join(lines)


def _is_rule(line: str) -> bool:
    return "|" in line and all(map(_RULE_CELL.fullmatch, _cells(line)))


def _named(table: list[str], rule: str) -> list[str]:
    """Return the lines of a table, or [] if not all rows have as many cells as the rule."""
    rows, width = [_cells(line) for line in table], len(_cells(rule))
    is_regular = all(any(row) and len(row) == width for row in rows)
    is_small = len(table[0]) * len(table) <= _MAX_GROWTH * sum(map(len, table))
    named = table_lines(rows, has_header=True) if is_regular and is_small else []
    return ["", "", *named] if len(named) == len(rows) - 1 else []


def _cells(line: str) -> list[str]:
    """Return the cells of a row, which may have bars at its ends; [""] of indented code."""
    row = "" if line.startswith((" " * 4, "\t")) else line.strip()
    row = row.removeprefix("|")
    row = row[:-1] if row.endswith("|") and not row.endswith("\\|") else row
    return [cell.strip().replace("\\|", "|") for cell in _BAR.split(row)]


def _front_title(text: str) -> str:
    front = _FRONT_MATTER.match(text)
    found = _FRONT_TITLE.search(front.group(1)) if front else None
    title = found.group(1).strip() if found else ""
    is_quoted = len(title) > 2 and title[0] in "\"'" and title[-1] == title[0]
    return title[1:-1].strip() if is_quoted else title
