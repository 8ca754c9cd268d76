"""Lookahead (arXiv 2312.12728): the likeliest token tree over all that is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, overload

import numpy as np

from ragaccel.decoding.tree import Origin
from ragaccel.drafting.arrays import MAX_IDS, Table
from ragaccel.drafting.calibration import Calibration
from ragaccel.drafting.expansion import (
    LEAST_PROB,
    OUTPUT,
    PROMPT,
    REFERENCE,
    SOURCES,
    Evidence,
    Limits,
    Pool,
    default_evidence,
    grow,
    new_pool,
    new_votes,
    require_lengths,
    tree_of,
)
from ragaccel.drafting.ngram import BOUNDARY, sorted_places
from ragaccel.drafting.suffix_array import (
    CONTEXT,
    ROOT,
    Corpus,
    Ids,
    Successors,
    append,
    empty_corpus,
    no_successors,
)
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from ragaccel.decoding.session import Context
    from ragaccel.decoding.tree import DraftTree


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


NUM_COMMON = 48
"""How many common tokens are guessed where nothing matches."""
HOPE = 0.5
"""After a common token hardly any is likelier; most of the searches there gave no guess."""

Mode = Literal["hierarchical", "parallel", "one"]


class PastTexts(Protocol):
    """What earlier requests said; a corpus that does not change once it was handed out."""

    def corpus(self) -> Corpus:
        """Prompts and answers of earlier requests."""
        ...

    def counts(self) -> Ids:
        """How often each token occurs in them."""
        ...

    def successors(self) -> Successors:
        """What follows each token in them."""
        ...


class NoPast:
    """No earlier requests."""

    def corpus(self) -> Corpus:
        """Return a corpus of no text."""
        return empty_corpus()

    def counts(self) -> Ids:
        """Return no counts."""
        return np.zeros(0, np.int32)

    def successors(self) -> Successors:
        """Return a table that knows no token."""
        return no_successors()


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
    evidence: Evidence = field(default_factory=default_evidence)

    mask_ids: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        require_lengths(self.decoding_length, self.branch_length)
        if self.mode not in _CHILDREN:
            raise ConfigurationError(f"mode is {self.mode!r}: take one of {', '.join(_CHILDREN)}")

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Guess at most ``budget`` tokens, and never more than ``decoding_length``."""
        request: _Request = context.shared(self._open)
        emitted = request.text.advance()
        if len(emitted) and len(request.nodes):
            self.calibration.learn(request.pool, request.nodes, emitted)
        request.nodes, tree = self._grown(request, (), request.pool, budget)
        return tree

    def draft_after(self, context: Context, guesses: Sequence[int], budget: int) -> DraftTree:
        """Guess what follows if some guesses are right; the root is the last of them.

        For a mixture in which another drafter made them; ``draft`` comes first.
        """
        request: _Request = context.shared(self._open)
        return self._grown(request, guesses, request.spare, budget)[1]

    def _grown(
        self, request: _Request, guesses: Sequence[int], pool: Pool, budget: int
    ) -> tuple[Ids, DraftTree]:
        budget = max(0, min(budget, self.decoding_length))
        limits = Limits(budget, self.branch_length, *_CHILDREN[self.mode], LEAST_PROB, HOPE)
        text, before = request.text, request.text.last(guesses)
        pool.token_ids[0] = before[-1]
        nodes = grow(
            text.corpus, request.past, request.successors, before, self.evidence,
            self.calibration.odds, request.common, request.shares, limits, request.votes, pool,
        )  # fmt: skip
        origins = Origins(text, pool.kinds[nodes], pool.lengths[nodes], pool.places[nodes])
        return nodes, tree_of(pool, nodes, origins)

    def _open(self, context: Context) -> _Request:
        return _Request(context, self)


_CHILDREN = {"hierarchical": (1 << 30, 1 << 30), "parallel": (1 << 30, 1), "one": (1, 1)}


class _Request:
    """What a drafter keeps of one request."""

    def __init__(self, context: Context, drafter: TrieDrafter) -> None:
        self.text = SearchedText(context)
        self.past = drafter.past.corpus()
        self.successors = drafter.past.successors()
        self.shares = shares_of_doubt(self.text, drafter.past, drafter.evidence)
        self.common = most_common(self.shares)
        self.votes = new_votes()
        self.pool: Pool = new_pool(drafter.decoding_length, len(self.common))
        self.spare: Pool = new_pool(drafter.decoding_length, len(self.common))
        self.nodes: Ids = np.zeros(0, np.int32)


def shares_of_doubt(text: SearchedText, past: PastTexts, evidence: Evidence) -> Table:
    """What each token gets where nothing matches: by how frequent it is here, and was before."""
    before = past.counts()
    here = text.counts(len(before))
    shares: Table = evidence.frequency[0] * here / max(1, int(here.sum()))
    shares[: len(before)] += evidence.frequency[1] * before / max(1, int(before.sum()))
    return shares


def most_common(shares: Table) -> Ids:
    """The tokens of greatest share, the greatest first."""
    num = min(NUM_COMMON, int(np.count_nonzero(shares)))
    tokens = np.argpartition(-shares, num - 1)[:num] if num else np.zeros(0, np.int64)
    return tokens[np.argsort(-shares[tokens], kind="stable")].astype(np.int32)
