"""Results on disk, with the machine that made them, and lists of runs in processes of their own.

A step that fails does not stop the others; a result that exists is not made again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from eval.data import MissingDataError
from ragaccel.errors import RagaccelError

Document = dict[str, Any]
Row = dict[str, Any]
Options = argparse.Namespace


def in_folder(out: Path | None, name: str) -> Path | None:
    """Return ``out`` if it is a JSON file or None, else the file ``name`` in the folder ``out``."""
    return out if out is None or out.suffix == ".json" else out / name


def measured(kind: str, measure: Callable[[Options], Document], options: Options) -> Document:
    """Set the threads, call ``measure``, write its document to ``--out``, and return it.

    An error that the user can correct ends the process with its message.
    """
    torch.set_num_threads(getattr(options, "threads", None) or torch.get_num_threads())
    current_commit()  # cached now: a later commit is not the code that runs
    try:
        document = measure(options)
    except (RagaccelError, FileNotFoundError, ValueError) as error:
        sys.exit(f"eval {kind}: {error}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(options.out, shown_json(document))
    return document


def result(
    kind: str,
    settings: dict[str, Any],
    *,
    device: str = "cpu",
    log: ResultsLog | None = None,
    **figures: Any,
) -> Document:
    """Return a result document: kind, settings, machine, command, and the figures.

    With a log that was continued within a round, ``resumed`` lists the places.
    """
    resumed = [row["resumed"] for row in log.rows if "resumed" in row] if log else []
    return {
        "kind": kind,
        "settings": settings,
        "machine": describe_machine(device),
        "run": describe_run(kind),
        **({"resumed": resumed} if resumed else {}),
        **figures,
    }


def settings_of(options: Options, *names: str, **others: Any) -> dict[str, Any]:
    """Return named options and others, with the commit: what must agree to compare two runs."""
    given = {name: getattr(options, name) for name in names}
    if "task" in given:  # a path of one machine
        given["task"] = Path(given["task"]).name
    return {**given, **others, "commit": current_commit()}


T = TypeVar("T")


class ResultsLog:
    """The measurements (rows) of one run, so that an interrupted run can continue.

    Rows are kept in a JSON-lines file whose first line has the run's settings, or in memory only if
    the path is None. An incomplete last line is dropped. ``open_results_log`` opens the log that
    belongs to a result file.

    Raises:
        ValueError: The file has rows made with other settings, or is damaged.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self.rows: list[dict[str, Any]] = []
        self._path, self._settings = path, settings
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        known = _read(path) if path.exists() else []
        if known and known[0] != settings:
            both = {**settings, **known[0]}
            changed = [key for key in both if known[0].get(key) != settings.get(key)]
            raise ValueError(
                f"{path.name} holds rows made with other settings ({', '.join(changed)}): "
                "delete it, or choose another --out"
            )
        self.rows = known[1:]
        self._rewrite()

    @property
    def measurements(self) -> list[dict[str, Any]]:
        """Return the rows with a ``decoder``, without the run's other notes."""
        return [row for row in self.rows if "decoder" in row]

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Keep the rows for which ``wanted`` returns True and delete the others."""
        kept = [row for row in self.rows if wanted(row)]
        if len(kept) < len(self.rows):
            self.rows = kept
            self._rewrite()

    def _rewrite(self) -> None:
        if self._path is not None:
            write_whole(self._path, "".join(map(_line, (self._settings, *self.rows))))

    def add(self, *rows: dict[str, Any]) -> None:
        """Append rows and write them to disk at once; pass rows together that need each other."""
        self.rows += rows
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(map(_line, rows)))


def open_results_log(out: Path | None, settings: dict[str, Any]) -> ResultsLog:
    """Open the results log beside the result file ``out``, or one in memory for None."""
    return ResultsLog(
        out and out.with_name(f"{out.name.removesuffix('.json')}.rows.jsonl"), settings
    )


def in_turns(
    results_log: ResultsLog,
    names: Sequence[str],
    examples: Mapping[str, T],
    measure: Callable[[str, T], Row],
    shown: Callable[[Row], str],
    *,
    repeats: int = 1,
    warm_up: Callable[[str], object] = lambda _name: None,
    forget: Callable[[str], object] = lambda _name: None,
    notes: Callable[[], Iterable[Row]] = tuple,
) -> None:
    """Measure every contestant on every example, in rounds whose order rotates.

    The rows of one example and round are logged together. Groups in the log are skipped; an
    incomplete one is dropped and measured again. Contestants forget everything before every round,
    since they would know the answers. If a run resumes within a round, the log tells where, since
    what was learned from the round's earlier examples is lost.

    Args:
        results_log: The log.
        names: The contestants.
        examples: The examples by id.
        measure: A function that runs a contestant on an example and returns the row's figures.
        shown: A function that returns a figure of a row for the line of progress.
        repeats: Number of rounds.
        warm_up: Called for each contestant before anything is measured.
        forget: Called for each contestant before each round.
        notes: Called for each group; returns further rows to log with it.
    """
    ran: dict[tuple[int, str], set[str]] = {}
    for row in results_log.measurements:
        if row["example"] in examples:
            ran.setdefault((row["round"], row["example"]), set()).add(row["decoder"])
    done = {group for group, had in ran.items() if had >= set(names)}
    cut = ran.keys() - done
    results_log.keep(lambda row: "decoder" not in row or (row["round"], row["example"]) not in cut)
    groups = [(turn, at, key) for turn in range(repeats) for at, key in enumerate(examples)]
    left = [(turn, at, key) for turn, at, key in groups if (turn, key) not in done]
    if left and left[0][1] > 0:
        results_log.add({"resumed": {"round": left[0][0], "example": left[0][2]}})
    if left:
        note("warming up")
        for name in names:
            warm_up(name)
    last_turn = None
    for number, (turn, at, key) in enumerate(left, start=1):
        if turn != last_turn:  # a new round repeats examples, as the warm-up did
            for name in names:
                forget(name)
        last_turn = turn
        noted = notes()
        rows = {
            name: {"example": key, "round": turn, "decoder": name, **measure(name, examples[key])}
            for name in rotated(names, at + turn)
        }
        results_log.add(*noted, *(rows[name] for name in names))
        told = ", ".join(f"{name} {shown(row)}" for name, row in rows.items())
        note(f"{number}/{len(left)} round {turn + 1} example {key}: {told}")


def rotated(names: Sequence[str], number: int) -> list[str]:
    """Return the order for a group: rotated, and reversed after each full rotation."""
    rotations, shift = divmod(number, len(names))
    order = [*names[shift:], *names[:shift]]
    return order[::-1] if rotations % 2 else order


def shown_json(document: Document) -> str:
    """Return a document as JSON, each list or object that holds no other on one line."""
    text = json.dumps(document, indent=1) + "\n"
    return re.sub(r"[\[{][^][{}]*[\]}]", lambda found: re.sub(r"\n\s*", " ", found[0]), text)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: an interrupted write leaves the old file unchanged."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines; text after the last line break is an interrupted write."""
    try:
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
        return [json.loads(line) for line in whole.split("\n") if line]
    except ValueError as error:
        raise ValueError(f"{path.name} is damaged ({error}): delete it") from error


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


