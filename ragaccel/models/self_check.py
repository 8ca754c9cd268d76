"""The self-check: passes over trees and batches against the model's own forward pass.

Whatever a model does with masks, positions or its cache that we did not foresee shows here, and
refuses the model before anything is decoded wrongly.

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

import functools
import hashlib
import inspect
import json
import logging
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AttentionInterface

from ragaccel.decoding.tree import DraftTree
from ragaccel.engine.model_input import causal_rows, concat_rows, tree_rows
from ragaccel.errors import UnsupportedModelError
from ragaccel.models.support import (
    NoCopyError,
    describe_quantization,
    find_lengths,
    make_small_copy,
)
from ragaccel.paths import atomic_write, data_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from ragaccel.models.support import Architecture, HuggingFaceTarget


logger = logging.getLogger("ragaccel")

_PREFIX, _CHUNK, _PROMPT = 12, 7, 4
# Eight nodes, three leaves; the branch that is kept (0, 2, 4, 7) needs its rows moved.
_PARENTS = (-1, 0, 0, 1, 2, 2, 3, 4)
_KEPT = (0, 2, 4, 7)
# Deviation allowed, as a share of the spread of the logits, where the model itself shows none.
_FLOOR = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
_NOISE_FACTOR = 4.0
# A model that deviates from itself by more than this is not a causal one, whatever its type.
_CEILING = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 0.25, torch.bfloat16: 0.5}


class InconsistentModelError(UnsupportedModelError):
    """Transformers' own passes disagree with each other; ``difference`` says by how much."""

    def __init__(self, name: str, difference: str, cause: str) -> None:
        super().__init__(
            f"{name} answers otherwise one token at a time than in one pass ({difference}): {cause}"
        )
        self.difference = difference


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence of a check: what is cached first, the tree behind it, and what follows."""

    prefix: list[int]
    tokens: list[int]
    after: list[int]

    @property
    def kept(self) -> list[int]:
        """The sequence that is left once one branch of the tree is kept."""
        return [*self.prefix, *(self.tokens[node] for node in _KEPT)]


@dataclass(frozen=True, slots=True)
class Expected:
    """What a model's own passes give for each sample, and how far ours may be from that."""

    samples: list[Sample]
    logits: list[tuple[Tensor, Tensor]]
    tolerance: float


def expected_passes(target: HuggingFaceTarget, lengths: Sequence[int] = (_PREFIX,)) -> Expected:
    """Compute a tree's branches and what follows one of them by transformers' own passes.

    The allowed deviation is a few times that of the model from itself: transformers' pass over a
    whole sequence against its own cached passes, one token at a time.

    Args:
        target: the model.
        lengths: tokens before the tree, for each sample; those that the model reads are taken.

    Raises:
        UnsupportedModelError: the model reads too little, or is no causal one.
    """
    vocab_size = int(target.model.config.get_text_config(decoder=True).vocab_size)
    limit = target.max_positions
    behind = len(_PARENTS) + 1
    if limit is not None and limit < min(lengths) + behind:
        raise UnsupportedModelError(
            f"{_class_name(target)} reads {limit} tokens: too few to be of use"
        )
    samples = [
        _sample(vocab_size, length)
        for length in lengths
        if limit is None or length + behind <= limit
    ]
    with torch.inference_mode(), _refusing_on_error(target):
        wanted = [_run_reference_passes(target, sample) for sample in samples]
        longest = max(range(len(samples)), key=lambda i: len(samples[i].prefix))
        tolerance = _measure_tolerance(target, samples[longest].kept, wanted[longest][0])
        return Expected(samples, wanted, tolerance)


def check_model(target: HuggingFaceTarget, expected: Expected) -> None:
    """Verify trees, keep one branch of each, go on from it, and compare with plain passes.

    Raises:
        UnsupportedModelError: naming the step that deviates and by how much.
    """
    for sample, wanted in zip(expected.samples, expected.logits, strict=True):
        with torch.inference_mode(), _refusing_on_error(target):
            (found,) = _run_own_passes(target, [sample])
        _compare(target, found, wanted, expected.tolerance)


