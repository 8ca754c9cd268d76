"""Remembered texts: what a history holds at one moment, and what it holds one request later."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ragaccel.draft import large_arrays
from ragaccel.draft.corpus import CONTEXT, SORTED_BY, Corpus, Ids, Kinds, empty_corpus, position
from ragaccel.draft.evidence import PAST_ANSWER, PAST_PROMPT
from ragaccel.draft.jit import compiled
from ragaccel.draft.ngram_index import sorted_places
from ragaccel.draft.restoring import checked
from ragaccel.draft.successors import (
    Successors,
    count_pairs,
    no_successors,
    with_pairs,
    with_rows,
)
from ragaccel.draft.texts import BOUNDARY

if TYPE_CHECKING:
    from ragaccel.draft.restoring import State

ANSWER_COUNTS = 3  # an answer's token counts as so many of a prompt's, for what is common


class Remembered(NamedTuple):
    """Requests in one corpus, each a prompt, its answer and a boundary; none of it ever changes.

    ``counts`` [largest id + 1] are weighted; ``starts`` [requests] are places in the corpus;
    ``evicted`` requests have been let go.
    """

    corpus: Corpus
    counts: Ids
    successors: Successors
    starts: Ids
    evicted: int


def nothing(evicted: int = 0) -> Remembered:
    """No requests."""
    none = np.zeros(0, np.int32)
    return Remembered(empty_corpus(), none, no_successors(), none, evicted)


def with_request(now: Remembered, prompt: Ids, answer: Ids, max_rows: int) -> Remembered:
    """What is remembered with one more request; successors get ``max_rows`` at most."""
    ids = np.concatenate([prompt, *[answer] * ANSWER_COUNTS])
    size = max(len(now.counts), int(ids.max(initial=-1)) + 1)
    counts = np.bincount(ids, minlength=size).astype(np.int32)
    counts[: len(now.counts)] += now.counts
    weights = np.ones(len(prompt) + len(answer))
    weights[len(prompt) :] = ANSWER_COUNTS
    both = np.concatenate([prompt, answer])
    return Remembered(
        joined(now.corpus, prompt, answer),
        counts,
        with_pairs(now.successors, both, weights, max_rows),
        np.append(now.starts, np.int32(len(now.corpus.token_ids))),
        now.evicted,
    )


def without_oldest(now: Remembered, keep: int) -> Remembered:
    """What is left when the oldest requests go until there are at most ``keep`` tokens."""
    token_ids, kinds, places, _, _ = now.corpus
    first = int(np.searchsorted(now.starts, len(token_ids) - keep))
    cut = int(now.starts[first]) if first < len(now.starts) else len(token_ids)
    gone, kinds_gone = token_ids[CONTEXT:cut], kinds[CONTEXT:cut]
    shift = cut - CONTEXT
    empty = empty_corpus()
    left = places[places >= cut] - np.int32(shift)
    token_ids = np.concatenate([empty.token_ids, token_ids[cut:]])
    kinds = np.concatenate([empty.kinds, kinds[cut:]])
    each = np.where(kinds_gone == PAST_ANSWER, ANSWER_COUNTS, 1)[gone >= 0]
    counts_gone = np.bincount(gone[gone >= 0], weights=each, minlength=len(now.counts))
    return Remembered(
        Corpus(token_ids, kinds, left, len(left), first_of(token_ids, left)),
        now.counts - counts_gone.astype(np.int32),
        now.successors,
        now.starts[first:] - np.int32(shift),
        now.evicted + first,
    )


def state_of(now: Remembered) -> State:
    """The texts alone, as arrays; all else follows from them, see :func:`rebuilt`.

    ``token_ids`` [tokens] without boundaries; ``prompt_lengths`` and ``answer_lengths`` [requests].
    """
    token_ids, kinds = now.corpus.token_ids, now.corpus.kinds
    ends = np.append(now.starts[1:], len(token_ids)) if len(now.starts) else now.starts
    so_far = np.concatenate([[0], np.cumsum(kinds == PAST_PROMPT)])
    prompts = so_far[ends] - so_far[now.starts]
    return {
        "token_ids": token_ids[token_ids >= 0],
        "prompt_lengths": prompts.astype(np.int32),
        "answer_lengths": (ends - now.starts - 1 - prompts).astype(np.int32),
    }


class Texts(NamedTuple):
    """Requests one after another; see :func:`state_of`."""

    token_ids: Ids
    prompt_lengths: Ids
    answer_lengths: Ids


def texts_from(state: State, vocab_size: int) -> Texts:
    """Return the texts of a state.

    Raises:
        ValueError: arrays that are no texts, or ids of ``vocab_size`` or more.
    """
    token_ids = checked(state, "token_ids", np.int32, (None,), low=0, high=vocab_size - 1)
    num = len(token_ids)
    prompts = checked(state, "prompt_lengths", np.int32, (None,), low=0, high=num)
    answers = checked(state, "answer_lengths", np.int32, (len(prompts),), low=0, high=num)
    if int(prompts.sum(dtype=np.int64) + answers.sum(dtype=np.int64)) != num:
        raise ValueError("the lengths of the requests do not add up to their tokens")
    return Texts(token_ids, prompts, answers)


def rebuilt(texts: Texts, max_rows: int) -> Remembered:
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
    weights = np.where(kinds == PAST_ANSWER, float(ANSWER_COUNTS), 1.0)
    counts = np.bincount(texts.token_ids, weights=weights[at]).astype(np.int32)
    # rows go to tokens in the order in which they came, request by request
    tokens, first = np.unique(texts.token_ids, return_index=True)
    tokens = tokens[np.lexsort((tokens, request_of[first]))]
    successors = with_rows(no_successors(), tokens, max_rows)
    count_pairs(successors, token_ids, weights)
    places = in_order(token_ids)
    corpus = Corpus(token_ids, kinds, places, len(places), first_of(token_ids, places))
    return Remembered(corpus, counts, successors, starts, 0)


def joined(corpus: Corpus, prompt: Ids, answer: Ids) -> Corpus:
    """A corpus with one more request at its end; the old one stays as it is."""
    added = np.concatenate([prompt, answer, np.array([BOUNDARY], np.int32)])
    start = len(corpus.token_ids)
    token_ids = large_arrays.joined([corpus.token_ids, added])
    kinds: Kinds = np.full(len(added), PAST_ANSWER, np.int8)
    kinds[: len(prompt)] = PAST_PROMPT
    alone = np.concatenate([np.full(CONTEXT, BOUNDARY, np.int32), added])
    new = in_order(alone) + np.int32(start - CONTEXT)
    at = positions(corpus, token_ids, new)
    places = large_arrays.inserted(corpus.places, at, new)
    kinds = large_arrays.joined([corpus.kinds, kinds])
    return Corpus(token_ids, kinds, places, len(places), first_of(token_ids, places))


def in_order(token_ids: Ids) -> Ids:
    """All places in the order of their contexts, the latest first where these are the same.

    So the order does not depend on how a machine sorts, nor on whether the requests came one by
    one or from a file.
    """
    places = sorted_places(token_ids.tolist())
    one, other = places[:-1], places[1:]
    same, inside = np.ones(len(one), bool), np.ones(len(one), bool)
    for i in range(1, SORTED_BY + 1):
        here = token_ids[one - i]
        same &= (here == token_ids[other - i]) | ~inside
        inside &= here >= 0  # what stands before a boundary is another text
    group = np.cumsum(np.concatenate([[True], ~same]))[: len(places)]
    return places[np.lexsort((-places, group))].astype(np.int32)


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
