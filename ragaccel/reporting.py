"""Reporting: where an answer's words stand, as plain values ready for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ragaccel.citing import copied_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ragaccel.citing import CopiedSpan
    from ragaccel.passage import Passage


def citations(
    text: str,
    passages: Sequence[Passage],
    spans: Sequence[CopiedSpan] | None = None,
    *,
    place: Callable[[Passage], str] | None = None,
) -> list[dict[str, Any]]:
    """Tell which runs of a text stand in which passages: its copied spans as plain values.

    Each has its ``text``, the ``passage_id``, the passage's ``citation`` for people, and where it
    stands in the passage (``start``, ``end``) and in the text (``out_start``, ``out_end``), in
    characters.

    Args:
        text: what was written.
        passages: what it may have been copied from.
        spans: its copied spans, where they are known; found otherwise.
        place: writes a citation, in place of ``Passage.citation``.
    """
    found = copied_spans(text, passages) if spans is None else spans
    return [
        {
            "text": text[span.start : span.end],
            "passage_id": span.passage_id,
            "citation": _cited(_copied(passages[span.passage_number - 1], span), place),
            "start": span.passage_start,
            "end": span.passage_end,
            "out_start": span.start,
            "out_end": span.end,
        }
        for span in found
    ]


def facts(
    passage: Passage, *, place: Callable[[Passage], str] | None = None
) -> dict[str, str | int]:
    """Tell what is known of a passage besides its text."""
    known = {
        "passage_id": passage.passage_id,
        "citation": _cited(passage, place),
        "title": passage.title,
        "source": passage.path,
        "page": passage.page,
        "line": passage.line,
    }
    return {name: value for name, value in known.items() if value is not None and value != ""}


def _copied(passage: Passage, span: CopiedSpan) -> Passage:
    return passage.cut(span.passage_start, span.passage_end)


def _cited(passage: Passage, place: Callable[[Passage], str] | None) -> str:
    return passage.citation if place is None else place(passage)
