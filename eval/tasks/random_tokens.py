"""Random tokens: prompts and answers drawn apart, in which nothing can be guessed at all."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from eval.examples import Example

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_NUM, _PROMPT, _ANSWER = 100, 256, 128


def load(limit: int | None = None, data: Path | None = None) -> list[Example]:  # noqa: ARG001
    num = _NUM if limit is None else min(limit, _NUM)
    return [Example(f"random-{seed}", draw=partial(_drawn, seed)) for seed in range(1, num + 1)]


def _drawn(seed: int, token_ids: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prompt and answer out of some token ids, the same every time."""
    rng = random.Random(seed)
    return tuple(rng.choices(token_ids, k=_PROMPT)), tuple(rng.choices(token_ids, k=_ANSWER))
