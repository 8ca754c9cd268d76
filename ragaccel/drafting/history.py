"""History: the prompts and answers of earlier requests, bounded, as texts to draft from."""

from __future__ import annotations

from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ragaccel.drafting import arrays as large_arrays
from ragaccel.drafting.arrays import MAX_VOCAB_SIZE, checked_array, compiled
from ragaccel.drafting.expansion import PAST_ANSWER, PAST_PROMPT
from ragaccel.drafting.ngram import BOUNDARY, sort_positions
from ragaccel.drafting.suffix_array import (
    CONTEXT,
    ROW_BYTES,
    SORT_DEPTH,
    BigramTable,
    Ids,
    Kinds,
    SuffixArray,
    count_bigrams,
    empty_bigrams,
    empty_suffix_array,
    insertion_rank,
    with_bigrams,
    with_rows,
)
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.drafting.arrays import State


@dataclass(frozen=True, slots=True)
class HistoryStats:
    """Of one namespace: what it remembers, and how many requests it has let go to make room."""

    requests: int
    tokens: int
    num_bytes: int
    evicted_requests: int


@dataclass(frozen=True, slots=True)
class MemoryStats(HistoryStats):
    """Of all namespaces together.

    ``hits`` and ``misses`` count how often a namespace was asked for and something, or nothing,
    was remembered of it. Requests of a namespace that was let go as a whole are not counted
    among ``evicted_requests``.
    """

    namespaces: int
    evicted_namespaces: int
    hits: int
    misses: int


@dataclass(frozen=True, slots=True)
class AnswerMemoryStats:
    """Of an answer memory; ``hits`` are questions to which something similar was found."""

    entries: int
    num_bytes: int
    evictions: int
    hits: int
    misses: int


ANSWER_WEIGHT = 3  # an answer's token counts as so many of a prompt's, for what is common


class Snapshot(NamedTuple):
    """Requests in one corpus, each a prompt, its answer and a boundary; none of it ever changes.

    ``counts`` [largest id + 1] are weighted; ``starts`` [requests] are places in the corpus;
    ``evicted`` requests have been let go.
    """

    suffix_array: SuffixArray
    counts: Ids
    bigrams: BigramTable
    starts: Ids
    evicted: int


def empty_snapshot(evicted: int = 0) -> Snapshot:
    """No requests."""
    none = np.zeros(0, np.int32)
    return Snapshot(empty_suffix_array(), none, empty_bigrams(), none, evicted)


def with_request(snapshot: Snapshot, prompt: Ids, answer: Ids, max_rows: int) -> Snapshot:
    """What is remembered with one more request; successors get ``max_rows`` at most."""
    ids = np.concatenate([prompt, *[answer] * ANSWER_WEIGHT])
    size = max(len(snapshot.counts), int(ids.max(initial=-1)) + 1)
    counts = np.bincount(ids, minlength=size).astype(np.int32)
    counts[: len(snapshot.counts)] += snapshot.counts
    weights = np.ones(len(prompt) + len(answer))
    weights[len(prompt) :] = ANSWER_WEIGHT
    both = np.concatenate([prompt, answer])
    return Snapshot(
        with_appended(snapshot.suffix_array, prompt, answer),
        counts,
        with_bigrams(snapshot.bigrams, both, weights, max_rows),
        np.append(snapshot.starts, np.int32(len(snapshot.suffix_array.token_ids))),
        snapshot.evicted,
    )


