"""Self-check: compare ragaccel's passes over trees and batches with the model's forward pass.

A model that treats masks, positions or its cache in an unexpected way is refused here, before it
decodes anything wrongly.

The check of the model itself reads some twenty tokens. Windows, chunks, scales and frequencies
that begin later are checked on a small copy in which they begin after a few tokens. Trees are
verified alone and in one pass with others, against transformers' own passes. Findings are stored
by config, code and versions.

A passed check of a model read from a folder is stored too, by its files, the processor and torch's
settings besides, so that the next load skips it.

The check does not cover quantized and GPU kernels (the copy is float32 on a CPU), weights,
adapters, changes to a model's objects rather than its class or config, and parts for images or
sound. Custom modeling code runs as usual. If no copy can be built, the model is used up to the
first length that its config names, and a warning says so.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import os
import platform
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AttentionInterface

from ragaccel.decoding.tree import DraftTree
from ragaccel.engine.model_input import causal_rows, concat_rows, tree_rows
from ragaccel.errors import UnsupportedModelError
from ragaccel.models.support import (
    NoCopyError,
    cache_keyword,
    cache_of,
    describe_quantization,
    find_lengths,
    make_small_copy,
)
from ragaccel.paths import atomic_write, data_dir, read_regular_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from ragaccel.models.support import Architecture, HuggingFaceTarget


logger = logging.getLogger("ragaccel")

_PREFIX, _CHUNK, _PROMPT = 12, 7, 4
# Eight nodes, three leaves; to keep the branch (0, 2, 4, 7) the cache must move rows.
_PARENTS = (-1, 0, 0, 1, 2, 2, 3, 4)
_KEPT = (0, 2, 4, 7)
_WIDTHS = (32, 64)
# Minimal tolerance, as a share of the standard deviation of the logits.
_FLOOR = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.15}
_NOISE_FACTOR = 4.0
# A model that deviates from itself by a larger share is not causal.
_CEILING = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 0.25, torch.bfloat16: 0.5}


class InconsistentModelError(UnsupportedModelError):
    """Raised if two of transformers' own passes disagree; ``difference`` says by how much."""

    def __init__(self, name: str, difference: str, cause: str) -> None:
        super().__init__(
            f"{name} gives other logits one token at a time than in one pass ({difference}): "
            f"{cause}"
        )
        self.difference = difference


@dataclass(frozen=True, slots=True)
class Sample:
    """The token ids of a check: a cached prefix, a tree after it, tokens after a kept branch."""

    prefix: list[int]
    tokens: list[int]
    after: list[int]

    @property
    def kept(self) -> list[int]:
        """Token ids of the prefix and of the kept branch of the tree."""
        return [*self.prefix, *(self.tokens[node] for node in _KEPT)]


@dataclass(frozen=True, slots=True)
class Expected:
    """The logits of transformers' passes for each sample, and the tolerance for ragaccel's.

    The logits of a sample are those of its tree and those of the tokens after the kept branch.
    """

    samples: list[Sample]
    logits: list[tuple[Tensor, Tensor]]
    tolerance: float


