"""Diversity: of many passages near to a question, some that do not say the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def diversify(
    nearness: NDArray[np.float32], vectors: NDArray[np.float32], k: int, balance: float
) -> list[int]:
    """Choose k of N by maximal marginal relevance (Carbonell & Goldstein, 1998), best first.

    Args:
        nearness: [N], the cosine of each with the question.
        vectors: [N, D], of length 1.
        k: How many.
        balance: 1 looks at nearness alone, 0 only at how unlike they are to those chosen before.
    """
    left = np.ones(len(vectors), dtype=bool)
    redundancy = np.full(len(vectors), -1.0, dtype=np.float32)
    chosen: list[int] = []
    while len(chosen) < min(k, len(vectors)):
        gain = balance * nearness - (1 - balance) * redundancy if chosen else nearness
        best = int(np.argmax(np.where(left, gain, -np.inf)))
        redundancy = np.maximum(redundancy, vectors @ vectors[best])
        chosen.append(best)
        left[best] = False
    return chosen
