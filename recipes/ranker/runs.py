"""The runs of the recipe, each in a process of its own, which imports this module."""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import TYPE_CHECKING

import torch

from ragaccel.retrieval import load_embedder
from ragaccel.retrieval.embedder import read_tokenizer
from ragaccel.retrieval.encoder import load_encoder
from ragaccel.retrieval.sentence_ranker import RankerNetwork
from recipes.ranker.examples import ExampleMaker, TrainingExamples
from recipes.ranker.fit import Fit, adapter_of, publish
from recipes.reader.corpus import TRAIN, load_corpus, load_foreign_corpus
from recipes.reader.folder import Folder

if TYPE_CHECKING:
    from pathlib import Path

ADAPTER = "adapter.safetensors"


def makers(source: Path, out: Path, part: str) -> dict[str, ExampleMaker]:
    """Return the makers of a part of the questions, of English and foreign ones."""
    embedder = load_embedder()
    tokenizer = read_tokenizer(embedder.folder)
    corpora = {"english": load_corpus(source), "foreign": load_foreign_corpus(source)}
    return {
        name: ExampleMaker(Folder(corpus, part, embedder, out / "vectors"), tokenizer)
        for name, corpus in corpora.items()
    }


def end_with_parent() -> None:
    """End this process when its parent is killed: it would train on beside the resumed run."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def train(
    source: Path,
    out: Path,
    tokens: int,
    learning_rate: float,
    device: str,
    threads: int,
    seed: int,
) -> dict[str, float]:
    """Train one run to its end and write its adapter; return its tokens and minutes."""
    torch.set_num_threads(threads)
    network = RankerNetwork(load_encoder(load_embedder().folder, "cpu"))
    folder = out / f"run-{seed}"
    fit = Fit(
        network, TrainingExamples(**makers(source, out, TRAIN)), folder,
        tokens=tokens, learning_rate=learning_rate, seed=seed, device=device,
    )  # fmt: skip
    fit.run()
    publish(adapter_of(network), folder / ADAPTER)
    return fit.progress.summary()
