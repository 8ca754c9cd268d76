"""Train the sentence ranker: ``python -m recipes.ranker --data DIR --out DIR``."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import load_file

from ragaccel.errors import ConfigurationError
from ragaccel.retrieval import load_embedder
from ragaccel.retrieval.encoder import load_encoder
from ragaccel.retrieval.sentence_ranker import RankerNetwork, add_adapter
from recipes.ranker.evaluate import evaluate
from recipes.ranker.examples import TrainingExamples
from recipes.ranker.fit import averaged, publish
from recipes.ranker.runs import ADAPTER, end_with_parent, makers, train
from recipes.reader.corpus import DEVELOPMENT, TRAIN
from recipes.training_run import check_arguments, run_command

TOKENS, LEARNING_RATE, RUNS = 12.0, 1e-3, 3


def main(
    out: Annotated[
        Path,
        typer.Option(help="Run folder for vectors, checkpoints, logs and the finished adapter."),
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
    """Train the sentence ranker or resume an interrupted run; then evaluate and write it.

    The runs train beside one another: on a processor two of one thread each are nearly twice as
    fast as one after the other with two.
    """
    check_arguments(tokens, learning_rate, device)
    source = data or Path(os.environ.get("RAGACCEL_DATA", ""))
    development = makers(source, out, DEVELOPMENT)
    digest = TrainingExamples(**makers(source, out, TRAIN)).digest  # makes the vectors of all runs
    side_by_side = min(runs, torch.get_num_threads()) if device == "cpu" else 1
    train_one = partial(
        train, source, out, round(tokens * 1e6), learning_rate, device,
        torch.get_num_threads() // side_by_side,
    )  # fmt: skip
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(side_by_side, spawn, end_with_parent) as pool:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # processes started now ignore it
        running = pool.map(train_one, range(seed, seed + runs))
        signal.signal(signal.SIGINT, handler)
        try:
            trained = list(running)
        except BrokenProcessPool:
            raise ConfigurationError(
                "a run was killed: the same command goes on from the last checkpoint"
            ) from None
        finally:
            for process in multiprocessing.active_children():
                process.terminate()
    adapter = averaged([load_file(out / f"run-{seed + at}" / ADAPTER) for at in range(runs)])
    publish(adapter, out / ADAPTER)
    ranker = RankerNetwork(load_encoder(load_embedder().folder, "cpu"))
    add_adapter(ranker, adapter)
    figures = {name: evaluate(ranker, maker) for name, maker in development.items()}
    print(json.dumps({"trained": trained, "data": digest, "development": figures}))


if __name__ == "__main__":
    run_command(main)
