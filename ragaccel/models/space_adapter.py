"""SPACE adapters: what teaches a frozen model to guess at mask tokens, as a folder.

Two files, neither of them a pickle: ``space_config.json`` and ``space.safetensors``. The model's
vocabulary stays as it is: mask tokens are numbered behind it, and their embeddings stand here.

Shapes: K mask tokens, D hidden size, R rank.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from ragaccel.errors import ConfigurationError, ModelNotFoundError
from ragaccel.models.gated import linear_sizes
from ragaccel.models.space_checks import check_changes, check_masks, tokens_per_pass
from ragaccel.models.space_files import (
    CONFIG_FILE,
    FOLDER,
    FORMAT,
    WEIGHTS_FILE,
    fetched,
    read_config,
)
from ragaccel.replacing import replacing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_SAMPLE = 16  # numbers of a model's embedding that tell it from others
_NEARLY = 0.99
_ALIKE = 0.02  # the share by which they differ after rounding at most

logger = logging.getLogger("ragaccel")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """Which model an adapter was trained for."""

    model_type: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    sample: tuple[float, ...]
    """Numbers from all over its embedding; none where that is offloaded."""


@dataclass(frozen=True, slots=True)
class SpaceAdapter:
    """Mask embeddings and gated low-rank changes of a model's linear layers.

    Args:
        base: the model it was trained for.
        num_masks: how many tokens ahead are guessed: K.
        mask_embeddings: [1, D] where all mask tokens share one, else [K, D].
        changes: the layers' ``down`` [R, in] and ``up`` [out, R], by name; none where the model
            itself was trained to guess.
        training: how it was trained, for whoever reads the folder.

    Raises:
        ConfigurationError: shapes that do not belong together, or numbers that are none.
    """

    base: BaseModel
    num_masks: int
    mask_embeddings: Tensor
    changes: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_masks(self.num_masks, self.base.hidden_size, self.mask_embeddings)
        check_changes(self.changes)

    @property
    def rank(self) -> int:
        """R; 0 where no layer is changed."""
        return next((down.shape[0] for down, _ in self.changes.values()), 0)

    @property
    def num_bytes(self) -> int:
        """How much memory its numbers take."""
        tensors = [self.mask_embeddings, *(part for pair in self.changes.values() for part in pair)]
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def num_useful(self) -> int:
        """How many mask tokens are worth their rows.

        The fewest that on held-out answers gave nearly as many tokens a pass as all of them; all
        where nothing is known of that.
        """
        told = tokens_per_pass(self.training)[: self.num_masks]
        enough = (k for k, found in enumerate(told, 1) if found >= _NEARLY * max(told))
        return next(enough, self.num_masks)

    def with_masks(self, num_masks: int) -> SpaceAdapter:
        """Guess fewer tokens ahead: the first mask tokens do not depend on the later ones.

        Raises:
            ConfigurationError: more than it has embeddings for.
        """
        if not 1 <= num_masks <= self.num_masks:
            raise ConfigurationError(
                f"this adapter has {self.num_masks} mask tokens: take 1 to {self.num_masks}, not "
                f"{num_masks}"
            )
        return replace(self, num_masks=num_masks, mask_embeddings=self.mask_embeddings[:num_masks])

    def save(self, folder: str | Path) -> None:
        """Write the folder; files there are replaced whole."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"mask_embeddings": self.mask_embeddings}
        for name, (down, up) in self.changes.items():
            tensors[f"{name}.down"], tensors[f"{name}.up"] = down, up
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        with replacing(folder / WEIGHTS_FILE) as file:
            file.write(save(kept, metadata={"format": "pt"}))
        config = {
            "format": FORMAT,
            "num_masks": self.num_masks,
            "rank": self.rank,
            "base": asdict(self.base),
            "training": self.training,
        }
        with replacing(folder / CONFIG_FILE) as file:
            file.write((json.dumps(config, indent=2) + "\n").encode())

    @classmethod
    def load(cls, name_or_path: str | Path, **hub: Any) -> SpaceAdapter:
        """Read a folder, or one of the hub; ``hub`` is ``revision``, ``subfolder`` and such.

        Raises:
            ModelNotFoundError: neither.
            ConfigurationError: a folder that holds no whole adapter.
        """
        folder = fetched(name_or_path, hub)
        config = read_config(folder)
        path = folder / WEIGHTS_FILE
        try:
            tensors = load_file(path)
            names = {name.removesuffix(".down") for name in tensors if name.endswith(".down")}
            base, training = config["base"], config.get("training", {})
            return cls(
                BaseModel(**{**base, "sample": tuple(map(float, base["sample"]))}),
                config["num_masks"],
                tensors["mask_embeddings"],
                {name: (tensors[f"{name}.down"], tensors[f"{name}.up"]) for name in sorted(names)},
                training if isinstance(training, dict) else {},
            )
        except ConfigurationError as error:
            raise ConfigurationError(f"{folder} holds no whole SPACE adapter: {error}") from error
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise ConfigurationError(f"{folder} holds no whole SPACE adapter: {error}") from error

    @classmethod
    def of_model(cls, name_or_path: str | Path, revision: str | None = None) -> SpaceAdapter:
        """Read the adapter that a model brings with it, in its folder ``space``.

        Args:
            name_or_path: the model's folder or name on the hub.
            revision: that of the model, on the hub.

        Raises:
            ModelNotFoundError: it brings none.
            ConfigurationError: one that is not whole.
        """
        if name_or_path and os.path.isdir(name_or_path):
            if (Path(name_or_path) / FOLDER).is_dir():
                return cls.load(Path(name_or_path) / FOLDER)
        elif name_or_path:
            with suppress(ModelNotFoundError):
                return cls.load(str(name_or_path), subfolder=FOLDER, revision=revision)
        raise ModelNotFoundError(
            f"the model {str(name_or_path)!r} brings no SPACE adapter: name the folder of one, or "
            f"train one with `ragaccel train space`"
        )

    def check(self, model: Any) -> None:
        """Look whether a model can wear it; warn if it has the shape but not the weights.

        Raises:
            ConfigurationError: the model has another shape; says which.
        """
        own = base_of(model)
        for name in ("model_type", "hidden_size", "vocab_size", "num_layers"):
            trained, given = getattr(self.base, name), getattr(own, name)
            if trained != given:
                raise ConfigurationError(
                    f"this SPACE adapter is for a model of {name} {trained}, not {given}: load it "
                    "with the model it was trained for, or train one with `ragaccel train space`"
                )
        self._check_layers(model)
        if own.sample and not _alike(self.base.sample, own.sample):
            logger.warning(
                "this SPACE adapter was trained for other weights than this model's: answers are "
                "the same, but its guesses may be poor"
            )

    def _check_layers(self, model: Any) -> None:
        sizes = linear_sizes(model)
        for name, (down, up) in self.changes.items():
            wanted, found = (down.shape[1], up.shape[0]), sizes.get(name)
            if found != wanted:
                what = "has no such layer" if found is None else f"has one of {found}"
                raise ConfigurationError(
                    f"this SPACE adapter changes {name} of {wanted}, and the model {what}"
                )


