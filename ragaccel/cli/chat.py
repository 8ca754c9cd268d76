"""``ragaccel chat``: a conversation about a folder of documents."""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from ragaccel.cli import options

if TYPE_CHECKING:
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.room import Room
    from ragaccel.cli.settings import Settings
    from ragaccel.cli.terminal import Terminal

_HELP = """\
/sources  every passage the last answer was made from
/new      forget what was said and begin anew
/quit     leave (so does Ctrl-D)"""


def chat(
    terminal: "Terminal",
    target: options.Target = None,
    index: options.Index = None,
    *,
    settings: "Settings",
    show_sources: options.ShowSources = False,
    stats: options.ShowStats = False,
    no_accel: options.NoAccel = False,
    resume: options.Continue = False,
) -> "ExitCode":
    """Ask one question after the other.

    What was said before is remembered, here and for --continue.

    Questions are read from the terminal, or a line each from a pipe. The exit code is 5 then
    where the documents do not answer one of them.
    """
    from ragaccel.cli.answering import Manner
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.room import open_room
    from ragaccel.cli.source import locate

    source = locate(target, index)
    manner = Manner(show_sources=show_sources, show_stats=stats, accelerate=not no_accel)
    codes = [ExitCode.OK]
    with open_room(terminal, source, settings, manner=manner, resume=resume) as room:
        if sys.stdin.isatty():
            terminal.note("a question, /help, or Ctrl-D to leave")
        while (line := _read_line(terminal)) not in (None, "/quit", "/exit"):
            if line and line.startswith("/"):
                _command(terminal, room, line)
            elif line:
                codes.append(_answer(terminal, room, line))
    if sys.stdin.isatty():
        return ExitCode.OK
    # what failed counts before what was not answered
    return max(codes, key=lambda code: 0.5 if code == ExitCode.NOT_ANSWERED else code)


def _read_line(terminal: "Terminal") -> str | None:
    if not sys.stdin.isatty():
        line = sys.stdin.buffer.readline().decode("utf-8", "replace")
        return line.strip() if line else None
    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() its editing and history)
    try:
        return terminal.err.input("\n[bold]> [/]").strip()
    except EOFError:
        terminal.note("")
        return None


def _answer(terminal: "Terminal", room: "Room", question: str) -> "ExitCode":
    """Answer one question; what goes wrong with it, or Ctrl-C, ends the answer and not the chat."""
    from ragaccel.cli.exits import ExitCode, exit_code_of, explain
    from ragaccel.errors import RagaccelError

    try:
        answer = room.ask(question)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        terminal.note("interrupted")
        return ExitCode.INTERRUPTED
    except RagaccelError as error:
        terminal.fail(explain(error))
        return exit_code_of(error)
    return ExitCode.OK if answer.answered else ExitCode.NOT_ANSWERED


def _command(terminal: "Terminal", room: "Room", line: str) -> None:
    from ragaccel.cli.report import show_sources

    if line == "/new":
        room.conversation.start_over()
        terminal.note("a new conversation")
    elif line == "/sources" and room.last is not None:
        show_sources(terminal, room.last, everything=True)
    elif line == "/sources":
        terminal.note("nothing was asked yet")
    else:
        terminal.note(_HELP)
