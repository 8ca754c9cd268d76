"""The recipe: every number that a SAR-SFT run is made with."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

MODES = ("gated", "lora", "full")
VARIANTS = ("efficient", "plain")
PRECISIONS = ("float32", "bfloat16")
SCHEDULES = ("cosine", "constant")
# What differs from the paper's numbers, which are the defaults of the fields. A gated base stays
# as it is: samples without mask tokens teach it nothing, and its own choices are what is guessed.
_OF_MODE: dict[str, dict[str, Any]] = {
    "gated": {
        "mask_probability": 1.0,
        "num_cuts": 24,
        "early_cuts": True,
        "mask_decay": 0.8,
        "distill": True,
        "learning_rate": 2e-3,
    },
    "lora": {"learning_rate": 2e-4},
    "full": {"rank": 0},
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model learns to guess; the defaults are the paper's (arXiv 2402.11809, §4.1).

    ``make_recipe`` has the defaults that suit a mode.

    Args:
        mode: "gated" trains changes that mask tokens' rows alone are given, so that the model's
            own answers stay as they are; "lora" trains low-rank changes of all rows, "full" all
            weights. Mask embeddings are trained always.
        num_masks: tokens guessed ahead: K.
        rank: of the changes; 0 in mode "full".
        targets: last parts of the names of the layers that are changed; ``None`` for all but the
            head.
        shared_mask: one embedding for all mask tokens.
        variant: "efficient" keeps the whole sample and appends mask tokens, so that both losses
            are learned in one pass; "plain" cuts the answer and puts them in the rest's place.
        mask_probability: of a sample getting mask tokens; the others are learned as they are.
        num_cuts: places of a sample that get mask tokens; the paper's is one.
        early_cuts: cut before the prompt's last token as well: the first guesses come from there,
            as mask tokens can be read with the prompt. The paper has none.
        late_cuts: cut near the answer's end as well, where the last mask tokens have no label;
            the paper never does, so that the ends of answers are guessed untrained.
        loss_weight: of a mask token's prediction beside a real token's.
        mask_decay: factor of a mask token's weight for each one before it: guesses far ahead count
            only if all nearer ones are right. The paper's is 1.
        distill: learn the model's own distribution after the real tokens rather than the tokens.
        learning_rate: the peak of AdamW's.
        schedule: "cosine" falls to nothing, "constant" stays.
        warmup: share of the steps over which the rate rises.
        weight_decay: AdamW's.
        steps: of the optimizer; ``None`` for as many as ``epochs`` take.
        epochs: times that all samples are seen.
        row_tokens: most tokens of a packed row, mask tokens included.
        accumulate: rows of one step, on each device.
        precision: "bfloat16" computes in it, with weights as they are.
        max_gradient: the norm that gradients are clipped to.
        seed: of first weights, order and cuts.
        evaluate_every: steps between evaluations; 0 for one at the end alone.
        save_every: steps between checkpoints.

    Raises:
        ConfigurationError: numbers that cannot work, or exclude each other.
    """

    mode: str = "gated"
    num_masks: int = 5
    rank: int = 32
    targets: tuple[str, ...] | None = None
    shared_mask: bool = False
    variant: str = "efficient"
    mask_probability: float = 0.5
    num_cuts: int = 1
    early_cuts: bool = False
    late_cuts: bool = True
    loss_weight: float = 1.0
    mask_decay: float = 1.0
    distill: bool = False
    learning_rate: float = 5e-5
    schedule: str = "cosine"
    warmup: float = 0.03
    weight_decay: float = 0.0
    steps: int | None = None
    epochs: int = 2
    row_tokens: int = 2048
    accumulate: int = 1
    precision: str = "float32"
    max_gradient: float = 1.0
    seed: int = 0
    evaluate_every: int = 0
    save_every: int = 100

    def __post_init__(self) -> None:
        for name, known in (
            ("mode", MODES),
            ("variant", VARIANTS),
            ("precision", PRECISIONS),
            ("schedule", SCHEDULES),
        ):
            if getattr(self, name) not in known:
                raise ConfigurationError(
                    f"{name} must be {', '.join(known)}, not {getattr(self, name)!r}"
                )
        for name in ("num_masks", "num_cuts", "epochs", "accumulate", "save_every"):
            self._at_least(name, 1)
        for name in ("rank", "loss_weight", "weight_decay", "evaluate_every"):
            self._at_least(name, 0)
        if self.steps is not None:
            self._at_least("steps", 1)
        for name in ("learning_rate", "max_gradient", "mask_probability", "mask_decay"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("mask_probability", "mask_decay", "warmup"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigurationError(f"{name} must be 0 to 1, not {getattr(self, name)}")
        self._refuse_contradictions()

    def _at_least(self, name: str, least: int) -> None:
        if getattr(self, name) < least:
            raise ConfigurationError(f"{name} must be {least} or more, not {getattr(self, name)}")

    def _refuse_contradictions(self) -> None:
        least = self.num_masks + 8
        reasons = {
            f"row_tokens must be {least} or more for {self.num_masks} mask tokens and a sample": (
                self.row_tokens < least
            ),
            "mode gated and lora need a rank of 1 or more": self.mode != "full" and self.rank < 1,
            "mode full changes all weights: rank must be 0": self.mode == "full" and self.rank > 0,
            "mode full changes all layers: leave targets away": (
                self.mode == "full" and self.targets is not None
            ),
            "a gated base learns nothing of samples without mask tokens: mask_probability must "
            "be 1": self.mode == "gated" and self.mask_probability < 1,
            "the plain variant cuts a sample at one place: num_cuts must be 1": (
                self.variant == "plain" and self.num_cuts > 1
            ),
            "distill needs the tokens that mask tokens stand for: take the efficient variant": (
                self.distill and self.variant == "plain"
            ),
        }
        for reason, holds in reasons.items():
            if holds:
                raise ConfigurationError(reason)

    def as_dict(self) -> dict[str, Any]:
        """All fields, as JSON knows them."""
        found = asdict(self)
        return {**found, "targets": None if self.targets is None else list(self.targets)}


def parse_changes(texts: Iterable[str]) -> dict[str, Any]:
    """Read changes of a recipe as they are typed: ``name=value``.

    Lists are written with commas; on and off are true and false.

    Raises:
        ConfigurationError: no such field, or a value of another type than its own.
    """
    kinds = {field.name: str(field.type).split(" ")[0] for field in fields(Recipe)}
    changes: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or name not in kinds or name == "mode":
            known = ", ".join(sorted(set(kinds) - {"mode"}))
            raise ConfigurationError(f"{text!r} sets nothing: write name=value, names are {known}")
        try:
            changes[name] = _parsed(value.strip(), kinds[name])
        except (ValueError, KeyError):
            raise ConfigurationError(f"{name} is of type {kinds[name]}, not {value!r}") from None
    return changes


def _parsed(value: str, kind: str) -> Any:
    if kind == "bool":
        return {"true": True, "false": False}[value.lower()]
    if kind.startswith("tuple"):
        return tuple(part.strip() for part in value.split(",") if part.strip()) or None
    return {"int": int, "float": float, "str": str}[kind](value)


def make_recipe(mode: str = "gated", **changes: Any) -> Recipe:
    """Make a recipe with the defaults that suit a mode; a change of ``None`` is none.

    Raises:
        ConfigurationError: as ``Recipe``, or a field that it does not have.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    unknown = sorted(set(given) - {field.name for field in fields(Recipe)})
    if unknown:
        raise ConfigurationError(f"a recipe has no {', '.join(unknown)}")
    defaults = dict(_OF_MODE.get(mode, {}))
    if given.get("variant") == "plain":
        defaults |= {"num_cuts": 1, "distill": False}
    return Recipe(**{**defaults, "mode": mode, **given})