def check_batch(target: HuggingFaceTarget, expected: Expected) -> None:
    """Check as ``check_model`` does, with the rows of all samples in one pass.

    Raises:
        UnsupportedModelError: naming the step that deviates and by how much.
    """
    with torch.inference_mode(), _refusing_on_error(target):
        found = _run_own_passes(target, expected.samples)
    for ours, wanted in zip(found, expected.logits, strict=True):
        _compare(target, ours, wanted, expected.tolerance)


def passes_check(target: HuggingFaceTarget, expected: Expected) -> bool:
    """Whether ``check_model`` finds nothing wrong."""
    try:
        check_model(target, expected)
    except UnsupportedModelError as refusal:
        logger.debug("decoding with the model's own attention: %s", refusal)
        return False
    return True


def _sample(vocab_size: int, length: int) -> Sample:
    ids = _spread_ids(vocab_size, length + len(_PARENTS) + 2)
    return Sample(ids[:length], ids[length:-2], ids[-2:])


@contextmanager
def _refusing_on_error(target: HuggingFaceTarget) -> Iterator[None]:
    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{_class_name(target)} cannot verify a tree of guesses over our cache: "
            f"{type(error).__name__}: {error}"
        ) from error


_STEPS = (
    "verifying a tree (does its attention ignore the mask, or its embedding the positions?)",
    "going on after keeping one branch (is its state more than keys and values by position?)",
)


def _run_own_passes(
    target: HuggingFaceTarget, samples: Sequence[Sample]
) -> list[tuple[Tensor, Tensor]]:
    """Run the samples through our passes: prompts one by one, trees and what follows together."""
    n = len(_PARENTS)
    caches = [target.new_cache(None, 128) for _ in samples]
    for sample, cache in zip(samples, caches, strict=True):
        for start in range(0, len(sample.prefix), _CHUNK):
            chunk = sample.prefix[start : start + _CHUNK]
            target.forward(causal_rows(chunk, cache), 1)
            cache.keep(range(len(chunk)))
    trees = [DraftTree(tuple(sample.tokens), _PARENTS, (1.0,) * n, ((),) * n) for sample in samples]
    rows = concat_rows([tree_rows(tree, cache) for tree, cache in zip(trees, caches, strict=True)])
    verified = torch.split(_as_float64(target.forward(rows, rows.num_rows)), n)
    for cache in caches:
        cache.keep(_KEPT)
    runs = [causal_rows(sample.after, cache) for sample, cache in zip(samples, caches, strict=True)]
    rows = concat_rows(runs)
    followed = torch.split(_as_float64(target.forward(rows, rows.num_rows)), len(samples[0].after))
    return list(zip(verified, followed, strict=True))


def _run_reference_passes(target: HuggingFaceTarget, sample: Sample) -> tuple[Tensor, Tensor]:
    paths: list[list[int]] = []
    for parent in _PARENTS:
        paths.append([*(paths[parent] if parent >= 0 else ()), len(paths)])
    rows: list[Tensor] = [torch.empty(0)] * len(paths)
    leaves = [node for node in range(len(_PARENTS)) if node not in _PARENTS]
    for leaf in leaves:
        path = [sample.tokens[node] for node in paths[leaf]]
        logits = _full_pass(target, [*sample.prefix, *path])
        for depth, node in enumerate(paths[leaf]):
            rows[node] = logits[len(sample.prefix) + depth]
    kept = [*sample.kept, *sample.after]
    return torch.stack(rows), _full_pass(target, kept)[-len(sample.after) :]


def _full_pass(target: HuggingFaceTarget, ids: Sequence[int]) -> Tensor:
    inputs = torch.tensor([list(ids), list(range(len(ids)))], device=target.device)
    # As generate does: left to themselves some models begin at another position.
    output = target.model(input_ids=inputs[:1], position_ids=inputs[1:], use_cache=False)
    return _as_float64(output.logits[0])


