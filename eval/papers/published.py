"""Published figures of the papers and their repositories, each with one source.

If a paper's text and its repository differ, both figures are here. All figures were read at their
source: for LLMA and Lookahead the abstracts and repositories, not the tables and figures of the
papers. Lookahead's repository has more rows; here is each kind of model, set and processor once or
twice, the largest speed-ups included.

In ``published.json`` ``speedup`` is over plain decoding by the same system, in the source's words.
``plain`` and ``accelerated`` are tokens per second. ``tokens_per_pass`` includes the one token that
every pass yields.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eval.report.tables import plain_table

PUBLISHED = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def published(experiment: str) -> list[dict[str, Any]]:
    """Return the published figures of an experiment: system, setting, source and what is known."""
    return [{"experiment": experiment, **figure} for figure in PUBLISHED[experiment]["figures"]]


def published_table(figures: list[dict[str, Any]]) -> str:
    """Return a table of published figures, one row each, with their sources."""
    numbers = ("plain", "accelerated", "tokens_per_pass")
    shown = [name for name in numbers if any(name in figure for figure in figures)]
    titles = {
        "plain": "tokens/s, plain",
        "accelerated": "tokens/s, accelerated",
        "tokens_per_pass": "tokens a pass",
    }
    rows = [
        [
            figure["system"],
            figure["setting"],
            f"{figure['speedup']} ×" if "speedup" in figure else "",
            *(str(figure.get(name, "")) for name in shown),
            figure["source"],
        ]
        for figure in figures
    ]
    heads = ["published", "setting", "speed-up", *(titles[name] for name in shown), "source"]
    return plain_table(heads, rows)
