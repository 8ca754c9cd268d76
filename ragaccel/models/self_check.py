"""Self-check: a small tree and its compaction against transformers' own passes, at loading.

Whatever a model does with masks, positions or its cache that we did not foresee shows here, and
refuses the model before anything is decoded wrongly.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ragaccel.decoding.tree import DraftTree
from ragaccel.engine.model_input import run_rows, together, tree_rows
from ragaccel.errors import ModelRefusedError
from ragaccel.models.architecture import quantization_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from ragaccel.models.huggingface import HuggingFaceModel

logger = logging.getLogger("ragaccel")

_PREFIX, _CHUNK, _PROMPT = 12, 7, 4
# Eight nodes, three leaves; the branch that is kept (0, 2, 4, 7) needs its rows moved.
_PARENTS = (-1, 0, 0, 1, 2, 2, 3, 4)
_KEPT = (0, 2, 4, 7)
# Deviation allowed, as a share of the spread of the logits, where the model itself shows none.
_FLOOR = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
_TIMES_NOISE = 4.0
# A model that deviates from itself by more than this is not a causal one, whatever its type.
_CEILING = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 0.25, torch.bfloat16: 0.5}


class NotItselfError(ModelRefusedError):
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
    allowed: float


def expected_passes(target: HuggingFaceModel, lengths: Sequence[int] = (_PREFIX,)) -> Expected:
    """Compute a tree's branches and what follows one of them by transformers' own passes.

    The allowed deviation is a few times that of the model from itself: transformers' pass over a
    whole sequence against its own cached passes, one token at a time.

    Args:
        target: the model.
        lengths: tokens before the tree, for each sample; those that the model reads are taken.

    Raises:
        ModelRefusedError: the model reads too little, or is no causal one.
    """
    vocab_size = int(target.model.config.get_text_config(decoder=True).vocab_size)
    limit = target.max_positions
    behind = len(_PARENTS) + 1
    if limit is not None and limit < min(lengths) + behind:
        raise ModelRefusedError(f"{_name(target)} reads {limit} tokens: too few to be of use")
    samples = [
        _sample(vocab_size, length)
        for length in lengths
        if limit is None or length + behind <= limit
    ]
    with torch.inference_mode(), _explained(target):
        wanted = [_theirs(target, sample) for sample in samples]
        longest = max(range(len(samples)), key=lambda i: len(samples[i].prefix))
        allowed = _allowed(target, samples[longest].kept, wanted[longest][0])
        return Expected(samples, wanted, allowed)


def check_model(target: HuggingFaceModel, expected: Expected) -> None:
    """Verify trees, keep one branch of each, go on from it, and compare with plain passes.

    Raises:
        ModelRefusedError: naming the step that deviates and by how much.
    """
    for sample, wanted in zip(expected.samples, expected.logits, strict=True):
        with torch.inference_mode(), _explained(target):
            (found,) = _ours(target, [sample])
        _compare(target, found, wanted, expected.allowed)


def check_batch(target: HuggingFaceModel, expected: Expected) -> None:
    """Check as ``check_model`` does, with the rows of all samples in one pass.

    Raises:
        ModelRefusedError: naming the step that deviates and by how much.
    """
    with torch.inference_mode(), _explained(target):
        found = _ours(target, expected.samples)
    for ours, wanted in zip(found, expected.logits, strict=True):
        _compare(target, ours, wanted, expected.allowed)


def passes_check(target: HuggingFaceModel, expected: Expected) -> bool:
    """Whether ``check_model`` finds nothing wrong."""
    try:
        check_model(target, expected)
    except ModelRefusedError as refusal:
        logger.debug("decoding with the model's own attention: %s", refusal)
        return False
    return True


def _sample(vocab_size: int, length: int) -> Sample:
    ids = _some_ids(vocab_size, length + len(_PARENTS) + 2)
    return Sample(ids[:length], ids[length:-2], ids[-2:])


@contextmanager
def _explained(target: HuggingFaceModel) -> Iterator[None]:
    try:
        yield
    except ModelRefusedError:
        raise
    except Exception as error:
        raise ModelRefusedError(
            f"{_name(target)} cannot verify a tree of guesses over our cache: "
            f"{type(error).__name__}: {error}"
        ) from error


_STEPS = (
    "verifying a tree (does its attention ignore the mask, or its embedding the positions?)",
    "going on after keeping one branch (is its state more than keys and values by position?)",
)


def _ours(target: HuggingFaceModel, samples: Sequence[Sample]) -> list[tuple[Tensor, Tensor]]:
    """Run the samples through our passes: prompts one by one, trees and what follows together."""
    n = len(_PARENTS)
    caches = [target.new_cache(None, 128) for _ in samples]
    for sample, cache in zip(samples, caches, strict=True):
        for start in range(0, len(sample.prefix), _CHUNK):
            chunk = sample.prefix[start : start + _CHUNK]
            target.forward(run_rows(chunk, cache), 1)
            cache.keep(range(len(chunk)))
    trees = [DraftTree(tuple(sample.tokens), _PARENTS, (1.0,) * n, ((),) * n) for sample in samples]
    rows = together([tree_rows(tree, cache) for tree, cache in zip(trees, caches, strict=True)])
    verified = torch.split(_exact(target.forward(rows, rows.num_rows)), n)
    for cache in caches:
        cache.keep(_KEPT)
    runs = [run_rows(sample.after, cache) for sample, cache in zip(samples, caches, strict=True)]
    rows = together(runs)
    followed = torch.split(_exact(target.forward(rows, rows.num_rows)), len(samples[0].after))
    return list(zip(verified, followed, strict=True))


def _theirs(target: HuggingFaceModel, sample: Sample) -> tuple[Tensor, Tensor]:
    paths: list[list[int]] = []
    for parent in _PARENTS:
        paths.append([*(paths[parent] if parent >= 0 else ()), len(paths)])
    rows: list[Tensor] = [torch.empty(0)] * len(paths)
    leaves = [node for node in range(len(_PARENTS)) if node not in _PARENTS]
    for leaf in leaves:
        path = [sample.tokens[node] for node in paths[leaf]]
        logits = _whole_pass(target, [*sample.prefix, *path])
        for depth, node in enumerate(paths[leaf]):
            rows[node] = logits[len(sample.prefix) + depth]
    kept = [*sample.kept, *sample.after]
    return torch.stack(rows), _whole_pass(target, kept)[-len(sample.after) :]


def _whole_pass(target: HuggingFaceModel, ids: Sequence[int]) -> Tensor:
    inputs = torch.tensor([list(ids), list(range(len(ids)))], device=target.device)
    # As generate does: left to themselves some models begin at another position.
    output = target.model(input_ids=inputs[:1], position_ids=inputs[1:], use_cache=False)
    return _exact(output.logits[0])


def _allowed(target: HuggingFaceModel, ids: list[int], wanted: Tensor) -> float:
    """Measure how far the model deviates from itself, and allow a few times that."""
    spread = max(float(wanted.std()), 1e-12)
    inputs = torch.tensor([ids, list(range(len(ids)))], device=target.device)
    # As generate reads: a prompt, then one token at a time over the cache that transformers makes.
    output = target.model(
        input_ids=inputs[:1, :_PROMPT], position_ids=inputs[1:, :_PROMPT], use_cache=True
    )
    rows = list(_exact(output.logits[0]))
    for at in range(_PROMPT, len(ids)):
        output = target.model(
            input_ids=inputs[:1, at : at + 1],
            position_ids=inputs[1:, at : at + 1],
            past_key_values=output.past_key_values,
            use_cache=True,
        )
        rows.append(_exact(output.logits[0, -1]))
    noise = float((torch.stack(rows) - _whole_pass(target, ids)).abs().max())
    dtype = _rounding(target.model, noise / spread)
    if not noise <= _CEILING[dtype] * spread:
        difference = f"logits differ by {noise:.2g} of a spread of {spread:.2g}"
        raise NotItselfError(_name(target), difference, _cause(target.model))
    return max(_FLOOR[dtype] * spread, _TIMES_NOISE * noise)


def _rounding(model: Any, noise: float) -> torch.dtype:
    """The type whose rounding shows in a model's passes, whatever the type of its activations.

    4 bits of bitsandbytes are computed in bfloat16 by some processors, and activations that are
    quantized in each pass turn the last bit of a sum into a step. Many models of float64 compute
    a softmax, a norm or scores in float32.
    """
    if model.dtype == torch.float64 and noise > _CEILING[torch.float64]:
        return torch.float32
    kind = quantization_of(model)
    is_coarse = "bitsandbytes" in kind or "DynamicActivation" in kind
    return model.dtype if model.dtype in _FLOOR and not is_coarse else torch.bfloat16


def _cause(model: Any) -> str:
    if not quantization_of(model):
        return "it is not a causal model"
    return (
        "its quantization rounds a row otherwise beside other rows, so that no two ways of "
        "decoding agree. Load it with weights that are quantized otherwise, or not at all"
    )


def _compare(
    target: HuggingFaceModel,
    found: tuple[Tensor, Tensor],
    wanted: tuple[Tensor, Tensor],
    allowed: float,
) -> None:
    for step, ours, theirs in zip(_STEPS, found, wanted, strict=True):
        deviation = float((ours - theirs).abs().max())
        if not deviation <= allowed:
            raise ModelRefusedError(
                f"{_name(target)} deviates from plain decoding when {step}: logits differ by "
                f"{deviation:.2g}, {allowed:.2g} would be rounding. It cannot be decoded exactly."
            )


def _some_ids(vocab_size: int, count: int) -> list[int]:
    """Pick well-spread ids, the same every time; no two neighbours alike."""
    return [(7919 * (i + 1) + i * i) % vocab_size for i in range(count)]


def _exact(logits: Tensor) -> Tensor:
    # Compared on the host: not every device has float64.
    return logits.cpu().double()


def _name(target: HuggingFaceModel) -> str:
    return type(target.model).__name__
