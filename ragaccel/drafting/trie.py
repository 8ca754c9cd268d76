"""Lookahead (arXiv 2312.12728): the likeliest draft tree over all known texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, overload

import numpy as np

from ragaccel.decoding.session import Drafter
from ragaccel.decoding.tree import Origin
from ragaccel.drafting.arrays import MAX_VOCAB_SIZE, Table
from ragaccel.drafting.calibration import Calibration
from ragaccel.drafting.expansion import (
    MIN_PROB,
    NODE,
    OUTPUT,
    PROMPT,
    REFERENCE,
    SOURCES,
    Limits,
    MatchWeights,
    Nodes,
    build_tree,
    default_match_weights,
    tree_of,
)
from ragaccel.drafting.history import History
from ragaccel.drafting.ngram import BOUNDARY, sort_positions
from ragaccel.drafting.suffix_array import (
    CONTEXT,
    ROOT,
    BigramTable,
    Ids,
    SuffixArray,
    append,
)
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from ragaccel.decoding.session import Context
    from ragaccel.decoding.tree import DraftTree


_INITIAL_CAPACITY = 512  # tokens of an answer before the arrays grow
_NO_BUCKETS = np.zeros(0, np.int32)


class RequestText:
    """The suffix array of one request's references, prompt and answer, which grows with it.

    A reference that occurs in the prompt is not stored a second time.
    """

    def __init__(self, context: Context) -> None:
        prompt = np.array(context.token_ids[: context.num_prompt], np.int32)
        self._context = context
        self._spans: list[tuple[int, int, str]] = []  # start, end, passage id
        parts = [np.full(CONTEXT, BOUNDARY, np.int32)]
        kinds = np.full(len(prompt), PROMPT, np.int8)
        size, inside = CONTEXT, []
        # Of equal references the first one stays.
        different = {r.token_ids: r for r in reversed(context.references)}
        for reference in reversed(different.values()):
            ids = _as_ids(reference.token_ids)
            start = _find(prompt, ids)
            if start >= 0:
                inside.append((start, start + len(ids), reference.passage_id))
            elif len(ids):
                parts += [ids, np.array([BOUNDARY], np.int32)]
                self._spans.append((size, size + len(ids), reference.passage_id))
                size += len(ids) + 1
        self.text_start = size
        for start, end, passage_id in inside:
            kinds[start:end] = REFERENCE
            self._spans.append((size + start, size + end, passage_id))
        self.output_start = size + len(prompt)
        known = np.concatenate([*parts, prompt])
        self._token_ids = known
        self._kinds = np.concatenate([np.full(size, REFERENCE, np.int8), kinds])
        self._positions = sort_positions(known.tolist()).astype(np.int32)
        self._num_positions, self.end = len(self._positions), len(known)
        self._enlarge(_INITIAL_CAPACITY)

    @property
    def suffix_array(self) -> SuffixArray:
        """Return the suffix array of the text so far."""
        return SuffixArray(
            self._token_ids, self._kinds, self._positions, self._num_positions, _NO_BUCKETS
        )

    def last_tokens(self, drafted: Sequence[int] = ()) -> Ids:
        """Return the last ``CONTEXT`` tokens of the text so far followed by draft tokens."""
        known = self._token_ids[self.end - CONTEXT : self.end]
        if not len(drafted):
            return known
        return np.concatenate([known, _as_ids(drafted)])[-CONTEXT:]

    def counts(self, size: int) -> Ids:
        """Return how often each token id has occurred so far, [``size`` or more]."""
        ids = self._token_ids[CONTEXT : self.end]
        return np.bincount(ids[ids >= 0], minlength=size).astype(np.int32)

    def advance(self) -> Ids:
        """Append the new tokens of the context, and return them."""
        gained = np.array(self._context.token_ids[self.end - self.text_start :], np.int32)
        if self.end + len(gained) > len(self._token_ids):
            self._enlarge(len(self._token_ids) + len(gained))
        if len(gained):
            append(self.suffix_array, self.end, gained)
            self._num_positions += len(gained)
            self.end += len(gained)
        return gained

    def origin(self, kind: int, length: int, position: int) -> Origin:
        """Return the origin of a draft token, given the first match that predicted it."""
        source = SOURCES[kind]
        if kind == REFERENCE:
            for start, end, passage_id in self._spans:
                if start <= position < end:
                    return Origin(source, length, passage_id, position - start)
        if kind in (PROMPT, OUTPUT):
            return Origin(source, length, "", position - self.text_start)
        return Origin(source, length)

    def _enlarge(self, more: int) -> None:
        self._token_ids = np.concatenate([self._token_ids, np.zeros(more, np.int32)])
        self._kinds = np.concatenate([self._kinds, np.full(more, OUTPUT, np.int8)])
        self._positions = np.concatenate([self._positions, np.zeros(more, np.int32)])


@dataclass(frozen=True, slots=True, eq=False)
class Origins(Sequence[tuple[Origin, ...]]):
    """The origins of a tree's nodes, built on demand, because most are never read."""

    text: RequestText
    nodes: Nodes

    def __len__(self) -> int:
        """Return the number of nodes, the root included."""
        return len(self.nodes)

    @overload
    def __getitem__(self, node: int) -> tuple[Origin, ...]: ...

    @overload
    def __getitem__(self, node: slice) -> Origins: ...

    def __getitem__(self, node: int | slice) -> tuple[Origin, ...] | Origins:
        """Return the origin of a node's token; an empty tuple for the root."""
        if isinstance(node, slice):
            return Origins(self.text, self.nodes[node])
        *_, kind, length, position = self.nodes[node].item()
        return () if position == ROOT else (self.text.origin(kind, length, position),)