def without_oldest(snapshot: Snapshot, keep: int) -> Snapshot:
    """What is left when the oldest requests go until there are at most ``keep`` tokens."""
    token_ids, kinds, positions, _, _ = snapshot.suffix_array
    first = int(np.searchsorted(snapshot.starts, len(token_ids) - keep))
    cut = int(snapshot.starts[first]) if first < len(snapshot.starts) else len(token_ids)
    gone, kinds_gone = token_ids[CONTEXT:cut], kinds[CONTEXT:cut]
    shift = cut - CONTEXT
    empty = empty_suffix_array()
    left = positions[positions >= cut] - np.int32(shift)
    token_ids = np.concatenate([empty.token_ids, token_ids[cut:]])
    kinds = np.concatenate([empty.kinds, kinds[cut:]])
    each = np.where(kinds_gone == PAST_ANSWER, ANSWER_WEIGHT, 1)[gone >= 0]
    counts_gone = np.bincount(gone[gone >= 0], weights=each, minlength=len(snapshot.counts))
    return Snapshot(
        SuffixArray(token_ids, kinds, left, len(left), bucket_starts(token_ids, left)),
        snapshot.counts - counts_gone.astype(np.int32),
        snapshot.bigrams,
        snapshot.starts[first:] - np.int32(shift),
        snapshot.evicted + first,
    )


def state_of(snapshot: Snapshot) -> State:
    """The texts alone, as arrays; all else follows from them, see :func:`rebuilt`.

    ``token_ids`` [tokens] without boundaries; ``prompt_lengths`` and ``answer_lengths`` [requests].
    """
    token_ids, kinds = snapshot.suffix_array.token_ids, snapshot.suffix_array.kinds
    ends = (
        np.append(snapshot.starts[1:], len(token_ids)) if len(snapshot.starts) else snapshot.starts
    )
    so_far = np.concatenate([[0], np.cumsum(kinds == PAST_PROMPT)])
    prompts = so_far[ends] - so_far[snapshot.starts]
    return {
        "token_ids": token_ids[token_ids >= 0],
        "prompt_lengths": prompts.astype(np.int32),
        "answer_lengths": (ends - snapshot.starts - 1 - prompts).astype(np.int32),
    }


class RequestTexts(NamedTuple):
    """Requests one after another; see :func:`state_of`."""

    token_ids: Ids
    prompt_lengths: Ids
    answer_lengths: Ids


def parse_texts(state: State, vocab_size: int) -> RequestTexts:
    """Return the texts of a state.

    Raises:
        ValueError: arrays that are no texts, or ids of ``vocab_size`` or more.
    """
    token_ids = checked_array(state, "token_ids", np.int32, (None,), low=0, high=vocab_size - 1)
    num = len(token_ids)
    prompts = checked_array(state, "prompt_lengths", np.int32, (None,), low=0, high=num)
    answers = checked_array(state, "answer_lengths", np.int32, (len(prompts),), low=0, high=num)
    if int(prompts.sum(dtype=np.int64) + answers.sum(dtype=np.int64)) != num:
        raise ValueError("the lengths of the requests do not add up to their tokens")
    return RequestTexts(token_ids, prompts, answers)


def build_snapshot(texts: RequestTexts, max_rows: int) -> Snapshot:
    """What is remembered of texts that were added one by one; the same, made in one go."""
    lengths = texts.prompt_lengths + texts.answer_lengths
    starts = np.cumsum(np.concatenate([[CONTEXT], lengths + 1]))[: len(lengths)].astype(np.int32)
    request_of = np.repeat(np.arange(len(lengths)), lengths)
    before = np.cumsum(np.concatenate([[0], lengths]))[:-1]
    offsets = np.arange(len(request_of)) - before[request_of]
    token_ids = np.full(CONTEXT + len(request_of) + len(lengths), BOUNDARY, np.int32)
    kinds: Kinds = np.full(len(token_ids), PAST_ANSWER, np.int8)
    kinds[:CONTEXT] = 0
    at = starts[request_of] + offsets
    token_ids[at] = texts.token_ids
    kinds[at[offsets < texts.prompt_lengths[request_of]]] = PAST_PROMPT
    weights = np.where(kinds == PAST_ANSWER, float(ANSWER_WEIGHT), 1.0)
    counts = np.bincount(texts.token_ids, weights=weights[at]).astype(np.int32)
    # rows go to tokens in the order in which they came, request by request
    tokens, first = np.unique(texts.token_ids, return_index=True)
    tokens = tokens[np.lexsort((tokens, request_of[first]))]
    bigrams = with_rows(empty_bigrams(), tokens, max_rows)
    count_bigrams(bigrams, token_ids, weights)
    positions = order_positions(token_ids)
    suffix_array = SuffixArray(
        token_ids, kinds, positions, len(positions), bucket_starts(token_ids, positions)
    )
    return Snapshot(suffix_array, counts, bigrams, starts, 0)


