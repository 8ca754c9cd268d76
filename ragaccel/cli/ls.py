"""``ragaccel ls``: the files of an index."""

from typing import TYPE_CHECKING, Annotated

import typer

from ragaccel.cli import options

if TYPE_CHECKING:
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.terminal import Terminal

_NAMELESS = "(of no document)"  # what a program put in without a path


def ls(
    terminal: "Terminal",
    target: options.Target = None,
    index: options.Index = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Files that could not be read or were passed over.")
    ] = False,
    json: options.Json = False,
) -> "ExitCode":
    """List the files of an index, with how many passages each has.

    With --failed those that it does not hold as they stand, each with the reason: they could not be
    read, were read by a guess of their encoding, or are no documents.
    """
    from rich.text import Text

    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.knowledge import open_store
    from ragaccel.cli.report import is_name
    from ragaccel.cli.source import locate
    from ragaccel.cli.unread import (
        count_unread,
        file_documents,
        list_unread,
        one_line,
        unread_documents,
    )

    source = locate(target, index)
    with open_store(source) as store:
        if json:
            terminal.json(unread_documents(store) if failed else file_documents(store))
            return ExitCode.OK
        if failed:
            list_unread(terminal, store)
            return ExitCode.OK
        records = list(store.files().values())
        num_failed, num_skipped = count_unread(store)
    for record in records:
        if record.status != "indexed":
            continue
        line = Text(f"{record.num_passages:7,}  ", style="dim").append(
            one_line(record.path or _NAMELESS)
        )
        if record.title and not is_name(record.title, record.path):
            line.append(f"  {one_line(record.title)}", style="dim")
        terminal.write(line, end="\n")
    if num_failed or num_skipped:
        told = f"{num_failed:,} files could not be read, {num_skipped:,} were passed over"
        terminal.note(f"{told}: `{source.command('ls', '--failed')}` names them")
    return ExitCode.OK
