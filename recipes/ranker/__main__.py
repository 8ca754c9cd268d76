"""Train the sentence ranker: ``python -m recipes.ranker --data DIR --out DIR``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ragaccel.errors import ConfigurationError
from ragaccel.retrieval import load_embedder
from ragaccel.retrieval.embedder import read_tokenizer
from ragaccel.retrieval.encoder import load_encoder
from ragaccel.retrieval.sentence_ranker import RankerNetwork, add_adapter
from recipes.ranker.evaluate import evaluate
from recipes.ranker.examples import ExampleMaker, TrainingExamples
from recipes.ranker.fit import Fit, adapter_of, averaged, publish
from recipes.reader.corpus import DEVELOPMENT, TRAIN, load_corpus, load_foreign_corpus
from recipes.reader.folder import Folder
from recipes.training_run import run_interruptibly

TOKENS, LEARNING_RATE, RUNS = 12.0, 1e-3, 3


def main(
    out: Annotated[
        Path, typer.Option(help="Run folder for vectors, checkpoint, log and the finished adapter.")
    ],
    data: Annotated[Path | None, typer.Option(help="Folder of the question sets.")] = None,
    tokens: Annotated[
        float, typer.Option(help="Millions of tokens of each run, the same when resumed.")
    ] = TOKENS,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = LEARNING_RATE,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    runs: Annotated[int, typer.Option(min=1, help="Number of runs, whose mean is written.")] = RUNS,
    seed: Annotated[int, typer.Option(help="Seed of the first run; the next has the next.")] = 0,
) -> None:
    """Train the sentence ranker or resume an interrupted run; then evaluate and write it."""
    source = data or Path(os.environ.get("RAGACCEL_DATA", ""))
    corpora = {"english": load_corpus(source), "foreign": load_foreign_corpus(source)}
    embedder = load_embedder()
    tokenizer = read_tokenizer(embedder.folder)

    def makers(part: str) -> dict[str, ExampleMaker]:
        return {
            name: ExampleMaker(Folder(corpus, part, embedder, out / "vectors"), tokenizer)
            for name, corpus in corpora.items()
        }

    examples = TrainingExamples(**makers(TRAIN))
    adapters, trained = [], []
    for number in range(seed, seed + runs):
        network = RankerNetwork(load_encoder(embedder.folder, "cpu"))
        fit = Fit(
            network, examples, out / f"run-{number}",
            tokens=round(tokens * 1e6), learning_rate=learning_rate, seed=number, device=device,
        )  # fmt: skip
        run_interruptibly(fit)
        adapters.append(adapter_of(network))
        trained.append(fit.progress.summary())
    adapter = averaged(adapters)
    publish(adapter, out / "adapter.safetensors")
    ranker = RankerNetwork(load_encoder(embedder.folder, "cpu"))
    add_adapter(ranker, adapter)
    figures = {name: evaluate(ranker, maker) for name, maker in makers(DEVELOPMENT).items()}
    print(json.dumps({"trained": trained, "data": examples.digest, "development": figures}))


if __name__ == "__main__":
    try:
        typer.run(main)
    except ConfigurationError as error:
        sys.exit(f"error: {error}")
