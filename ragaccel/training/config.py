"""The training configuration of SPACE: what is trained, how long and how."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from ragaccel.errors import ConfigurationError

MODES = ("gated", "paper")
PRECISIONS = ("float32", "bfloat16")
_PAPERS: dict[str, Any] = {"rank": 0, "learning_rate": 5e-5}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of a training run of SPACE; ``make_recipe`` has the defaults of each mode.

    Args:
        mode: "gated" trains mask embeddings and low-rank weights that apply to mask tokens only, on
            the distribution of the model itself; the model's answers do not change. "paper" trains
            all weights as arXiv 2402.11809, §4.1 does: half of the samples are cut at one position,
            where every mask token has a label, and continued with mask tokens of one embedding.
        num_masks: Number of mask tokens K, which is the number of tokens predicted ahead.
        rank: Rank of the gated weights; 0 in mode "paper".
        learning_rate: Peak rate of AdamW, after a warm-up of 3 % of the steps; a cosine follows.
        steps: Number of optimizer steps; ``None`` for as many as ``epochs`` take.
        epochs: Number of times that all samples are seen.
        row_tokens: Maximum tokens of a packed row, mask tokens included.
        accumulate: Rows per optimizer step on each device.
        precision: The type to compute in, "float32" or "bfloat16"; the weights keep their own.
        seed: Seed of initial weights, sample order and cuts.
        evaluate_every: Steps between evaluations; 0 evaluates at the end only.
        save_every: Steps between checkpoints.

    Raises:
        ConfigurationError: A value is out of range, or two values exclude each other.
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
                    f"{name} must be {' or '.join(known)}, not {getattr(self, name)!r}"
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
            raise ConfigurationError(
                "paper mode trains all weights, not low-rank ones: do not give a rank"
            )

    @property
    def is_paper(self) -> bool:
        """Return whether all weights are trained, as in the paper (mode "paper")."""
        return self.mode == "paper"

    @property
    def num_cuts(self) -> int:
        """Return the maximum number of cuts of a sample: tokens that a group of masks follows."""
        return 1 if self.is_paper else 24

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, and the settings that the mode implies, for JSON."""
        shared, cuts = self.is_paper, self.num_cuts
        return {**asdict(self), "shared_mask": shared, "num_cuts": cuts, "distill": not shared}


def make_recipe(mode: str = "gated", **changes: Any) -> Recipe:
    """Make a recipe from the defaults of a mode; a change of ``None`` keeps the default.

    Raises:
        ConfigurationError: ``Recipe`` refuses a value, or a change is not one of its fields.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    unknown = sorted(set(given) - {field.name for field in fields(Recipe)})
    if unknown:
        raise ConfigurationError(f"a recipe has no field {', '.join(unknown)}")
    return Recipe(**{**(_PAPERS if mode == "paper" else {}), "mode": mode, **given})
