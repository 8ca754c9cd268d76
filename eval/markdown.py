"""Markdown: tables, as the report writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a table: the titles of its columns, and the cells of each row."""
    lines = [_line(titles), "|---" * len(titles) + "|", *map(_line, rows)]
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