def with_appended(suffix_array: SuffixArray, prompt: Ids, answer: Ids) -> SuffixArray:
    """A corpus with one more request at its end; the old one stays as it is."""
    added = np.concatenate([prompt, answer, np.array([BOUNDARY], np.int32)])
    start = len(suffix_array.token_ids)
    token_ids = large_arrays.concatenate([suffix_array.token_ids, added])
    kinds: Kinds = np.full(len(added), PAST_ANSWER, np.int8)
    kinds[: len(prompt)] = PAST_PROMPT
    alone = np.concatenate([np.full(CONTEXT, BOUNDARY, np.int32), added])
    new = order_positions(alone) + np.int32(start - CONTEXT)
    at = insertion_ranks(suffix_array, token_ids, new)
    positions = large_arrays.insert(suffix_array.positions, at, new)
    kinds = large_arrays.concatenate([suffix_array.kinds, kinds])
    return SuffixArray(
        token_ids, kinds, positions, len(positions), bucket_starts(token_ids, positions)
    )


def order_positions(token_ids: Ids) -> Ids:
    """All places in the order of their contexts, the latest first where these are the same.

    So the order does not depend on how a machine sorts, nor on whether the requests came one by
    one or from a file.
    """
    positions = sort_positions(token_ids.tolist())
    one, other = positions[:-1], positions[1:]
    same, inside = np.ones(len(one), bool), np.ones(len(one), bool)
    for i in range(1, SORT_DEPTH + 1):
        here = token_ids[one - i]
        same &= (here == token_ids[other - i]) | ~inside
        inside &= here >= 0  # what stands before a boundary is another text
    group = np.cumsum(np.concatenate([[True], ~same]))[: len(positions)]
    return positions[np.lexsort((-positions, group))].astype(np.int32)


def bucket_starts(token_ids: Ids, positions: Ids) -> Ids:
    """Where the places that follow each token begin; one entry more than there are tokens."""
    counts = np.bincount(token_ids[positions - 1] + 1)
    return np.cumsum(counts).astype(np.int32)


@compiled
def insertion_ranks(suffix_array: SuffixArray, token_ids: Ids, positions: Ids) -> Ids:
    """Where each of some sorted places would stand among those of a corpus."""
    found = np.empty(len(positions), np.int32)
    for i in range(len(positions)):
        found[i] = insertion_rank(suffix_array, token_ids, positions[i])
    return found


__all__ = ["ANSWER_WEIGHT", "BYTES_PER_TOKEN", "History"]

