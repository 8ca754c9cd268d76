"""First occurrences: LLMA's own index, where each n-gram of the references stands first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ragaccel.draft.texts import Match, Texts

if TYPE_CHECKING:
    from ragaccel.decoding.session import Context

MAX_N = 5
MAX_REFERENCE_TOKENS = 768


class FirstOccurrences:
    """Finds where the last tokens of the output occur first in the references.

    Follows the released code of LLMA (Yang et al., 2023): the prompt is neither matched nor copied
    from, a reference counts to its 768th token, and an n-gram at the very end of a reference
    counts as found though nothing follows it there.
    """

    def __init__(self, context: Context) -> None:
        self.texts = Texts(
            context,
            [replace(r, token_ids=r.token_ids[:MAX_REFERENCE_TOKENS]) for r in context.references],
        )
        self._first: dict[tuple[int, ...], int] = {}
        for start, end in self.texts.references():
            for n in range(1, MAX_N + 1):
                for place in range(start + n, end + 1):
                    ngram = tuple(self.texts.token_ids[place - n : place])
                    self._first.setdefault(ngram, place)

    def find(self, min_n: int = 1, max_n: int = MAX_N) -> Match | None:
        """Find the first occurrence of the last n output tokens, the longest n of the bounds."""
        self.texts.grow()
        tokens = self.texts.token_ids
        for n in range(min(max_n, len(tokens) - self.texts.output_start), min_n - 1, -1):
            place = self._first.get(tuple(tokens[-n:]))
            if place is not None:
                return Match(n, place)
        return None
