"""Make the SVG screenshots of the README from the output of the command on a terminal.

python demos/screens.py [FOLDER]
"""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
WIDTH = 96
SCREENS = {
    "ask": ("How high may the swell be for a landing at Gannet Ledge?", "--compare"),
}
_ERASED = re.compile(r"[^\n]*\n[^\n]*\x1b\[1A\x1b\[2K")  # a spinner that was erased
_REDRAWN = re.compile(r"[^\n]*\r(?=[^\n])")


def main(folder: Path) -> None:
    """Make every screenshot; index the documents first, so that none shows the indexing."""
    shown("index", "demos/documents")
    for name, question in SCREENS.items():
        words = ("ask", "demos/documents", *question)
        screen = Console(file=io.StringIO(), record=True, width=WIDTH)
        screen.print(Text.assemble(("$ ", "dim"), (f"ragaccel {shlex.join(words)}", "bold")))
        screen.print(Text.from_ansi(shown(*words).rstrip()))
        screen.save_svg(str(folder / f"{name}.svg"), title="ragaccel")


def shown(*arguments: str) -> str:
    """Return the final output of a command on a terminal of WIDTH columns, with colours."""
    terminal, inside = pty.openpty()
    settings = {**os.environ, "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "ragaccel", *arguments]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": inside, "stderr": inside}
    with subprocess.Popen(command, cwd=HERE.parent, env=settings, **pipes):
        os.close(inside)
        text = b"".join(iter(lambda: _read(terminal), b"")).decode()
    os.close(terminal)
    return left_of(text.replace("\r\n", "\n"))


def left_of(text: str) -> str:
    """Return terminal output without the spinners that were erased."""
    return _REDRAWN.sub("", _ERASED.sub("", text))


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux raises it when the command has ended
        return b""


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else HERE / "screens")
