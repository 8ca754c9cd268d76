"""Sentences: where each one starts and ends in a text."""

from __future__ import annotations

import re
from collections.abc import Iterator

_BREAK = re.compile(
    r"""
    \n\s*\n                                  # a blank line
  | \n(?=\s*(?:[-*+•>|#]|\d+[.)]\s|```))     # a list item, heading, quote, table row or fence
  | (?<=[|:;`])\n                            # a line that ends a row or an introduction
  | (?<=[.!?…])["'”’)\]]*\s+(?=["'“‘(\[]*[A-Z0-9À-ÞА-Я])  # the end of a sentence
  | (?<=[。！？])
    """,
    re.VERBOSE,
)
_ABBREVIATION = re.compile(
    r"(?:\b(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|No|Nos|vs|Fig|Figs|Eq|Vol|Jr|Sr|Gen|Col|Capt|Lt|Rev|Mt|Ft"
    r"|e\.g|i\.e|etc|cf|al|approx|ca|p|pp|Inc|Ltd|Co|Corp|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sep|Sept|Oct"
    r"|Nov|Dec))\.$"
)


def sentence_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of every sentence, white space around it left out, in order.

    A rule-based splitter for prose and Markdown alike: headings, list items and table rows count
    as sentences; common abbreviations and initials do not end one. Spans never overlap.
    """
    start = 0
    for found in _BREAK.finditer(text):
        closing = found.group().rstrip()
        end = found.start() + (len(closing) if closing and "\n" not in closing else 0)
        if "\n" not in found.group() and _ABBREVIATION.search(text, start, end):
            continue
        yield from _trimmed(text, start, end)
        start = found.end()
    yield from _trimmed(text, start, len(text))


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, as strings."""
    return [text[start:end] for start, end in sentence_spans(text)]


def _trimmed(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    piece = text[start:end]
    stripped = piece.strip()
    if stripped:
        start += len(piece) - len(piece.lstrip())
        yield start, start + len(stripped)
