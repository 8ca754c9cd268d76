"""Evaluation of SPACE: tokens per verification pass on held-out answers.

One forward pass over a sample puts a group of mask tokens after every token of its answer. Their
most likely tokens are all predictions that decoding could verify, so the number of passes that
decoding takes can be counted for any number of mask tokens up to K.

The recorded answer stands for the model's own. If the model would choose another token somewhere,
the metrics are approximate; ``Metrics.own`` tells how often it chooses the recorded one.

Shapes: T tokens of an answer, K mask tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ragaccel.training.data import Collator, Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ragaccel.training.data import Sample
    from ragaccel.training.model import SpaceNetwork


@dataclass(frozen=True, slots=True)
class Metrics:
    """How well mask tokens predict held-out answers.

    Attributes:
        samples: Number of answers.
        tokens_per_pass: With 1 to K mask tokens, all tokens (with the end token) divided by all
            verification passes (with the first one).
        right: For each of the K mask tokens, the share of its predictions that are right.
        own: Share of recorded tokens that the model itself would choose.
        with_prompt: Tokens per pass if the first pass also verifies predictions, of mask tokens
            that were read with the prompt; empty after the paper's training, which has none there.
    """

    samples: int
    tokens_per_pass: tuple[float, ...]
    right: tuple[float, ...]
    own: float
    with_prompt: tuple[float, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the metrics, rounded, for JSON."""
        return {
            "samples": self.samples,
            "tokens_per_pass": [round(value, 3) for value in self.tokens_per_pass],
            "right": [round(value, 3) for value in self.right],
            "own": round(self.own, 4),
            "with_prompt": [round(value, 3) for value in self.with_prompt],
        }


def evaluate(
    network: SpaceNetwork,
    samples: Sequence[Sample],
    *,
    reduce: Callable[[Tensor], Tensor] = lambda counts: counts,
) -> Metrics:
    """Evaluate a network's mask predictions on samples; return the metrics.

    Args:
        network: The network; its training mode is restored afterwards.
        samples: Held-out answers of two tokens or more.
        reduce: A function that sums counts over processes, each with a part of the samples.
    """
    num_masks, was_training = network.recipe.num_masks, network.training
    # samples, tokens, own choices; passes by number of masks; right predictions and predictions by
    # mask; passes by number of masks if the first pass has predictions, too
    counts = torch.zeros(3 + 4 * num_masks, dtype=torch.long)
    network.eval()
    try:
        with torch.no_grad():
            for sample in samples:
                counts += _count(
                    sample.answer_ids, *predict_masks(network, sample, network.recipe.row_tokens)
                )
    finally:
        network.train(was_training)
    total = reduce(counts).tolist()
    passes, right, tried, prompt_passes = (total[3 + i * num_masks :][:num_masks] for i in range(4))
    is_early = not network.recipe.is_paper
    return Metrics(
        samples=total[0],
        tokens_per_pass=tuple(total[1] / max(1, count) for count in passes),
        right=tuple(one / max(1, of) for one, of in zip(right, tried, strict=True)),
        own=total[2] / max(1, total[1]),
        with_prompt=tuple(total[1] / max(1, count) for count in prompt_passes) if is_early else (),
    )


def predict_masks(
    network: SpaceNetwork, sample: Sample, row_tokens: int
) -> tuple[list[list[int]], list[int], list[int]]:
    """Predict tokens by masks after every token of an answer, and by the model itself.

    Returns:
        predictions: [T - 1] lists of K tokens. The masks of list t follow answer token t - 1 (list
            0: the prompt's last token); its j-th token, from 1, predicts answer token t + j.
        own: [T] the model's choice of each answer token after the recorded ones.
        prompt_predictions: [K] predictions of the answer's first tokens by masks that follow the
            prompt's last token but one; empty after the paper's training.
    """
    num_masks, length = network.recipe.num_masks, len(sample)
    first = len(sample.prompt_ids) - 1
    early = min(first, int(not network.recipe.is_paper))
    cuts = range(first - early, length - 2)
    at_once = max(1, (row_tokens - length) // num_masks)
    collator = Collator(num_masks, network.base.vocab_size)
    predictions: list[list[int]] = []
    own: list[int] = []
    device = network.mask_embeddings.device
    for start in range(0, len(cuts), at_once):
        batch = collator([[Plan(sample, tuple(cuts[start : start + at_once]))]])
        row = [batch[name].to(device) for name in ("input_ids", "position_ids", "attention_mask")]
        real = 0 if own else length - 1 - first  # the model's own choices, only in the first pass
        wanted = torch.arange(first, row[0].shape[1], device=device)
        wanted = torch.cat((wanted[:real], wanted[length - first :]))
        chosen = network(*row, wanted=wanted).argmax(-1).tolist()
        own += chosen[:real]
        predictions += [chosen[i : i + num_masks] for i in range(real, len(chosen), num_masks)]
    prompt_predictions = predictions.pop(0) if early else []
    return predictions, own, prompt_predictions


def count_passes(
    answer: Sequence[int],
    predictions: Sequence[Sequence[int]],
    num_masks: int,
    prompt_predictions: Sequence[int] = (),
) -> int:
    """Count the verification passes that SPACE's decoding takes for an answer of T tokens.

    A pass yields the predictions that are right, up to the first wrong one, and one token more. The
    first pass has no predictions unless ``prompt_predictions`` are given.

    Args:
        answer: Its tokens, with the end token.
        predictions: As ``predict_masks`` returns them.
        num_masks: Number of predictions of each group to use.
        prompt_predictions: Predictions that the first pass verifies.
    """
    passes = done = 0
    chain = prompt_predictions[:num_masks]
    while done < len(answer):
        pairs = list(zip(chain, answer[done:], strict=False))
        accepted = next((i for i, (one, two) in enumerate(pairs) if one != two), len(pairs))
        leaf = done + accepted  # the masks after the last accepted draft token
        done += accepted + 1
        passes += 1
        if done < len(answer):
            chain = predictions[leaf][:num_masks]
    return passes


def _count(
    answer: Sequence[int],
    predictions: Sequence[Sequence[int]],
    own: Sequence[int],
    prompt_predictions: Sequence[int],
) -> Tensor:
    num_masks = len(predictions[0])
    sizes = range(1, num_masks + 1)
    passes = [count_passes(answer, predictions, count) for count in sizes]
    prompt_passes = [
        count_passes(answer, predictions, count, prompt_predictions) for count in sizes
    ]
    right, tried = [0] * num_masks, [0] * num_masks
    for position, chain in enumerate(predictions):
        for ahead, token in enumerate(chain[: len(answer) - 1 - position]):
            tried[ahead] += 1
            right[ahead] += token == answer[position + 1 + ahead]
    agreed = sum(one == two for one, two in zip(own, answer, strict=True))
    return torch.tensor([1, len(answer), agreed, *passes, *right, *tried, *prompt_passes])
