"""SPACE adapters: files, checks, and gated LoRA layers attached to a model.

Follows gated LoRA (Samragh et al., 2025, arXiv 2507.11851): rows of real tokens are computed by the
original layer, unchanged to the last bit; rows of mask tokens get x A B in addition. The adapter
wraps linear layers of any kind: plain, packed or quantized ones, and GPT-2's transposed ones.

An adapter is a folder of two files, ``space_config.json`` and ``space.safetensors``. The model's
vocabulary stays unchanged: mask tokens have the ids after it, and the adapter holds their
embeddings.

Shapes: N rows of a pass, M of them mask tokens, V vocabulary, K mask tokens, D hidden size, R rank.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from ragaccel.errors import ConfigurationError, ModelNotFoundError
from ragaccel.models.hub import RepoKind, find_folder
from ragaccel.paths import atomic_write

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor


_FLOAT16_LIMIT = 1e4  # largest magnitude of mask tokens' activations in float16


class MaskRows:
    """The mask rows of the current pass, shared by all gated layers of a model.

    ``gate`` is True for mask rows, [N, 1] on the device of the layers. Without it all layers
    compute their original result. Its shape does not depend on the number of mask rows, so that
    captured passes can have one.
    """

    def __init__(self) -> None:
        self.gate: Tensor | None = None

    def clear(self) -> None:
        """Clear the mask rows, so that all layers compute their original result."""
        self.gate = None

    def gate_of(self, inputs: Tensor) -> Tensor | None:
        """Return the gate if ``inputs`` has all rows of the pass; layers of experts get some."""
        gate = self.gate
        if gate is None or inputs.dim() < 2 or inputs.shape[-2] != gate.shape[0]:
            return None
        return gate.to(inputs.device)


class GatedLinear(nn.Module):
    """A linear layer with a low-rank change that applies to rows of mask tokens only.

    Inputs with other rows than those of the pass get the original layer, because their mask rows
    are unknown.

    Args:
        inner: the original layer, unchanged.
        down: [R, in_features].
        up: [out_features, R].
        rows: the mask rows of the current pass.
    """

    def __init__(self, inner: nn.Module, down: Tensor, up: Tensor, rows: MaskRows) -> None:
        super().__init__()
        self.inner, self._rows = inner, rows
        self.down = nn.Parameter(down, requires_grad=False)
        self.up = nn.Parameter(up, requires_grad=False)

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the original layer: models read a layer's weight or sizes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs [..., N, out_features] for inputs [..., N, in_features]."""
        found: Tensor = self.inner(inputs)
        # A router that subclasses a linear layer may return a tuple.
        return self.change_mask_rows(inputs, found) if isinstance(found, torch.Tensor) else found

    def has_mask_rows(self, inputs: Tensor) -> bool:
        """Return whether rows of ``inputs`` may be mask tokens."""
        return self._rows.gate_of(inputs) is not None

    def change_mask_rows(self, inputs: Tensor, found: Tensor) -> Tensor:
        """Return the original layer's outputs with the change in the rows of mask tokens."""
        gate = self._rows.gate_of(inputs)
        if gate is None:
            return found
        changed = _clamp_float16(found + self._change(inputs).to(found.dtype))
        return torch.where(gate, changed, found)

    def _change(self, inputs: Tensor) -> Tensor:
        hidden = nn.functional.linear(inputs.to(self.down.dtype), self.down)
        return nn.functional.linear(hidden, self.up)


def _clamp_float16(changed: Tensor) -> Tensor:
    """Keep activations of mask tokens finite in float16, which ends at 65,504.

    Attention weighs mask tokens' states with 0 in rows of real tokens, and 0 times infinity is
    NaN.
    """
    if changed.dtype != torch.float16:
        return changed
    return changed.nan_to_num(0.0, _FLOAT16_LIMIT, -_FLOAT16_LIMIT).clamp(
        -_FLOAT16_LIMIT, _FLOAT16_LIMIT
    )