def _measure_tolerance(target: HuggingFaceTarget, ids: list[int], wanted: Tensor) -> float:
    """Measure how far the model deviates from itself, and allow a few times that."""
    spread = max(float(wanted.std()), 1e-12)
    inputs = torch.tensor([ids, list(range(len(ids)))], device=target.device)
    # As generate reads: a prompt, then one token at a time over the cache that transformers makes.
    output = target.model(
        input_ids=inputs[:1, :_PROMPT], position_ids=inputs[1:, :_PROMPT], use_cache=True
    )
    rows = list(_as_float64(output.logits[0]))
    for at in range(_PROMPT, len(ids)):
        output = target.model(
            input_ids=inputs[:1, at : at + 1],
            position_ids=inputs[1:, at : at + 1],
            past_key_values=output.past_key_values,
            use_cache=True,
        )
        rows.append(_as_float64(output.logits[0, -1]))
    noise = float((torch.stack(rows) - _full_pass(target, ids)).abs().max())
    dtype = _effective_dtype(target.model, noise / spread)
    if not noise <= _CEILING[dtype] * spread:
        difference = f"logits differ by {noise:.2g} of a spread of {spread:.2g}"
        raise InconsistentModelError(_class_name(target), difference, _cause(target.model))
    return max(_FLOOR[dtype] * spread, _NOISE_FACTOR * noise)


def _effective_dtype(model: Any, noise: float) -> torch.dtype:
    """The type whose rounding shows in a model's passes, whatever the type of its activations.

    4 bits of bitsandbytes are computed in bfloat16 by some processors, and activations that are
    quantized in each pass turn the last bit of a sum into a step. Many models of float64 compute
    a softmax, a norm or scores in float32.
    """
    if model.dtype == torch.float64 and noise > _CEILING[torch.float64]:
        return torch.float32
    kind = describe_quantization(model)
    is_coarse = "bitsandbytes" in kind or "DynamicActivation" in kind
    return model.dtype if model.dtype in _FLOOR and not is_coarse else torch.bfloat16


def _cause(model: Any) -> str:
    if not describe_quantization(model):
        return "it is not a causal model"
    return (
        "its quantization rounds a row otherwise beside other rows, so that no two ways of "
        "decoding agree. Load it with weights that are quantized otherwise, or not at all"
    )


def _compare(
    target: HuggingFaceTarget,
    found: tuple[Tensor, Tensor],
    wanted: tuple[Tensor, Tensor],
    tolerance: float,
) -> None:
    for step, ours, theirs in zip(_STEPS, found, wanted, strict=True):
        deviation = float((ours - theirs).abs().max())
        if not deviation <= tolerance:
            raise UnsupportedModelError(
                f"{_class_name(target)} deviates from plain decoding when {step}: logits differ by "
                f"{deviation:.2g}, {tolerance:.2g} would be rounding. It cannot be decoded exactly."
            )


def _spread_ids(vocab_size: int, count: int) -> list[int]:
    """Pick well-spread ids, the same every time; no two neighbours alike."""
    return [(7919 * (i + 1) + i * i) % vocab_size for i in range(count)]


def _as_float64(logits: Tensor) -> Tensor:
    # Compared on the host: not every device has float64.
    return logits.cpu().double()


def _class_name(target: HuggingFaceTarget) -> str:
    return type(target.model).__name__


_FORMAT = "ragaccel length check 1"
_LENGTHS = (22, 5, 44)  # tokens before the trees: past the short lengths, below, far past
_SEEDS = (1, 2)  # of copies; what fails with one only is a near tie of its router
UNBATCHABLE = "beside the rows of other requests, what it computes for a row is not the same"


@dataclass(frozen=True, slots=True)
class Findings:
    """How a model is to be decoded past its lengths, or why it cannot be.

    ``has_window`` tells that the sliding window of its config is applied, ``own_attention`` that it
    may run with our attention, ``batchable`` that passes may join sequences. ``max_tokens`` is what
    it reads at most, where nothing longer could be checked.
    """

    has_window: bool = True
    own_attention: bool = True
    batchable: bool = True
    refusal: str = ""
    max_tokens: int | None = None

    def apply_to(self, architecture: Architecture) -> Architecture:
        """Return the architecture that decoding goes by."""
        if not self.has_window:
            architecture = architecture.without_window()
        limit = architecture.max_positions
        if self.max_tokens is not None and (limit is None or self.max_tokens < limit):
            architecture = replace(architecture, max_positions=self.max_tokens)
        return architecture


_KNOWN_FINDINGS: dict[str, Findings] = {}


