"""Make functions the runs of ``python -m eval``: their options, errors in one line, results.

A run is a function of its options that returns a result (``experiment``) or does something else
(``command``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.data import DATA_VARIABLE
from eval.runner import in_folder, measured

Document = dict[str, Any]
Options = argparse.Namespace
Measure = Callable[[Options], Document]


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a run: its names and the further arguments of ``add_argument``."""

    names: tuple[str, ...]
    settings: dict[str, Any]

    def add(self, parser: argparse.ArgumentParser) -> None:
        """Add the option to a parser, with the default in the help text."""
        settings = dict(self.settings)
        shown = settings.get("default") not in (None, (), []) and "action" not in settings
        if shown and "%(default)" not in settings.get("help", ""):
            settings["help"] = f"{settings.get('help', '')} (default: %(default)s)".strip()
        parser.add_argument(*self.names, **settings)


def option(*names: str, **settings: Any) -> Option:
    """Return an option; the arguments are those of ``add_argument``."""
    return Option(names, settings)


def integer(name: str, default: int, about: str = "", **settings: Any) -> Option:
    return option(name, type=int, default=default, help=about, **settings)


def names_of(text: str) -> list[str]:
    """Split comma-separated names."""
    return text.split(",")


def numbers_of(text: str) -> tuple[int, ...]:
    """Parse comma-separated integers."""
    return tuple(int(part) for part in text.split(","))


DATA = option("--data", type=Path, help=f"data folder; also the variable {DATA_VARIABLE}")
MODEL = option("--model", default="reader", help="reader, a hub name, a folder, or random:SHAPE")
THREADS = option("--threads", type=int, help="processor threads (default: torch's)")
DEVICE = option("--device", default="cpu", help="cpu, cuda or cuda:N")
TOKENIZER = option("--tokenizer", help="reader, a name in the data folder, a folder, or a hub name")
TARGET = (MODEL, TOKENIZER, DATA, THREADS, DEVICE)
"""The options for a model, its tokenizer and its device."""
DTYPE = option(
    "--dtype",
    choices=("float64", "float32", "bfloat16", "float16", "int8"),
    help="default: float32 on a CPU, bfloat16 on a GPU",
)
TASK = option("--task", default="demo", help="a task's name, or a .jsonl file of your own")
LIMIT = option("--limit", type=int, help="examples to take (default: all)")
COMPILE = option(
    "--compile", action="store_true", help="have torch compile what is replayed, on a GPU"
)
OUT = option("--out", type=Path, help="result file, or its folder; a second run continues")
SEED = integer("--seed", 1, "of the random numbers")


def command(*options: Option, **defaults: Any) -> Callable[[Callable[[Options], Any]], Any]:
    """Make a function of options, ``run_NAME``, the run NAME; its docstring is the help.

    The run takes the command line's arguments, by default those of the process. ``parse`` of the
    run returns the options alone.
    """

    def make(function: Callable[[Options], Any]) -> Any:
        name = function.__name__.removeprefix("run_")

        def parse(arguments: Sequence[str] | None = None) -> Options:
            parser = argparse.ArgumentParser(
                prog=f"python -m eval {name}",
                description=function.__doc__,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            for one in options:
                one.add(parser)
            parser.set_defaults(**defaults)
            return parser.parse_args(arguments)

        def run(arguments: Sequence[str] | None = None) -> Any:
            return function(parse(arguments))

        run.parse, run.function = parse, function  # type: ignore[attr-defined]
        run.__name__, run.__module__ = function.__name__, function.__module__
        run.__doc__ = function.__doc__
        return run

    return make


def experiment(
    *options: Option,
    table: Callable[[Document], str] | None = None,
    shown: Sequence[str] = (),
    broken: Callable[[Document], Any] = lambda _document: None,
    file: str | None = None,
    **defaults: Any,
) -> Callable[[Measure], Any]:
    """Make a function of options that returns a result the run of its name; see ``command``.

    The result is written to ``--out``, and the table printed; the last line of stdout is JSON.

    Args:
        options: The options, besides ``--out``.
        table: A function that returns the result's table.
        shown: The parts of the result in the last line; if one, that part alone.
        broken: A function that returns a message, or True, if the result is a failure.
        file: The file's name in a folder ``--out``; the run's name without it.
        defaults: Other defaults of the options.
    """

    def make(measure: Measure) -> Any:
        name = measure.__name__.removeprefix("run_")

        def finish(options: Options) -> None:
            default = file.format_map(vars(options)) if file else f"{name.replace('_', '-')}.json"
            options.out = in_folder(options.out, default)
            document = measured(name, measure, options)
            if table is not None:
                print(table(document))
            parts = {part: document.get(part) for part in shown} or document
            print(json.dumps(parts[shown[0]] if len(shown) == 1 else parts))
            if told := broken(document):
                sys.exit(f"eval {name}: {told}" if isinstance(told, str) else 1)

        finish.__name__, finish.__module__ = measure.__name__, measure.__module__
        finish.__doc__ = measure.__doc__
        run = command(*options, OUT, **defaults)(finish)
        run.measure = measure
        return run

    return make


def places(out: Path | None = None) -> tuple[Option, Option]:
    """Return ``--data`` and ``--out`` as absolute paths: steps run in the project's folder."""
    data = option("--data", type=_whole, help=f"data folder; also the variable {DATA_VARIABLE}")
    told = {"default": out} if out else {"required": True}
    return data, option("--out", type=_whole, help="folder of results", **told)


def _whole(path: str) -> Path:
    return Path(path).resolve()


def set_options(
    sets: Sequence[str], limit: int | None, tokenizer: str | None
) -> tuple[Option, ...]:
    """Return the options for recorded sets to replay and their tokenizer."""
    return (
        DATA,
        option("--sets", default=",".join(sets), help="files of rag/ in the data folder"),
        option("--tokenizer", default=tokenizer, help="of the data folder, or a folder"),
        option("--limit", type=int, default=limit, help="rows of each file"),
    )
