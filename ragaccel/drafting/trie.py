"""Lookahead (arXiv 2312.12728): the likeliest token tree over all that is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, overload

import numpy as np

from ragaccel.decoding.tree import Origin
from ragaccel.drafting.arrays import MAX_VOCAB_SIZE, Table
from ragaccel.drafting.calibration import Calibration
from ragaccel.drafting.expansion import (
    MIN_PROB,
    OUTPUT,
    PROMPT,
    REFERENCE,
    SOURCES,
    Candidates,
    Limits,
    MatchWeights,
    build_tree,
    check_lengths,
    default_match_weights,
    new_candidates,
    new_scores,
    tree_of,
)
from ragaccel.drafting.ngram import BOUNDARY, sort_positions
from ragaccel.drafting.suffix_array import (
    CONTEXT,
    ROOT,
    BigramTable,
    Ids,
    SuffixArray,
    append,
    empty_bigrams,
    empty_suffix_array,
)
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from ragaccel.decoding.session import Context
    from ragaccel.decoding.tree import DraftTree


_INITIAL_CAPACITY = 512  # tokens of an answer, before the arrays are made larger


class RequestText:
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
        positions = sort_positions(known.tolist())
        self._token_ids = np.concatenate([known, np.zeros(_INITIAL_CAPACITY, np.int32)])
        self._kinds = np.concatenate(
            [np.full(size, REFERENCE, np.int8), kinds, np.full(_INITIAL_CAPACITY, OUTPUT, np.int8)]
        )
        self._positions = np.concatenate([positions, np.zeros(_INITIAL_CAPACITY, np.int64)]).astype(
            np.int32
        )
        self._num_positions = len(positions)
        self._none = np.zeros(0, np.int32)
        self.end = len(known)

    @property
    def suffix_array(self) -> SuffixArray:
        """What can be searched now."""
        return SuffixArray(
            self._token_ids, self._kinds, self._positions, self._num_positions, self._none
        )

    def last_tokens(self, drafted: Sequence[int] = ()) -> Ids:
        """The last tokens, with some that are guessed to follow. [CONTEXT]."""
        known = self._token_ids[self.end - CONTEXT : self.end]
        if not len(drafted):
            return known
        return np.concatenate([known, _as_ids(drafted)])[-CONTEXT:]

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
            append(self.suffix_array, self.end, gained)
            self._num_positions += len(gained)
            self.end += len(gained)
        return gained

    def origin(self, kind: int, length: int, position: int) -> Origin:
        """Say where a guess comes from, by the first vote for it."""
        source = SOURCES[kind]
        if kind == REFERENCE:
            for start, end, offset, passage_id in self._spans:
                if start <= position < end:
                    return Origin(source, length, passage_id, position - start + offset)
        if kind in (PROMPT, OUTPUT):
            return Origin(source, length, "", position - self.text_start)
        return Origin(source, length)

    def _enlarge(self, gained: int) -> None:
        more = len(self._token_ids) + gained
        self._token_ids = np.concatenate([self._token_ids, np.zeros(more, np.int32)])
        self._kinds = np.concatenate([self._kinds, np.full(more, OUTPUT, np.int8)])
        self._positions = np.concatenate([self._positions, np.zeros(more, np.int32)])


class Origins(Sequence[tuple[Origin, ...]]):
    """The origins of a tree's nodes, made when they are asked for: most are soon forgotten."""

    __slots__ = ("_kinds", "_lengths", "_positions", "_text")

    def __init__(self, text: RequestText, kinds: Ids, lengths: Ids, positions: Ids) -> None:
        self._text, self._kinds, self._lengths, self._positions = text, kinds, lengths, positions

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
            return Origins(
                self._text, self._kinds[node], self._lengths[node], self._positions[node]
            )
        position = int(self._positions[node])
        if position == ROOT:
            return ()
        return (self._text.origin(int(self._kinds[node]), int(self._lengths[node]), position),)


def _as_ids(token_ids: Sequence[int]) -> Ids:
    """An array of token ids; those that no vocabulary has end a text."""
    try:
        ids = np.array(token_ids, np.int64)
    except OverflowError:
        ids = np.array([min(token, MAX_VOCAB_SIZE) for token in token_ids], np.int64)
    return np.where(ids < MAX_VOCAB_SIZE, ids, BOUNDARY).astype(np.int32)


def _find(text: Ids, part: Ids) -> int:
    """Where a run of tokens first stands in a text; -1 where it does not."""
    size = text.itemsize
    haystack, needle = text.tobytes(), part.tobytes()
    at = haystack.find(needle) if needle else -1
    while at >= 0 and at % size:
        at = haystack.find(needle, at + 1)
    return at // size if at >= 0 else -1


NUM_COMMON = 48
"""How many common tokens are guessed where nothing matches."""
PRIOR = 0.5
"""After a common token hardly any is likelier; most of the searches there gave no guess."""

Mode = Literal["hierarchical", "parallel", "one"]


class PastTexts(Protocol):
    """What earlier requests said; a corpus that does not change once it was handed out."""

    def suffix_array(self) -> SuffixArray:
        """Prompts and answers of earlier requests."""
        ...

    def counts(self) -> Ids:
        """How often each token occurs in them."""
        ...

    def bigrams(self) -> BigramTable:
        """What follows each token in them."""
        ...