def linear_sizes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of each linear layer of a language model, by name.

    Quantized and packed layers count. Embeddings and the head do not, and neither do layers of
    single experts, which get some rows of a pass in another order, so that their mask rows are
    unknown.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        name: sizes
        for name, layer in model.named_modules()
        if layer is not head
        and "experts" not in name.split(".")
        and (sizes := _sizes(layer)) is not None
    }


def gate_linears(
    model: nn.Module, changes: Mapping[str, tuple[Tensor, Tensor]], rows: MaskRows
) -> list[GatedLinear]:
    """Wrap the named layers of a model in ``GatedLinear``, in place.

    Args:
        model: the model to change.
        changes: ``down`` and ``up`` of each layer, by name.
        rows: the mask rows that all wrapped layers share.

    Raises:
        KeyError: the model has no layer of such a name.
        ValueError: a change does not fit its layer.
    """
    gated = []
    for name, (down, up) in changes.items():
        parent_name, _, own = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        layer = getattr(parent, own, None)
        if not isinstance(layer, nn.Module):
            raise KeyError(name)
        if _sizes(layer) != (down.shape[1], up.shape[0]) or down.shape[0] != up.shape[1]:
            raise ValueError(
                f"the adapter's weights for {name} have shapes {tuple(down.shape)} and "
                f"{tuple(up.shape)}, which do not fit the layer's sizes {_sizes(layer)}"
            )
        wrapped = GatedLinear(layer, down, up, rows)
        wrapped.train(layer.training)
        setattr(parent, own, wrapped)
        gated.append(wrapped)
    return gated


def _sizes(layer: nn.Module) -> tuple[int, int] | None:
    """Return (inputs, outputs) of a linear layer of any kind; None for other modules."""
    if isinstance(layer, GatedLinear):
        return None
    num_inputs, num_outputs = (
        getattr(layer, "in_features", None),
        getattr(layer, "out_features", None),
    )
    if isinstance(num_inputs, int) and isinstance(num_outputs, int):
        return num_inputs, num_outputs
    weight = getattr(layer, "weight", None)
    if type(layer).__name__ == "Conv1D" and isinstance(weight, torch.Tensor) and weight.dim() == 2:
        return weight.shape[0], weight.shape[1]  # GPT-2's transposed layer
    return None


class AttachedAdapter:
    """A SPACE adapter attached to a model: mask embeddings, and gated changes of its layers.

    Token V + i is mask token i. Rows of real tokens are the same as without the adapter, to the
    last bit in a pass of as many rows: they do not attend to mask tokens, and no layer changes
    them. A mixture of experts groups rows by expert, so there they may round differently.

    Args:
        adapter: a trained adapter that fits the model (``SpaceAdapter.check``).
        network: the modules that passes run through; their linear layers are wrapped.
        dtype: dtype of the activations.
    """

    def __init__(self, adapter: SpaceAdapter, network: Any, dtype: torch.dtype) -> None:
        self.adapter, self.num_masks = adapter, adapter.num_masks
        self._rows = MaskRows()
        embedding = network.get_input_embeddings()
        self._vocab_size: int = embedding.weight.shape[0]
        masks = adapter.mask_embeddings.expand(self.num_masks, -1)
        self._masks = masks.to(device_of(embedding, masks.device), dtype)
        self._changes = {}
        for name, (down, up) in adapter.changes.items():
            device = device_of(network.get_submodule(name), self._masks.device)
            self._changes[name] = (down.to(device, dtype), up.to(device, dtype))
        self.wrap(network)

    def wrap(self, network: nn.Module) -> None:
        """Wrap the layers of another module tree over the same weights."""
        gate_linears(network, self._changes, self._rows)

    def embed(self, network: Any, token_ids: Tensor) -> Tensor:
        """Embed token ids [1, N] that may include mask tokens; return [1, N, D]."""
        last = self._vocab_size - 1
        known: Tensor = network.get_input_embeddings()(token_ids.clamp(max=last))
        number = (token_ids - self._vocab_size).clamp(min=0)
        masks = self._masks[number.to(self._masks.device)].to(known.device, known.dtype)
        return torch.where((token_ids > last)[..., None], masks, known)

    @contextmanager
    def mark_rows(self, token_ids: Tensor) -> Iterator[None]:
        """Mark the mask rows of a pass over token ids [1, N] for the gated layers."""
        gate = token_ids[0, :, None] >= self._vocab_size
        self._rows.gate = gate.to(self._masks.device)
        try:
            yield
        finally:
            self._rows.clear()


