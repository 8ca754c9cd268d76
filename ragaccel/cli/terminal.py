"""Output to the terminal: styles, word wrap, marked answers, progress and exit codes."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import sys
import time
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ragaccel.errors import CapacityError, ConfigurationError, EmptyIndexError, RagaccelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from rich.console import RenderableType

    from ragaccel.answer import Segment
    from ragaccel.retrieval.indexing import Progress as IndexingProgress


_LOG = logging.getLogger("ragaccel")

# The colours of passages 1 to 6, then again; readable on dark and light backgrounds.
PALETTE = ("cyan", "magenta", "green", "yellow", "blue", "red")

# A document may hold escape sequences that would control the terminal.
_CONTROL = dict.fromkeys({*range(32), *range(127, 160)} - {9, 10}, "\N{REPLACEMENT CHARACTER}")


def passage_style(number: int) -> str:
    """Return the colour of a passage by its number, counted from 1."""
    return PALETTE[(number - 1) % len(PALETTE)]


def printable(text: str) -> str:
    """Return a text with its control characters replaced, except tabs and line feeds."""
    return text.translate(_CONTROL)


class Terminal:
    """The output of a command: results to stdout, notes, warnings and errors to stderr."""

    def __init__(self, *, quiet: bool = False, color: str = "auto") -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        self.quiet = quiet
        self.json_indent: int | None = 2
        """Of JSON documents; None: each is one line."""
        self._has_written = False
        self._warnings: logging.Handler | None = None
        always, never = (True if color == wanted else None for wanted in ("always", "never"))
        self.out = Console(highlight=False, force_terminal=always, no_color=never)
        self.err = Console(highlight=False, stderr=True, no_color=never)

    @property
    def colored(self) -> bool:
        """Return whether stdout shows colours."""
        return self.out.color_system is not None and not self.out.no_color

    @property
    def interactive(self) -> bool:
        """Return whether stderr is a terminal that progress may be drawn on."""
        return self.err.is_terminal and not self.err.is_dumb_terminal and not self.quiet

    @property
    def wrap_width(self) -> int | None:
        """Return the width in cells to wrap text at, or None if stdout is not a terminal."""
        return self.out.width if self.out.is_terminal else None

    @property
    def unicode(self) -> bool:
        """Return whether stdout can show more than ASCII."""
        encoding = getattr(sys.stdout, "encoding", None) or "ascii"
        return "utf" in encoding.lower()

    def write(self, text: str | Text, end: str = "") -> None:
        """Write to stdout and flush; the text is neither wrapped nor read as markup."""
        body = text if isinstance(text, Text) else Text(text)
        self.out.print(body, end=end, soft_wrap=True)
        self.out.file.flush()

    def show(self, renderable: RenderableType) -> None:
        """Write a table or other object of rich to stdout."""
        self.out.print(renderable, soft_wrap=not self.out.is_terminal)

    def json(self, document: Any) -> None:
        """Write one JSON document to stdout."""
        text = json.dumps(document, ensure_ascii=False, indent=self.json_indent, default=str)
        self.out.file.write(text + "\n")
        self.out.file.flush()

    def note(self, text: str | Text | RenderableType, style: str = "dim") -> None:
        """Write a note to stderr; --quiet leaves it out."""
        if not self.quiet:
            self._print(text, style)

    def separate(self) -> None:
        """Write an empty line after earlier notes if stderr is a terminal."""
        if self._has_written and self.interactive:
            self._print(Text(), "")
            self._has_written = False

    def warn(self, text: str) -> None:
        """Write a warning to stderr."""
        self._print(Text.assemble(("warning: ", "bold yellow"), printable(text)), "")

    def show_log_warnings(self) -> None:
        """Show warnings of the ragaccel logger as warnings of the command."""
        if self._warnings is None:
            self._warnings = _WarningHandler(self)
            _LOG.addHandler(self._warnings)

    def fail(self, text: str) -> None:
        """Write an error to stderr."""
        self._print(Text.assemble(("error: ", "bold red"), printable(text)), "")

    def _print(self, text: str | Text | RenderableType, style: str) -> None:
        body = Text(printable(text), style=style) if isinstance(text, str) else text
        self._has_written = True
        self.err.print(body, soft_wrap=isinstance(body, Text))

    def working(self, what: str) -> AbstractContextManager[object]:
        """Return a context that shows a spinner on stderr if it is a terminal."""
        if not self.interactive:
            return nullcontext()
        return self.err.status(f"[dim]{what}[/]", spinner="dots")

    def progress(self, *columns: str | ProgressColumn, period: float = 30.0) -> Progress:
        """Return progress bars on stderr, which disappear at their end; none without a terminal.

        ``period`` is the time in seconds over which the speed is estimated.
        """
        return Progress(
            TextColumn("[dim]{task.description}"),
            BarColumn(bar_width=28),
            *columns,
            console=self.err,
            transient=True,
            speed_estimate_period=period,
            disable=not self.interactive,
        )

    def close(self) -> None:
        """Flush stdout and stop showing warnings of the ragaccel logger."""
        if self._warnings is not None:
            _LOG.removeHandler(self._warnings)
        self.out.file.flush()


class _WarningHandler(logging.Handler):
    """A logging handler that shows warnings on a terminal."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(logging.WARNING)
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        self._terminal.warn(record.getMessage())


