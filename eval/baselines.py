"""Baselines: other systems' drafters, written from their descriptions, for comparison only."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from ragaccel.decoding.tree import DraftTree, Origin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.decoding.session import Context


class LookupDrafter:
    """Prompt lookup as in transformers: the leftmost match of the last two tokens, or of one."""

    mask_ids: ClassVar[tuple[int, ...]] = ()

    def __init__(self, num_tokens: int = 10, max_ngram: int = 2) -> None:
        self._num_tokens, self._max_ngram = num_tokens, max_ngram

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Guess a chain: what follows the match."""
        tokens = context.token_ids
        first = context.shared(_Places)
        first.grow(tokens)
        for n in range(min(self._max_ngram, len(tokens) - 1), 0, -1):
            tail = tokens[-n:]
            for place in first.of.get(tail[0], ()):
                if place + n < len(tokens) and tokens[place : place + n] == tail:
                    copied = tokens[place + n : place + n + min(self._num_tokens, budget)]
                    return _chain(tokens[-1], copied, "lookup")
        return DraftTree.chain(tokens[-1:])


class _Places:
    """Where each token stands in the running text."""

    def __init__(self, context: Context) -> None:  # noqa: ARG002
        self.of: dict[int, list[int]] = {}
        self._known = 0

    def grow(self, tokens: Sequence[int]) -> None:
        for place in range(self._known, len(tokens)):
            self.of.setdefault(tokens[place], []).append(place)
        self._known = len(tokens)


class _Suffixes:
    """Where each token stands in a list of texts, to be narrowed down by what precedes it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._ends: dict[int, list[int]] = {}

    def append(self, token: int) -> None:
        self._ends.setdefault(token, []).append(len(self.tokens))
        self.tokens.append(token)

    def speculate(self, context: Sequence[int], most: int) -> tuple[float, list[int]]:
        """The best greedy path over all lengths of match: (sum of probabilities, tokens)."""
        tokens, best = self.tokens, (0.0, list[int]())
        ends = [end for end in self._ends.get(context[-1], ()) if end + 1 < len(tokens)]
        for length in range(1, min(SuffixDrafter.MAX_DEPTH, len(context)) + 1):
            if length > 1:
                ends = [
                    end
                    for end in ends
                    if end >= length - 1 and tokens[end - length + 1] == context[-length]
                ]
            if not ends:
                break
            best = max(best, self._path(ends, min(most, length)), key=lambda path: path[0])
        return best

    def _path(self, ends: list[int], most: int) -> tuple[float, list[int]]:
        score, prob, path = 0.0, 1.0, list[int]()
        for step in range(1, most + 1):
            following = Counter(
                self.tokens[end + step] for end in ends if end + step < len(self.tokens)
            )
            following.pop(-1, None)
            if not following:
                break
            token, count = following.most_common(1)[0]
            prob *= count / len(ends)
            if prob < SuffixDrafter.MIN_PROB:
                break
            ends = [
                end
                for end in ends
                if end + step < len(self.tokens) and self.tokens[end + step] == token
            ]
            score += prob
            path.append(token)
        return score, path


class SuffixDrafter:
    """Suffix decoding after Arctic Inference: the best-scoring path of a suffix tree.

    Of every length of match the greedy path by counts is followed for as many tokens as match, down
    to a chance of 0.1; the path whose chances sum to most is drafted. One tree holds prompt and
    output, the other the outputs of past requests.
    """

    MAX_DEPTH, MIN_PROB = 24, 0.1
    mask_ids: ClassVar[tuple[int, ...]] = ()

    class Outputs(_Suffixes):
        """Outputs of past requests."""

        def add(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:  # noqa: ARG002
            """Remember an answer."""
            for token in (*answer_ids, -1):
                self.append(token)

    def __init__(self, past: Outputs) -> None:
        self._past = past

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Guess a chain from whichever tree scores more."""
        own = context.shared(_OwnSuffixes)
        for token in context.token_ids[len(own.tokens) :]:
            own.append(token)
        tail = context.token_ids[-self.MAX_DEPTH :]
        found = max(
            own.speculate(tail, budget), self._past.speculate(tail, budget), key=lambda f: f[0]
        )
        return _chain(context.token_ids[-1], found[1], "suffix")


class _OwnSuffixes(_Suffixes):
    """Prompt and output of one request."""

    def __init__(self, context: Context) -> None:  # noqa: ARG002
        super().__init__()


def _chain(root: int, copied: Sequence[int], source: str) -> DraftTree:
    origins = [(), *[(Origin(source, 0),)] * len(copied)]
    return DraftTree.chain([root, *copied], origins=origins)
