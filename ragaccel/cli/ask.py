"""``ragaccel ask``: one question, one answer."""

from typing import TYPE_CHECKING, Annotated

import typer

from ragaccel.cli import options

if TYPE_CHECKING:
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.settings import Settings
    from ragaccel.cli.terminal import Terminal


def ask(
    terminal: "Terminal",
    target: options.Target = None,
    question: Annotated[
        str | None,
        typer.Argument(metavar="QUESTION", help="The question; or pipe it in.", show_default=False),
    ] = None,
    index: options.Index = None,
    *,
    settings: "Settings",
    compare: options.Compare = False,
    show_sources: options.ShowSources = False,
    stats: options.ShowStats = False,
    json: options.Json = False,
    plain: options.Plain = False,
    no_stream: options.NoStream = False,
    no_accel: options.NoAccel = False,
    resume: options.Continue = False,
) -> "ExitCode":
    """Index what is new in a folder, then answer a question from it.

    A text piped in beside the question is taken into account with the documents.

    Where they do not answer it, the nearest passages are shown and the exit code is 5.
    """
    from ragaccel.cli.answering import Manner
    from ragaccel.cli.exits import ExitCode, UsageError
    from ragaccel.cli.question import read_question
    from ragaccel.cli.room import open_room

    if compare and no_accel:
        raise UsageError("--compare measures against --no-accel: give one of them")
    asked = read_question(terminal, target, question, index)
    manner = Manner(json, not no_stream, plain, show_sources, stats, compare, not no_accel)
    with open_room(terminal, asked.source, settings, manner=manner, resume=resume) as room:
        answer = room.ask(asked.text, asked.context)
    return ExitCode.OK if answer.answered else ExitCode.NOT_ANSWERED
