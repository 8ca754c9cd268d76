"""Markdown: tables, as the report writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a table: the titles of its columns, and the cells of each row."""
    lines = [_line(titles), "|---" * len(titles) + "|", *map(_line, rows)]
    return "\n".join(lines)


def ratio_cell(figures: Mapping[str, Any], label: str, digits: int = 2) -> str:
    """A ratio with its interval, or nothing where it was not measured."""
    if label not in figures:
        return ""
    low, high = (f"{bound:.{digits}f}" for bound in figures[f"{label}_interval"])
    return f"{figures[label]:.{digits}f} ({low} to {high})"


def _line(cells: Iterable[str]) -> str:
    escaped = (cell.replace("|", r"\|") for cell in cells)  # a bar would end the cell
    return f"| {' | '.join(escaped)} |"
