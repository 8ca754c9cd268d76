"""The run folder: what a run is of, its last checkpoint and its log, each replaced whole."""

from __future__ import annotations

import io
import json
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ragaccel.errors import ConfigurationError
from ragaccel.replacing import replacing

if TYPE_CHECKING:
    from pathlib import Path

_RUN, _CHECKPOINT, _LOG = "run.json", "checkpoint.pt", "log.json"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder that a run can go on from. Nothing in it is shipped."""

    path: Path

    def claim(self, facts: dict[str, Any], name: str = _RUN) -> None:
        """Take the folder for a run, or find it taken by the same one.

        Args:
            facts: everything that the run's outcome depends on, as JSON knows it.
            name: the file that tells them; a part of the run may have one of its own.

        Raises:
            ConfigurationError: another run's folder; names what differs.
        """
        file = self.path / name
        if not file.exists():
            if name == _RUN and (self.path / _CHECKPOINT).exists():
                raise ConfigurationError(f"{self.path} holds a checkpoint of an unknown run")
            with replacing(file) as opened:
                opened.write((json.dumps(facts, indent=2) + "\n").encode())
            return
        try:
            found = _flat(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, AttributeError) as error:
            raise ConfigurationError(f"{file} is damaged: delete {self.path}") from error
        wanted = _flat(json.loads(json.dumps(facts)))
        differing = [
            f"{name} {found.get(name)!r} there, {wanted.get(name)!r} here"
            for name in sorted({*found, *wanted})
            if found.get(name) != wanted.get(name)
        ]
        if differing:
            raise ConfigurationError(
                f"{self.path} is another run's folder ({'; '.join(differing)}): give the same "
                "arguments to go on with that run, or another folder, or delete it"
            )

    def save(self, state: dict[str, Any], log: list[dict[str, Any]]) -> None:
        """Replace the checkpoint, and the log beside it."""
        buffer = io.BytesIO()
        torch.save({**state, "log": json.dumps(log)}, buffer)
        with replacing(self.path / _CHECKPOINT) as file:
            file.write(buffer.getbuffer())
        with replacing(self.path / _LOG) as file:
            file.write((json.dumps(log, indent=1) + "\n").encode())

    def load(self) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """The last checkpoint and its log; None where none was saved.

        Raises:
            ConfigurationError: a file that is no checkpoint.
        """
        file = self.path / _CHECKPOINT
        if not file.exists():
            return None
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
            return state, json.loads(state.pop("log"))
        except (OSError, RuntimeError, pickle.UnpicklingError, KeyError, ValueError) as error:
            raise ConfigurationError(
                f"{file} is no checkpoint: delete {self.path} to begin anew"
            ) from error


def _flat(facts: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested facts under one name each."""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
