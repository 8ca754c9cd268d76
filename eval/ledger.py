"""The ledger: measurements on disk as they are made, so that a run that was stopped goes on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


class Ledger:
    """Rows of one run, in a file of JSON lines whose first line holds the run's settings.

    Without a path the rows are kept in memory alone. A last line cut short by a crash is dropped.
    ``kept_beside`` opens the one that belongs to a result file.

    Raises:
        ValueError: the file holds rows made with other settings; names them.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self.rows: list[dict[str, Any]] = []
        self._path = path
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
        path.write_text("".join(_line(row) for row in (settings, *self.rows)), encoding="utf-8")

    @property
    def measurements(self) -> list[dict[str, Any]]:
        """The rows of contenders, without what a run notes beside them."""
        return [row for row in self.rows if "contender" in row]

    def add(self, *rows: dict[str, Any]) -> None:
        """Append rows, at once on disk; those that count only together, in one go."""
        self.rows += rows
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(map(_line, rows)))


def kept_beside(out: Path | None, settings: dict[str, Any]) -> Ledger:
    """Open the ledger of a result file, or one in memory where no file is wanted."""
    return Ledger(out and out.with_suffix(".rows.jsonl"), settings)


def _read(path: Path) -> list[dict[str, Any]]:
    """Read all lines; what stands behind the last line's end was cut short."""
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.split("\n") if line]


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"
