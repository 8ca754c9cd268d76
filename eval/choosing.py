"""Choosing: the best of many settings by one half of the questions, judged on the other half.

The best of many is partly luck; on questions that had no part in the choice it has none. Halves are
of whole articles (:attr:`Question.is_held_out`). A setting's worth is the mean of its sets', each
set counting once, whatever its size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from eval.ratios import middle_95, resampled_means, spread

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from eval.question_sets import Question

    Values = Mapping[str, Sequence[float]]  # by set, one of every question
    Questions = Mapping[str, Sequence[Question]]

Setting = TypeVar("Setting", bound="Hashable")


def half(values: Sequence[float], questions: Sequence[Question], *, held_out: bool) -> list[float]:
    """The values of one half's questions."""
    pairs = zip(values, questions, strict=True)
    return [value for value, question in pairs if question.is_held_out == held_out]


def choose(worth: Mapping[Setting, Values], questions: Questions) -> Setting:
    """Find the setting that is worth most on the half to choose by; the first of equals.

    Raises:
        ValueError: A half of a set has no question.
    """
    for name, asked in questions.items():
        if len({question.is_held_out for question in asked}) < 2:
            raise ValueError(f"{name}: too few questions to choose by some and judge by others")

    def mean_worth(setting: Setting) -> float:
        means = [
            float(np.mean(half(values, questions[name], held_out=False)))
            for name, values in worth[setting].items()
        ]
        return sum(means) / len(means)

    return max(worth, key=mean_worth)


def gain(ours: Values, theirs: Values, questions: Questions) -> dict[str, Any]:
    """What one setting gains over another on the held-out half: of each set, and their mean.

    Each as (difference, and the bounds of its 95 % interval over articles).
    """
    by_set, draws, means = {}, [], []
    for name, values in ours.items():
        differences = [a - b for a, b in zip(values, theirs[name], strict=True)]
        kept = half(differences, questions[name], held_out=True)
        groups = [question.group for question in questions[name] if question.is_held_out]
        by_set[name] = spread(kept, groups)
        # sets are drawn apart: by chance of their own
        draws.append(resampled_means(kept, groups, seed=len(draws)))
        means.append(float(np.mean(kept)))
    low, high = middle_95(np.mean(draws, axis=0))
    mean = [round(number, 4) for number in (sum(means) / len(means), low, high)]
    return {"sets": by_set, "mean": mean}