BYTES_PER_TOKEN = 9  # its id, its place in order, its kind
_BIGRAM_SHARE = 8  # what follows each token may take an eighth of the bytes; its counts only fade
_EVICTED_SHARE = 4  # when full, a quarter goes: the oldest requests


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
        if vocab_size is not None and not 1 <= vocab_size <= MAX_VOCAB_SIZE:
            raise ConfigurationError(
                f"vocab_size must be from 1 to {MAX_VOCAB_SIZE}, not {vocab_size}"
            )
        self.max_bytes = max_bytes
        self.vocab_size = MAX_VOCAB_SIZE if vocab_size is None else vocab_size
        self._max_rows = max_bytes // _BIGRAM_SHARE // ROW_BYTES
        self._max_tokens = (max_bytes - self._max_rows * ROW_BYTES) // BYTES_PER_TOKEN
        self._max_total_tokens = self._max_tokens - CONTEXT - 1
        self._num_kept_tokens = self._max_total_tokens * (_EVICTED_SHARE - 1) // _EVICTED_SHARE
        self._lock = RLock()  # of those who change it; who reads takes what stands there
        self._snapshot = empty_snapshot()

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._snapshot = empty_snapshot(self._snapshot.evicted)

    def suffix_array(self) -> SuffixArray:
        """What can be searched; it does not change later."""
        return self._snapshot.suffix_array

    def counts(self) -> Ids:
        """How often each token occurs; those of answers count more."""
        return self._snapshot.counts

    def bigrams(self) -> BigramTable:
        """What follows each token most often; it does not change later."""
        return self._snapshot.bigrams

    @property
    def num_bytes(self) -> int:
        """How large it is; beside it stand twelve bytes for each token of the vocabulary."""
        return _num_bytes(self._snapshot)

    @property
    def num_requests(self) -> int:
        """How many requests it remembers."""
        return len(self._snapshot.starts)

    def stats(self) -> HistoryStats:
        """Count what it remembers and has let go; waits for nobody."""
        snapshot = self._snapshot
        requests = len(snapshot.starts)
        tokens = len(snapshot.suffix_array.token_ids) - CONTEXT - requests
        return HistoryStats(requests, tokens, _num_bytes(snapshot), snapshot.evicted)

    def add(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """Remember a request that has ended; of one that is too large, its end.

        One that holds an id outside the vocabulary is not remembered.
        """
        prompt, answer = self._as_ids(prompt_ids), self._as_ids(answer_ids)
        if prompt is None or answer is None:
            return
        prompt, answer = self._truncate(prompt, answer)
        added = len(prompt) + len(answer) + 1
        with self._lock:
            snapshot = self._snapshot
            if len(snapshot.suffix_array.token_ids) + added > self._max_total_tokens:
                snapshot = without_oldest(snapshot, self._num_kept_tokens - added)
            self._snapshot = with_request(snapshot, prompt, answer, self._max_rows)

    def state(self) -> State:
        """Its texts, as arrays that do not change later; ``restore`` takes them in again."""
        return state_of(self._snapshot)

    def restore(self, state: State) -> None:
        """Remember the requests of a state, and nothing else; of too many the newest.

        Raises:
            ValueError: arrays that are no texts, or ids outside the vocabulary.
        """
        texts = parse_texts(state, self.vocab_size)
        sizes = (texts.prompt_lengths + texts.answer_lengths + 1)[::-1]
        num = int(np.searchsorted(np.cumsum(sizes), self._max_tokens - CONTEXT, side="right"))
        if num < len(sizes):
            texts = self._newest(texts, num)
        made = build_snapshot(texts, self._max_rows)
        with self._lock:
            evicted = self._snapshot.evicted + len(sizes) - len(made.starts)
            self._snapshot = made._replace(evicted=evicted)

    def _newest(self, texts: RequestTexts, num: int) -> RequestTexts:
        """The last ``num`` requests; if not even one fits, its end."""
        prompts = texts.prompt_lengths[-max(1, num) :]
        answers = texts.answer_lengths[-max(1, num) :]
        token_ids = texts.token_ids[len(texts.token_ids) - int(prompts.sum() + answers.sum()) :]
        if num:
            return RequestTexts(token_ids, prompts, answers)
        prompt, answer = self._truncate(token_ids[: prompts[0]], token_ids[prompts[0] :])
        lengths = np.array([[len(prompt)], [len(answer)]], np.int32)
        return RequestTexts(np.concatenate([prompt, answer]), *lengths)

    def _as_ids(self, token_ids: Sequence[int]) -> Ids | None:
        """Token ids as an array; None if one of them is no token."""
        ids = np.asarray(token_ids)
        if not ids.size:
            return np.zeros(0, np.int32)
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= self.vocab_size:
            return None
        return ids.astype(np.int32)

    def _truncate(self, prompt: Ids, answer: Ids) -> tuple[Ids, Ids]:
        """As much of the end of a request as is remembered of one."""
        answer = answer[-self._num_kept_tokens :]
        return prompt[max(0, len(prompt) + len(answer) - self._num_kept_tokens) :], answer


def _num_bytes(snapshot: Snapshot) -> int:
    pairs = len(snapshot.bigrams.totals) * ROW_BYTES
    return len(snapshot.suffix_array.token_ids) * BYTES_PER_TOKEN + pairs
