"""The trie drafter: many branches from all texts at hand, equal prefixes shared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np

from ragaccel.draft.calibration import Calibration
from ragaccel.draft.corpus import Corpus, Ids, empty_corpus
from ragaccel.draft.evidence import Evidence, Table, default_evidence
from ragaccel.draft.growth import (
    LEAST_PROB,
    Limits,
    Pool,
    grow,
    new_pool,
    require_lengths,
    tree_of,
)  # fmt: skip
from ragaccel.draft.searched import Origins, SearchedText
from ragaccel.draft.successors import Successors, no_successors
from ragaccel.draft.votes import new_votes
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.decoding.session import Context
    from ragaccel.decoding.tree import DraftTree

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

    probe_ids: ClassVar[tuple[int, ...]] = ()

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
