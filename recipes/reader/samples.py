"""Write the reader's examples as SPACE training samples: ``python -m recipes.reader.samples``."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import PreTrainedTokenizerFast

from ragaccel.errors import ConfigurationError
from ragaccel.models import bundled_reader_path
from ragaccel.retrieval import load_embedder
from ragaccel.training import write_samples
from recipes.reader.corpus import HELD_OUT, TRAIN, load_corpus
from recipes.reader.examples import Example, ExampleMaker
from recipes.reader.folder import Folder


def main(
    out: Annotated[Path, typer.Option(help="JSON-lines file to write.")],
    cache: Annotated[Path, typer.Option(help="Folder that keeps the vectors of all sentences.")],
    data: Annotated[Path | None, typer.Option(help="Folder of the question sets.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of questions.")] = 3000,
    held_out: Annotated[
        bool,
        typer.Option("--held-out", help="Draw from articles that the reader was not trained on."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
) -> None:
    """Write questions with passages and answers, as the bundled reader was trained on them."""
    corpus = load_corpus(data or Path(os.environ.get("RAGACCEL_DATA", "")))
    folder = Folder(corpus, HELD_OUT if held_out else TRAIN, load_embedder(), cache)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(bundled_reader_path())
    written = write_samples(out, islice(rows(ExampleMaker(folder, tokenizer), seed), count))
    print(f"{written} questions in {out}", file=sys.stderr)


def rows(maker: ExampleMaker, seed: int) -> Iterator[dict[str, Any]]:
    """Yield SPACE samples of prompts in the order of use, for ever."""
    rng = random.Random(seed)
    for number in maker.folder.order(seed):
        example = maker.draw(number, rng, shuffled_share=0.0)
        if example is not None:
            yield row(example)


def row(example: Example) -> dict[str, Any]:
    """Return an example as a SPACE sample; the prompt ends with ``<answer>``."""
    start = example.answer_start + 1
    return {
        "question": example.question.text,
        "prompt_ids": example.token_ids[:start],
        "answer_ids": example.token_ids[start:],
    }


if __name__ == "__main__":
    try:
        typer.run(main)
    except ConfigurationError as error:
        sys.exit(f"error: {error}")
