"""The searched text of a request: references and running text, and what was last grown on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from ragaccel.decoding.tree import Origin
from ragaccel.draft.corpus import CONTEXT, ROOT, Corpus, Ids, append
from ragaccel.draft.evidence import OUTPUT, PROMPT, REFERENCE, SOURCES
from ragaccel.draft.ngram_index import sorted_places
from ragaccel.draft.restoring import MAX_IDS
from ragaccel.draft.texts import BOUNDARY

if TYPE_CHECKING:
    from ragaccel.decoding.session import Context

_ROOM = 512  # tokens of an answer, before the arrays are made larger


class SearchedText:
    """A growing corpus of one request: references that are not in the prompt, prompt, answer.

    A reference that stands in the prompt is searched there, and only once.
    """

    def __init__(self, context: Context) -> None:
        prompt = np.array(context.token_ids[: context.num_prompt], np.int32)
        self._context = context
        self._spans: list[tuple[int, int, int, str]] = []  # start, end, offset, passage id
        parts = [np.full(CONTEXT, BOUNDARY, np.int32)]
        kinds = np.full(len(prompt), PROMPT, np.int8)
        size, inside = CONTEXT, []
        different = {r.token_ids: r for r in reversed(context.references)}  # the first of equals
        for reference in reversed(different.values()):
            ids = _as_ids(reference.token_ids)
            start = _find(prompt, ids)
            if start >= 0:
                inside.append((start, start + len(ids), reference.passage_id))
            elif len(ids):
                parts += [ids, np.array([BOUNDARY], np.int32)]
                self._spans.append((size, size + len(ids), 0, reference.passage_id))
                size += len(ids) + 1
        self.text_start = size
        for start, end, passage_id in inside:
            kinds[start:end] = REFERENCE
            self._spans.append((size + start, size + end, 0, passage_id))
        self.output_start = size + len(prompt)
        known = np.concatenate([*parts, prompt])
        places = sorted_places(known.tolist())
        self._token_ids = np.concatenate([known, np.zeros(_ROOM, np.int32)])
        self._kinds = np.concatenate(
            [np.full(size, REFERENCE, np.int8), kinds, np.full(_ROOM, OUTPUT, np.int8)]
        )
        self._places = np.concatenate([places, np.zeros(_ROOM, np.int64)]).astype(np.int32)
        self._num_places = len(places)
        self._none = np.zeros(0, np.int32)
        self.end = len(known)

    @property
    def corpus(self) -> Corpus:
        """What can be searched now."""
        return Corpus(self._token_ids, self._kinds, self._places, self._num_places, self._none)

    def last(self, guesses: Sequence[int] = ()) -> Ids:
        """The last tokens, with some that are guessed to follow. [CONTEXT]."""
        known = self._token_ids[self.end - CONTEXT : self.end]
        if not len(guesses):
            return known
        return np.concatenate([known, _as_ids(guesses)])[-CONTEXT:]

    def counts(self, size: int) -> Ids:
        """How often each token id below ``size`` occurs so far."""
        ids = self._token_ids[CONTEXT : self.end]
        return np.bincount(ids[ids >= 0], minlength=size).astype(np.int32)

    def advance(self) -> Ids:
        """Take in what the context has gained, and return it."""
        gained = np.array(self._context.token_ids[self.end - self.text_start :], np.int32)
        if self.end + len(gained) > len(self._token_ids):
            self._enlarge(len(gained))
        if len(gained):
            append(self.corpus, self.end, gained)
            self._num_places += len(gained)
            self.end += len(gained)
        return gained

    def origin(self, kind: int, length: int, place: int) -> Origin:
        """Say where a guess comes from, by the first vote for it."""
        source = SOURCES[kind]
        if kind == REFERENCE:
            for start, end, offset, passage_id in self._spans:
                if start <= place < end:
                    return Origin(source, length, passage_id, place - start + offset)
        if kind in (PROMPT, OUTPUT):
            return Origin(source, length, "", place - self.text_start)
        return Origin(source, length)

    def _enlarge(self, gained: int) -> None:
        more = len(self._token_ids) + gained
        self._token_ids = np.concatenate([self._token_ids, np.zeros(more, np.int32)])
        self._kinds = np.concatenate([self._kinds, np.full(more, OUTPUT, np.int8)])
        self._places = np.concatenate([self._places, np.zeros(more, np.int32)])


class Origins(Sequence[tuple[Origin, ...]]):
    """The origins of a tree's nodes, made when they are asked for: most are soon forgotten."""

    __slots__ = ("_kinds", "_lengths", "_places", "_text")

    def __init__(self, text: SearchedText, kinds: Ids, lengths: Ids, places: Ids) -> None:
        self._text, self._kinds, self._lengths, self._places = text, kinds, lengths, places

    def __len__(self) -> int:
        """Count the nodes, the root included."""
        return len(self._kinds)

    @overload
    def __getitem__(self, node: int) -> tuple[Origin, ...]: ...

    @overload
    def __getitem__(self, node: slice) -> Origins: ...

    def __getitem__(self, node: int | slice) -> tuple[Origin, ...] | Origins:
        """Return where a node's guess comes from; nothing for the root."""
        if isinstance(node, slice):
            return Origins(self._text, self._kinds[node], self._lengths[node], self._places[node])
        place = int(self._places[node])
        if place == ROOT:
            return ()
        return (self._text.origin(int(self._kinds[node]), int(self._lengths[node]), place),)


def _as_ids(token_ids: Sequence[int]) -> Ids:
    """An array of token ids; those that no vocabulary has end a text."""
    try:
        ids = np.array(token_ids, np.int64)
    except OverflowError:
        ids = np.array([min(token, MAX_IDS) for token in token_ids], np.int64)
    return np.where(ids < MAX_IDS, ids, BOUNDARY).astype(np.int32)


def _find(text: Ids, part: Ids) -> int:
    """Where a run of tokens first stands in a text; -1 where it does not."""
    size = text.itemsize
    haystack, needle = text.tobytes(), part.tobytes()
    at = haystack.find(needle) if needle else -1
    while at >= 0 and at % size:
        at = haystack.find(needle, at + 1)
    return at // size if at >= 0 else -1
