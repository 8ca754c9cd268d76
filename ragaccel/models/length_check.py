"""Length check: a small copy of a model, past every length at which its architecture changes.

The self-check of the model itself reads some twenty tokens. Windows, chunks, scales and
frequencies that begin later are checked on a copy in which they begin after a few tokens: trees
alone and in one pass with others, against transformers' own passes. What was found is remembered,
by config and versions.

Not seen are: quantized kernels and those of a GPU (the copy is of float32, on a processor);
weights, adapters and what was changed in the model's objects rather than in its class or config;
parts for pictures or sound. Code of a model's own is run like any other. Where no copy can be
built, the model is used up to the first length that its config names, and a warning says so.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import sys
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AttentionInterface

from ragaccel.errors import ModelRefusedError
from ragaccel.homes import data_home
from ragaccel.models.self_check import (
    NotItselfError,
    check_batch,
    check_model,
    expected_passes,
)
from ragaccel.models.small_copy import NoCopyError, lengths_of, make_small_copy
from ragaccel.replacing import replacing

if TYPE_CHECKING:
    from collections.abc import Callable

    from ragaccel.models.architecture import Architecture
    from ragaccel.models.huggingface import HuggingFaceModel
    from ragaccel.models.self_check import Expected

_FORMAT = "ragaccel length check 1"
_LENGTHS = (22, 5, 44)  # tokens before the trees: past the short lengths, below, far past
_SEEDS = (1, 2)  # of copies; what fails with one only is a near tie of its router
UNBATCHABLE = "beside the rows of other requests, what it computes for a row is not the same"

logger = logging.getLogger("ragaccel")


@dataclass(frozen=True, slots=True)
class Findings:
    """How a model is to be decoded past its lengths, or why it cannot be.

    ``has_window`` tells that the sliding window of its config is applied, ``takes_ours`` that it
    may run with our attention, ``joins`` that passes may join sequences. ``most_tokens`` is what
    it reads at most, where nothing longer could be checked.
    """

    has_window: bool = True
    takes_ours: bool = True
    joins: bool = True
    refusal: str = ""
    most_tokens: int | None = None

    def applied_to(self, architecture: Architecture) -> Architecture:
        """Return the architecture that decoding goes by."""
        if not self.has_window:
            architecture = architecture.without_window()
        limit = architecture.max_positions
        if self.most_tokens is not None and (limit is None or self.most_tokens < limit):
            architecture = replace(architecture, max_positions=self.most_tokens)
        return architecture


_FOUND: dict[str, Findings] = {}


def check_lengths(
    model: Any,
    architecture: Architecture,
    make: Callable[[Any, Findings], HuggingFaceModel],
    folder: Path | None = None,
) -> Findings:
    """Check a model's architecture past its lengths, unless that was done before.

    Args:
        model: a causal language model of transformers.
        architecture: what its config says.
        make: makes a target of a copy, to be decoded as is found.
        folder: where findings are remembered; ``None`` remembers them in this process only.

    Raises:
        ModelRefusedError: it cannot be decoded exactly past a length; the message names which.
    """
    key = _key(model)
    found = None if key is None else (_FOUND.get(key) or _remembered(folder, key))
    if found is None:
        found = _found(model, architecture, make)
        if key is not None and folder is not None:
            _remember(folder, key, found)
    if key is not None:
        _FOUND[key] = found
    if found.refusal:
        raise ModelRefusedError(found.refusal)
    if found.most_tokens is not None:
        logger.warning(
            "no small copy of %s can be checked: it is used for up to %s tokens, below the first "
            "length at which its config says that it changes",
            type(model).__name__,
            found.most_tokens,
        )
    return found


def check_folder(*, keep: bool = True) -> Path | None:
    """Where findings are remembered; None if they are not, or for a user without a home."""
    try:
        return data_home() / "checks" if keep else None
    except RuntimeError:
        return None


def _found(
    model: Any,
    architecture: Architecture,
    make: Callable[[Any, Findings], HuggingFaceModel],
) -> Findings:
    found = Findings()
    for seed in _SEEDS:
        try:
            with torch.device("cpu"):  # whatever the caller's default is
                found = _found_by(model, architecture, make, seed)
        except NoCopyError as error:
            return _without_copy(model, str(error))
        if found == Findings(takes_ours=architecture.exchanges_attention):
            break
    return found


def _without_copy(model: Any, why: str) -> Findings:
    """Trust a model up to the first length of its config, as nothing could be checked past it."""
    lengths = lengths_of(model.config)
    logger.info("no small copy of %s: %s", type(model).__name__, why)
    return Findings(most_tokens=min(lengths.values(), default=None))


def _found_by(
    model: Any,
    architecture: Architecture,
    make: Callable[[Any, Findings], HuggingFaceModel],
    seed: int,
) -> Findings:
    copy = make_small_copy(model, seed)
    try:
        expected = expected_passes(make(copy, Findings(takes_ours=False)), _LENGTHS)
    except ModelRefusedError as refusal:
        return Findings(refusal=_why_not_itself(model, make, seed, refusal))
    ways = [Findings(takes_ours=True), Findings(takes_ours=False)]
    if architecture.window is not None:
        ways += [replace(way, has_window=False) for way in ways]
    refusals = []
    for way in ways:
        target = make(copy, way)
        if way.takes_ours and not target.attends:
            continue
        try:
            check_model(target, expected)
        except ModelRefusedError as refusal:
            refusals.append(str(refusal))
            continue
        return replace(way, joins=not target.attends or _joins(target, expected))
    return Findings(refusal=_at_lengths(model, make, seed, refusals[0]))


def _joins(target: HuggingFaceModel, expected: Expected) -> bool:
    try:
        check_batch(target, expected)
    except ModelRefusedError as refusal:
        logger.info("%s: %s", UNBATCHABLE, refusal)
        return False
    return True


def _why_not_itself(
    model: Any,
    make: Callable[[Any, Findings], HuggingFaceModel],
    seed: int,
    refusal: ModelRefusedError,
) -> str:
    """Say why transformers' own passes over a copy disagree, or cannot be run."""
    window = lengths_of(model.config).get("sliding_window")
    if window is None or not isinstance(refusal, NotItselfError):
        return _at_lengths(model, make, seed, str(refusal))
    try:
        copy = make_small_copy(model, seed, windowed=False)
        expected_passes(make(copy, Findings(takes_ours=False)), _LENGTHS)
    except (ModelRefusedError, NoCopyError):
        return _at_lengths(model, make, seed, str(refusal))
    return (
        f"{type(model).__name__} does not know the sliding_window={window} of its config: its "
        "attention reads all tokens, but the cache of its generate drops those before the window, "
        f"so that no two ways of decoding agree past it ({refusal.difference}). Set "
        "model.config.sliding_window = None, or take it out of config.json"
    )


