"""Train the bundled reader: ``python -m recipes.reader --data DIR --out DIR``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from ragaccel.retrieval import load_embedder
from ragaccel.retrieval.sentence_ranker import default_ranker
from recipes.reader.corpus import DEVELOPMENT, TRAIN, Corpus, load_corpus
from recipes.reader.evaluate import evaluate
from recipes.reader.examples import ExampleMaker
from recipes.reader.fit import Fit
from recipes.reader.folder import Folder
from recipes.reader.network import new_reader
from recipes.reader.publish import publish
from recipes.reader.vocabulary import train_tokenizer
from recipes.training_run import check_arguments, run_command

TOKENS, LEARNING_RATE = 15, 2.5e-3  # from nothing; a finished reader takes 1e-3


def main(
    out: Annotated[
        Path, typer.Option(help="Run folder for vectors, checkpoint, log and the finished reader/.")
    ],
    data: Annotated[Path | None, typer.Option(help="Folder of the question sets.")] = None,
    start: Annotated[
        Path | None, typer.Option(help="Folder of a reader to start from; without one, nothing.")
    ] = None,
    tokens: Annotated[
        float, typer.Option(help="Millions of tokens to train on, the same when resumed.")
    ] = TOKENS,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = LEARNING_RATE,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of weights, order and examples.")] = 0,
) -> None:
    """Train the bundled reader or resume an interrupted run; then evaluate and write it."""
    check_arguments(tokens, learning_rate, device)
    corpus = load_corpus(data or Path(os.environ.get("RAGACCEL_DATA", "")))
    torch.manual_seed(seed)
    tokenizer, model = _started(start, out / "tokenizer", corpus)
    embedder, vectors = load_embedder(), out / "vectors"
    train = ExampleMaker(Folder(corpus, TRAIN, embedder, vectors), tokenizer)
    asked = Folder(corpus, DEVELOPMENT, embedder, vectors, default_ranker())
    development = ExampleMaker(asked, tokenizer)
    fit = Fit(
        model, train, out,
        tokens=round(tokens * 1e6), learning_rate=learning_rate, seed=seed, device=device,
    )  # fmt: skip
    fit.run()
    publish(model.cpu(), tokenizer, out / "reader")
    figures = evaluate(model, development)
    print(
        json.dumps(
            {"trained": fit.progress.summary(), "data": corpus.digest(), "development": figures}
        )
    )


def _started(
    start: Path | None, folder: Path, corpus: Corpus
) -> tuple[PreTrainedTokenizerFast, LlamaForCausalLM]:
    """Return tokenizer and model to start from; a new tokenizer is kept in ``folder``."""
    if start is not None:
        known = PreTrainedTokenizerFast.from_pretrained(start)
        return known, AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    tokenizer = _tokenizer(folder, corpus)
    special = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return tokenizer, new_reader(len(tokenizer), special)


def _tokenizer(folder: Path, corpus: Corpus) -> PreTrainedTokenizerFast:
    if folder.exists():
        saved: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
        return saved
    texts = [f" {s}" for p in corpus.paragraphs if p.part == TRAIN for s in p.sentences]
    texts += [f" {question.text}" for question in corpus.of_part(TRAIN)]
    tokenizer = train_tokenizer(texts)
    half_written = folder.with_name("tokenizer.tmp")
    tokenizer.save_pretrained(half_written)
    half_written.replace(folder)
    return tokenizer


if __name__ == "__main__":
    run_command(main)
