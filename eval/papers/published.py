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

PUBLISHED = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def published(experiment: str) -> list[dict[str, Any]]:
    """Return the published figures of an experiment: system, setting, source and what is known."""
    return [{"experiment": experiment, **figure} for figure in PUBLISHED[experiment]["figures"]]
