"""Evaluation of the reader's choice: the right sentence, and refusals, from one pass a question."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence

import torch
from transformers import LlamaForCausalLM

from ragaccel.quotes import ruled_out, values_of
from recipes.reader.batches import batched
from recipes.reader.examples import Example, ExampleMaker
from recipes.reader.folder import ANSWER, ARTICLE, NOTHING, Folder

BATCH = 24


@torch.inference_mode()
def chances(model: LlamaForCausalLM, examples: Sequence[Example]) -> list[list[float]]:
    """Return the chances of each sentence, and last of the refusal, to be the answer."""
    model.train(False)
    padding = int(model.config.pad_token_id or 0)
    max_tokens = model.config.max_position_embeddings
    found: dict[int, list[float]] = {}
    order = sorted(range(len(examples)), key=lambda at: len(examples[at].token_ids))
    for start in range(0, len(order), BATCH):
        some = order[start : start + BATCH]
        batch = batched([examples[at] for at in some], padding, max_tokens)
        token_ids = batch.token_ids[:, : int(batch.start.max()) + 1].to(model.device)
        hidden = model.model(token_ids).last_hidden_state
        logits = model.lm_head(hidden[torch.arange(len(some)), batch.start]).cpu()
        for at, row in zip(some, logits, strict=True):
            ends = examples[at].sentence_ends
            markers = torch.tensor([examples[at].token_ids[end] for end in ends])
            found[at] = row[markers].float().softmax(0).tolist()
    return [found[at] for at in range(len(examples))]


def evaluate(
    model: LlamaForCausalLM, maker: ExampleMaker, *, questions: int = 1000, seed: int = 1
) -> dict[str, dict[str, float]]:
    """Return figures by question set, and of ``all``, in percent of the questions.

    ``nearest`` are the questions that the first sentence answers, ``found`` those whose sentence
    is among those given, ``right`` those for which the reader chooses it, ``right_together`` those
    for which its chances and the sentences' values do (``together``), and ``wrongly_refused``
    those that it refuses. ``refused`` are the same questions without the answer, ``off_topic``
    without its article.
    """
    numbers = list(range(len(maker.folder.questions)))
    random.Random(seed).shuffle(numbers)
    numbers = numbers[:questions]
    sets: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
    for number in numbers:
        sets[maker.folder.questions[number].source][number] = {}
    outcomes = {number: one for of_set in sets.values() for number, one in of_set.items()}
    for without in (NOTHING, ANSWER, ARTICLE):
        made = {n: maker.make(n, random.Random(f"{seed} {n}"), without=without) for n in numbers}
        kept = {number: example for number, example in made.items() if example is not None}
        for number, each in zip(kept, chances(model, list(kept.values())), strict=True):
            outcomes[number] |= _outcome(maker.folder, kept[number], each, without)
    return {
        name: _shares(list(of_set.values())) for name, of_set in {**sets, "all": outcomes}.items()
    }


def together(folder: Folder, example: Example, of_each: Sequence[float]) -> list[float]:
    """Return the value of each sentence by all that ``QuoteConstraint`` decides by."""
    question = example.question.text
    sentences = ruled_out(question, folder.sentences_of(example.nearest))
    return [
        math.log(max(chance, 1e-9)) + value
        for chance, value in zip(of_each[:-1], values_of(question, sentences), strict=True)
    ]


def _outcome(
    folder: Folder, example: Example, of_each: list[float], without: str
) -> dict[str, float]:
    is_refused = float(of_each[-1] == max(of_each))
    if without != NOTHING:
        return {"refused" if without == ANSWER else "off_topic": is_refused}
    values = together(folder, example, of_each)
    return {
        "found": 1.0,
        "nearest": float(example.gold == 0),
        "right": float(of_each[example.gold] == max(of_each)),
        "right_together": float(values[example.gold] == max(values) > -math.inf),
        "wrongly_refused": is_refused,
    }


_NAMES = (
    "nearest", "found", "right", "right_together", "wrongly_refused", "refused", "off_topic"
)  # fmt: skip


def _shares(outcomes: Sequence[dict[str, float]]) -> dict[str, float]:
    count = max(1, len(outcomes))
    shares = {n: round(100 * sum(one.get(n, 0.0) for one in outcomes) / count, 1) for n in _NAMES}
    return {"questions": len(outcomes), **shares}
