"""The commands models, models pull and models default: language models here and on the hub."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from typer import Argument, Option

from ragaccel.cli.settings import Json, read_default_model
from ragaccel.cli.terminal import Terminal, UsageError
from ragaccel.errors import RagaccelError
from ragaccel.paths import atomic_write, default_model_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ragaccel.models.hub import Download, MemoryAtHand

Name = Annotated[
    str,
    Argument(metavar="NAME", help="A name on huggingface.co, such as Qwen/Qwen2.5-0.5B-Instruct."),
]


def models(terminal: Terminal, json: Json = False) -> None:
    """List language models: those cached here, and others that fit this machine's memory."""
    from ragaccel.models.hub import memory_at_hand, suggested_model

    memory = memory_at_hand()
    default = None
    with suppress(UsageError):  # a warning tells about a damaged file
        default = read_default_model()
    rows = list(_rows(memory, default))
    if json:
        place = "gpu" if memory.is_gpu else "cpu"
        terminal.json({"memory_gb": round(memory.gigabytes, 1), "device": place, "models": rows})
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("model", overflow="fold")
    for heading in ("download", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in rows:
        table.add_row(row["name"], _gb(row["download_gb"]), _gb(row["memory_gb"]), _marks(row))
    terminal.show(table)
    kind = "free on the GPU" if memory.is_gpu else "of memory free"
    name, size = suggested_model(memory)
    if any(row["fits"] and row["slow"] for row in rows):
        terminal.note("slow: fits, but needs a GPU to be quick")
    terminal.note(f"{_gb(memory.gigabytes)} {kind}; suggested here: {name}, {_gb(size)}")
    terminal.note("download one: ragaccel models pull NAME")
    terminal.note("use it always: ragaccel models default NAME")


def _rows(memory: MemoryAtHand, default: str | None) -> Iterator[dict[str, Any]]:
    """Yield the cached models, then the suggested ones that are not cached."""
    from ragaccel.models.hub import SUGGESTIONS, cached_models, weight_gigabytes

    here = list(cached_models())
    if default is not None and os.path.isdir(default):
        here = [(default, Path(default)), *here]
    configs = {name: _config_of(folder, name) for name, folder in here}
    cached = {
        name: weight_gigabytes(folder)
        for name, folder in here
        if configs[name] is not None or os.path.isdir(name)  # the default folder
    }
    others = {one.name: one.gigabytes for one in SUGGESTIONS if one.name not in cached}
    for name, size in {**cached, **others}.items():
        own = _memory_for(configs.get(name), memory)
        yield {
            "name": name,
            "download_gb": round(size, 2),
            "memory_gb": round(own.needed(size), 1),
            "cached": name in cached,
            "fits": own.fits(size),
            "slow": own.is_slow(size / 2),  # two bytes a parameter
            "default": name == default,
        }


def _config_of(folder: Path, name: str) -> Any:
    """Return a model's config, None if it is not supported."""
    from ragaccel.models.load import check_config

    try:
        return check_config(folder, name)
    except RagaccelError:
        return None


def _memory_for(config: Any, memory: MemoryAtHand) -> MemoryAtHand:
    """Return the memory that a model may take, by its config; None for a suggested one."""
    from ragaccel.models.load import expansion_on_cpu

    if config is None or memory.is_gpu:
        return memory
    return replace(memory, expansion=expansion_on_cpu(config))


def _marks(row: dict[str, Any]) -> str:
    marks = [mark for mark in ("default", "cached") if row[mark]]
    if not row["fits"]:
        return ", ".join([*marks, "too large here"])
    return ", ".join([*marks, "slow" if row["slow"] else "fits"])


def _gb(gigabytes: float) -> str:
    return f"{1000 * gigabytes:.0f} MB" if gigabytes < 0.1 else f"{gigabytes:.1f} GB"


def pull(terminal: Terminal, name: Name) -> None:
    """Download a language model from the hub into the cache of huggingface_hub.

    Its config is checked first. An interrupted download goes on where it stopped.
    """
    pull_model(terminal, name)


def default(
    terminal: Terminal,
    name: Annotated[
        str | None,
        Argument(metavar="NAME", help="A cached model or a folder.", show_default=False),
    ] = None,
    clear: Annotated[
        bool, Option("--clear", help="Go back to the built-in reader.", show_default=False)
    ] = False,
) -> None:
    """Show, set or clear the model that answers if no option or setting names one."""
    path = default_model_file()
    if clear:
        if name is not None:
            raise UsageError("give NAME or --clear, not both")
        path.unlink(missing_ok=True)
        terminal.note("the built-in reader answers if no model is named")
        return
    if name is None:
        terminal.write(read_default_model() or "none: the built-in reader answers", end="\n")
        return
    folder = _find_here(name)
    if folder is None:
        raise UsageError(f"{name} is not on this machine: run `ragaccel models pull {name}` first")
    from ragaccel.models.load import check_config

    check_config(folder, name)
    is_folder = Path(name).expanduser().is_dir()
    with atomic_write(path, private=True) as file:
        file.write(f"{folder.resolve() if is_folder else name}\n".encode())
    terminal.note(f"{name} answers if no option or setting names another model ({path})")


def resolve_model(terminal: Terminal, name: str) -> None:
    """Check that a model can be loaded, before slower work begins; download it if needed.

    Raises:
        ModelNotFoundError: There is no such model.
        UnsupportedModelError: Its config rules it out.
    """
    from ragaccel.models.hub import memory_at_hand, weight_gigabytes
    from ragaccel.models.load import check_config

    folder = _find_here(name) or pull_model(terminal, name)
    config = check_config(folder, name)
    memory, size = _memory_for(config, memory_at_hand()), weight_gigabytes(folder)
    if not memory.fits(size):
        terminal.warn(
            f"{name} needs about {_gb(memory.needed(size))} of memory, and"
            f" {_gb(memory.gigabytes)} are free: it may fail (`ragaccel models` lists smaller ones)"
        )


def _find_here(name: str) -> Path | None:
    from ragaccel.models.hub import LANGUAGE_MODEL, find_local_folder

    return find_local_folder(name, LANGUAGE_MODEL, {})


def pull_model(terminal: Terminal, name: str) -> Path:
    """Download a model of the hub with progress on stderr; return its folder."""
    from ragaccel.models.hub import plan_download, run_download
    from ragaccel.models.load import check_config

    with terminal.working("asking the hub"):
        plan = plan_download(name)
        check_config(plan.config_folder, name)
    missing = sum(file.size for file in plan.missing)
    where = str(plan.cache).replace(str(Path.home()), "~", 1)
    if not missing:
        terminal.note(f"{name} is here already: {_gb(plan.size / 1e9)} in {where}")
    else:
        terminal.note(f"{name}: {_gb(missing / 1e9)} to {where}")
    try:
        with _progress(terminal, plan) as advance:
            folder = run_download(plan, advance)
    except KeyboardInterrupt:
        terminal.note(f"what came is kept: `ragaccel models pull {name}` goes on from there")
        raise
    if missing:
        terminal.note(f"{name} is ready: ragaccel ask DIR QUESTION --model {name}")
    return folder


@contextmanager
def _progress(terminal: Terminal, plan: Download) -> Iterator[Callable[[int], None]]:
    """Yield a function that counts downloaded bytes: a bar, or a note for each tenth."""
    total = sum(file.size for file in plan.missing)
    bar = terminal.progress(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    task = bar.add_task("downloading", total=total)
    done = shown = 0

    def advance(count: int) -> None:
        nonlocal done, shown
        done += count
        bar.update(task, completed=done)
        if not terminal.interactive and total and (tenth := 10 * done // total) > shown:
            shown = tenth
            terminal.note(f"{10 * tenth} % of {_gb(total / 1e9)}")

    with bar:
        yield advance
