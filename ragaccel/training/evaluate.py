"""Evaluation: held-out tokens per pass.

One pass over a sample has a group of mask tokens behind every token of its answer. Their likeliest
tokens are all the guesses that SPACE's decoding could meet there, so that it can be walked with
them, for any number of mask tokens up to K.

The recorded answer stands for the model's own: where the model would choose another token, the
figures are only near to what decoding gives. ``Figures.own`` tells how often it would not.

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
class Figures:
    """What a model guesses on held-out answers.

    Attributes:
        samples: how many answers.
        tokens_per_pass: with 1 to K mask tokens: all tokens over all verify passes, the end token
            and the first pass included.
        with_prompt: the same where the first pass has guesses too, from mask tokens that were read
            with the prompt; empty after the paper's training, which teaches none there.
        right: share of the first to the K-th mask token's guesses that are the recorded token.
        own: share of recorded tokens that are the model's own choice.
    """

    samples: int
    tokens_per_pass: tuple[float, ...]
    right: tuple[float, ...]
    own: float
    with_prompt: tuple[float, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The figures rounded, as JSON knows them."""
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
    row_tokens: int | None = None,
    reduce: Callable[[Tensor], Tensor] = lambda counts: counts,
) -> Figures:
    """Judge a network's guesses on samples.

    Args:
        network: the network; its mode is put back afterwards.
        samples: held-out answers, of two tokens or more.
        row_tokens: most tokens of a pass; the recipe's by default. A pass takes at least one group.
        reduce: sums counts over processes that each have a part of the samples.
    """
    num_masks, was_training = network.recipe.num_masks, network.training
    room = network.recipe.row_tokens if row_tokens is None else row_tokens
    # samples, tokens, own choices; then by mask: passes, right guesses, guesses, passes if foreseen
    counts = torch.zeros(3 + 4 * num_masks, dtype=torch.long)
    network.eval()
    try:
        with torch.no_grad():
            for sample in samples:
                counts += _counts(sample.answer_ids, *guess(network, sample, room))
    finally:
        network.train(was_training)
    total = reduce(counts).tolist()
    passes, right, tried, fewer = (total[3 + i * num_masks :][:num_masks] for i in range(4))
    is_early = not network.recipe.is_paper
    return Figures(
        samples=total[0],
        tokens_per_pass=tuple(total[1] / max(1, count) for count in passes),
        right=tuple(one / max(1, of) for one, of in zip(right, tried, strict=True)),
        own=total[2] / max(1, total[1]),
        with_prompt=tuple(total[1] / max(1, count) for count in fewer) if is_early else (),
    )


def guess(
    network: SpaceNetwork, sample: Sample, row_tokens: int
) -> tuple[list[list[int]], list[int], list[int]]:
    """What mask tokens guess behind every token of an answer, and what the model chooses itself.

    Returns:
        guesses: [T - 1] lists of K; the first stand behind the prompt's last token, the j-th guess
            of list t is of answer token t + j (from 0, where the first guess has j = 1).
        own: [T] the model's choice of each answer token after the recorded ones.
        foreseen: [K] of the answer's first tokens, from behind the prompt's last token but one;
            empty after the paper's training.
    """
    num_masks, length = network.recipe.num_masks, len(sample)
    first = len(sample.prompt_ids) - 1
    early = min(first, int(not network.recipe.is_paper))
    cuts = range(first - early, length - 2)
    at_once = max(1, (row_tokens - length) // num_masks)
    lay_out = Collator(num_masks, network.base.vocab_size)
    guesses: list[list[int]] = []
    own: list[int] = []
    device = network.mask_embeddings.device
    for start in range(0, len(cuts), at_once):
        batch = lay_out([[Plan(sample, tuple(cuts[start : start + at_once]))]])
        row = [batch[name].to(device) for name in ("input_ids", "position_ids", "attention_mask")]
        real = 0 if own else length - 1 - first  # the answer's are asked for once
        wanted = torch.arange(first, row[0].shape[1], device=device)
        wanted = torch.cat((wanted[:real], wanted[length - first :]))
        chosen = network(*row, wanted=wanted).argmax(-1).tolist()
        own += chosen[:real]
        guesses += [chosen[i : i + num_masks] for i in range(real, len(chosen), num_masks)]
    foreseen = guesses.pop(0) if early else []
    return guesses, own, foreseen


def count_passes(
    answer: Sequence[int],
    guesses: Sequence[Sequence[int]],
    num_masks: int,
    foreseen: Sequence[int] = (),
) -> int:
    """Count the verify passes that SPACE's decoding takes for an answer of T tokens.

    The first pass has no guesses and yields one token; every other one yields the guesses that are
    right from the first on, and one token more.

    Args:
        answer: its tokens, the ending one included.
        guesses: as ``guess`` returns them.
        num_masks: how many of each group are used.
        foreseen: guesses of the first pass, if it has some.
    """
    passes = done = 0
    chain = foreseen[:num_masks]
    while done < len(answer):
        pairs = list(zip(chain, answer[done:], strict=False))
        accepted = next((i for i, (one, two) in enumerate(pairs) if one != two), len(pairs))
        leaf = done + accepted  # the group behind the token before the last one that is known
        done += accepted + 1
        passes += 1
        if done < len(answer):
            chain = guesses[leaf][:num_masks]
    return passes


def _counts(
    answer: Sequence[int],
    guesses: Sequence[Sequence[int]],
    own: Sequence[int],
    foreseen: Sequence[int],
) -> Tensor:
    num_masks = len(guesses[0])
    sizes = range(1, num_masks + 1)
    passes = [count_passes(answer, guesses, count) for count in sizes]
    fewer = [count_passes(answer, guesses, count, foreseen) for count in sizes]
    right, tried = [0] * num_masks, [0] * num_masks
    for place, chain in enumerate(guesses):
        for ahead, token in enumerate(chain[: len(answer) - 1 - place]):
            tried[ahead] += 1
            right[ahead] += token == answer[place + 1 + ahead]
    agreed = sum(one == two for one, two in zip(own, answer, strict=True))
    return torch.tensor([1, len(answer), agreed, *passes, *right, *tried, *fewer])
