"""SPACE on the bundled reader: held-out questions, its own answers, alone and beside copying.

    python -m eval.papers.space_reader --data DATA --out eval/results
    python -m eval.papers.space_reader --data DATA --adapter FOLDER --limit 20

Every question is answered plainly, by the paper's layout with 1 to K mask tokens, by our trees of
mask tokens' guesses, by copying (``TrieDrafter``, which knows no earlier requests) and by copying
and SPACE together; the latter three as users have them, as wide as the measured cost of a pass
makes worth it, and with 24 guesses whatever they cost. The decoders take turns on each question and
keep what they learn; the first tenth of the questions is not counted. Then the same sampled, held
against plain sampling with the same seed. Ends in one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eval.adapters import chosen_adapter, describe_adapter, wearing
from eval.examples import in_data
from eval.machine import current_commit
from eval.papers.published import published
from eval.papers.space_decoders import GUESSES, TEMPERATURE, answered, counted, figures_of
from eval.papers.space_layout import space_reader_table
from eval.papers.space_questions import draw_jobs, held_out_maker
from eval.script import in_folder, measured, new_parser, note, result
from eval.targets import default_dtype, load_target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eval.jobs import Job

QUESTIONS, MAX_NEW_TOKENS = 200, 160
ASKED = {"space": 1.8, "beside_copying": 1.05}  # tokens a pass; and times those of copying alone
NAME = "space-reader.json"


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("papers.space_reader", measure, parse(arguments))
    print(space_reader_table(document))
    print(json.dumps(document["sets"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("papers.space_reader", __doc__)
    add = parser.add_argument
    add("--data", type=Path, help="data folder; also the variable RAGACCEL_DATA")
    add("--adapter", type=Path, help="its folder (default: the reader's own)")
    add("--limit", type=int, default=QUESTIONS, help="questions (default: %(default)s)")
    add("--max-new-tokens", type=int, default=MAX_NEW_TOKENS)
    add("--threads", type=int, help="processor threads (default: torch's)")
    add("--device", default="cpu", help="cpu, cuda or cuda:N")
    add("--out", type=Path, help=f"result file, or the folder of {NAME}; a second run goes on")
    options = parser.parse_args(arguments)
    options.out = in_folder(options.out, NAME)
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Have every question answered that the ledger lacks.

    Raises:
        ValueError: no question, or no adapter.
    """
    if options.limit < 1:
        raise ValueError("--limit must be 1 or more")
    data = in_data("text", options.data).parent
    note("loading the reader, then the articles")
    target = load_target("reader", device=options.device)
    adapter = chosen_adapter(target, options.adapter)
    worn = wearing(target, adapter)
    maker = held_out_maker(data, target.tokenizer)
    jobs = draw_jobs(
        maker,
        options.limit,
        eos_ids=target.tokenizer.eos_ids,
        max_new_tokens=options.max_new_tokens,
    )
    settings = _settings(options, jobs) | {"num_masks": adapter.num_masks, "rank": adapter.rank}
    rows = answered(options.out, settings, target, worn, jobs)
    return result(
        "space_reader",
        settings,
        device=options.device,
        module="papers.space_reader",
        parameters=sum(weight.numel() for weight in target.model.parameters()),
        adapter=describe_adapter(adapter),
        asked=ASKED,
        kinds=Counter(job.job_id.partition("/")[0] for job in counted(jobs)),
        sets={"held-out questions": figures_of(target, jobs, rows)},
        published=published("space"),
    )


def _settings(options: argparse.Namespace, jobs: Sequence[Job]) -> dict[str, Any]:
    return {
        "model": "reader",
        "dtype": default_dtype(options.device),
        "device": options.device,
        "threads": torch.get_num_threads(),
        "examples": len(jobs),
        "warming": len(jobs) - len(counted(jobs)),
        "guesses": GUESSES,
        "temperature": TEMPERATURE,
        "max_new_tokens": options.max_new_tokens,
        "commit": current_commit(),
    }


if __name__ == "__main__":
    main()
