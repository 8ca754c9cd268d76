"""Questions on held-out articles: what the bundled reader is asked, in its own tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

from eval.jobs import Job
from eval.reader import clapnq_questions
from eval.steps import CACHE
from ragaccel.decoding.request import Reference
from ragaccel.retrieval.embedder import load_embedder
from recipes.reader.corpus import load_articles, load_questions
from recipes.reader.evaluate import SHAPES
from recipes.reader.examples import ExampleMaker
from recipes.reader.vocabulary import NONE, PASSAGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ragaccel.models.tokenizer import Tokenizer
    from recipes.reader.examples import Example

HUMAN_SHARE = 0.5  # of the questions, people's own; the others are made of sentences
SEED = 7
VECTORS = CACHE / "vectors"


def held_out_maker(data: Path, tokenizer: Tokenizer) -> ExampleMaker:
    """Gather the articles and questions that the reader was not trained on.

    Raises:
        ConfigurationError: the data folder holds no text archives.
        ModelNotFoundError: there is no embedder, which finds half of the passages.
    """
    articles = [article for article in load_articles(data) if article.held_out]
    questions = [question for question in load_questions(data) if question.held_out]
    questions += clapnq_questions(data)
    words: Any = tokenizer.tokenizer
    return ExampleMaker(
        articles, questions, words, seed=SEED, embedder=load_embedder(), cache=VECTORS
    )


def draw_jobs(
    maker: ExampleMaker, count: int, *, eos_ids: frozenset[int], max_new_tokens: int
) -> list[Job]:
    """Draw questions, over whole passages and over found sentences by turns; none twice."""
    shapes = cycle([replace(shape, human_share=HUMAN_SHARE) for shape in SHAPES.values()])
    jobs: dict[tuple[int, ...], Job] = {}
    while len(jobs) < count:
        example = maker.make(next(shapes))
        prompt = tuple(example.token_ids[: example.answer_start + 1])
        references = tuple(passages_of(maker, example))
        name = f"{example.origin}/{len(jobs)}"
        job = Job(name, prompt, references, references, (), max_new_tokens, eos_ids)
        jobs.setdefault(prompt, job)
    return list(jobs.values())


def passages_of(maker: ExampleMaker, example: Example) -> Iterator[Reference]:
    """Cut the passages out of a prompt's own ids, as the library does."""
    ids = example.token_ids[: example.answer_start]
    passage, none = maker.id_of[PASSAGE], maker.id_of[NONE]
    starts = [place for place, token in enumerate(ids) if token == passage]
    for number, (start, end) in enumerate(zip(starts, _ends(ids, starts, none), strict=True)):
        yield Reference(tuple(ids[start + 1 : end]), passage_id=f"passage/{number}")


def _ends(ids: Sequence[int], starts: Sequence[int], none: int) -> list[int]:
    """Where passages end: at the next one, the last at the refusal that stands behind it."""
    return [*starts[1:], ids.index(none, starts[-1])] if starts else []
