"""Scripts: a measurement as it is run from the command line, and the document it ends in."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

import torch

from eval.ledger import write_whole
from eval.machine import current_commit, describe_machine, describe_run
from ragaccel.errors import RagaccelError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Document = dict[str, Any]


def new_parser(kind: str, doc: str) -> argparse.ArgumentParser:
    """Make the parser of ``eval.KIND``, which is described by its docstring's first line."""
    return argparse.ArgumentParser(prog=f"python -m eval.{kind}", description=doc.split("\n")[0])


def in_folder(out: Path | None, name: str) -> Path | None:
    """The file of a result, where its folder alone was named."""
    return out if out is None or out.suffix == ".json" else out / name


def measured(
    kind: str, measure: Callable[[argparse.Namespace], Document], options: argparse.Namespace
) -> Document:
    """Measure on the threads that are asked for; keep the document where ``--out`` says.

    What the caller can mend ends the process with a line that says so.
    """
    torch.set_num_threads(getattr(options, "threads", None) or torch.get_num_threads())
    current_commit()  # of the code that runs, whatever is committed meanwhile
    try:
        document = measure(options)
    except (RagaccelError, FileNotFoundError, ValueError) as error:
        sys.exit(f"eval.{kind}: {error}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(options.out, json.dumps(document, indent=1) + "\n")
    return document


def result(
    kind: str,
    settings: dict[str, Any],
    *,
    device: str = "cpu",
    module: str | None = None,
    **figures: Any,
) -> Document:
    """Lay out a result: what was measured, with which settings, where and by which command.

    ``module`` is the one below ``eval`` that was run, where it is not called as the kind is.
    """
    return {
        "kind": kind,
        "settings": settings,
        "machine": describe_machine(device),
        "run": describe_run(f"eval.{module or kind}"),
        **figures,
    }


def note(text: str) -> None:
    """Say where the run stands."""
    print(text, file=sys.stderr, flush=True)