def expected_passes(target: HuggingFaceTarget, lengths: Sequence[int] = (_PREFIX,)) -> Expected:
    """Compute the expected logits by transformers' own passes, for every branch of the trees.

    The tolerance is a multiple of the model's deviation from itself: transformers' pass over a
    whole sequence against its cached passes, one token at a time.

    Args:
        target: the model.
        lengths: prefix length of each sample; lengths beyond the model's limit are skipped.

    Raises:
        UnsupportedModelError: the model's limit is too short, or the model is not causal.
    """
    vocab_size = int(target.model.config.get_text_config(decoder=True).vocab_size)
    limit = target.max_positions
    behind = len(_PARENTS) + 1
    if limit is not None and limit < min(lengths) + behind:
        raise UnsupportedModelError(
            f"{_class_name(target)} reads at most {limit} tokens, but {min(lengths) + behind} or "
            "more are needed"
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
    """Verify trees, keep a branch of each, continue after it, and compare all logits.

    Raises:
        UnsupportedModelError: logits deviate; the message names the step and the deviation.
    """
    for sample, wanted in zip(expected.samples, expected.logits, strict=True):
        with torch.inference_mode(), _refusing_on_error(target):
            (found,) = _run_own_passes(target, [sample])
        _compare(target, found, wanted, expected.tolerance)


def check_batch(target: HuggingFaceTarget, expected: Expected) -> None:
    """Run ``check_model`` with the rows of all samples in one pass.

    Raises:
        UnsupportedModelError: logits deviate; the message names the step and the deviation.
    """
    with torch.inference_mode(), _refusing_on_error(target):
        found = _run_own_passes(target, expected.samples)
    for ours, wanted in zip(found, expected.logits, strict=True):
        _compare(target, ours, wanted, expected.tolerance)


def check_wide_passes(target: HuggingFaceTarget, expected: Expected) -> None:
    """Compare passes over 32 and 64 new rows, for which kernels are others than for few.

    Raises:
        UnsupportedModelError: logits deviate; the message names the deviation.
    """
    vocab_size = int(target.model.config.get_text_config(decoder=True).vocab_size)
    limit = target.max_positions
    for num_rows in _WIDTHS:
        if limit is not None and num_rows > limit:
            return
        ids = _spread_ids(vocab_size, num_rows)
        with torch.inference_mode(), _refusing_on_error(target):
            rows = causal_rows(ids, target.new_cache(None, num_rows))
            found = _as_float64(target.forward(rows, num_rows))
            _compare(target, (found,), (_full_pass(target, ids),), expected.tolerance)


def passes_check(target: HuggingFaceTarget, expected: Expected, what: str = "") -> bool:
    """Return whether ``check_model`` succeeds; if not, warn that ``what`` is not used, and why."""
    try:
        check_model(target, expected)
    except UnsupportedModelError as refusal:
        if what:
            logger.warning("%s are not used, so answers come more slowly: %s", what, refusal)
        else:
            logger.debug("the model keeps its own attention: %s", refusal)
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
            f"{_class_name(target)} cannot verify a tree of draft tokens over ragaccel's cache: "
            f"{type(error).__name__}: {error}"
        ) from error


_STEPS = (
    "verifying a tree (does its attention ignore the mask, or its embedding the positions?)",
    "continuing after one kept branch (has it other state than keys and values by position?)",
)


def _run_own_passes(
    target: HuggingFaceTarget, samples: Sequence[Sample]
) -> list[tuple[Tensor, Tensor]]:
    """Run the samples through ragaccel's passes: prompts one by one, all trees in one pass."""
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
    # generate passes positions; without them some models begin at another position.
    output = target.model(input_ids=inputs[:1], position_ids=inputs[1:], use_cache=False)
    return _as_float64(output.logits[0])


def _measure_tolerance(target: HuggingFaceTarget, ids: list[int], wanted: Tensor) -> float:
    """Measure the model's deviation from itself; return a multiple of it as the tolerance."""
    spread = max(float(wanted.std()), 1e-12)
    inputs = torch.tensor([ids, list(range(len(ids)))], device=target.device)
    # As in generate: a prompt, then one token at a time over transformers' cache.
    output = target.model(
        input_ids=inputs[:1, :_PROMPT], position_ids=inputs[1:, :_PROMPT], use_cache=True
    )
    rows, keyword = list(_as_float64(output.logits[0])), cache_keyword(target.model)
    for at in range(_PROMPT, len(ids)):
        output = target.model(
            input_ids=inputs[:1, at : at + 1],
            position_ids=inputs[1:, at : at + 1],
            use_cache=True,
            **{keyword: cache_of(output)},
        )
        rows.append(_as_float64(output.logits[0, -1]))
    noise = float((torch.stack(rows) - _full_pass(target, ids)).abs().max())
    dtype = _effective_dtype(target.model, noise / spread)
    if not noise <= _CEILING[dtype] * spread:
        difference = f"logits differ by {noise:.2g}, their standard deviation is {spread:.2g}"
        raise InconsistentModelError(_class_name(target), difference, _cause(target.model))
    return max(_FLOOR[dtype] * spread, _NOISE_FACTOR * noise)


def _effective_dtype(model: Any, noise: float) -> torch.dtype:
    """Return the dtype whose rounding shows in a model's passes.

    Some CPUs compute 4-bit weights of bitsandbytes in bfloat16, and dynamic quantization of
    activations turns the last bit of a sum into a whole step. Many float64 models compute a
    softmax, a norm or scores in float32.
    """
    if model.dtype == torch.float64 and noise > _CEILING[torch.float64]:
        return torch.float32
    kind = describe_quantization(model)
    is_coarse = "bitsandbytes" in kind or "DynamicActivation" in kind
    return model.dtype if model.dtype in _FLOOR and not is_coarse else torch.bfloat16