def _as_ids(token_ids: Sequence[int]) -> Ids:
    """Return token ids as an array, with a boundary in place of ids beyond any vocabulary."""
    try:
        ids = np.array(token_ids, np.int64)
    except OverflowError:
        ids = np.array([min(token, MAX_VOCAB_SIZE) for token in token_ids], np.int64)
    return np.where(ids < MAX_VOCAB_SIZE, ids, BOUNDARY).astype(np.int32)


def _find(text: Ids, part: Ids) -> int:
    """Return the first index of a run of tokens in a text, or -1."""
    size = text.itemsize
    haystack, needle = text.tobytes(), part.tobytes()
    at = haystack.find(needle) if needle else -1
    while at >= 0 and at % size:
        at = haystack.find(needle, at + 1)
    return at // size if at >= 0 else -1


NUM_COMMON = 48
"""Number of frequent tokens that are drafted if nothing matches."""
PRIOR = 0.5
"""Bound on the probability of a child of a frequent token; most searches there find nothing."""

Mode = Literal["hierarchical", "parallel", "one"]


class PastTexts(Protocol):
    """Texts of earlier requests. A suffix array never changes after it is returned."""

    def suffix_array(self) -> SuffixArray:
        """Return the prompts and answers of earlier requests."""
        ...

    def counts(self) -> Ids:
        """Return how often each token occurs in earlier requests."""
        ...

    def bigrams(self) -> BigramTable:
        """Return the most frequent successors of each token in earlier requests."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TrieDrafter(Drafter):
    """A drafter of the likeliest tree over every text that can be copied.

    Extends Lookahead (Zhao et al., 2023, arXiv 2312.12728): branches come from the prompt, the
    references, the running output and past requests, and equal prefixes share nodes. Lookahead
    stores branches in a trie by their first tokens and ranks them by frequency. This drafter keeps
    the texts in suffix arrays and builds the trie it needs for each draft: longer contexts weigh
    more than shorter ones, and nodes are added by their estimated acceptance probability, up to
    ``decoding_length``.

    Args:
        decoding_length: the maximum number of draft tokens of a tree, as in the paper (its default
            is 64).
        branch_length: the maximum number of tokens of a branch, as in the paper (its default is
            12; ours is 24).
        mode: the paper's three modes: "hierarchical" builds a tree, "parallel" builds branches that
            split at the root only, "one" builds a single branch.
        past: earlier requests of the same namespace.
        calibration: learned corrections of the probabilities; one per namespace.
        match_weights: the weights of matches.

    Raises:
        ConfigurationError: a length is below 1, or the mode is unknown.
    """

    decoding_length: int = 64
    branch_length: int = 24
    mode: Mode = "hierarchical"
    past: PastTexts = field(default_factory=History)
    calibration: Calibration = field(default_factory=Calibration)
    match_weights: MatchWeights = field(default_factory=default_match_weights)

    def __post_init__(self) -> None:
        for name in ("decoding_length", "branch_length"):
            if (length := getattr(self, name)) < 1:
                raise ConfigurationError(f"{name} must be 1 or more, not {length}")
        if self.mode not in _CHILDREN:
            raise ConfigurationError(
                f"mode must be one of {', '.join(_CHILDREN)}, not {self.mode!r}"
            )

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Return a tree of at most ``budget`` draft tokens, and at most ``decoding_length``."""
        request: _Request = context.shared(self._open)
        emitted = request.advance()
        if len(emitted) and len(request.nodes):
            self.calibration.learn(request.nodes, emitted)
        request.nodes = self._build(request, (), budget)
        return tree_of(request.nodes, Origins(request, request.nodes))

    def draft_after(self, context: Context, drafted: Sequence[int], budget: int) -> DraftTree:
        """Return a tree that continues another drafter's tokens; its root is the last of them."""
        request: _Request = context.shared(self._open)
        nodes = self._build(request, drafted, budget)
        return tree_of(nodes, Origins(request, nodes))

    def _build(self, request: _Request, drafted: Sequence[int], budget: int) -> Nodes:
        budget = max(0, min(budget, self.decoding_length))
        limits = Limits(budget, self.branch_length, *_CHILDREN[self.mode], MIN_PROB, PRIOR)
        nodes: Nodes = build_tree(
            request.suffix_array, request.past, request.bigrams, request.last_tokens(drafted),
            self.match_weights, self.calibration.odds, request.common, request.shares, limits,
        )  # fmt: skip
        return nodes

    def _open(self, context: Context) -> _Request:
        return _Request(context, self)


