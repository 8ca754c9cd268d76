"""Examples: what is asked, of which passages, and what a recorded answer says."""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragaccel.passage import Passage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Draw = Callable[[Sequence[int]], tuple[tuple[int, ...], tuple[int, ...]]]

TASKS = Path(__file__).parent / "tasks"
DATA_VARIABLE = "RAGACCEL_DATA"


class MissingDataError(FileNotFoundError):
    """A corpus that does not ship and is not where the data folder should be."""


@dataclass(frozen=True, slots=True)
class Example:
    """One question. ``history`` holds earlier messages, ``answer`` is empty if none is recorded.

    Where no passages are asked about, there is no question either but a ``prompt``, to be continued
    as it stands; or ``draw``, which makes prompt and answer in token ids out of those there are.
    """

    example_id: str
    question: str = ""
    passages: tuple[Passage, ...] = ()
    answer: str = ""
    history: tuple[dict[str, str], ...] = ()
    prompt: str = ""
    draw: Draw | None = None


def load_task(name: str, limit: int | None = None, data: Path | None = None) -> list[Example]:
    """Load the examples of a task by the name of its file in ``eval/tasks``, or of a JSONL file.

    A file of one's own holds objects ``{id, question, passages: [{title, text}], answer}`` a line.

    Raises:
        FileNotFoundError: no such task; names those there are.
        MissingDataError: its corpus is not at hand; says how to point at it.
    """
    if name.endswith(".jsonl"):
        return read_unified(Path(name), limit)
    if not (TASKS / f"{name}.py").is_file():
        known = ", ".join(sorted(path.stem for path in TASKS.glob("*.py")))
        raise FileNotFoundError(f"no task {name!r}: take one of {known}, or a .jsonl file")
    examples: list[Example] = importlib.import_module(f"eval.tasks.{name}").load(limit, data)
    return examples


def read_unified(path: Path, limit: int | None = None) -> list[Example]:
    """Read ``{id, question, history, passages, answer}`` objects, one a line."""
    return [_example(row) for row in islice(read_rows(path), limit)]


def in_data(name: str, data: Path | None = None) -> Path:
    """Find a file of the data folder: ``data``, or what the variable RAGACCEL_DATA names.

    Raises:
        MissingDataError: says what is missing and how to give it.
    """
    folder = data or (Path(os.environ[DATA_VARIABLE]) if DATA_VARIABLE in os.environ else None)
    if folder is None:
        raise MissingDataError(
            f"{name} does not ship with the project: give its folder with --data or in the "
            f"variable {DATA_VARIABLE}, or take a task that ships (--task demo)"
        )
    path = folder / name
    if not path.exists():
        raise MissingDataError(f"the data folder {folder} holds no {name}")
    return path


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read a file of JSON objects, one a line."""
    with path.open(encoding="utf-8", newline="\n") as file:  # other separators stand in strings
        for line in file:
            if line.strip():
                yield json.loads(line)


def _example(row: dict[str, Any]) -> Example:
    passages = tuple(
        Passage(f"{row['id']}/{number}", part["text"], part.get("title", ""), end=len(part["text"]))
        for number, part in enumerate(row["passages"], start=1)
        if part["text"].strip()
    )
    history = tuple(
        {"role": "assistant" if turn["role"] != "user" else "user", "content": turn["text"]}
        for turn in row.get("history", ())
    )
    answer = row.get("answer", "").strip()
    return Example(str(row["id"]), row["question"].strip(), passages, answer, history)