def _cause(model: Any) -> str:
    if torch.is_autocast_enabled(model.device.type):
        return "torch.autocast is on: load it outside, with dtype= for a lower precision"
    if not describe_quantization(model):
        is_rounded = _matmul_precision() in ("bf16", "tf32", "high", "medium")
        if is_rounded and model.dtype == torch.float32:
            return (
                "torch multiplies float32 numbers in a lower precision: set it back, with "
                "torch.backends.mkldnn.matmul.fp32_precision = 'ieee' or "
                "torch.set_float32_matmul_precision('highest')"
            )
        return "it is not a causal model"
    return (
        "its quantization rounds a row differently beside other rows, so that no two ways of "
        "decoding agree. Load it with another quantization, or without one"
    )


def _compare(
    target: HuggingFaceTarget,
    found: tuple[Tensor, ...],
    wanted: tuple[Tensor, ...],
    tolerance: float,
) -> None:
    for step, ours, theirs in zip(_STEPS[: len(found)], found, wanted, strict=True):
        deviation = float((ours - theirs).abs().max())
        if not deviation <= tolerance:
            raise UnsupportedModelError(
                f"{_class_name(target)} deviates from plain decoding when {step}: logits differ by "
                f"{deviation:.2g}, rounding explains {tolerance:.2g}. It cannot be decoded exactly."
            )


def _spread_ids(vocab_size: int, count: int) -> list[int]:
    """Return spread-out token ids, the same every time; adjacent ids differ."""
    return [(7919 * (i + 1) + i * i) % vocab_size for i in range(count)]


def _as_float64(logits: Tensor) -> Tensor:
    # Compare on the host: not every device has float64.
    return logits.cpu().double()


def _class_name(target: HuggingFaceTarget) -> str:
    return type(target.model).__name__


_FORMAT = "ragaccel length check 1"
MAX_KEPT_CHECKS = 256
"""Checks that are kept on disk; every change of weights, versions or settings adds one."""
_LENGTHS = (22, 5, 44)  # tokens before a tree: past the copy's short lengths, below, far past
_SEEDS = (1, 2)  # of copies; only one fails if a router has a near tie
_MAX_FILES = 1000
_MAX_BYTES = 100_000  # of a record
_NUM_SAMPLED = 64
_ENVIRONMENT = (
    "ATEN_", "DNNL_", "KMP_", "LD_", "MKL_", "NUMBA_", "OMP_", "ONEDNN_", "OPENBLAS_", "TORCH_",
    "TRANSFORMERS_",
)  # fmt: skip
_PACKAGES = ("ragaccel", "numba", "llvmlite")
_CALLED = {  # modules whose functions a model's code calls
    "torch",
    "torch.nn.functional",
    "transformers.integrations.sdpa_attention",
    "transformers.masking_utils",
}
UNBATCHABLE = "what it computes for a row depends on the rows of other requests"


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings of the length check: how to decode a model, or why it is refused.

    Attributes:
        has_window: the model applies the sliding window of its config.
        own_attention: the model may run with ragaccel's attention.
        batchable: one pass may contain rows of several sequences.
        refusal: why the model cannot be decoded; empty if it can.
        max_tokens: the longest sequence that could be checked; None for no limit.
    """

    has_window: bool = True
    own_attention: bool = True
    batchable: bool = True
    refusal: str = ""
    max_tokens: int | None = None

    def apply_to(self, architecture: Architecture) -> Architecture:
        """Return the architecture with these findings applied."""
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
    """Check a model's architecture past the lengths of its config, or read earlier findings.

    Args:
        model: a causal language model of transformers.
        architecture: the architecture that its config describes.
        make: makes a target model of a small copy, with given findings.
        folder: folder for findings; ``None`` keeps them in this process only.

    Raises:
        UnsupportedModelError: the model cannot be decoded exactly past a length, which the message
            names.
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
            "%s is limited to %s tokens: beyond this length of its config it may compute "
            "differently, and no small copy of it can be built to check that",
            type(model).__name__,
            found.max_tokens,
        )
    return found


def check_folder(*, keep: bool = True) -> Path | None:
    """Return the folder for findings; None without ``keep`` or without a home directory."""
    try:
        return data_dir() / "checks" if keep else None
    except RuntimeError:
        return None


