"""Measure the indexing of a folder (new, unchanged and after one edit) and a query."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

from eval import cli
from eval.report.tables import show
from eval.runner import result

QUESTIONS = (
    "How do I load a model in 8 bit?",
    "What does the timeout parameter do?",
    "How can I fine-tune with LoRA on my own data?",
    "Which environment variables configure proxies?",
    "How are plugins installed and listed?",
    "What is the default chunk size for ingestion?",
    "How do I constrain the output to a JSON schema?",
    "How do I share a tool with other agents?",
    "Which models support flash attention?",
    "How is an index saved and loaded again?",
)
# Imports no more than indexing does, since its start and its memory are measured.
_INDEX_ONCE = """
import json, resource, sys
from ragaccel.retrieval import Store, index_folder, load_embedder
with Store(sys.argv[2]) as store:
    report = index_folder(store, load_embedder(), sys.argv[1])
print(json.dumps({
    "files": report.added + report.changed + report.unchanged, "passages": report.passages,
    "embedded": report.embedded, "embed_share": report.embed_seconds / report.seconds,
    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""


def index_in_process(folder: Path, index: Path) -> dict[str, Any]:
    """Index a folder in a new process; return its figures and its time with startup."""
    started, cpu = time.perf_counter(), children_cpu_seconds()
    done = subprocess.run(
        [sys.executable, "-c", _INDEX_ONCE, str(folder), str(index)],
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    return {
        **json.loads(done.stdout),
        "seconds": seconds,
        "cpu_seconds": children_cpu_seconds() - cpu,
    }


def children_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def query_seconds(index: Path) -> dict[str, float]:
    """Load the index in this process; return the seconds of the first and of later queries."""
    from ragaccel.retrieval import open_retriever

    started = time.perf_counter()
    retriever = open_retriever(index)
    retriever.warm_up()
    loaded = time.perf_counter() - started
    times = []
    for question in QUESTIONS * 3:
        started = time.perf_counter()
        found = retriever.search(question, 6)
        times.append(1000 * (time.perf_counter() - started))
        assert found
    return {
        "load_seconds": loaded,
        "query_ms_median": median(times),
        "query_ms_worst": max(times),
    }


@cli.experiment(
    cli.option("--data", type=Path, default=os.environ.get("RAGACCEL_DATA"), help="documents"),
    table=show,
)
def run_indexing(options: Namespace) -> dict[str, Any]:
    """Indexing: the time for a new folder, an unchanged one and one edit, and for a query.

        python -m eval indexing --data FOLDER

    Each run of indexing is a new process on a copy of the folder; its time includes the start of
    the process.
    """
    if options.data is None or not options.data.is_dir():
        raise ValueError("give a folder of documents with --data")
    with tempfile.TemporaryDirectory() as scratch:
        folder, index = Path(scratch, "data"), Path(scratch, "index.db")
        shutil.copytree(options.data, folder)
        first, again = (index_in_process(folder, index) for _ in range(2))
        edited = max(folder.rglob("*.md"), key=lambda path: path.stat().st_size)
        with edited.open("a", encoding="utf-8") as file:
            file.write("\n\nThis sentence was added to see how long one edit takes.\n")
        edit = index_in_process(folder, index)
        figures = {
            "folder": options.data.name,
            **{name: first[name] for name in ("files", "passages", "embed_share", "peak_mb")},
            "first_seconds": first["seconds"],
            "first_cpu_seconds": first["cpu_seconds"],
            "unchanged_seconds": again["seconds"],
            "edit_seconds": edit["seconds"],
            "edit_cpu_seconds": edit["cpu_seconds"],
            "edit_embedded": edit["embedded"],
            "index_mb": index.stat().st_size / 1e6,
            **query_seconds(index),
            "load_average": os.getloadavg()[0],
        }
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
    return result("indexing", {}, figures=rounded)