ROOT = Path(__file__).parents[1]
_PACKAGES = ("ragaccel", "torch", "transformers", "numpy")


def describe_machine(device: str) -> dict[str, Any]:
    """Return the processor, memory, GPU, system and package versions, as results record them."""
    return {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": _memory_gb(),
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        "system": platform.system(),
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
    }


def describe_run(run: str) -> dict[str, Any]:
    """Return the command, commit and date of this process, as a result of ``run`` records them."""
    return {
        "command": f"python -m eval {run} {_arguments(sys.argv[1:])}".strip(),
        "commit": current_commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


@cache
def current_commit() -> str:
    """Return the commit of the code, with a plus sign if files differ from it."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    changed = _git(
        "status", "--porcelain", "--", "ragaccel", "eval/*.py", "eval/shapes", "eval/tasks"
    )
    return commit + ("+" if changed else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _arguments(arguments: Sequence[str]) -> str:
    """Join the arguments of a command, and cut paths of this machine to their last part."""
    return " ".join(map(_shown, arguments))


def _shown(argument: str) -> str:
    name, equals, value = argument.rpartition("=")
    is_path = os.sep in value and (os.path.isabs(value) or os.path.exists(value))
    return f"{name}{equals}{_short(value)}" if is_path else argument


def _short(path: str) -> str:
    full = Path(path).resolve()
    return str(full.relative_to(ROOT)) if full.is_relative_to(ROOT) else full.name


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "from source"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gb() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9)
    except (AttributeError, ValueError, OSError):
        return None


def note(text: str) -> None:
    """Print a line of progress to stderr."""
    print(text, file=sys.stderr, flush=True)


CACHE = ROOT / ".cache" / "eval"
HOURS = 3600.0
_TAIL = 400  # characters of an error that are shown


@dataclass(frozen=True, slots=True)
class Step:
    """One result of a suite: the run that makes it, its arguments, its file and its time limit.

    ``fallback`` is run if this step fails.
    """

    run: str
    arguments: tuple[str, ...]
    out: Path
    seconds: float = 2 * HOURS
    fallback: Step | None = None


def given(options: Options, *names: str) -> tuple[str, ...]:
    """Return those of the named options that are given as arguments for another run."""
    pairs = ((name, getattr(options, name)) for name in names)
    return tuple(
        f"--{name.replace('_', '-')}={value}" for name, value in pairs if value is not None
    )


def run_all(steps: Iterable[Step], title: str) -> None:
    """Make every missing result; at the end exit with an error that lists the failed ones."""
    try:
        failed = [step.out.name for step in steps if not done(step)]
    except MissingDataError as error:
        sys.exit(f"{title}: {error}")
    if failed:
        sys.exit(f"{title}: no {', '.join(failed)}: run the same command again to try these only")


def run_and_report(steps: Iterable[Step], title: str, out: Path) -> None:
    """Make every missing result, then the report, even if some results failed."""
    try:
        run_all(steps, title)
    finally:
        failed = run_process("report", [f"--results={out}"], HOURS)
    if failed:
        sys.exit(f"{title}: all results exist, but the report failed")


def done(step: Step) -> bool:
    """Make a step's result unless it exists, and return whether it exists now."""
    if is_whole(step.out):
        note_step(f"{step.out.name} is there already: skipped")
        return True
    step.out.parent.mkdir(parents=True, exist_ok=True)
    note_step(f"{step.out.name}: python -m eval {step.run} {' '.join(step.arguments)}")
    try:
        code = run_process(step.run, step.arguments, step.seconds)
    except Exception as error:
        code = repr(error)[-_TAIL:]
    if code:
        note_step(f"{step.out.name}: failed, {code}")
        if step.fallback is not None and done(step.fallback):
            note_step(f"{step.fallback.out.name} stands in for {step.out.name}")
    return is_whole(step.out)


def is_whole(path: Path) -> bool:
    """Return whether a file exists and is complete JSON."""
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    return True


def run_process(run: str, arguments: Sequence[str], seconds: float) -> int:
    """Run ``eval RUN`` in a new process, since a process cannot recover from a device error."""
    command = [sys.executable, "-m", "eval", run, *arguments]
    return subprocess.run(command, cwd=ROOT, timeout=seconds, check=False).returncode


def note_step(text: str) -> None:
    """Print a line of progress to stderr."""
    print(f"eval: {text}", file=sys.stderr, flush=True)


MAX_COMMANDS = 2  # a longer list would take too much room in a caption


def place_of(document: Document) -> str:
    """Return the name of the hardware that made a result."""
    machine = document["machine"]
    return str(machine["gpu"] or f"{machine['processor']}, {machine['threads']} threads")


def caption_of(document: Document) -> str:
    """Return the caption of one result: hardware, versions, commit, date and command."""
    if "run" not in document:
        command = "python -m eval replay --json eval/results/replay.json"
        return f"Llama-2 tokens, the first 150 rows of each file: `{command}`"
    settings, run = document.get("settings", {}), document["run"]
    kind = f"{settings['dtype']}, " if "dtype" in settings else ""
    asked = ""
    if "examples" in settings:
        asked = f"{settings['examples']} examples x {settings.get('repeats', 1)}; "
    return (
        f"{place_of(document)}, {kind}{_versions(document)}; {asked}"
        f"commit {run['commit']}, {run['date']}: `{run['command']}`"
    )


def caption_of_many(documents: Sequence[Document]) -> str:
    """Return one caption for a table of several results.

    List machines, commits and numbers of examples that differ, and up to two distinct commands.
    """
    runs = [one["run"] for one in documents]
    examples = [one["settings"]["examples"] for one in documents if "examples" in one["settings"]]
    asked = f"{_joined(map(str, examples))} examples a set; " if examples else ""
    dates = sorted({run["date"] for run in runs})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    places = _joined((place_of(one) for one in documents), "; ")
    dtypes = _joined(one["settings"]["dtype"] for one in documents if "dtype" in one["settings"])
    commands = dict.fromkeys(f"`{_command(one)}`" for one in documents)
    told = ", ".join(commands) if len(commands) <= MAX_COMMANDS else "commands with each result"
    return (
        f"{places}, {dtypes}, {_joined(map(_versions, documents))}; {asked}"
        f"commit {_joined(run['commit'] for run in runs)}, {days}: {told}"
    )


def _versions(document: Document) -> str:
    machine = document["machine"]
    return f"torch {machine['torch']}, transformers {machine['transformers']}"


def _command(document: Document) -> str:
    """Return a result's command with ``TASK`` for its set and without ``--out``.

    Results of several sets then have the same command.
    """
    task, command = document["settings"].get("task"), document["run"]["command"]
    command = re.sub(r" --out(=| )\S+", "", command)
    if not task:
        return str(command)
    return re.sub(rf"(--task[= ])\S*{re.escape(task)}(?=\s|$)", r"\1TASK", command)


def _joined(values: Iterable[str], between: str = ", ") -> str:
    return between.join(dict.fromkeys(values))