def silence_libraries() -> None:
    """Turn off the progress bars and notices of transformers and huggingface_hub."""
    for name, value in (
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
        ("HF_HUB_DISABLE_TELEMETRY", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
    ):
        os.environ.setdefault(name, value)


_PARTS = re.compile(r"\n|[^\S\n]+|\S+")


class WordWrap:
    """A writer that wraps lines between words at ``width`` cells; None: it writes text unchanged.

    It writes a word when the space after the word comes; ``finish`` writes the last word.
    """

    def __init__(self, write: Callable[[Text], None], width: int | None) -> None:
        self._write = write
        self._width = width
        self._column = 0
        self._space = ""
        self._word = Text()

    def feed(self, text: str, style: str = "") -> None:
        """Write the next text, in one style, up to its last complete word."""
        if self._width is None:
            self._write(Text(text, style=style))
            return
        for part in _PARTS.findall(text):
            if part == "\n":
                self._end_word()
                self._emit(Text("\n"))
                self._column, self._space = 0, ""
            elif part.isspace():
                self._end_word()
                self._space += part
            else:
                self._word.append(part, style=style)

    def finish(self) -> None:
        """Write the last word."""
        self._end_word()

    def _end_word(self) -> None:
        if not self._word or self._width is None:
            return
        width = cell_len(self._word.plain)
        if self._column and self._column + cell_len(self._space) + width > self._width:
            self._emit(Text("\n"))
            self._column, self._space = 0, ""
        self._emit(Text(self._space) + self._word)
        self._column += cell_len(self._space) + width
        self._word, self._space = Text(), ""

    def _emit(self, text: Text) -> None:
        if text:
            self._write(text)


_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_BEFORE_CITATION = " .,;:!?\"'”’)»"


def number_mark(terminal: Terminal, number: int) -> str:
    """Return the number shown after a copied span: superscript, or ``[1]`` on ASCII terminals."""
    return str(number).translate(_SUPERSCRIPTS) if terminal.unicode else f"[{number}]"


class MarkedAnswer:
    """A writer of an answer's segments as they come, with copied spans marked.

    A copied span stands in «…» (``<<…>>`` on an ASCII terminal) and has its passage's colour. The
    passage's number follows, unless the answer itself cites it, as in ``«The hut sleeps 14.» [2]``.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._wrap = WordWrap(terminal.write, terminal.wrap_width)
        self._span_number = 0  # passage number of a span that may have ended; 0 if none
        self._pending = ""  # text after that span, which may be the start of a citation

    def add(self, segments: Iterable[Segment]) -> None:
        """Write the next segments; adjacent segments of one passage are one span."""
        for segment in segments:
            number = segment.passage_number
            if not number:
                self._add_text(segment.text)
                continue
            if number != self._span_number or self._pending:
                self._end_span(cited=False)
                self._feed("«" if self._terminal.unicode else "<<", number)
            self._feed(segment.text, number)
            self._span_number = number

    def finish(self) -> None:
        """End the last span and the line."""
        self._end_span(cited=False)
        self._wrap.finish()
        self._terminal.write("\n")

    def _add_text(self, text: str) -> None:
        self._pending += text
        if not self._span_number:
            self._end_span(cited=False)
            return
        follows = self._pending.lstrip(_BEFORE_CITATION)
        citation = f"[{self._span_number}]"
        if not citation.startswith(follows[: len(citation)]):
            self._end_span(cited=False)
        elif len(follows) >= len(citation):
            self._end_span(cited=True)

    def _end_span(self, *, cited: bool) -> None:
        """Close the span, add its number unless the answer cites it, and write the pending text."""
        if self._span_number:
            self._feed("»" if self._terminal.unicode else ">>", self._span_number)
            if not cited:
                self._feed(number_mark(self._terminal, self._span_number), self._span_number)
        self._feed(self._pending, 0)
        self._span_number, self._pending = 0, ""

    def _feed(self, text: str, number: int) -> None:
        style = passage_style(number) if number and self._terminal.colored else ""
        if text:
            self._wrap.feed(printable(text), style)


_MAX_NAME_LENGTH = 40
_SPEED_PERIOD = 1e6  # seconds; one batch of passages may take longer than the default of 30


@contextmanager
def indexing_progress(
    terminal: Terminal, command: str
) -> Iterator[Callable[[IndexingProgress], None]]:
    """Yield a function that draws the progress of indexing; the bar disappears at the end.

    One bar covers all stages, so that its remaining time is that of all work. Nothing is drawn
    before the first file, or without a terminal. If a run will take longer than a minute, a note
    says so; ``command`` is the command line of this run for it.
    """
    estimate = _Estimate(terminal, command)
    bars = terminal.progress(
        "{task.fields[count]}",
        TimeRemainingColumn(),
        "[dim]{task.fields[name]}",
        period=_SPEED_PERIOD,
    )
    task = bars.add_task("reading", total=None, visible=False, count="", name="")

    def draw(progress: IndexingProgress, /) -> None:
        estimate.update(progress)
        if not terminal.interactive:
            return
        files = f"{progress.files_done:,}/{progress.files_total:,} files"
        passages = f"{progress.passages_done:,}/{progress.passages_total:,} passages"
        bars.update(
            task,
            description=progress.stage,
            completed=progress.work_done,
            total=progress.work_total or None,
            count=f"{files}, {passages}" if progress.passages_total else files,
            visible=progress.files_total > 0,
            name=_short(progress.path),
        )

    with bars:
        yield draw


_MEASURED_SECONDS = 3.0  # of embedding, before its speed is taken for that of the whole run
_LONG_SECONDS = 60.0


class _Estimate:
    """The note about a long run, written once the speed of embedding is known."""

    def __init__(self, terminal: Terminal, command: str) -> None:
        self._terminal, self._command = terminal, command
        self._began: tuple[float, float] | None = None
        self._is_told = False

    def update(self, progress: IndexingProgress) -> None:
        """Take the progress of a run."""
        if progress.stage != "embedding" or self._is_told:
            return
        now, done = time.perf_counter(), progress.work_done
        if not done:  # the first batch also loads the model
            return
        if self._began is None:
            self._began = now, done
        seconds, gained = now - self._began[0], done - self._began[1]
        if seconds < _MEASURED_SECONDS or not gained:
            return
        self._is_told = True
        left = (progress.work_total - done) * seconds / gained
        if left > _LONG_SECONDS:
            self._terminal.note(
                f"indexing takes about {duration(left)}. Ctrl-C keeps what is done, and so does"
                f" `{self._command} --for 2m`; the next run goes on"
            )


def duration(seconds: float) -> str:
    """Return a time in words, such as 40 s, 12 min or 1.5 h."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _short(path: str) -> str:
    name = os.path.basename(path).replace("\n", " ")
    if len(name) > _MAX_NAME_LENGTH:
        name = name[: _MAX_NAME_LENGTH - 1] + "…"
    return escape(printable(name))


class ExitCode(IntEnum):
    """Exit codes of the commands, a part of the public interface."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOTHING = 3
    PARTIAL = 4
    NOT_ANSWERED = 5
    INTERRUPTED = 130


class UsageError(ConfigurationError):
    """The error that the command line is wrong; the message says how to write it."""


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code for an error."""
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, EmptyIndexError):
        return ExitCode.NOTHING
    if isinstance(error, ConfigurationError) and not isinstance(error, CapacityError):
        return ExitCode.USAGE
    return ExitCode.FAILED


def explain(error: BaseException) -> str:
    """Return one line about an error: what went wrong and what to do.

    Errors of this package have such a message. Common errors of the system get one here; any other
    error is a defect and is shown with its type.
    """
    message = " ".join(str(error).split())
    if isinstance(error, RagaccelError):
        # the library names its own argument
        return message.replace("path=FILE", "--index PATH") or type(error).__name__
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full: free some space and run this again; what was saved so far is kept"
    if isinstance(error, PermissionError):
        return f"no permission: {error.filename or message}"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"a name is too long for this file system: {str(error.filename)[:60]}…"
    if isinstance(error, FileNotFoundError):
        return f"no such file or folder: {error.filename or message}"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out of memory: use a smaller --model, -k or --max-new-tokens"
    return f"unexpected {type(error).__name__}: {message} (--debug shows the traceback)"