def describe_files(folder: Path) -> str:
    """Return the path, size and times of each file in a folder; empty if one may stay unseen."""
    facts: list[tuple[str, int, int, int, int]] = []
    try:
        paths = sorted(islice(folder.rglob("*"), _MAX_FILES + 1))
        if len(paths) > _MAX_FILES:
            return ""
        for path in paths:
            is_folder = path.is_dir()
            if is_folder and path.is_symlink():
                return ""
            if not is_folder:
                seen = path.stat()
                times = (seen.st_mtime_ns, seen.st_ctime_ns)
                facts.append((os.path.realpath(path), seen.st_ino, seen.st_size, *times))
    except OSError:
        return ""
    return json.dumps(facts)


class PassedCheck:
    """The record of a passed check of one model's weights on this processor.

    There is a record only for a model on a CPU that was read unchanged from a folder: a GPU's
    kernels also depend on its driver. Refusals are never stored.

    Args:
        model: the model, before its network is selected.
        found: the findings about its architecture.
        files: the result of ``describe_files`` from before the weights were read.
        folder: the folder for records; None for no record.
        *settings: what else the caller's network depends on.
    """

    def __init__(
        self, model: Any, found: Findings, files: str, folder: Path | None, *settings: object
    ) -> None:
        self._folder, self._found, self._key = folder, found, ""
        devices = {weight.device.type for weight in model.parameters()}
        if not files or folder is None or _is_changed(model) or devices != {"cpu"}:
            return
        if architecture := _findings_key(model):
            sample = _sample_weights(model)
            facts = ("weights", architecture, files, sample, *settings, *_compute_settings())
            self._key = hashlib.sha256(json.dumps(facts, default=repr).encode()).hexdigest()[:32]

    def is_stored(self) -> bool:
        """Return whether the same weights have passed with the same findings."""
        return bool(self._key) and _read_findings(self._folder, self._key) == self._found

    def store(self) -> None:
        """Store that the check was passed."""
        if self._key and self._folder is not None:
            _write_findings(self._folder, self._key, self._found)


def _is_changed(model: Any) -> bool:
    """Return whether a model computes something else than its classes over its files' weights."""
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    return bool(
        describe_quantization(model)
        or getattr(model, "peft_config", None)
        or any(getattr(torch.nn.modules.module, f"_global{name}") for name in hooks)
        or any("forward" in vars(module) for module in model.modules())
        or any(getattr(module, name) for module in model.modules() for name in hooks)
    )


