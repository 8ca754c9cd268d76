"""Corpora: token ids in which every place is found again by what precedes it.

A *place* is an index into the tokens; its context is what stands before it. All places are kept in
the order of their contexts, read backwards, as a suffix array keeps suffixes: the neighbours of a
context in that order are its longest matches, whatever their length.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ragaccel.draft.jit import compiled, inlined
from ragaccel.draft.texts import BOUNDARY

SORTED_BY = 8
"""Tokens of context that places are sorted by; longer matches are counted, not sorted by."""
MAX_MATCH = 16
"""The longest match that is told apart from longer ones."""
MAX_GAP = 8
"""Tokens compared beyond the first that differs."""
ROOT = -2  # stands for a place where there is none: of a tree's root, which is no guess
CONTEXT = MAX_MATCH + 1 + MAX_GAP
"""Tokens of context that are looked at, and boundaries that must stand before all text."""

Ids = npt.NDArray[np.int32]
Kinds = npt.NDArray[np.int8]


class Corpus(NamedTuple):
    """Texts with a boundary before each, and the places that follow a token, in order.

    ``token_ids`` [N] begins with ``CONTEXT`` boundaries; ``kinds`` [N] says what each token is part
    of; of ``places`` the first ``num_places`` count. ``first_of`` [largest id + 2] says where the
    places that follow each token begin among them, and shortens the search; it may be empty.
    """

    token_ids: Ids
    kinds: Kinds
    places: Ids
    num_places: int
    first_of: Ids


def empty_corpus() -> Corpus:
    """A corpus of no text."""
    none = np.zeros(0, np.int32)
    return Corpus(np.full(CONTEXT, BOUNDARY, np.int32), np.zeros(CONTEXT, np.int8), none, 0, none)


@inlined
def is_before(token_ids: Ids, place: int, context: Ids, end: int) -> bool:
    """Whether a place stands before the context ``context[:end]`` in the order of contexts."""
    for i in range(1, SORTED_BY + 1):
        one, other = token_ids[place - i], context[end - i]
        if one != other:
            return bool(one < other)
        if one < 0:
            return False
    return False


@compiled
def position(corpus: Corpus, context: Ids, end: int) -> int:
    """Where the context ``context[:end]`` would stand among the places."""
    low, high = 0, corpus.num_places
    if len(corpus.first_of):
        last = min(context[end - 1], len(corpus.first_of) - 2)
        low, high = corpus.first_of[last], corpus.first_of[last + 1]
        if last < context[end - 1]:
            low = high
    while low < high:
        middle = (low + high) // 2
        if is_before(corpus.token_ids, corpus.places[middle], context, end):
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def match_length(token_ids: Ids, place: int, context: Ids, end: int) -> int:
    """How many tokens before a place are those before ``end``, up to ``MAX_MATCH``."""
    length = 0
    while length < MAX_MATCH:
        token = token_ids[place - 1 - length]
        if token < 0 or token != context[end - 1 - length]:
            break
        length += 1
    return length


@inlined
def match_beyond(token_ids: Ids, place: int, context: Ids, end: int) -> int:
    """How many tokens agree beyond the first that differs, up to ``MAX_GAP``.

    The one that differs may have been substituted, inserted or left out: an answer that changes a
    word of what it copies goes on copying.
    """
    best = 0
    first = 0 if token_ids[place - 1] >= 0 and context[end - 1] >= 0 else 3  # a text ends here
    for change in range(first, 3):
        here = place - 1 - (change != 1)
        there = end - 1 - (change != 2)
        length = 0
        while (
            length < MAX_GAP
            and token_ids[here - length] >= 0
            and token_ids[here - length] == context[there - length]
        ):
            length += 1
        best = max(best, length)
    return best


@compiled
def append(corpus: Corpus, end: int, gained: Ids) -> None:
    """Write tokens from ``end`` on and take in their places, behind ``num_places`` others."""
    for i in range(len(gained)):
        corpus.token_ids[end + i] = gained[i]
        num_places = corpus.num_places + i
        so_far = Corpus(
            corpus.token_ids, corpus.kinds, corpus.places, num_places, corpus.first_of
        )  # fmt: skip
        insert(so_far, end + i)


@compiled
def insert(corpus: Corpus, place: int) -> None:
    """Take a place in, behind ``num_places`` others; its token may be of use from now on."""
    places = corpus.places
    low = position(corpus, corpus.token_ids, place)
    later = places[low : corpus.num_places].copy()
    places[low + 1 : corpus.num_places + 1] = later
    places[low] = place
