"""Evaluation of the ranker: the right sentence, and passages without one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from ragaccel.retrieval.sentence_ranker import RankerNetwork
from recipes.ranker.examples import Example, ExampleMaker
from recipes.ranker.fit import batches_of, scores_of
from recipes.reader.folder import ANSWER, ARTICLE, NOTHING, NUM_PASSAGES

_TOKENS_AT_ONCE = 12_288
EXCHANGED = "exchanged"


@torch.inference_mode()
def ranked(
    network: RankerNetwork, examples: Sequence[Example], device: str = "cpu"
) -> list[list[float]]:
    """Return the scores of each example's sentences."""
    found: dict[int, list[float]] = {}
    places = {id(example): place for place, example in enumerate(examples)}
    for batch in batches_of(examples, _TOKENS_AT_ONCE):
        scores, _ = scores_of(network, batch, device)
        for example, row in zip(batch, scores.cpu().tolist(), strict=True):
            found[places[id(example)]] = row[: example.size]
    return [found[place] for place in range(len(examples))]


def evaluate(
    network: RankerNetwork, maker: ExampleMaker, *, questions: int = 600, seed: int = 1
) -> dict[str, float]:
    """Return figures in percent of the questions, each asked of six passages.

    ``found`` are those whose sentence is in the passages, ``right`` those whose sentence the ranker
    puts first, and ``among_five`` among its first five. ``near_misses`` and ``off_topic`` are those
    without their answer or article whose best score is one that 95 % of the right ones reach; they
    may have fewer passages, and none holds the answer's words. ``exchanged`` are questions
    with their passages, asked for another name or number.
    """
    numbers = list(range(len(maker.folder.questions)))
    random.Random(seed).shuffle(numbers)
    numbers = numbers[:questions]
    best: dict[str, list[float]] = {}
    counts = dict.fromkeys(("found", "right", "among_five"), 0)
    for kind in (NOTHING, ANSWER, ARTICLE, EXCHANGED):
        without, exchanged = (NOTHING, True) if kind == EXCHANGED else (kind, False)
        made = [
            maker.make(
                n, random.Random(f"{seed} {n}"), NUM_PASSAGES, without=without, exchanged=exchanged
            )
            for n in numbers
        ]
        kept = [example for example in made if example is not None]
        scores = ranked(network, kept)
        if kind != NOTHING:
            best[kind] = [max(of_each) for of_each in scores]
            continue
        best[NOTHING] = []
        for example, of_each in zip(kept, scores, strict=True):
            above = sum(score > of_each[example.gold] for score in of_each)
            counts["found"] += 1
            counts["right"] += not above
            counts["among_five"] += above < 5
            if not above:
                best[NOTHING].append(max(of_each))
    least = sorted(best[NOTHING] or [0.0])[len(best[NOTHING]) // 20]
    shares = {name: round(100 * count / len(numbers), 1) for name, count in counts.items()}
    for name, kind in (("near_misses", ANSWER), ("off_topic", ARTICLE), (EXCHANGED, EXCHANGED)):
        above = sum(score >= least for score in best[kind])
        shares[name] = round(100 * above / max(1, len(best[kind])), 1)
    return {"questions": len(numbers), **shares}
