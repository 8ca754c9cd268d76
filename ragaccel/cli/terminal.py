"""Terminal: the answer on stdout, everything else on stderr, colours where they can be seen."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.console import RenderableType

_LOG = logging.getLogger("ragaccel")

# One colour a passage, told apart on dark and light backgrounds; the seventh starts again.
PALETTE = ("cyan", "magenta", "green", "yellow", "blue", "red")

# A document may hold escape sequences; shown to a terminal they would be obeyed.
_CONTROL = dict.fromkeys({*range(32), *range(127, 160)} - {9, 10}, "\N{REPLACEMENT CHARACTER}")


def passage_style(number: int) -> str:
    """The colour of the passage with this number, counted from 1."""
    return PALETTE[(number - 1) % len(PALETTE)]


def printable(text: str) -> str:
    """The text without the control characters that a terminal would obey."""
    return text.translate(_CONTROL)


class Terminal:
    """Where a command's output goes."""

    def __init__(self, *, quiet: bool = False, color: str = "auto") -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        self.quiet = quiet
        self._told = False
        self._warnings: logging.Handler | None = None
        always = True if color == "always" else None
        never = True if color == "never" else None
        self.out = Console(highlight=False, force_terminal=always, no_color=never)
        self.err = Console(highlight=False, stderr=True, no_color=never)

    @property
    def colored(self) -> bool:
        """Whether stdout shows colours."""
        return self.out.color_system is not None and not self.out.no_color

    @property
    def interactive(self) -> bool:
        """Whether a person watches stderr, so that progress may be drawn there."""
        return self.err.is_terminal and not self.err.is_dumb_terminal and not self.quiet

    @property
    def wrap_width(self) -> int | None:
        """Where to break lines of running text, in cells; None when stdout is no terminal."""
        return self.out.width if self.out.is_terminal else None

    @property
    def unicode(self) -> bool:
        """Whether stdout can show more than ASCII."""
        encoding = getattr(sys.stdout, "encoding", None) or "ascii"
        return "utf" in encoding.lower()

    def write(self, text: str | Text, end: str = "") -> None:
        """Write to stdout, at once and as it is: nothing is wrapped or taken for markup."""
        body = text if isinstance(text, Text) else Text(text)
        self.out.print(body, end=end, soft_wrap=True)
        self.out.file.flush()

    def show(self, renderable: RenderableType) -> None:
        """Write a table or the like to stdout."""
        self.out.print(renderable, soft_wrap=not self.out.is_terminal)

    def json(self, document: Any) -> None:
        """Write one JSON document to stdout."""
        sys.stdout.write(json.dumps(document, ensure_ascii=False, indent=2, default=str) + "\n")
        sys.stdout.flush()

    def note(self, text: str | Text | RenderableType, style: str = "dim") -> None:
        """Tell on stderr how things went; --quiet leaves it out."""
        if not self.quiet:
            self._tell(text, style)

    def set_apart(self) -> None:
        """Put an empty line between what was told so far and what comes, where a person reads."""
        if self._told and self.interactive:
            self._tell(Text(), "")
            self._told = False

    def warn(self, text: str) -> None:
        """Tell on stderr what a person should look into."""
        self._tell(Text.assemble(("warning: ", "bold yellow"), printable(text)), "")

    def pass_on_warnings(self) -> None:
        """Tell what the library warns of in its log as any other warning."""
        if self._warnings is None:
            self._warnings = _Warnings(self)
            _LOG.addHandler(self._warnings)

    def fail(self, text: str) -> None:
        """Tell on stderr why the command could not do what was asked."""
        self._tell(Text.assemble(("error: ", "bold red"), printable(text)), "")

    def _tell(self, text: str | Text | RenderableType, style: str) -> None:
        body = Text(printable(text), style=style) if isinstance(text, str) else text
        self._told = True
        self.err.print(body, soft_wrap=isinstance(body, Text))

    def working(self, what: str) -> AbstractContextManager[object]:
        """A spinner on stderr while something takes its time, where a person watches."""
        if not self.interactive:
            return nullcontext()
        return self.err.status(f"[dim]{what}[/]", spinner="dots")

    def close(self) -> None:
        """Flush stdout."""
        if self._warnings is not None:
            _LOG.removeHandler(self._warnings)
        self.out.file.flush()


class _Warnings(logging.Handler):
    """Takes warnings of a log to a terminal."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(logging.WARNING)
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        self._terminal.warn(record.getMessage())


def silence_libraries() -> None:
    """Keep the progress bars and notices of the libraries below off the terminal."""
    for name, value in (
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
        ("HF_HUB_DISABLE_TELEMETRY", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
    ):
        os.environ.setdefault(name, value)
