"""``ragaccel doctor``: whether everything that is needed is there."""

from typing import TYPE_CHECKING, Annotated

import typer

from ragaccel.cli import options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ragaccel.cli.checks import Check
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.settings import Settings
    from ragaccel.cli.source import Source
    from ragaccel.cli.terminal import Terminal
    from ragaccel.llm import LLM

_MARKS = {
    "ok": ("✓", "ok", "green"),
    "missing": ("–", "--", "yellow"),
    "broken": ("✗", "!!", "red"),
}


def doctor(
    terminal: "Terminal",
    target: options.Target = None,
    index: options.Index = None,
    load: Annotated[
        bool, typer.Option("--load", help="Load the language model and check that it is exact.")
    ] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure what verifying so many tokens at once costs here."),
    ] = False,
    json: options.Json = False,
    *,
    settings: "Settings",
) -> "ExitCode":
    """Check that everything needed is there.

    Looks at versions, extras, device, models and, given a folder, its index.
    """
    if measure:
        from ragaccel.cli.measuring import show_costs

        return show_costs(terminal, settings, json=json)
    from dataclasses import asdict

    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.source import locate

    source = locate(target, index) if target or index else None
    checks = []
    for check in _all_checks(terminal, settings, source, load=load):
        checks.append(check)
        if not json:
            _show(terminal, check)
    if json:
        terminal.json([asdict(check) for check in checks])
    broken = [check for check in checks if check.state == "broken"]
    if broken:
        terminal.fail(f"{len(broken)} of {len(checks)} checks failed")
    return ExitCode.FAILED if broken else ExitCode.OK


def _all_checks(
    terminal: "Terminal", settings: "Settings", source: "Source | None", *, load: bool
) -> "Iterator[Check]":
    from ragaccel.cli import checks
    from ragaccel.cli.knowledge import index_health
    from ragaccel.cli.room import load_llm

    yield from checks.installation()
    yield from checks.machine()
    yield from checks.homes()
    yield from checks.models(settings)
    if load:
        yield checks.attempt("loading it", lambda: _loaded(load_llm(terminal, settings)))
    if source is not None:
        found = source
        yield checks.attempt("index", lambda: index_health(found, settings))


def _loaded(llm: "LLM") -> str:
    limit = llm.context_length
    room = "any number of" if limit is None else f"{limit:,}"
    return f"decodes exactly (self-check passed), {room} tokens of context"


def _show(terminal: "Terminal", check: "Check") -> None:
    from rich.text import Text

    mark, plain, style = _MARKS[check.state]
    line = Text().append(mark if terminal.unicode else plain, style=style)
    line.append(f" {check.name}", style="bold").append(f"  {check.detail}")
    terminal.write(line, end="\n")
    if check.state != "ok" and check.remedy:
        terminal.write(Text(f"    {check.remedy}", style="dim"), end="\n")
