"""Steps: results that are made one after the other, each a file and a process of its own.

What fails is told at the end and loses no other, and what is there already is not made again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eval.examples import MissingDataError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "eval"
HOURS = 3600.0
_TAIL = 400  # characters of an error that are told


@dataclass(frozen=True, slots=True)
class Step:
    """One result: the module that makes it, its arguments, its file, the most seconds it takes.

    Where ``fallback`` is given, it is run if this fails.
    """

    module: str
    arguments: tuple[str, ...]
    out: Path
    seconds: float = 2 * HOURS
    fallback: Step | None = None


def add_places(parser: argparse.ArgumentParser, out: Path | None = None) -> None:
    """Add the options for the data and the results, as whole paths: steps run in our own folder."""
    add = parser.add_argument
    add("--data", type=_whole, help="data folder; also the variable RAGACCEL_DATA")
    shown = "" if out is None else " (default: %(default)s)"
    add("--out", type=_whole, default=out, required=out is None, help=f"folder of results{shown}")


def _whole(path: str) -> Path:
    return Path(path).resolve()


def run_all(steps: Iterable[Step], title: str) -> None:
    """Make every result that is not there yet; end with an error that names those that failed."""
    try:
        failed = [step.out.name for step in steps if not done(step)]
    except MissingDataError as error:
        sys.exit(f"{title}: {error}")
    if failed:
        sys.exit(f"{title}: no {', '.join(failed)}: run the same command again to try these only")


def run_and_report(steps: Iterable[Step], title: str, out: Path) -> None:
    """Make every result, and the report of those there are, whatever failed."""
    try:
        run_all(steps, title)
    finally:
        failed = run_module("eval.report", [f"--results={out}"], HOURS)
    if failed:
        sys.exit(f"{title}: all results are there, but no report of them")


def done(step: Step) -> bool:
    """Whether a result is there, now that it was made if it was not."""
    if is_whole(step.out):
        note(f"{step.out.name} is there already: skipped")
        return True
    step.out.parent.mkdir(parents=True, exist_ok=True)
    note(f"{step.out.name}: python -m {step.module} {' '.join(step.arguments)}")
    try:
        code = run_module(step.module, step.arguments, step.seconds)
    except Exception as error:
        code = repr(error)[-_TAIL:]
    if code:
        note(f"{step.out.name}: failed, {code}")
        if step.fallback is not None and done(step.fallback):
            note(f"{step.fallback.out.name} stands in for {step.out.name}")
    return is_whole(step.out)


def is_whole(path: Path) -> bool:
    """Whether a file is there and holds JSON to its end."""
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    return True


def run_module(module: str, arguments: Sequence[str], seconds: float) -> int:
    """Run a module in a fresh process, as an error of the device outlives whoever catches it."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, timeout=seconds, check=False).returncode


def note(text: str) -> None:
    """Say where the run stands."""
    print(f"eval: {text}", file=sys.stderr, flush=True)
