"""A process of another environment that does measured work, asked in JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Work = dict[str, Any]


class Worker:
    """A process that reads work as JSON lines and replies in JSON lines; stderr is this one's."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], settings: Work
    ) -> None:
        """Start the process in ``folder``; its first line are the settings."""
        self.name = command[-1]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, **environment},
        )
        self.about = self.ask(**settings)

    def ask(self, **work: Any) -> Work:
        """Do one piece of work in the process and return its reply.

        Raises:
            RuntimeError: The process ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(work) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended: so does its output
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name} ended: what it said stands above")
        answer: Work = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
