"""Evaluation of the reader's choice: the right sentence, and refusals, from one pass a question."""

from __future__ import annotations

import random

import torch
from transformers import PreTrainedModel

from recipes.minilm_reader.examples import Example, ExampleMaker
from recipes.minilm_reader.fit import batched
from recipes.minilm_reader.nearest import ANSWER, ARTICLE, NOTHING

CANDIDATES = 5
BATCH = 16


@torch.inference_mode()
def choices(model: PreTrainedModel, examples: list[Example]) -> list[list[float]]:
    """Return the chances of each sentence and of the refusal, which is last, to be the answer."""
    found: list[list[float]] = []
    for at in range(0, len(examples), BATCH):
        some = examples[at : at + BATCH]
        batch = batched(some, model.config.pad_token_id or 0, random.Random(0))
        logits = model(batch.token_ids).logits[torch.arange(len(some)), batch.start]
        for row, example in zip(logits, some, strict=True):
            markers = [example.token_ids[end] for end in example.sentence_ends]
            found.append(row[torch.tensor(markers)].softmax(0).tolist())
    return found


def evaluate(
    model: PreTrainedModel,
    maker: ExampleMaker,
    *,
    questions: int = 1000,
    candidates: int = CANDIDATES,
    seed: int = 1,
) -> dict[str, dict[str, float]]:
    """Return shares of right choices by question set, and of refusals, over the same questions.

    ``nearest`` is the share of questions that the nearest sentence answers, ``found`` of those
    whose sentence is among the candidates, ``right`` of those that the reader chooses right;
    ``refused`` of the questions whose answer was taken away (``without``), of all others
    (``wrongly_refused``).
    """
    model.train(False)
    rng = random.Random(seed)
    numbers = list(range(len(maker.folder.questions)))
    rng.shuffle(numbers)
    totals: dict[str, list[dict[str, float]]] = {}
    for number in numbers[:questions]:
        source = maker.folder.questions[number].source
        totals.setdefault(source, []).append(_outcome(model, maker, number, candidates, seed))
    every = [one for of_set in totals.values() for one in of_set]
    return {name: _means(of_set) for name, of_set in {**totals, "all": every}.items()}


def _outcome(
    model: PreTrainedModel, maker: ExampleMaker, number: int, candidates: int, seed: int
) -> dict[str, float]:
    made = [
        maker.make(number, random.Random(f"{seed} {number}"), candidates, without=without)
        for without in (NOTHING, ANSWER, ARTICLE)
    ]
    kept = [example for example in made if example is not None]
    chances = dict(zip(map(id, kept), choices(model, kept), strict=True)) if kept else {}
    chosen = [
        None if e is None else max(range(len(e.sentence_ends)), key=chances[id(e)].__getitem__)
        for e in made
    ]
    own = made[0]
    is_right = own is not None and chosen[0] == own.gold
    refused = [
        e is not None and c == len(e.sentence_ends) - 1 for e, c in zip(made, chosen, strict=True)
    ]
    return {
        "nearest": float(own is not None and own.gold == 0),
        "found": float(own is not None),
        "right": float(is_right),
        "wrongly_refused": float(refused[0]),
        "refused": float(refused[1]),
        "refused_off_topic": float(refused[2]),
        "questions": 1.0,
    }


def _means(outcomes: list[dict[str, float]]) -> dict[str, float]:
    means = {
        name: round(100 * sum(one[name] for one in outcomes) / len(outcomes), 1)
        for name in outcomes[0]
    }
    return {**means, "questions": len(outcomes)}