def device_of(module: Any, otherwise: torch.device) -> torch.device:
    """Return the device on which a module computes; accelerate's hooks name it if offloaded."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.device.type != "meta":
        return weight.device
    used = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return otherwise if used is None else torch.device(used)


_MAX_MASKS = 1024
_MAX_MAGNITUDE = 1e3  # larger weights could overflow, and NaN would spread to other rows


def _check_masks(num_masks: int, hidden_size: int, embeddings: Tensor) -> None:
    """Check the number of mask tokens, and the shape and values of their embeddings."""
    if type(num_masks) is not int or not 1 <= num_masks <= _MAX_MASKS:
        raise ConfigurationError(f"num_masks must be 1 to {_MAX_MASKS}, not {num_masks!r}")
    shape = tuple(embeddings.shape)
    if shape not in ((1, hidden_size), (num_masks, hidden_size)):
        raise ConfigurationError(
            f"mask embeddings of shape {shape} do not fit {num_masks} mask tokens and hidden "
            f"size {hidden_size}"
        )
    _check_numbers("mask_embeddings", embeddings)


def _check_change(name: str, down: Tensor, up: Tensor) -> None:
    """Check the shapes and values of a layer's low-rank change."""
    if down.dim() != 2 or up.dim() != 2 or len(down) != up.shape[1]:
        raise ConfigurationError(
            f"the weights for {name} have shapes {tuple(down.shape)} and {tuple(up.shape)}: "
            "they must be [R, in] and [out, R]"
        )
    _check_numbers(f"{name}.down", down)
    _check_numbers(f"{name}.up", up)


