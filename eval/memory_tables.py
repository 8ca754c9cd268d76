"""Memory tables: what processes held, in Markdown."""

from __future__ import annotations

from typing import Any

from eval.markdown import table
from eval.tables import NAMES


def memory_table(document: dict[str, Any]) -> str:
    """Lay out how a process grows between two of its requests: one row a setting."""
    first, last = (
        f"{next(iter(document['processes'].values()))['readings'][at]['requests']:,} requests"
        for at in (0, -1)
    )
    titles = [
        *("setting", f"resident after {first}", f"after {last}", "growth"),
        *("of it remembered", "of it kept prefixes"),
    ]
    rows = []
    for name, figures in document["processes"].items():
        readings = figures["readings"]
        sizes = [
            readings[0]["resident_bytes"],
            readings[-1]["resident_bytes"],
            figures["growth_bytes"],
            figures["remembered_growth_bytes"],
            figures["kept_growth_bytes"],
        ]
        rows.append([name, *(f"{size / 1e6:.1f} MB" for size in sizes)])
    return table(titles, rows)


def peak_memory_table(document: dict[str, Any]) -> str:
    """Lay out what each decoder's process held: one row a decoder."""
    rows = [
        [
            NAMES.get(name, name),
            f"{figures['loaded_bytes'] / 1e6:,.0f} MB",
            f"{figures['peak_bytes'] / 1e6:,.0f} MB",
            f"{(figures['peak_bytes'] - figures['loaded_bytes']) / 1e6:,.0f} MB",
        ]
        for name, figures in document["contenders"].items()
    ]
    return table(["decoder", "before the answer", "at most", "more"], rows)