class NoPast:
    """No earlier requests."""

    def suffix_array(self) -> SuffixArray:
        """Return a corpus of no text."""
        return empty_suffix_array()

    def counts(self) -> Ids:
        """Return no counts."""
        return np.zeros(0, np.int32)

    def bigrams(self) -> BigramTable:
        """Return a table that knows no token."""
        return empty_bigrams()


@dataclass(frozen=True, slots=True, eq=False)
class TrieDrafter:
    """Drafts the likeliest tree over everything that can be copied from.

    A superset of Lookahead (Zhao et al., 2023, arXiv 2312.12728): branches come from the prompt,
    the references, the running output and past requests, and equal prefixes share nodes. Where
    that stores branches in a trie by their first tokens and ranks them by frequency, this one keeps
    the texts themselves, in the order of their contexts, and grows the trie it needs for each
    draft: longer contexts count more than shorter, and nodes are taken by their estimated chance
    of acceptance, until ``decoding_length`` of them stand.

    Args:
        decoding_length: guesses of a tree, as in the paper (its default 64).
        branch_length: tokens of its longest branch, as in the paper (its default 12; ours is 24).
        mode: the paper's three: "hierarchical" grows a tree, "parallel" branches that part at
            the root only, "one" a single branch.
        past: earlier requests, of the same namespace only.
        calibration: learns how far the guesses are to be believed; one for each namespace.
        evidence: what matches are worth.

    Raises:
        ConfigurationError: a length below 1, or no such mode.
    """

    decoding_length: int = 64
    branch_length: int = 24
    mode: Mode = "hierarchical"
    past: PastTexts = field(default_factory=NoPast)
    calibration: Calibration = field(default_factory=Calibration)
    match_weights: MatchWeights = field(default_factory=default_match_weights)

    mask_ids: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        check_lengths(self.decoding_length, self.branch_length)
        if self.mode not in _CHILDREN:
            raise ConfigurationError(f"mode is {self.mode!r}: take one of {', '.join(_CHILDREN)}")

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Guess at most ``budget`` tokens, and never more than ``decoding_length``."""
        request: _Request = context.shared(self._open)
        emitted = request.text.advance()
        if len(emitted) and len(request.nodes):
            self.calibration.learn(request.candidates, request.nodes, emitted)
        request.nodes, tree = self._build(request, (), request.candidates, budget)
        return tree

    def draft_after(self, context: Context, drafted: Sequence[int], budget: int) -> DraftTree:
        """Guess what follows if some guesses are right; the root is the last of them.

        For a mixture in which another drafter made them; ``draft`` comes first.
        """
        request: _Request = context.shared(self._open)
        return self._build(request, drafted, request.branch_candidates, budget)[1]

    def _build(
        self, request: _Request, drafted: Sequence[int], candidates: Candidates, budget: int
    ) -> tuple[Ids, DraftTree]:
        budget = max(0, min(budget, self.decoding_length))
        limits = Limits(budget, self.branch_length, *_CHILDREN[self.mode], MIN_PROB, PRIOR)
        text, before = request.text, request.text.last_tokens(drafted)
        candidates.token_ids[0] = before[-1]
        nodes = build_tree(
            text.suffix_array, request.past, request.bigrams, before, self.match_weights,
            self.calibration.odds, request.common, request.shares, limits, request.scores,
            candidates,
        )  # fmt: skip
        origins = Origins(
            text, candidates.kinds[nodes], candidates.lengths[nodes], candidates.positions[nodes]
        )
        return nodes, tree_of(candidates, nodes, origins)

    def _open(self, context: Context) -> _Request:
        return _Request(context, self)


_CHILDREN = {"hierarchical": (1 << 30, 1 << 30), "parallel": (1 << 30, 1), "one": (1, 1)}


class _Request:
    """What a drafter keeps of one request."""

    def __init__(self, context: Context, drafter: TrieDrafter) -> None:
        self.text = RequestText(context)
        self.past = drafter.past.suffix_array()
        self.bigrams = drafter.past.bigrams()
        self.shares = backoff_shares(self.text, drafter.past, drafter.match_weights)
        self.common = most_common(self.shares)
        self.scores = new_scores()
        self.candidates: Candidates = new_candidates(drafter.decoding_length, len(self.common))
        self.branch_candidates: Candidates = new_candidates(
            drafter.decoding_length, len(self.common)
        )
        self.nodes: Ids = np.zeros(0, np.int32)


def backoff_shares(text: RequestText, past: PastTexts, match_weights: MatchWeights) -> Table:
    """What each token gets where nothing matches: by how frequent it is here, and was before."""
    before = past.counts()
    here = text.counts(len(before))
    shares: Table = match_weights.frequency[0] * here / max(1, int(here.sum()))
    shares[: len(before)] += match_weights.frequency[1] * before / max(1, int(before.sum()))
    return shares


def most_common(shares: Table) -> Ids:
    """The tokens of greatest share, the greatest first."""
    num = min(NUM_COMMON, int(np.count_nonzero(shares)))
    tokens = np.argpartition(-shares, num - 1)[:num] if num else np.zeros(0, np.int64)
    return tokens[np.argsort(-shares[tokens], kind="stable")].astype(np.int32)
