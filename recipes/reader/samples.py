"""Write the reader's examples as SPACE training samples: ``python -m recipes.reader.samples``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from transformers import PreTrainedTokenizerFast

from ragaccel.errors import ConfigurationError
from ragaccel.models import bundled_reader_path
from ragaccel.retrieval import load_embedder
from ragaccel.training import write_samples
from recipes.reader.corpus import limit_books, load_articles, load_questions
from recipes.reader.examples import Example, ExampleMaker
from recipes.reader.fit import CURRICULUM

if TYPE_CHECKING:
    from collections.abc import Iterator


def main(
    out: Annotated[Path, typer.Option(help="JSON-lines file to write.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder of text archives and question sets.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of questions.")] = 3000,
    held_out: Annotated[
        bool,
        typer.Option("--held-out", help="Draw from documents that the reader was not trained on."),
    ] = False,
    cache: Annotated[
        Path | None, typer.Option(help="Folder that keeps the vectors of all sentences.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
) -> None:
    """Write questions with passages and answers, as the bundled reader was trained on them."""
    folder = data or Path(os.environ.get("RAGACCEL_DATA", ""))
    if not (folder / "text").is_dir():
        raise ConfigurationError(
            f"there is no folder {folder / 'text'} of text archives: pass --data FOLDER or set"
            " RAGACCEL_DATA"
        )
    articles = limit_books(load_articles(folder), 0)
    maker = ExampleMaker(
        [article for article in articles if article.held_out == held_out],
        [question for question in load_questions(folder) if question.held_out == held_out],
        PreTrainedTokenizerFast.from_pretrained(bundled_reader_path()),
        seed=seed,
        embedder=load_embedder(),
        cache=cache,
        augmented=not held_out,
    )
    written = write_samples(out, rows(maker, count))
    print(f"{written} questions in {out}", file=sys.stderr)


def rows(maker: ExampleMaker, count: int) -> Iterator[dict[str, Any]]:
    """Yield ``count`` SPACE samples in the shapes of the last training stage."""
    stage = CURRICULUM[-1][1]
    shares, shapes = [share for share, _ in stage], [shape for _, shape in stage]
    for _ in range(count):
        yield row(maker.make(maker.rng.choices(shapes, shares)[0]))


def row(example: Example) -> dict[str, Any]:
    """Return an example as a SPACE sample; the prompt ends with ``<answer>``."""
    start = example.answer_start + 1
    return {
        "question": example.question,
        "prompt_ids": example.token_ids[:start],
        "answer_ids": example.token_ids[start:],
    }


if __name__ == "__main__":
    try:
        typer.run(main)
    except ConfigurationError as error:
        sys.exit(f"error: {error}")
