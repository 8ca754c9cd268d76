"""Captions: where a result was measured, with which versions, and by which command."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Document = dict[str, Any]


MOST_COMMANDS = 2  # more of them say less than they take room


def place_of(document: Document) -> str:
    """Name the hardware that a result is of."""
    machine = document["machine"]
    return str(machine["gpu"] or f"{machine['processor']}, {machine['threads']} threads")


def caption_of(document: Document) -> str:
    """Caption one result."""
    if "run" not in document:
        command = "python -m eval.replay --json eval/results/replay.json"
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
    """Caption what was put together from results of several sets: their one command, if it is one.

    What differs is told for each: machines, commits, numbers of examples.
    """
    runs = [one["run"] for one in documents]
    examples = [one["settings"]["examples"] for one in documents if "examples" in one["settings"]]
    asked = f"{_joined(map(str, examples))} examples a set; " if examples else ""
    dates = sorted({run["date"] for run in runs})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    places = _joined((place_of(one) for one in documents), "; ")
    dtypes = _joined(one["settings"]["dtype"] for one in documents if "dtype" in one["settings"])
    commands = dict.fromkeys(f"`{_command(one)}`" for one in documents)
    told = ", ".join(commands) if len(commands) <= MOST_COMMANDS else "commands with each result"
    return (
        f"{places}, {dtypes}, {_joined(map(_versions, documents))}; {asked}"
        f"commit {_joined(run['commit'] for run in runs)}, {days}: {told}"
    )


def _versions(document: Document) -> str:
    machine = document["machine"]
    return f"torch {machine['torch']}, transformers {machine['transformers']}"


def _command(document: Document) -> str:
    """The command with ``TASK`` for the set and without its file: many sets then have the same."""
    task, command = document["settings"].get("task"), document["run"]["command"]
    command = re.sub(r" --out(=| )\S+", "", command)
    if not task:
        return str(command)
    return re.sub(rf"(--task[= ])\S*{re.escape(task)}(?=\s|$)", r"\1TASK", command)


def _joined(values: Iterable[str], between: str = ", ") -> str:
    return between.join(dict.fromkeys(values))
