"""Match and copy: find the last tokens in a reference and guess what follows there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, ClassVar, Protocol

from ragaccel.decoding.tree import DraftTree
from ragaccel.draft.first_occurrences import MAX_N as PAPER_MAX_N
from ragaccel.draft.first_occurrences import FirstOccurrences
from ragaccel.draft.ngram_index import MAX_N, NgramIndex
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ragaccel.decoding.session import Context
    from ragaccel.draft.texts import Match, Texts

# Replayed with 100 recorded answers of each of llma_msmarco, clapnq, mtrag_un, pubmedqa and qmsum
# (GPT-2 tokens): how often the first guess held, by the length of the match...
_FIRST = (0.24, 0.40, 0.46, 0.50, 0.55, 0.60, 0.65, 0.70)
# ...and how often the next one did, by how many guesses of the same copy had held before it.
_NEXT = (0.60, 0.72, 0.78, 0.81, 0.83, 0.85, 0.86, 0.88, 0.89, 0.90, 0.91, 0.92, 0.93, 0.94)
_LATER = 0.95


class CopyIndex(Protocol):
    """Finds earlier occurrences of the last tokens, and reads on from there."""

    @property
    def texts(self) -> Texts:
        """The texts that are searched."""
        ...

    def find(self, min_n: int, max_n: int) -> Match | None:
        """Find the best earlier occurrence of the last n tokens, None when there is none."""
        ...


@dataclass(frozen=True, slots=True)
class CopyDrafter:
    """Copies one span: what follows the longest earlier occurrence of the last tokens.

    Follows LLMA (Yang et al., 2023, "Inference with Reference") and goes past it: the running text
    is matched from the prompt on, so that the first token can be a copied one; it is copied from
    as the references are; and of equal matches the best is taken, not the first.

    ``min_n`` and ``max_n`` bound the tokens that must match, ``max_length`` the tokens copied; how
    many of these are verified is the session's affair. ``index`` makes the index of a context.

    Raises:
        ConfigurationError: bounds that cannot match anything.
    """

    min_n: int = 1
    max_n: int = MAX_N
    max_length: int = 31
    index: Callable[[Context], CopyIndex] = NgramIndex

    probe_ids: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        longest = PAPER_MAX_N if self.index is FirstOccurrences else MAX_N
        if not 1 <= self.min_n <= self.max_n <= longest:
            raise ConfigurationError(
                f"1 <= min_n <= max_n <= {longest} must hold, got {self.min_n} and {self.max_n}"
            )
        if self.max_length < 1:
            raise ConfigurationError(f"max_length must be 1 or more, not {self.max_length}")

    @classmethod
    def paper(cls, n: int = 1, k: int = 20) -> CopyDrafter:
        """Make the drafter of the LLMA paper, for comparison.

        ``k`` counts the token that is fed anyway, so at most k - 1 are guessed; matches are 5 down
        to ``n`` tokens of the output, in their first occurrence. Tokenize the references apart from
        the prompt, as the paper does, and give the session a fixed ``token_budget`` of k - 1.
        """
        return cls(min_n=n, max_n=PAPER_MAX_N, max_length=k - 1, index=FirstOccurrences)

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Guess a chain of at most ``budget`` tokens; the root alone when nothing matches."""
        index = context.shared(self.index)
        root = context.token_ids[-1]
        match = index.find(self.min_n, self.max_n)
        if match is None:
            return DraftTree.chain([root])
        copied = index.texts.following(match.place, min(budget, self.max_length))
        return DraftTree.chain(
            [root, *copied],
            path_probs(match.length, len(copied)),
            [(), *index.texts.origins(match, len(copied))],
        )


@lru_cache(maxsize=1024)
def path_probs(length: int, count: int) -> tuple[float, ...]:
    """Estimate for the root and ``count`` tokens copied after a match the chance of acceptance."""
    first = _FIRST[min(length, len(_FIRST)) - 1]
    later = [_NEXT[i] if i < len(_NEXT) else _LATER for i in range(count - 1)]
    return tuple(accumulate([1.0, first, *later][: count + 1], mul))
