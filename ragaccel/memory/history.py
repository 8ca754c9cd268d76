"""History: prompts and answers of earlier requests of one namespace, to be searched for drafts."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from ragaccel.draft.corpus import CONTEXT, Corpus, Ids, Kinds, empty_corpus, position
from ragaccel.draft.evidence import PAST_ANSWER, PAST_PROMPT
from ragaccel.draft.jit import compiled
from ragaccel.draft.ngram_index import sorted_places
from ragaccel.draft.successors import ROW_BYTES, Successors, no_successors, with_pairs
from ragaccel.draft.texts import BOUNDARY
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

BYTES_A_TOKEN = 9  # its id, its place in order, its kind
ANSWER_COUNTS = 3  # an answer's token counts as so many of a prompt's, for what is common
_SHARE_OF_PAIRS = 8  # what follows each token may take an eighth of the bytes; its counts only fade
_SHARE_LET_GO = 4  # when full, a quarter goes: the oldest requests


class History:
    """Texts of past requests in one corpus; Lookahead's warm trie, kept as text.

    When it would grow beyond ``max_bytes`` the oldest requests are let go, at least a quarter of
    it, so that this is rare. What was handed out never changes: a request goes on with what it
    began with. What follows each token is counted for all requests there ever were, and only fades;
    ``clear`` forgets it too. Shared by threads.

    Raises:
        ConfigurationError: a limit below a kilobyte.
    """

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        if max_bytes < 1024:
            raise ConfigurationError(f"max_bytes is {max_bytes}: a history needs 1024 or more")
        self.max_bytes = max_bytes
        self._max_rows = max_bytes // _SHARE_OF_PAIRS // ROW_BYTES
        self._max_tokens = (max_bytes - self._max_rows * ROW_BYTES) // BYTES_A_TOKEN
        self._lock = Lock()
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._corpus = empty_corpus()
            self._counts = np.zeros(0, np.int32)
            self._successors = no_successors()
            self._starts: list[int] = []  # of each request

    def corpus(self) -> Corpus:
        """What can be searched; it does not change later."""
        return self._corpus

    def counts(self) -> Ids:
        """How often each token occurs; those of answers count more."""
        return self._counts

    def successors(self) -> Successors:
        """What follows each token most often; it does not change later."""
        return self._successors

    @property
    def num_bytes(self) -> int:
        """How large it is; beside it stand twelve bytes for each token of the vocabulary."""
        pairs = len(self._successors.totals) * ROW_BYTES
        return len(self._corpus.token_ids) * BYTES_A_TOKEN + pairs

    @property
    def num_requests(self) -> int:
        """How many requests it remembers."""
        return len(self._starts)

    def add(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """Remember a request that has ended; of one that is too large, its end."""
        prompt, answer = np.array(prompt_ids, np.int32), np.array(answer_ids, np.int32)
        limit = self._max_tokens - CONTEXT - 1
        keep = limit * (_SHARE_LET_GO - 1) // _SHARE_LET_GO
        answer = answer[-keep:]
        prompt = prompt[max(0, len(prompt) + len(answer) - keep) :]
        with self._lock:
            added = len(prompt) + len(answer) + 1
            if len(self._corpus.token_ids) + added > limit:
                self._let_go(keep - added)
            self._starts.append(len(self._corpus.token_ids))
            self._corpus = joined(self._corpus, prompt, answer)
            ids = np.concatenate([prompt, *[answer] * ANSWER_COUNTS])
            size = max(len(self._counts), int(ids.max(initial=-1)) + 1)
            counts = np.bincount(ids, minlength=size).astype(np.int32)
            counts[: len(self._counts)] += self._counts
            self._counts = counts
            weights = np.ones(len(prompt) + len(answer))
            weights[len(prompt) :] = ANSWER_COUNTS
            self._successors = with_pairs(
                self._successors, np.concatenate([prompt, answer]), weights, self._max_rows
            )

    def _let_go(self, keep: int) -> None:
        """Forget the oldest requests until at most ``keep`` tokens are left."""
        token_ids, kinds, places, _, _ = self._corpus
        first = next(
            (i for i, start in enumerate(self._starts) if len(token_ids) - start <= keep),
            len(self._starts),
        )
        cut = self._starts[first] if first < len(self._starts) else len(token_ids)
        gone, kinds_gone = token_ids[CONTEXT:cut], kinds[CONTEXT:cut]
        shift = cut - CONTEXT
        self._starts = [start - shift for start in self._starts[first:]]
        empty = empty_corpus()
        left = places[places >= cut] - np.int32(shift)
        token_ids = np.concatenate([empty.token_ids, token_ids[cut:]])
        kinds = np.concatenate([empty.kinds, kinds[cut:]])
        self._corpus = Corpus(token_ids, kinds, left, len(left), first_of(token_ids, left))
        each = np.where(kinds_gone == PAST_ANSWER, ANSWER_COUNTS, 1)[gone >= 0]
        self._counts = self._counts - np.bincount(
            gone[gone >= 0], weights=each, minlength=len(self._counts)
        ).astype(np.int32)


def joined(corpus: Corpus, prompt: Ids, answer: Ids) -> Corpus:
    """A corpus with one more request at its end; the old one stays as it is."""
    added = np.concatenate([prompt, answer, np.array([BOUNDARY], np.int32)])
    start = len(corpus.token_ids)
    token_ids = np.concatenate([corpus.token_ids, added])
    kinds: Kinds = np.full(len(added), PAST_ANSWER, np.int8)
    kinds[: len(prompt)] = PAST_PROMPT
    alone = np.concatenate([np.full(CONTEXT, BOUNDARY, np.int32), added])
    new = (sorted_places(alone.tolist()) - CONTEXT + start).astype(np.int32)
    at = positions(corpus, token_ids, new)
    places = np.insert(corpus.places, at, new)
    kinds = np.concatenate([corpus.kinds, kinds])
    return Corpus(token_ids, kinds, places, len(places), first_of(token_ids, places))


def first_of(token_ids: Ids, places: Ids) -> Ids:
    """Where the places that follow each token begin; one entry more than there are tokens."""
    counts = np.bincount(token_ids[places - 1] + 1)
    return np.cumsum(counts).astype(np.int32)


@compiled
def positions(corpus: Corpus, token_ids: Ids, places: Ids) -> Ids:
    """Where each of some sorted places would stand among those of a corpus."""
    found = np.empty(len(places), np.int32)
    for i in range(len(places)):
        found[i] = position(corpus, token_ids, places[i])
    return found
