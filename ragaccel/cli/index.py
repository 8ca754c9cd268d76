"""``ragaccel index``: take the documents of a folder into its index."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragaccel.cli import options

if TYPE_CHECKING:
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.settings import Settings
    from ragaccel.cli.terminal import Terminal


def index(
    terminal: "Terminal",
    target: options.Target = None,
    index: options.Index = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Start the index anew.")] = False,
    passages: Annotated[
        Path | None,
        typer.Option(
            "--passages",
            metavar="FILE",
            help="Take ready-made passages: TSV `id<TAB>text` or JSONL {id, title, text}.",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail when a file cannot be read.")
    ] = False,
    json: options.Json = False,
    *,
    settings: "Settings",
) -> "ExitCode":
    """Take the documents of a folder into its index.

    New and changed files are read, unchanged ones skipped, vanished ones dropped; links that lead
    out of the folder are passed over. An index made anew takes the old one's place when it is
    whole.
    """
    from ragaccel.cli.exits import ExitCode, UsageError
    from ragaccel.cli.knowledge import index_source, report_document, tell_report
    from ragaccel.cli.source import locate, locate_passages

    if passages is not None and target is not None:
        raise UsageError("give DIR or --passages FILE, not both")
    source = locate_passages(passages, index) if passages else locate(target, index)
    report = index_source(
        terminal,
        source,
        settings,
        include=include or (),
        exclude=exclude or (),
        rebuild=rebuild,
    )
    if json:
        terminal.json(report_document(source, report))
    else:
        tell_report(terminal, source, report, always=True)
    if not report.failed:
        return ExitCode.OK
    return ExitCode.FAILED if strict else ExitCode.PARTIAL
