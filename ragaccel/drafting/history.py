"""History: prompts and answers of earlier requests, in bounded memory, to draft from."""

from __future__ import annotations

from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ragaccel.drafting import arrays as large_arrays
from ragaccel.drafting.arrays import MAX_VOCAB_SIZE, Field, check_state
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
from ragaccel.jit import compiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.drafting.arrays import State


@dataclass(frozen=True, slots=True)
class HistoryStats:
    """Size of one namespace's history, and the number of requests it evicted."""

    requests: int
    tokens: int
    num_bytes: int
    evicted_requests: int


@dataclass(frozen=True, slots=True)
class MemoryStats(HistoryStats):
    """Totals over all namespaces of a memory.

    ``hits`` and ``misses`` count lookups of a namespace that did and did not hold a request.
    Requests of a namespace that was evicted as a whole are not part of ``evicted_requests``.
    """

    namespaces: int
    evicted_namespaces: int
    hits: int
    misses: int


@dataclass(frozen=True, slots=True)
class AnswerMemoryStats:
    """Size of an answer memory; ``hits`` counts questions that found a similar one."""

    entries: int
    num_bytes: int
    evictions: int
    hits: int
    misses: int


ANSWER_WEIGHT = 3  # weight of an answer's token against a prompt's, in counts


class Snapshot(NamedTuple):
    """Requests in one suffix array: each a prompt, its answer and a boundary. Never modified.

    ``counts`` [largest id + 1] holds each token's count, in which answers weigh more than prompts.
    ``starts`` [requests] are positions in the suffix array. ``evicted`` is the number of requests
    dropped so far.
    """

    suffix_array: SuffixArray
    counts: Ids
    bigrams: BigramTable
    starts: Ids
    evicted: int


def empty_snapshot(evicted: int = 0) -> Snapshot:
    """Return a snapshot without requests."""
    none = np.zeros(0, np.int32)
    return Snapshot(empty_suffix_array(), none, empty_bigrams(), none, evicted)