def _sample_weights(model: Any) -> list[tuple[str, str, list[float]]]:
    """Return some numbers of each weight.

    Two read-only images may hold files of one path, inode, size and time, and a list of shards may
    name files outside the folder.
    """
    return [
        (name, str(weight.dtype), numbers[:: max(1, numbers.numel() // _NUM_SAMPLED)].tolist())
        for name, weight in model.named_parameters()
        for numbers in [weight.detach().flatten()]
    ]


def _matmul_precision() -> str:
    """Return how precisely torch multiplies float32 numbers on a CPU."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    # Where it is set, the older getter may raise.
    return getattr(matmul, "fp32_precision", "") or torch.get_float32_matmul_precision()


def _compute_settings() -> list[object]:
    """Return what a CPU's results depend on: processor, build, threads and settings of torch."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = sorted({line for line in lines if line.startswith(("model name", "flags"))})
    except OSError:
        processor = [platform.processor()]
    given = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_ENVIRONMENT))
    backends = torch.backends
    return [
        platform.platform(), processor, given, torch.__config__.show(), torch.get_num_threads(),
        backends.cpu.get_cpu_capability(), backends.mkldnn.enabled,
        _matmul_precision(), torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cpu"), str(torch.get_default_dtype()),
    ]  # fmt: skip


def _check_copies(
    model: Any,
    architecture: Architecture,
    make: Callable[[Any, Findings], HuggingFaceTarget],
) -> Findings:
    found = Findings()
    for seed in _SEEDS:
        try:
            with torch.device("cpu"):  # the caller may have set another default
                found = _check_copy(model, architecture, make, seed)
        except NoCopyError as error:
            return _findings_without_copy(model, str(error))
        if found == Findings(own_attention=architecture.has_replaceable_attention):
            break
    return found


def _findings_without_copy(model: Any, why: str) -> Findings:
    """Return findings that limit a model to its config's first length: none was checked."""
    lengths = find_lengths(model.config)
    logger.info("%s cannot be checked on a small copy: %s", type(model).__name__, why)
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
    """Return why transformers' own passes over a copy disagree with each other, or fail."""
    window = find_lengths(model.config).get("sliding_window")
    if window is None or not isinstance(refusal, InconsistentModelError):
        return _explain_refusal(model, make, seed, str(refusal))
    try:
        copy = make_small_copy(model, seed, windowed=False)
        expected_passes(make(copy, Findings(own_attention=False)), _LENGTHS)
    except (UnsupportedModelError, NoCopyError):
        return _explain_refusal(model, make, seed, str(refusal))
    return (
        f"{type(model).__name__} ignores the sliding_window={window} of its config: its "
        "attention reads all tokens, but the cache of its generate drops those before the window, "
        f"so that no two ways of decoding agree past it ({refusal.difference}). Set "
        "model.config.sliding_window = None, or remove it from config.json"
    )


def _explain_refusal(
    model: Any,
    make: Callable[[Any, Findings], HuggingFaceTarget],
    seed: int,
    refusal: str,
) -> str:
    """Return a refusal; if shorter sequences are correct, add the lengths past which it holds."""
    named = ", ".join(f"{name}={value}" for name, value in find_lengths(model.config).items())
    if not named:
        return refusal
    try:
        copy = make_small_copy(model, seed, shortened=False)
        target = make(copy, Findings(own_attention=False))
        check_model(target, expected_passes(target, _LENGTHS))
    except (UnsupportedModelError, NoCopyError):
        return refusal  # shorter sequences are wrong too
    return f"{refusal.rstrip('.')}. This happens past the lengths in its config: {named}"


def _findings_key(model: Any) -> str | None:
    """Return a hash of everything that findings depend on; None if it cannot be determined."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config
    attention = config.get_text_config(decoder=True)._attn_implementation
    stock = AttentionInterface._global_mapping.get(attention)
    if attention not in (None, "eager") and not _is_of_transformers(stock):
        return None  # in the next process this may name another function
    code = _hash_model_code(base)
    if code is None:
        return None
    facts = {
        "config": {name: value for name, value in config.to_dict().items() if name[:1] != "_"},
        "class": f"{type(base).__module__}.{type(base).__qualname__}",
        "attention": attention,
        "versions": [torch.__version__, transformers.__version__, *map(_version, _PACKAGES)],
        "code": (_hash_package_code(), code),
    }
    written = json.dumps(facts, sort_keys=True, default=repr)
    return hashlib.sha256(written.encode()).hexdigest()[:32]


def _hash_model_code(model: Any) -> str | None:
    """Return a hash of the source of a model's modules; None if some of it is not in files."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    if any(_is_patched(kind) for kind in kinds):
        return None
    digest = hashlib.sha256("".join(sorted(map(_describe_functions, kinds))).encode())
    try:
        for name in sorted({kind.__module__ for kind in kinds} | _CALLED):
            digest.update(_describe_functions(sys.modules[name]).encode())
            if name.partition(".")[0] not in ("builtins", "torch"):  # their versions are in the key
                digest.update(inspect.getsource(sys.modules[name]).encode())
    except (KeyError, OSError, TypeError):
        return None  # e.g. classes defined in an interactive session
    return digest.hexdigest()


def _describe_functions(owner: Any) -> str:
    """Return where the functions of a class or module are from: some may be replaced."""
    codes = {name: getattr(value, "__code__", None) for name, value in vars(owner).items()}
    places = {
        name: (code.co_filename, code.co_firstlineno)
        for name, code in codes.items()
        if isinstance(code, CodeType)
    }
    return repr(sorted(places.items()))


def _is_patched(kind: type[Any]) -> bool:
    """Return whether a class's forward method was replaced by a function from elsewhere."""
    forward = vars(kind).get("forward")
    if forward is None or kind is torch.nn.Module:
        return False
    written = (kind.__module__, f"{kind.__qualname__}.forward")
    return (getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")) != written


def _is_of_transformers(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith("transformers.")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@functools.cache
def _hash_package_code() -> str:
    """Return a hash of the source of ragaccel's modules that passes run through."""
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
        document = json.loads(read_regular_file(folder / f"{key}.json", _MAX_BYTES))
        found = Findings(**document["found"])
        if document["format"] == _FORMAT and document["key"] == key and _is_valid(found):
            return found
    except FileNotFoundError:
        return None
    except Exception as error:  # the check is run again instead
        logger.debug("findings of an earlier check cannot be read: %s", error)
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
        newest = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in newest[:-MAX_KEPT_CHECKS]:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.debug("findings of a check cannot be written: %s", error)