def _at_lengths(
    model: Any,
    make: Callable[[Any, Findings], HuggingFaceModel],
    seed: int,
    refusal: str,
) -> str:
    """Name the lengths past which a refusal holds, where shorter sequences would be right."""
    named = ", ".join(f"{name}={value}" for name, value in lengths_of(model.config).items())
    if not named:
        return refusal
    try:
        copy = make_small_copy(model, seed, shortened=False)
        target = make(copy, Findings(takes_ours=False))
        check_model(target, expected_passes(target, _LENGTHS))
    except (ModelRefusedError, NoCopyError):
        return refusal  # it is nothing that begins at a length
    return f"{refusal.rstrip('.')}. This shows past the lengths of its config: {named}"


def _key(model: Any) -> str | None:
    """Name what findings depend on; None where that cannot be told."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config
    attention = config.get_text_config(decoder=True)._attn_implementation
    stock = AttentionInterface._global_mapping.get(attention)
    if attention not in (None, "eager") and not _is_of_transformers(stock):
        return None  # whatever is registered under a name may be something else next time
    code = _code(base)
    if code is None:
        return None
    told = {
        "config": {name: value for name, value in config.to_dict().items() if name[:1] != "_"},
        "class": f"{type(base).__module__}.{type(base).__qualname__}",
        "attention": attention,
        "versions": (_own_version(), torch.__version__, transformers.__version__),
        "code": (_own_code(), code),
    }
    written = json.dumps(told, sort_keys=True, default=repr)
    return hashlib.sha256(written.encode()).hexdigest()[:32]


def _code(model: Any) -> str | None:
    """Tell the code of a model's modules from another; None where that is not all in files."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    if any(_is_patched(kind) for kind in kinds):
        return None
    told = hashlib.sha256()
    for name in sorted({kind.__module__ for kind in kinds}):
        if name.partition(".")[0] not in ("builtins", "torch"):  # as their versions tell
            try:
                told.update(inspect.getsource(sys.modules[name]).encode())
            except (KeyError, OSError, TypeError):
                return None  # as of classes that were typed in
    return told.hexdigest()


def _is_patched(kind: type[Any]) -> bool:
    """Whether a function from elsewhere was put in place of a class's forward method."""
    forward = vars(kind).get("forward")
    if forward is None or kind is torch.nn.Module:
        return False
    written = (kind.__module__, f"{kind.__qualname__}.forward")
    return (getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")) != written


def _is_of_transformers(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith("transformers.")


def _own_version() -> str:
    try:
        return version("ragaccel")
    except PackageNotFoundError:
        return ""


@cache
def _own_code() -> str:
    """Tell one state of the code that passes run through from another."""
    told = hashlib.sha256()
    root = Path(__file__).parents[1]
    for folder in ("models", "engine"):
        for file in sorted((root / folder).glob("*.py")):
            told.update(file.read_bytes())
    return told.hexdigest()


def _remembered(folder: Path | None, key: str) -> Findings | None:
    if folder is None:
        return None
    try:
        document = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        found = Findings(**document["found"])
        if document["format"] == _FORMAT and document["key"] == key and _is_sound(found):
            return found
    except FileNotFoundError:
        return None
    except Exception as error:  # checked anew: what it holds is no one's work
        logger.debug("findings of an earlier check are not read: %s", error)
    return None


def _is_sound(found: Findings) -> bool:
    flags = (found.has_window, found.takes_ours, found.joins)
    most = found.most_tokens
    is_length = most is None or (isinstance(most, int) and not isinstance(most, bool) and most > 0)
    return is_length and isinstance(found.refusal, str) and all(type(f) is bool for f in flags)


def _remember(folder: Path, key: str, found: Findings) -> None:
    document = {"format": _FORMAT, "key": key, "found": asdict(found)}
    try:
        with replacing(folder / f"{key}.json") as file:
            file.write(json.dumps(document, indent=1).encode())
    except OSError as error:
        logger.debug("findings of a check are not kept: %s", error)
