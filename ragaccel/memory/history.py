"""History: prompts and answers of earlier requests of one namespace, to be searched for drafts."""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING

import numpy as np

from ragaccel.draft.corpus import CONTEXT, Corpus, Ids
from ragaccel.draft.restoring import MAX_IDS
from ragaccel.draft.successors import ROW_BYTES, Successors
from ragaccel.errors import ConfigurationError
from ragaccel.memory.figures import Figures
from ragaccel.memory.remembered import (
    ANSWER_COUNTS,
    Remembered,
    Texts,
    nothing,
    rebuilt,
    state_of,
    texts_from,
    with_request,
    without_oldest,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.draft.restoring import State

__all__ = ["ANSWER_COUNTS", "BYTES_A_TOKEN", "History"]

BYTES_A_TOKEN = 9  # its id, its place in order, its kind
_SHARE_OF_PAIRS = 8  # what follows each token may take an eighth of the bytes; its counts only fade
_SHARE_LET_GO = 4  # when full, a quarter goes: the oldest requests


class History:
    """Texts of past requests in one corpus; Lookahead's warm trie, kept as text.

    When it would grow beyond ``max_bytes`` the oldest requests are let go, at least a quarter of
    it, so that this is rare. What was handed out never changes: a request goes on with what it
    began with. What follows each token is counted for all requests there ever were, and only fades;
    ``clear`` forgets it too. Shared by threads.

    Args:
        max_bytes: how large it may grow.
        vocab_size: token ids are below this; below 2**24 where it is None. There are arrays as
            long as the largest id, so a single id that is no token could take all memory; and no
            model could verify a guess of it.

    Raises:
        ConfigurationError: a limit below a kilobyte, or a vocabulary of no or too many tokens.
    """

    def __init__(self, max_bytes: int = 64 << 20, vocab_size: int | None = None) -> None:
        if max_bytes < 1024:
            raise ConfigurationError(f"max_bytes is {max_bytes}: a history needs 1024 or more")
        if vocab_size is not None and not 1 <= vocab_size <= MAX_IDS:
            raise ConfigurationError(f"vocab_size must be from 1 to {MAX_IDS}, not {vocab_size}")
        self.max_bytes = max_bytes
        self.vocab_size = MAX_IDS if vocab_size is None else vocab_size
        self._max_rows = max_bytes // _SHARE_OF_PAIRS // ROW_BYTES
        self._max_tokens = (max_bytes - self._max_rows * ROW_BYTES) // BYTES_A_TOKEN
        self._limit = self._max_tokens - CONTEXT - 1
        self._keep = self._limit * (_SHARE_LET_GO - 1) // _SHARE_LET_GO
        self._lock = RLock()  # of those who change it; who reads takes what stands there
        self._now = nothing()

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._now = nothing(self._now.evicted)

    def corpus(self) -> Corpus:
        """What can be searched; it does not change later."""
        return self._now.corpus

    def counts(self) -> Ids:
        """How often each token occurs; those of answers count more."""
        return self._now.counts

    def successors(self) -> Successors:
        """What follows each token most often; it does not change later."""
        return self._now.successors

    @property
    def num_bytes(self) -> int:
        """How large it is; beside it stand twelve bytes for each token of the vocabulary."""
        return _num_bytes(self._now)

    @property
    def num_requests(self) -> int:
        """How many requests it remembers."""
        return len(self._now.starts)

    def figures(self) -> Figures:
        """Count what it remembers and has let go; waits for nobody."""
        now = self._now
        requests = len(now.starts)
        tokens = len(now.corpus.token_ids) - CONTEXT - requests
        return Figures(requests, tokens, _num_bytes(now), now.evicted)

    def add(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """Remember a request that has ended; of one that is too large, its end.

        One that holds an id outside the vocabulary is not remembered.
        """
        prompt, answer = self._ids(prompt_ids), self._ids(answer_ids)
        if prompt is None or answer is None:
            return
        prompt, answer = self._end_of(prompt, answer)
        added = len(prompt) + len(answer) + 1
        with self._lock:
            now = self._now
            if len(now.corpus.token_ids) + added > self._limit:
                now = without_oldest(now, self._keep - added)
            self._now = with_request(now, prompt, answer, self._max_rows)

    def state(self) -> State:
        """Its texts, as arrays that do not change later; ``restore`` takes them in again."""
        return state_of(self._now)

    def restore(self, state: State) -> None:
        """Remember the requests of a state, and nothing else; of too many the newest.

        Raises:
            ValueError: arrays that are no texts, or ids outside the vocabulary.
        """
        texts = texts_from(state, self.vocab_size)
        sizes = (texts.prompt_lengths + texts.answer_lengths + 1)[::-1]
        num = int(np.searchsorted(np.cumsum(sizes), self._max_tokens - CONTEXT, side="right"))
        if num < len(sizes):
            texts = self._newest(texts, num)
        made = rebuilt(texts, self._max_rows)
        with self._lock:
            evicted = self._now.evicted + len(sizes) - len(made.starts)
            self._now = made._replace(evicted=evicted)

    def _newest(self, texts: Texts, num: int) -> Texts:
        """The last ``num`` requests; if not even one fits, its end."""
        prompts = texts.prompt_lengths[-max(1, num) :]
        answers = texts.answer_lengths[-max(1, num) :]
        token_ids = texts.token_ids[len(texts.token_ids) - int(prompts.sum() + answers.sum()) :]
        if num:
            return Texts(token_ids, prompts, answers)
        prompt, answer = self._end_of(token_ids[: prompts[0]], token_ids[prompts[0] :])
        lengths = np.array([[len(prompt)], [len(answer)]], np.int32)
        return Texts(np.concatenate([prompt, answer]), *lengths)

    def _ids(self, token_ids: Sequence[int]) -> Ids | None:
        """Token ids as an array; None if one of them is no token."""
        ids = np.asarray(token_ids)
        if not ids.size:
            return np.zeros(0, np.int32)
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= self.vocab_size:
            return None
        return ids.astype(np.int32)

    def _end_of(self, prompt: Ids, answer: Ids) -> tuple[Ids, Ids]:
        """As much of the end of a request as is remembered of one."""
        answer = answer[-self._keep :]
        return prompt[max(0, len(prompt) + len(answer) - self._keep) :], answer


def _num_bytes(now: Remembered) -> int:
    pairs = len(now.successors.totals) * ROW_BYTES
    return len(now.corpus.token_ids) * BYTES_A_TOKEN + pairs
