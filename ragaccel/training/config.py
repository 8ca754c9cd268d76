"""The training configuration: what is trained, on what, how long."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from ragaccel.errors import ConfigurationError

MODES = ("gated", "paper")
PRECISIONS = ("float32", "bfloat16")
_PAPERS: dict[str, Any] = {"rank": 0, "learning_rate": 5e-5}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model learns to guess; ``make_recipe`` has the defaults of a mode.

    Args:
        mode: "gated" trains mask embeddings, and low-rank changes that mask tokens' rows alone are
            given, on what the model itself says; its own answers stay as they are. "paper" trains
            all weights as arXiv 2402.11809, §4.1 does: half of the samples are cut at one place,
            where every mask token has a label, and go on with mask tokens that share an embedding.
        num_masks: tokens guessed ahead: K.
        rank: of the gated changes; 0 in mode "paper".
        learning_rate: the peak of AdamW's; it rises over 3 % of the steps and falls as a cosine.
        steps: of the optimizer; ``None`` for as many as ``epochs`` take.
        epochs: times that all samples are seen.
        row_tokens: most tokens of a packed row, mask tokens included.
        accumulate: rows of one step, on each device.
        precision: "bfloat16" computes in it, with weights as they are.
        seed: of first weights, order and cuts.
        evaluate_every: steps between evaluations; 0 for one at the end alone.
        save_every: steps between checkpoints.

    Raises:
        ConfigurationError: numbers that cannot work, or exclude each other.
    """

    mode: str = "gated"
    num_masks: int = 5
    rank: int = 32
    learning_rate: float = 2e-3
    steps: int | None = None
    epochs: int = 2
    row_tokens: int = 2048
    accumulate: int = 1
    precision: str = "float32"
    seed: int = 0
    evaluate_every: int = 0
    save_every: int = 100

    def __post_init__(self) -> None:
        for name, known in (("mode", MODES), ("precision", PRECISIONS)):
            if getattr(self, name) not in known:
                raise ConfigurationError(
                    f"{name} must be {', '.join(known)}, not {getattr(self, name)!r}"
                )
        minimums = dict.fromkeys(("num_masks", "steps", "epochs", "accumulate", "save_every"), 1)
        minimums |= {"evaluate_every": 0, "row_tokens": self.num_masks + 8}
        minimums["rank"] = 0 if self.is_paper else 1
        for name, number in minimums.items():
            given = getattr(self, name)
            if given is not None and given < number:
                raise ConfigurationError(f"{name} must be {number} or more, not {given}")
        if not self.learning_rate > 0:
            raise ConfigurationError(f"learning_rate must be above 0, not {self.learning_rate}")
        if self.is_paper and self.rank:
            raise ConfigurationError("the paper trains all weights: leave the rank away")

    @property
    def is_paper(self) -> bool:
        """Whether all weights are trained, with the paper's settings."""
        return self.mode == "paper"

    @property
    def num_cuts(self) -> int:
        """Most places of a sample that get mask tokens."""
        return 1 if self.is_paper else 24

    def as_dict(self) -> dict[str, Any]:
        """All fields, and what follows from the mode, as JSON knows them."""
        shared, cuts = self.is_paper, self.num_cuts
        return {**asdict(self), "shared_mask": shared, "num_cuts": cuts, "distill": not shared}


def make_recipe(mode: str = "gated", **changes: Any) -> Recipe:
    """Make a recipe with the defaults of a mode; a change of ``None`` is none.

    Raises:
        ConfigurationError: as ``Recipe``, or a field that it does not have.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    unknown = sorted(set(given) - {field.name for field in fields(Recipe)})
    if unknown:
        raise ConfigurationError(f"a recipe has no {', '.join(unknown)}")
    return Recipe(**{**(_PAPERS if mode == "paper" else {}), "mode": mode, **given})