_CHILDREN = {"hierarchical": (1 << 30, 1 << 30), "parallel": (1 << 30, 1), "one": (1, 1)}


class _Request(RequestText):
    """The state of one request in a ``TrieDrafter``: its texts, and its last tree."""

    def __init__(self, context: Context, drafter: TrieDrafter) -> None:
        super().__init__(context)
        self.past = drafter.past.suffix_array()
        self.bigrams = drafter.past.bigrams()
        self.shares = backoff_shares(self, drafter.past, drafter.match_weights)
        self.common = most_common(self.shares)
        self.nodes: Nodes = np.zeros(0, NODE)


def backoff_shares(text: RequestText, past: PastTexts, match_weights: MatchWeights) -> Table:
    """Return each token's share of the back-off mass: its frequency now and in past requests."""
    before = past.counts()
    here = text.counts(len(before))
    shares: Table = match_weights.frequency[0] * here / max(1, int(here.sum()))
    shares[: len(before)] += match_weights.frequency[1] * before / max(1, int(before.sum()))
    return shares


def most_common(shares: Table) -> Ids:
    """Return at most ``NUM_COMMON`` tokens, those of greatest share, in descending order."""
    num = min(NUM_COMMON, int(np.count_nonzero(shares)))
    tokens = np.argpartition(-shares, num - 1)[:num] if num else np.zeros(0, np.int64)
    return tokens[np.argsort(-shares[tokens], kind="stable")].astype(np.int32)
