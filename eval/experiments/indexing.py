"""Measure the indexing of a folder (new, unchanged and after one edit) and a query."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

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


def index_once(folder: Path, index: Path) -> dict[str, Any]:
    """Index a folder in this process; return its report's figures and the peak memory."""
    from ragaccel.retrieval import Store, index_folder, load_embedder

    with Store(index) as store:
        report = index_folder(store, load_embedder(), folder)
    return {
        "files": report.added + report.changed + report.unchanged,
        "failed": len(report.failed),
        "passages": report.passages,
        "embedded": report.embedded,
        "index_seconds": report.seconds,
        "embed_seconds": report.embed_seconds,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def in_a_process(folder: Path, index: Path) -> dict[str, Any]:
    """Index a folder in a new process; return its figures and its time with startup."""
    command = [
        sys.executable,
        "-m",
        "eval",
        "indexing",
        "--data",
        str(folder),
        "--once",
        str(index),
    ]
    started, cpu = time.perf_counter(), children_cpu_seconds()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - started
    result: dict[str, Any] = json.loads(done.stdout)
    return {**result, "seconds": seconds, "cpu_seconds": children_cpu_seconds() - cpu}


def children_cpu_seconds() -> float:
    """Return the CPU seconds of this process's ended child processes."""
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
        times.append(time.perf_counter() - started)
        assert found
    return {
        "load_seconds": loaded,
        "query_ms_median": 1000 * statistics.median(times),
        "query_ms_worst": 1000 * max(times),
    }


def measure(data: Path) -> dict[str, Any]:
    """Index a copy of a folder anew, unchanged, and after one edit; then time queries."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, index = Path(scratch, "data"), Path(scratch, "index.db")
        shutil.copytree(data, folder)
        first = in_a_process(folder, index)
        again = in_a_process(folder, index)
        edited = max(folder.rglob("*.md"), key=lambda path: path.stat().st_size)
        with edited.open("a", encoding="utf-8") as file:
            file.write("\n\nThis sentence was added to see how long one edit takes.\n")
        edit = in_a_process(folder, index)
        return {
            "folder": data.name,
            "files": first["files"],
            "passages": first["passages"],
            "first_seconds": first["seconds"],
            "first_cpu_seconds": first["cpu_seconds"],
            "embed_share": first["embed_seconds"] / first["index_seconds"],
            "peak_mb": first["peak_mb"],
            "unchanged_seconds": again["seconds"],
            "edit_seconds": edit["seconds"],
            "edit_cpu_seconds": edit["cpu_seconds"],
            "edit_embedded": edit["embedded"],
            "index_mb": index.stat().st_size / 1e6,
            **query_seconds(index),
            "load_average": os.getloadavg()[0],
        }


def run_indexing() -> None:
    """Indexing: the time for a new folder, an unchanged one and one edit, and for a query.

        python -m eval indexing --data FOLDER

    Each run of indexing is a new process on a copy of the folder; its time includes the start of
    the process. The last line of the output is one JSON document.
    """
    parser = argparse.ArgumentParser(description=run_indexing.__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("RAGACCEL_DATA"))
    parser.add_argument("--out", type=Path, help="write the figures there too")
    parser.add_argument("--once", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.data is None or not Path(options.data).is_dir():
        parser.error("give a folder of documents with --data")
    if options.once:  # before imports that indexing does not need
        print(json.dumps(index_once(options.data, options.once)))
        return
    from eval.runner import describe_machine, describe_run

    result = measure(options.data)
    result = {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}
    document = {
        "kind": "indexing",
        "machine": describe_machine("cpu"),
        "run": describe_run("indexing"),
        "figures": result,
    }
    if options.out:
        options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))
