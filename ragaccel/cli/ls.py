"""``ragaccel ls``: the files of an index."""

from typing import TYPE_CHECKING

from ragaccel.cli import options

if TYPE_CHECKING:
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.terminal import Terminal

_NAMELESS = "(of no document)"  # what a program put in without a path


def ls(
    terminal: "Terminal",
    target: options.Target = None,
    index: options.Index = None,
    json: options.Json = False,
) -> "ExitCode":
    """List the files of an index, with how many passages each has."""
    from dataclasses import asdict

    from rich.text import Text

    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.knowledge import open_store
    from ragaccel.cli.report import is_name
    from ragaccel.cli.source import locate

    source = locate(target, index)
    with open_store(source) as store:
        records = list(store.files().values())
    if json:
        terminal.json([asdict(record) for record in records])
        return ExitCode.OK
    for record in records:
        if record.status != "indexed":
            continue
        line = Text(f"{record.num_passages:7,}  ", style="dim").append(
            _one_line(record.path or _NAMELESS)
        )
        if record.title and not is_name(record.title, record.path):
            line.append(f"  {_one_line(record.title)}", style="dim")
        terminal.write(line, end="\n")
    skipped = sum(record.status != "indexed" for record in records)
    if skipped:
        terminal.note(f"{skipped} binary files passed over")
    return ExitCode.OK


def _one_line(text: str) -> str:
    from ragaccel.cli.terminal import printable

    return printable(text.replace("\n", "\0"))