def check_lengths(
    model: Any,
    architecture: Architecture,
    make: Callable[[Any, Findings], HuggingFaceTarget],
    folder: Path | None = None,
) -> Findings:
    """Check a model's architecture past its lengths, unless that was done before.

    Args:
        model: a causal language model of transformers.
        architecture: what its config says.
        make: makes a target of a copy, to be decoded as is found.
        folder: where findings are remembered; ``None`` remembers them in this process only.

    Raises:
        UnsupportedModelError: it cannot be decoded exactly past a length; the message names which.
    """
    key = _findings_key(model)
    found = None if key is None else (_KNOWN_FINDINGS.get(key) or _read_findings(folder, key))
    if found is None:
        found = _check_copies(model, architecture, make)
        if key is not None and folder is not None:
            _write_findings(folder, key, found)
    if key is not None:
        _KNOWN_FINDINGS[key] = found
    if found.refusal:
        raise UnsupportedModelError(found.refusal)
    if found.max_tokens is not None:
        logger.warning(
            "no small copy of %s can be checked: it is used for up to %s tokens, below the first "
            "length at which its config says that it changes",
            type(model).__name__,
            found.max_tokens,
        )
    return found


def check_folder(*, keep: bool = True) -> Path | None:
    """Where findings are remembered; None if they are not, or for a user without a home."""
    try:
        return data_dir() / "checks" if keep else None
    except RuntimeError:
        return None


def _check_copies(
    model: Any,
    architecture: Architecture,
    make: Callable[[Any, Findings], HuggingFaceTarget],
) -> Findings:
    found = Findings()
    for seed in _SEEDS:
        try:
            with torch.device("cpu"):  # whatever the caller's default is
                found = _check_copy(model, architecture, make, seed)
        except NoCopyError as error:
            return _findings_without_copy(model, str(error))
        if found == Findings(own_attention=architecture.has_replaceable_attention):
            break
    return found


def _findings_without_copy(model: Any, why: str) -> Findings:
    """Trust a model up to the first length of its config, as nothing could be checked past it."""
    lengths = find_lengths(model.config)
    logger.info("no small copy of %s: %s", type(model).__name__, why)
    return Findings(max_tokens=min(lengths.values(), default=None))


def _check_copy(
    model: Any,
    architecture: Architecture,
    make: Callable[[Any, Findings], HuggingFaceTarget],
    seed: int,
) -> Findings:
    copy = make_small_copy(model, seed)
    try:
        expected = expected_passes(make(copy, Findings(own_attention=False)), _LENGTHS)
    except UnsupportedModelError as refusal:
        return Findings(refusal=_explain_inconsistency(model, make, seed, refusal))
    variants = [Findings(own_attention=True), Findings(own_attention=False)]
    if architecture.window is not None:
        variants += [replace(variant, has_window=False) for variant in variants]
    refusals = []
    for variant in variants:
        target = make(copy, variant)
        if variant.own_attention and not target.uses_own_attention:
            continue
        try:
            check_model(target, expected)
        except UnsupportedModelError as refusal:
            refusals.append(str(refusal))
            continue
        return replace(
            variant, batchable=not target.uses_own_attention or _is_batchable(target, expected)
        )
    return Findings(refusal=_explain_refusal(model, make, seed, refusals[0]))


def _is_batchable(target: HuggingFaceTarget, expected: Expected) -> bool:
    try:
        check_batch(target, expected)
    except UnsupportedModelError as refusal:
        logger.info("%s: %s", UNBATCHABLE, refusal)
        return False
    return True


def _explain_inconsistency(
    model: Any,
    make: Callable[[Any, Findings], HuggingFaceTarget],
    seed: int,
    refusal: UnsupportedModelError,
) -> str:
    """Say why transformers' own passes over a copy disagree, or cannot be run."""
    window = find_lengths(model.config).get("sliding_window")
    if window is None or not isinstance(refusal, InconsistentModelError):
        return _explain_refusal(model, make, seed, str(refusal))
    try:
        copy = make_small_copy(model, seed, windowed=False)
        expected_passes(make(copy, Findings(own_attention=False)), _LENGTHS)
    except (UnsupportedModelError, NoCopyError):
        return _explain_refusal(model, make, seed, str(refusal))
    return (
        f"{type(model).__name__} does not know the sliding_window={window} of its config: its "
        "attention reads all tokens, but the cache of its generate drops those before the window, "
        f"so that no two ways of decoding agree past it ({refusal.difference}). Set "
        "model.config.sliding_window = None, or take it out of config.json"
    )