def new_adapter(
    model: Any, num_masks: int, rank: int, *, shared_mask: bool = False, seed: int = 0
) -> SpaceAdapter:
    """Make an untrained adapter: its changes are none, its masks the mean of the vocabulary.

    Args:
        model: the language model it is for.
        num_masks: tokens guessed ahead.
        rank: of the changes; 0 for mask embeddings alone.
        shared_mask: one embedding for all mask tokens, as in the paper; else one each.
        seed: of the first weights.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = model.get_input_embeddings().weight.detach().float().cpu()
    count = 1 if shared_mask else num_masks
    masks = weight.mean(0).repeat(count, 1)
    masks += torch.randn(masks.shape, generator=generator) * weight.std() * 0.1
    changes = {}
    for name, (given, taken) in linear_sizes(model).items() if rank else ():
        down = torch.randn(rank, given, generator=generator) * given**-0.5
        changes[name] = (down, torch.zeros(taken, rank))
    return SpaceAdapter(base_of(model), num_masks, masks, changes)


def base_of(model: Any) -> BaseModel:
    """Tell what an adapter of this model has to fit."""
    config = model.config.get_text_config(decoder=True)
    weight = model.get_input_embeddings().weight
    rows, columns = weight.shape
    return BaseModel(config.model_type, columns, rows, config.num_hidden_layers, _sample_of(weight))


def _sample_of(weight: Tensor) -> tuple[float, ...]:
    if weight.device.type == "meta":  # accelerate's hooks put it there while it is used
        return ()
    rows, columns = weight.shape
    row = torch.arange(_SAMPLE) * (rows - 1) // (_SAMPLE - 1)
    column = torch.arange(_SAMPLE) * 7919 % columns
    with torch.no_grad():
        numbers = weight[row.to(weight.device), column.to(weight.device)].float().tolist()
    return tuple(round(number, 6) for number in numbers)


def _alike(sample: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two samples differ by rounding at most."""
    largest = max((abs(number) for number in sample), default=0.0)
    return len(sample) == len(other) and all(
        abs(one - two) <= _ALIKE * largest for one, two in zip(sample, other, strict=True)
    )