def with_request(snapshot: Snapshot, prompt: Ids, answer: Ids, max_rows: int) -> Snapshot:
    """Return a snapshot with one more request; its bigram table has at most ``max_rows`` rows."""
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
    """Return a snapshot without its oldest requests, with at most ``keep`` tokens."""
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
    """Return the texts of a snapshot as arrays; ``build_snapshot`` derives the rest from them.

    ``token_ids`` [tokens] has no boundaries; ``prompt_lengths`` and ``answer_lengths`` are
    [requests].
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
    """Token ids of requests, one after another, and their lengths; see ``state_of``."""

    token_ids: Ids
    prompt_lengths: Ids
    answer_lengths: Ids


def parse_texts(state: State, vocab_size: int) -> RequestTexts:
    """Return the texts that a state stores.

    Raises:
        ValueError: the arrays have another form, or an id is ``vocab_size`` or more.
    """
    fields = {
        "token_ids": Field(np.int32, ("tokens",), 0, vocab_size - 1),
        "prompt_lengths": Field(np.int32, ("requests",), 0),
        "answer_lengths": Field(np.int32, ("requests",), 0),
    }
    texts = RequestTexts(*check_state(state, fields))
    num = sum(int(lengths.sum(dtype=np.int64)) for lengths in texts[1:])
    if num != len(texts.token_ids):
        raise ValueError("the lengths of the requests do not add up to their tokens")
    return texts


def build_snapshot(texts: RequestTexts, max_rows: int) -> Snapshot:
    """Return the snapshot that adding the texts one by one would give, built at once."""
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
    # Assign rows in the order in which tokens first occur, request by request.
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
    """Return a suffix array with one more request at its end."""
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
    """Return all positions sorted by their contexts; of equal contexts, the latest comes first.

    The order is the same on every machine, and whether requests came one by one or from a file.
    """
    positions = sort_positions(token_ids.tolist())
    one, other = positions[:-1], positions[1:]
    same, inside = np.ones(len(one), bool), np.ones(len(one), bool)
    for i in range(1, SORT_DEPTH + 1):
        here = token_ids[one - i]
        same &= (here == token_ids[other - i]) | ~inside
        inside &= here >= 0  # a boundary ends the comparison
    group = np.cumsum(np.concatenate([[True], ~same]))[: len(positions)]
    return positions[np.lexsort((-positions, group))].astype(np.int32)


def bucket_starts(token_ids: Ids, positions: Ids) -> Ids:
    """Return the index where the sorted positions after each token begin, and one final entry."""
    counts = np.bincount(token_ids[positions - 1] + 1)
    return np.cumsum(counts).astype(np.int32)


@compiled
def insertion_ranks(suffix_array: SuffixArray, token_ids: Ids, positions: Ids) -> Ids:
    """Return the insertion rank of each of some sorted positions."""
    found = np.empty(len(positions), np.int32)
    for i in range(len(positions)):
        found[i] = insertion_rank(suffix_array, token_ids, positions[i])
    return found


BYTES_PER_TOKEN = 9  # its id, its position, its kind
_BIGRAM_SHARE = 8  # one eighth of the bytes is for the bigram table
_EVICTED_SHARE = 4  # an eviction drops at least a quarter


class History:
    """Texts of past requests in one suffix array: the counterpart of Lookahead's warm trie.

    When it would exceed ``max_bytes``, it evicts the oldest requests, at least a quarter of it, so
    that evictions are rare. A returned suffix array never changes, so a request keeps the history
    it began with. The bigram table counts all requests ever added and only fades; ``clear`` drops
    it too. Shared by threads.

    Args:
        max_bytes: the maximum size in bytes.
        vocab_size: exclusive upper bound of token ids; None allows ids below 2**24. Some arrays are
            as long as the largest id, so one invalid id could exhaust memory, and no model could
            verify a draft of it.

    Raises:
        ConfigurationError: ``max_bytes`` is below 1024, or ``vocab_size`` is out of range.
    """

    def __init__(self, max_bytes: int = 64 << 20, vocab_size: int | None = None) -> None:
        if max_bytes < 1024:
            raise ConfigurationError(
                f"max_bytes must be 1024 or more per namespace, not {max_bytes}"
            )
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
        self._lock = RLock()  # for writers; readers take the current snapshot
        self._snapshot = empty_snapshot()

    def clear(self) -> None:
        """Drop all requests and the bigram table."""
        with self._lock:
            self._snapshot = empty_snapshot(self._snapshot.evicted)

    def suffix_array(self) -> SuffixArray:
        """Return the texts to search. The result never changes."""
        return self._snapshot.suffix_array

    def counts(self) -> Ids:
        """Return how often each token occurs; tokens of answers count more."""
        return self._snapshot.counts

    def bigrams(self) -> BigramTable:
        """Return the most frequent successors of each token. The result never changes."""
        return self._snapshot.bigrams

    @property
    def num_bytes(self) -> int:
        """Return the bytes of tokens and bigrams, without the 12 bytes per vocabulary token."""
        return _num_bytes(self._snapshot)

    @property
    def num_requests(self) -> int:
        """Return the number of requests."""
        return len(self._snapshot.starts)

    def stats(self) -> HistoryStats:
        """Return the size of the history and its number of evictions, without taking a lock."""
        snapshot = self._snapshot
        requests = len(snapshot.starts)
        tokens = len(snapshot.suffix_array.token_ids) - CONTEXT - requests
        return HistoryStats(requests, tokens, _num_bytes(snapshot), snapshot.evicted)

    def add(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """Add a finished request; of one that is too large, only its end.

        A request with an id outside the vocabulary is ignored.
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
        """Return the texts of all requests as arrays that never change; ``restore`` loads them."""
        return state_of(self._snapshot)

    def restore(self, state: State) -> None:
        """Replace all requests with those of a state; keep the newest that fit.

        Raises:
            ValueError: the arrays have another form, or an id is outside the vocabulary.
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
        """Return the last ``num`` requests; if ``num`` is 0, the end of the last one."""
        prompts = texts.prompt_lengths[-max(1, num) :]
        answers = texts.answer_lengths[-max(1, num) :]
        token_ids = texts.token_ids[len(texts.token_ids) - int(prompts.sum() + answers.sum()) :]
        if num:
            return RequestTexts(token_ids, prompts, answers)
        prompt, answer = self._truncate(token_ids[: prompts[0]], token_ids[prompts[0] :])
        lengths = np.array([[len(prompt)], [len(answer)]], np.int32)
        return RequestTexts(np.concatenate([prompt, answer]), *lengths)

    def _as_ids(self, token_ids: Sequence[int]) -> Ids | None:
        """Return token ids as an array, or None if one of them is outside the vocabulary."""
        ids = np.asarray(token_ids)
        if not ids.size:
            return np.zeros(0, np.int32)
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= self.vocab_size:
            return None
        return ids.astype(np.int32)

    def _truncate(self, prompt: Ids, answer: Ids) -> tuple[Ids, Ids]:
        """Return the end of a request, at most the limit per request."""
        answer = answer[-self._num_kept_tokens :]
        return prompt[max(0, len(prompt) + len(answer) - self._num_kept_tokens) :], answer


def _num_bytes(snapshot: Snapshot) -> int:
    pairs = len(snapshot.bigrams.totals) * ROW_BYTES
    return len(snapshot.suffix_array.token_ids) * BYTES_PER_TOKEN + pairs