def _check_numbers(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point() or not bool((tensor.float().abs() <= _MAX_MAGNITUDE).all()):
        raise ConfigurationError(
            f"{name} holds values that are NaN, infinite or far too large: was the learning rate "
            "too high?"
        )


CONFIG_FILE, WEIGHTS_FILE = "space_config.json", "space.safetensors"
FOLDER = "space"
"""The subfolder of a model's folder that holds the model's own adapter."""
FORMAT = 1
ADAPTER = RepoKind(
    "SPACE adapter",
    (CONFIG_FILE, WEIGHTS_FILE),
    (CONFIG_FILE,),
    "train one with `ragaccel train space`",
)


def _find_adapter_folder(name_or_path: str | Path, hub: dict[str, Any]) -> Path:
    """Find the folder of an adapter; ask the hub only if the cache does not have it."""
    folder = Path(os.path.expanduser(name_or_path))
    if os.path.isdir(folder) or isinstance(name_or_path, Path):
        return folder / (hub.get("subfolder") or "")
    return find_folder(name_or_path, ADAPTER, hub)


def _read_config(folder: Path) -> dict[str, Any]:
    """Read the config file of an adapter's folder; it may be missing, invalid or too new."""
    path = folder / CONFIG_FILE
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        is_known = config["format"] <= FORMAT
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigurationError(
            f"{folder} holds no {CONFIG_FILE}: name a folder that `ragaccel train space` wrote"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not a SPACE adapter config: {error}") from error
    if not is_known:
        raise ConfigurationError(
            f"{path} is of a later format ({config['format']}): update ragaccel"
        )
    return config


_SAMPLE_SIZE = 16  # embedding values that identify a model
_USEFUL_SHARE = 0.95
_SAMPLE_TOLERANCE = 0.02  # largest relative difference after rounding

logger = logging.getLogger("ragaccel")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """Facts that identify the model that an adapter was trained for."""

    model_type: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    sample: tuple[float, ...]
    """A few values of the model's input embedding; empty if the embedding is offloaded."""


@dataclass(frozen=True, slots=True)
class SpaceAdapter:
    """Mask embeddings and gated low-rank changes of a model's linear layers.

    Args:
        base: the model that the adapter was trained for.
        num_masks: number K of mask tokens; each predicts one more token ahead.
        mask_embeddings: [1, D] if all mask tokens share one, else [K, D].
        changes: the layers' ``down`` [R, in] and ``up`` [out, R], by name; empty if the model
            itself was trained to predict mask tokens.
        training: a record of the training.

    Raises:
        ConfigurationError: shapes do not fit together, or values are NaN, infinite or far too
            large.
    """

    base: BaseModel
    num_masks: int
    mask_embeddings: Tensor
    changes: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_masks(self.num_masks, self.base.hidden_size, self.mask_embeddings)
        for name, (down, up) in self.changes.items():
            _check_change(name, down, up)

    @property
    def rank(self) -> int:
        """Rank R of the low-rank changes; 0 if no layer is changed."""
        return next((down.shape[0] for down, _ in self.changes.values()), 0)

    @property
    def num_bytes(self) -> int:
        """Size of the adapter's tensors, in bytes."""
        tensors = [self.mask_embeddings, *(part for pair in self.changes.values() for part in pair)]
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def num_useful(self) -> int:
        """Number of mask tokens that are worth their rows.

        That is the smallest number with at least 95 % of the best tokens per pass on held-out
        answers, or all mask tokens if the training recorded none: on a CPU the others take more
        time than they save, and on a GPU little.
        """
        figures = self.training.get("held_out")
        values = figures.get("tokens_per_pass") if isinstance(figures, dict) else None
        if not isinstance(values, list) or not all(isinstance(one, int | float) for one in values):
            values = []
        best = _USEFUL_SHARE * max(values[: self.num_masks], default=0.0)
        enough = (k for k, found in enumerate(values[: self.num_masks], 1) if found >= best)
        return next(enough, self.num_masks)

    def with_masks(self, num_masks: int) -> SpaceAdapter:
        """Return an adapter with the first ``num_masks`` mask tokens; they predict the same.

        Raises:
            ConfigurationError: ``num_masks`` is not between 1 and that of this adapter.
        """
        if not 1 <= num_masks <= self.num_masks:
            raise ConfigurationError(
                f"this adapter has {self.num_masks} mask tokens: num_masks must be from 1 to "
                f"{self.num_masks}, not {num_masks}"
            )
        return replace(self, num_masks=num_masks, mask_embeddings=self.mask_embeddings[:num_masks])

    def save(self, folder: str | Path) -> None:
        """Write the adapter's files to a folder, each atomically."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"mask_embeddings": self.mask_embeddings}
        for name, (down, up) in self.changes.items():
            tensors[f"{name}.down"], tensors[f"{name}.up"] = down, up
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        with atomic_write(folder / WEIGHTS_FILE) as file:
            file.write(save(kept, metadata={"format": "pt"}))
        config = {
            "format": FORMAT,
            "num_masks": self.num_masks,
            "rank": self.rank,
            "base": asdict(self.base),
            "training": self.training,
        }
        with atomic_write(folder / CONFIG_FILE) as file:
            file.write((json.dumps(config, indent=2) + "\n").encode())

    @classmethod
    def load(cls, name_or_path: str | Path, **hub: Any) -> SpaceAdapter:
        """Load an adapter from a folder or the hub; ``hub`` may hold ``revision``, ``subfolder``.

        Raises:
            ModelNotFoundError: no folder, cache entry or repository on the hub has this name.
            ConfigurationError: the folder does not hold a complete adapter.
        """
        folder = _find_adapter_folder(name_or_path, hub)
        config = _read_config(folder)
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
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise ConfigurationError(
                f"{folder} holds no complete SPACE adapter: {error}"
            ) from error

    @classmethod
    def load_for_model(cls, name_or_path: str | Path, revision: str | None = None) -> SpaceAdapter:
        """Load the adapter in the subfolder ``space`` of a model.

        Args:
            name_or_path: the model's folder or name on the hub.
            revision: the model's revision on the hub.

        Raises:
            ModelNotFoundError: the model has no adapter.
            ConfigurationError: the adapter is incomplete.
        """
        if name_or_path and os.path.isdir(name_or_path):
            if (Path(name_or_path) / FOLDER).is_dir():
                return cls.load(Path(name_or_path) / FOLDER)
        elif name_or_path:
            with suppress(ModelNotFoundError):
                return cls.load(str(name_or_path), subfolder=FOLDER, revision=revision)
        raise ModelNotFoundError(
            f"the model {str(name_or_path)!r} has no SPACE adapter: name the folder of one, or "
            f"train one with `ragaccel train space`"
        )

    def check(self, model: Any) -> None:
        """Check that the adapter fits a model; warn if only the model's weights differ.

        Raises:
            ConfigurationError: the model's sizes differ; the message names which.
        """
        own = describe_base_model(model)
        for name in ("model_type", "hidden_size", "vocab_size", "num_layers"):
            trained, found = getattr(self.base, name), getattr(own, name)
            if trained != found:
                raise ConfigurationError(
                    f"this SPACE adapter is for a model of {name} {trained}, not {found}: load it "
                    "with the model it was trained for, or train one with `ragaccel train space`"
                )
        self._check_layers(model)
        if own.sample and not _is_close(self.base.sample, own.sample):
            logger.warning(
                "this SPACE adapter was trained for other weights than this model's: answers are "
                "the same, but fewer of its draft tokens may be accepted"
            )

    def _check_layers(self, model: Any) -> None:
        sizes = linear_sizes(model)
        for name, (down, up) in self.changes.items():
            wanted, found = (down.shape[1], up.shape[0]), sizes.get(name)
            if found != wanted:
                what = "has no such layer" if found is None else f"has {found}"
                raise ConfigurationError(
                    f"this SPACE adapter changes {name} of sizes {wanted}, but the model {what}"
                )


def new_adapter(
    model: Any, num_masks: int, rank: int, *, shared_mask: bool = False, seed: int = 0
) -> SpaceAdapter:
    """Make an untrained adapter, with zero changes and mask embeddings near the mean embedding.

    Args:
        model: the language model that the adapter is for.
        num_masks: number of mask tokens.
        rank: rank of the changes; 0 for mask embeddings alone.
        shared_mask: one embedding for all mask tokens, as in arXiv 2402.11809; else one each.
        seed: seed of the initial weights.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = model.get_input_embeddings().weight.detach().float().cpu()
    count = 1 if shared_mask else num_masks
    masks = weight.mean(0).repeat(count, 1)
    masks += torch.randn(masks.shape, generator=generator) * weight.std() * 0.1
    changes = {}
    for name, (num_inputs, num_outputs) in linear_sizes(model).items() if rank else ():
        down = torch.randn(rank, num_inputs, generator=generator) * num_inputs**-0.5
        changes[name] = (down, torch.zeros(num_outputs, rank))
    return SpaceAdapter(describe_base_model(model), num_masks, masks, changes)


def describe_base_model(model: Any) -> BaseModel:
    """Describe the model that an adapter has to fit: type, sizes and a sample of its weights."""
    config = model.config.get_text_config(decoder=True)
    weight = model.get_input_embeddings().weight
    rows, columns = weight.shape
    return BaseModel(config.model_type, columns, rows, config.num_hidden_layers, _sample_of(weight))


def _sample_of(weight: Tensor) -> tuple[float, ...]:
    if weight.device.type == "meta":  # offloaded by accelerate
        return ()
    rows, columns = weight.shape
    row = torch.arange(_SAMPLE_SIZE) * (rows - 1) // (_SAMPLE_SIZE - 1)
    column = torch.arange(_SAMPLE_SIZE) * 7919 % columns
    with torch.no_grad():
        numbers = weight[row.to(weight.device), column.to(weight.device)].float().tolist()
    return tuple(round(number, 6) for number in numbers)


def _is_close(sample: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether two samples differ by rounding at most."""
    largest = max((abs(number) for number in sample), default=0.0)
    return len(sample) == len(other) and all(
        abs(one - two) <= _SAMPLE_TOLERANCE * largest
        for one, two in zip(sample, other, strict=True)
    )
