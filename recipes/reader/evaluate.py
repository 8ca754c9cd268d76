"""Evaluation of the reader on held-out documents: right sentence, right passage, refusals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import torch
from transformers import LlamaForCausalLM

from recipes.reader.examples import Example, ExampleMaker
from recipes.reader.passages import Shape

SHAPES = {
    "four passages": Shape(length=1000, min_passages=4, max_passages=4, max_passage_tokens=150),
    "six found, cut to a sentence each": Shape(
        length=1000, min_passages=6, max_passages=6, max_passage_tokens=150, max_sentences=1
    ),
}


@dataclass(frozen=True, slots=True)
class Metrics:
    """The results of an evaluation, in percent of the questions but for ``examples``.

    Attributes:
        examples: Number of questions.
        verbatim: Answerable ones whose answer is exactly the right sentence and its citation.
        passage: Answerable ones whose answer is a sentence of the right passage.
        refused: Unanswerable ones that are refused.
        wrongly_refused: Answerable ones that are refused.
        chance: The expected ``verbatim`` of a random sentence.
    """

    examples: int
    verbatim: float
    passage: float
    refused: float
    wrongly_refused: float
    chance: float


@torch.inference_mode()
def outcome(model: LlamaForCausalLM, example: Example) -> dict[str, float]:
    """Evaluate one example by the model's greedy choice at every token of the answer.

    One forward pass is enough: greedy decoding gives the recorded answer if and only if every
    choice after the recorded tokens is the next recorded token.
    """
    ids, start = example.token_ids, example.answer_start
    device = model.device
    logits = model(torch.tensor([ids[:-1]], device=device)).logits[0, start:]
    choices = logits.argmax(-1).tolist()
    markers = [ids[end] for end in example.sentence_ends]
    chosen = markers.index(choices[0]) if choices[0] in markers else -1
    refusal = len(markers) - 1
    answerable = example.gold_end != refusal
    passages = _passage_numbers(example)
    return {
        "answerable": answerable,
        "verbatim": choices == ids[start + 1 :],
        "passage": answerable and chosen >= 0 and passages[chosen] == passages[example.gold_end],
        "refused": chosen == refusal,
        "chance": 1 / len(markers),
    }


def _passage_numbers(example: Example) -> list[int]:
    """Return the citation token of each sentence, which stands before its closing marker."""
    return [example.token_ids[end - 1] for end in example.sentence_ends]


def summarize(outcomes: Iterable[dict[str, float]]) -> Metrics:
    """Return the metrics of the outcomes of several examples."""
    outcomes = list(outcomes)
    totals: dict[str, float] = defaultdict(float)
    for one in outcomes:
        if one["answerable"]:
            totals["answerable"] += 1
            for name in ("verbatim", "passage", "chance"):
                totals[name] += one[name]
            totals["wrongly_refused"] += one["refused"]
        else:
            totals["unanswerable"] += 1
            totals["refused"] += one["refused"]

    def percent(name: str, of: str) -> float:
        return round(100 * totals[name] / max(1, totals[of]), 1)

    return Metrics(
        len(outcomes),
        percent("verbatim", "answerable"),
        percent("passage", "answerable"),
        percent("refused", "unanswerable"),
        percent("wrongly_refused", "answerable"),
        percent("chance", "answerable"),
    )


def evaluate(
    model: LlamaForCausalLM,
    maker: ExampleMaker,
    *,
    examples: int = 400,
    seed: int = 1,
    shapes: Mapping[str, Shape] = SHAPES,
) -> dict[str, dict[str, dict[str, float]]]:
    """Return metrics by shape and question set ("made" for generated questions).

    A seed always draws the same examples. Questions of a set smaller than ``examples`` repeat with
    other distractors.
    """
    model.train(False)
    return {name: _by_kind(model, maker, shape, examples, seed) for name, shape in shapes.items()}


def _by_kind(
    model: LlamaForCausalLM, maker: ExampleMaker, shape: Shape, examples: int, seed: int
) -> dict[str, dict[str, float]]:
    maker.reseed(seed)
    kinds = {q.source for s in maker.sources.everything for q in s.questions}
    kinds |= {"made"} if any(not s.questions for s in maker.sources.everything) else set()
    drawn: dict[str, list[dict[str, float]]] = {kind: [] for kind in sorted(kinds)}
    while min(map(len, drawn.values())) < examples:
        example = maker.make(shape)
        kind = drawn[example.origin]
        if len(kind) < examples:
            kind.append(outcome(model, example))
    return {name: asdict(summarize(kind)) for name, kind in drawn.items()}
