"""Train the bundled reader: ``python -m recipes.reader --data DIR --out DIR``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import PreTrainedTokenizerFast

from ragaccel.errors import ConfigurationError
from ragaccel.retrieval import load_embedder
from recipes.reader.corpus import (
    Article,
    HumanQuestion,
    limit_books,
    load_articles,
    load_questions,
)
from recipes.reader.evaluate import evaluate
from recipes.reader.examples import ExampleMaker
from recipes.reader.fit import Fit
from recipes.reader.network import new_reader
from recipes.reader.publish import publish
from recipes.reader.vocabulary import train_tokenizer

TOKENS = 30.0  # millions


def main(
    out: Annotated[
        Path, typer.Option(help="Run folder for checkpoint, log and the finished reader/.")
    ],
    data: Annotated[
        Path | None, typer.Option(help="Folder of text archives and question sets.")
    ] = None,
    tokens: Annotated[
        float, typer.Option(help="Millions of tokens to train on, in all resumed runs together.")
    ] = TOKENS,
    hidden: Annotated[int, typer.Option(help="Hidden size, a multiple of 64.")] = 256,
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 6,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 2.5e-3,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of weights, order and examples.")] = 0,
    examples: Annotated[
        int, typer.Option(help="Held-out questions of each kind to evaluate on.")
    ] = 400,
) -> None:
    """Train the bundled reader or resume an interrupted run; then evaluate and write it."""
    folder = data or Path(os.environ.get("RAGACCEL_DATA", ""))
    if not (folder / "text").is_dir():
        raise ConfigurationError(
            f"there is no folder {folder / 'text'} of text archives: pass --data FOLDER or set"
            " RAGACCEL_DATA"
        )
    articles, questions = limit_books(load_articles(folder), seed), load_questions(folder)
    tokenizer = _tokenizer(out / "tokenizer", articles, questions)
    embedder = load_embedder()
    makers = [
        ExampleMaker(
            [a for a in articles if a.held_out == held_out],
            [q for q in questions if q.held_out == held_out],
            tokenizer,
            seed=seed,
            embedder=embedder,
            cache=out,
            augmented=not held_out,
        )
        for held_out in (False, True)
    ]
    torch.manual_seed(seed)
    model = new_reader(
        len(tokenizer),
        {
            "bos": tokenizer.bos_token_id,
            "eos": tokenizer.eos_token_id,
            "pad": tokenizer.pad_token_id,
        },
        hidden=hidden,
        layers=layers,
    )
    fit = Fit(
        model,
        makers[0],
        out,
        tokens=round(tokens * 1e6),
        learning_rate=learning_rate,
        device=device,
    )
    try:
        fit.run()
    except KeyboardInterrupt:
        fit.save()
        print("interrupted: run the same command again to go on from here", file=sys.stderr)
        raise typer.Exit(130) from None
    metrics = evaluate(model, makers[1], examples=examples)
    publish(model.cpu(), tokenizer, out / "reader")
    trained = {"tokens": fit.progress.tokens, "minutes": round(fit.progress.seconds / 60, 1)}
    print(json.dumps({"trained": trained, "held_out": metrics}))


def _tokenizer(
    folder: Path, articles: list[Article], questions: list[HumanQuestion]
) -> PreTrainedTokenizerFast:
    if folder.exists():
        saved: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
        return saved
    texts = [" " + s for a in articles if not a.held_out for s in a.sentences]
    for question in questions:
        if not question.held_out:
            texts += [" " + question.question, *(" " + s for s in question.sentences)]
    tokenizer = train_tokenizer(texts)
    tokenizer.save_pretrained(folder)
    return tokenizer


if __name__ == "__main__":
    try:
        typer.run(main)
    except ConfigurationError as error:
        sys.exit(f"error: {error}")