def _explain_refusal(
    model: Any,
    make: Callable[[Any, Findings], HuggingFaceTarget],
    seed: int,
    refusal: str,
) -> str:
    """Name the lengths past which a refusal holds, where shorter sequences would be right."""
    named = ", ".join(f"{name}={value}" for name, value in find_lengths(model.config).items())
    if not named:
        return refusal
    try:
        copy = make_small_copy(model, seed, shortened=False)
        target = make(copy, Findings(own_attention=False))
        check_model(target, expected_passes(target, _LENGTHS))
    except (UnsupportedModelError, NoCopyError):
        return refusal  # it is nothing that begins at a length
    return f"{refusal.rstrip('.')}. This shows past the lengths of its config: {named}"


def _findings_key(model: Any) -> str | None:
    """Name what findings depend on; None where that cannot be told."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config
    attention = config.get_text_config(decoder=True)._attn_implementation
    stock = AttentionInterface._global_mapping.get(attention)
    if attention not in (None, "eager") and not _is_of_transformers(stock):
        return None  # whatever is registered under a name may be something else next time
    code = _hash_model_code(base)
    if code is None:
        return None
    facts = {
        "config": {name: value for name, value in config.to_dict().items() if name[:1] != "_"},
        "class": f"{type(base).__module__}.{type(base).__qualname__}",
        "attention": attention,
        "versions": (_package_version(), torch.__version__, transformers.__version__),
        "code": (_hash_package_code(), code),
    }
    written = json.dumps(facts, sort_keys=True, default=repr)
    return hashlib.sha256(written.encode()).hexdigest()[:32]


def _hash_model_code(model: Any) -> str | None:
    """Tell the code of a model's modules from another; None where that is not all in files."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    if any(_is_patched(kind) for kind in kinds):
        return None
    digest = hashlib.sha256()
    for name in sorted({kind.__module__ for kind in kinds}):
        if name.partition(".")[0] not in ("builtins", "torch"):  # as their versions tell
            try:
                digest.update(inspect.getsource(sys.modules[name]).encode())
            except (KeyError, OSError, TypeError):
                return None  # as of classes that were typed in
    return digest.hexdigest()


def _is_patched(kind: type[Any]) -> bool:
    """Whether a function from elsewhere was put in place of a class's forward method."""
    forward = vars(kind).get("forward")
    if forward is None or kind is torch.nn.Module:
        return False
    written = (kind.__module__, f"{kind.__qualname__}.forward")
    return (getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")) != written


def _is_of_transformers(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith("transformers.")


def _package_version() -> str:
    try:
        return version("ragaccel")
    except PackageNotFoundError:
        return ""


@functools.cache
def _hash_package_code() -> str:
    """Tell one state of the code that passes run through from another."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for folder in ("models", "engine"):
        for file in sorted((root / folder).glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _read_findings(folder: Path | None, key: str) -> Findings | None:
    if folder is None:
        return None
    try:
        document = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        found = Findings(**document["found"])
        if document["format"] == _FORMAT and document["key"] == key and _is_valid(found):
            return found
    except FileNotFoundError:
        return None
    except Exception as error:  # checked anew: what it holds is no one's work
        logger.debug("findings of an earlier check are not read: %s", error)
    return None


def _is_valid(found: Findings) -> bool:
    flags = (found.has_window, found.own_attention, found.batchable)
    max_tokens = found.max_tokens
    is_length = max_tokens is None or (
        isinstance(max_tokens, int) and not isinstance(max_tokens, bool) and max_tokens > 0
    )
    return is_length and isinstance(found.refusal, str) and all(type(f) is bool for f in flags)


def _write_findings(folder: Path, key: str, found: Findings) -> None:
    document = {"format": _FORMAT, "key": key, "found": asdict(found)}
    try:
        with atomic_write(folder / f"{key}.json") as file:
            file.write(json.dumps(document, indent=1).encode())
    except OSError as error:
        logger.debug("findings of a check are not kept: %s", error)
