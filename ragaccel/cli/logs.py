"""``ragaccel logs``: questions asked before, and their answers."""

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from ragaccel.cli import options

if TYPE_CHECKING:
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.history import Turn
    from ragaccel.cli.terminal import Terminal

_MOST = 2**63 - 1  # the largest number that SQLite holds


def logs(
    terminal: "Terminal",
    limit: Annotated[int, typer.Option("-n", min=1, max=_MOST, help="How many, the latest.")] = 5,
    containing: Annotated[
        str, typer.Option("--containing", metavar="TEXT", help="Only where this text occurs.")
    ] = "",
    conversation: Annotated[
        int | None,
        typer.Option(
            "--conversation", metavar="N", min=1, max=_MOST, help="Only this conversation."
        ),
    ] = None,
    path: Annotated[bool, typer.Option("--path", help="Print where the history is kept.")] = False,
    json: options.Json = False,
) -> "ExitCode":
    """Show past questions and answers, the latest last."""
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.history import History, default_history_path

    if path:
        terminal.write(str(default_history_path()), end="\n")
        return ExitCode.OK
    history = History()
    try:
        turns = history.recent(limit, containing, conversation)[::-1]
    finally:
        history.close()
    if json:
        terminal.json([_document(turn) for turn in turns])
    elif not turns:
        terminal.note(
            "nothing was asked yet" if not containing else "no question or answer like it"
        )
    for turn in turns if not json else ():
        _show(terminal, turn)
    return ExitCode.OK


def _show(terminal: "Terminal", turn: "Turn") -> None:
    from rich.text import Text

    from ragaccel.cli.terminal import printable

    when = datetime.fromtimestamp(turn.asked).strftime("%Y-%m-%d %H:%M")
    head = f"#{turn.turn_id}  {when}  {turn.source}  conversation {turn.conversation}"
    terminal.write(Text(printable(head), style="dim"), end="\n")
    terminal.write(Text(printable(turn.question), style="bold"), end="\n")
    terminal.write(printable(turn.answer), end="\n" if turn.answer else "")
    if turn.state != "answered":
        terminal.write(Text(f"({turn.state})", style="yellow"), end="\n")
    for source in turn.details.get("sources", ()):
        if source.get("used"):
            line = f"  {source['number']} {source['citation']}"
            terminal.write(Text(printable(line), style="dim"), end="\n")
    terminal.write("\n")


def _document(turn: "Turn") -> dict[str, object]:
    return {
        "id": turn.turn_id,
        "conversation": turn.conversation,
        "source": turn.source,
        "asked": datetime.fromtimestamp(turn.asked).astimezone().isoformat(timespec="seconds"),
        "question": turn.question,
        "answer": turn.answer,
        "state": turn.state,
        "model": turn.model,
        **turn.details,
    }
