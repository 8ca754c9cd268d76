"""Examples: what is asked, of which passages, and what a recorded answer says."""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragaccel.passage import Passage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Draw = Callable[[Sequence[int]], tuple[tuple[int, ...], tuple[int, ...]]]

TASKS = Path(__file__).parent / "tasks"
DATA_VARIABLE = "RAGACCEL_DATA"


class MissingDataError(FileNotFoundError):
    """A corpus that does not ship and is not where the data folder should be."""


@dataclass(frozen=True, slots=True)
class Example:
    """One question. ``history`` holds earlier messages, ``answer`` is empty if none is recorded.

    Where no passages are asked about, there is no question either but a ``prompt``, to be continued
    as it stands; or ``turns``, what the user of a chat says: first this, then, when it is answered,
    that; or ``draw``, which makes prompt and answer in token ids out of those there are.
    """

    example_id: str
    question: str = ""
    passages: tuple[Passage, ...] = ()
    answer: str = ""
    history: tuple[dict[str, str], ...] = ()
    prompt: str = ""
    turns: tuple[str, ...] = ()
    draw: Draw | None = None


def load_task(name: str, limit: int | None = None, data: Path | None = None) -> list[Example]:
    """Load the examples of a task by the name of its file in ``eval/tasks``, or of a JSONL file.

    A file of one's own holds an object a line: ``{id, question, passages: [{title, text}],
    answer}``, ``{id, prompt, answer}`` or ``{id, turns}``.

    Raises:
        FileNotFoundError: no such task; names those there are.
        MissingDataError: its corpus is not at hand; says how to point at it.
    """
    if name.endswith(".jsonl"):
        return read_unified(Path(name), limit)
    if (TASKS / f"{name}.py").is_file():
        task = importlib.import_module(f"eval.tasks.{name}")
        examples: list[Example] = task.load(limit, data)
        return examples
    if name in task_names():
        return read_unified(TASKS / f"{name}.jsonl", limit)
    raise FileNotFoundError(
        f"no task {name!r}: take one of {', '.join(task_names())}, or a .jsonl file"
    )


def task_names() -> list[str]:
    """The tasks there are: what loads its examples, and files of examples as they stand."""
    return sorted({path.stem for path in TASKS.iterdir() if path.suffix in {".py", ".jsonl"}})


def read_unified(path: Path, limit: int | None = None) -> list[Example]:
    """Read a file of objects as ``load_task`` takes them, one a line."""
    return [_example(row) for row in islice(read_rows(path), limit)]


def has_data(data: Path | None = None) -> bool:
    """Whether a data folder is named, as an option or in the variable RAGACCEL_DATA.

    Raises:
        MissingDataError: one is named, but it is none.
    """
    if data is None and DATA_VARIABLE not in os.environ:
        return False
    in_data("rag", data)
    return True


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


def telling_none_of(rows: Iterable[Example], measured: Sequence[Example]) -> list[Example]:
    """Leave out of some rows those that would tell a measured one's answer to who remembers them.

    Such are the measured rows themselves (a task may spread its few over the whole file), rows of
    the same answer, and later turns of a conversation, whose history quotes the earlier answers.
    """
    ids = {one.example_id for one in measured}
    answers = {one.answer for one in measured if one.answer}

    def tells(row: Example) -> bool:
        said = (row.answer, row.prompt, *(message["content"] for message in row.history))
        return row.example_id in ids or any(answer in text for text in said for answer in answers)

    return [row for row in rows if not tells(row)]


def alternate(
    rows: Iterable[dict[str, Any]], kind: Callable[[dict[str, Any]], str], limit: int | None = None
) -> list[dict[str, Any]]:
    """Take the rows of each kind in turn, so that a few of them are of every kind."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(kind(row), []).append(row)
    turns = chain.from_iterable(zip_longest(*kinds.values()))
    return list(islice((row for row in turns if row is not None), limit))


def _example(row: dict[str, Any]) -> Example:
    if "prompt" in row:
        return Example(str(row["id"]), prompt=row["prompt"], answer=row.get("answer", ""))
    if "turns" in row:
        return Example(str(row["id"]), turns=tuple(row["turns"]))
    passages = tuple(
        Passage(f"{row['id']}/{number}", part["text"], part.get("title", ""), end=len(part["text"]))
        for number, part in enumerate(row["passages"], start=1)
        if part["text"].strip()
    )
    answer = row.get("answer", "").strip()
    return Example(
        str(row["id"]),
        row["question"].strip(),
        passages,
        answer,
        as_messages(row.get("history", ())),
    )


def as_messages(turns: Iterable[dict[str, str]]) -> tuple[dict[str, str], ...]:
    """The turns of a unified row as a chat's messages: whoever is not the user is the assistant."""
    return tuple(
        {"role": "assistant" if turn["role"] != "user" else "user", "content": turn["text"]}
        for turn in turns
    )
