"""SPACE over training: tokens a pass for every number of mask tokens, as a training run noted them.

    ragaccel train space SAMPLES --out FOLDER --evaluate-every 50 ...
    python -m eval.papers.space_curves --run FOLDER-run --out eval/results

Nothing is trained here: the log of a run folder is read and kept. Figures are of held-out answers,
walked as the paper decodes, without decoding. Ends in one JSON document.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.machine import current_commit
from eval.papers.published import published
from eval.papers.space_layout import space_curves_table
from eval.script import in_folder, measured, new_parser, result

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME = "space-curves.json"


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("papers.space_curves", measure, parse(arguments))
    print(space_curves_table(document))
    print(json.dumps(document["curve"][-1]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("papers.space_curves", __doc__)
    add = parser.add_argument
    add("--run", type=Path, required=True, help="the run's folder, which holds its log")
    add("--out", type=Path, help=f"result file, or the folder of {NAME}")
    options = parser.parse_args(arguments)
    options.out = in_folder(options.out, NAME)
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Read a run's log.

    Raises:
        ValueError: no log, or none with evaluations; says what to do.
    """
    log, run = read_run(options.run)
    curve = curve_of(log)
    if not curve:
        raise ValueError(
            f"{options.run.name} was never evaluated while it trained: train with --evaluate-every "
            "and held-out samples"
        )
    return result(
        "space_curves",
        {"model": run["model"]["model_type"], "commit": current_commit()},
        module="papers.space_curves",
        recipe=run["recipe"],
        samples=run["samples"],
        curve=curve,
        losses=[{"step": row["step"], "loss": row["loss"]} for row in log if "loss" in row],
        published=published("space"),
    )


def read_run(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Read a run folder's log, and what the run is of.

    Raises:
        ValueError: a file that is missing or damaged.
    """
    try:
        log, run = (
            json.loads((folder / name).read_text(encoding="utf-8"))
            for name in ("log.json", "run.json")
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder.name} holds no whole log.json and run.json: name the folder where a run of "
            "`ragaccel train space` keeps its checkpoints"
        ) from error
    return log, run


def curve_of(log: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The evaluations of a log, in the order of their steps; of one step the last."""
    by_step = {
        row["step"]: {"step": row["step"], **row["figures"]} for row in log if "figures" in row
    }
    return [by_step[step] for step in sorted(by_step)]


if __name__ == "__main__":
    main()
