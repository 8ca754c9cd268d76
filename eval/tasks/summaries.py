"""Summaries: whole documents of the handbook under demos/, to be summarized; none are recorded."""

from __future__ import annotations

from pathlib import Path

from eval.examples import Example
from ragaccel.passage import Passage

_DOCUMENTS = Path(__file__).parents[2] / "demos" / "documents"
_FILES = (
    "incidents/2018-grounding-of-the-petrel.md",
    "history/keepers-remembered.txt",
    "equipment/diesel-generators.md",
    "incidents/2022-storm-hilda.md",
    "island/birds-and-seals.md",
    "procedures/landing-by-boat.txt",
    "history/the-lightvessel-constance.md",
    "incidents/2020-lantern-fire-at-wether-holm.txt",
)


def load(limit: int | None = None, data: Path | None = None) -> list[Example]:  # noqa: ARG001
    return [_example(_DOCUMENTS / name) for name in _FILES[:limit]]


def _example(path: Path) -> Example:
    text = path.read_text(encoding="utf-8").strip()
    title = path.stem.replace("-", " ")
    return Example(
        f"summary-{path.stem}",
        "Summarize this document in about five sentences.",
        (Passage(f"{path.stem}/1", text, title, end=len(text)),),
    )
