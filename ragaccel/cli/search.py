"""``ragaccel search``: the passages nearest to a query, without a language model."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ragaccel.cli import options

if TYPE_CHECKING:
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.settings import Settings
    from ragaccel.cli.terminal import Terminal
    from ragaccel.passage import Passage


def search(
    terminal: "Terminal",
    target: options.Target = None,
    query: Annotated[
        str | None, typer.Argument(metavar="QUERY", help="What to look for; or pipe it in.")
    ] = None,
    index: options.Index = None,
    mode: Annotated[
        Literal["fused", "dense", "text"],
        typer.Option(help="By meaning and words together, by meaning, or by words."),
    ] = "fused",
    full: Annotated[bool, typer.Option("--full", help="Whole passages, not their start.")] = False,
    json: options.Json = False,
    *,
    settings: "Settings",
) -> "ExitCode":
    """Find passages, without a model, and show their scores.

    What is new in the folder is indexed first.
    """
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.knowledge import open_knowledge
    from ragaccel.cli.question import read_question
    from ragaccel.cli.report import passage_document
    from ragaccel.errors import NothingIndexedError

    asked = read_question(terminal, target, query, index, verb="search")
    with open_knowledge(terminal, asked.source, settings) as knowledge:
        passages = knowledge.retriever.search(asked.text, settings.k, mode=mode)
    if json:
        terminal.json(
            {
                "query": asked.text,
                "mode": mode,
                "passages": [passage_document(passage) for passage in passages],
            }
        )
    if not passages:
        raise NothingIndexedError(f"no passage of {asked.source.name} has to do with it")
    if not json:
        for number, passage in enumerate(passages, start=1):
            _show(terminal, number, passage, full=full)
    return ExitCode.OK


def _show(terminal: "Terminal", number: int, passage: "Passage", *, full: bool) -> None:
    from rich.text import Text

    from ragaccel.cli.report import excerpt, source_line
    from ragaccel.cli.terminal import printable

    terminal.write(source_line(terminal, number, passage, score=True), end="\n")
    body = printable(passage.text) + "\n" if full else excerpt(passage, terminal.wrap_width)
    terminal.write(Text(body), end="\n")
