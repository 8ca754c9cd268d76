"""The ledger: measurements on disk as they are made, so that a run that was stopped goes on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Ledger:
    """Rows of one run, in a file of JSON lines whose first line holds the run's settings.

    Without a path the rows are kept in memory alone. A last line cut short by a crash is dropped.
    ``kept_beside`` opens the one that belongs to a result file.

    Raises:
        ValueError: the file holds rows made with other settings, and names them; or is damaged.
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
        """The rows of contenders, without what a run notes beside them."""
        return [row for row in self.rows if "contender" in row]

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop all rows but those that are wanted."""
        kept = [row for row in self.rows if wanted(row)]
        if len(kept) < len(self.rows):
            self.rows = kept
            self._rewrite()

    def _rewrite(self) -> None:
        if self._path is not None:
            write_whole(self._path, "".join(map(_line, (self._settings, *self.rows))))

    def add(self, *rows: dict[str, Any]) -> None:
        """Append rows, at once on disk; those that count only together, in one go."""
        self.rows += rows
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(map(_line, rows)))


def kept_beside(out: Path | None, settings: dict[str, Any]) -> Ledger:
    """Open the ledger of a result file, or one in memory where no file is wanted."""
    return Ledger(out and out.with_name(f"{out.name.removesuffix('.json')}.rows.jsonl"), settings)


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there as a whole or, where that was cut short, as it was before."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _read(path: Path) -> list[dict[str, Any]]:
    """Read all lines; what stands behind the last line's end was cut short."""
    try:
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
        return [json.loads(line) for line in whole.split("\n") if line]
    except ValueError as error:
        raise ValueError(f"{path.name} is damaged ({error}): delete it") from error


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"
