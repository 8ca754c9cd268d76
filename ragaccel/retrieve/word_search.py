"""Word search: the store's full-text index asked in plain words, ranked by BM25."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragaccel.retrieve.store import Store

_WORD = re.compile(r"\w+")
_COMMON_WORDS = """
a about an and are as at be been but by can could did do does for from had has have how i if in into
is it its me my no not of on or our shall she should so than that the their them there they this to
us was we were what when where which who whom whose why will with would you your
"""
_COMMON = frozenset(_COMMON_WORDS.split())
_TITLE_WEIGHT = 2.0
_MAX_WORDS = 32


def search_words(store: Store, question: str, limit: int) -> list[tuple[int, float]]:
    """The passages that share words with a question, as (row, BM25 score), best first.

    Any of the words may match; the commonest English ones are asked for only when there are no
    others. What stands in the question is data: no operator of the query language gets through.
    """
    query = _query(question)
    if not query:
        return []
    rows = store.rows(
        "SELECT rowid, bm25(words, ?, 1.0) AS cost FROM words WHERE words MATCH ?"
        " ORDER BY cost, rowid LIMIT ?",
        (_TITLE_WEIGHT, query, limit),
    )
    return [(key, -cost) for key, cost in rows]


def _query(question: str) -> str:
    words = list(dict.fromkeys(_WORD.findall(question.lower())))
    telling = [word for word in words if word not in _COMMON] or words
    return " OR ".join(f'"{word}"' for word in telling[:_MAX_WORDS])
