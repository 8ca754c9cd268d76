"""Warm: passes of every size that some jobs need, captured before anything is timed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragaccel.engine.engine import Engine, measure_passes
from ragaccel.engine.row_blocks import num_splits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eval.jobs import Job
    from ragaccel.models.hf_model import HuggingFaceModel

_STEP = 64  # tokens between two lengths that are looked at


def capture_passes(
    model: HuggingFaceModel,
    jobs: Sequence[Job],
    *,
    compile: bool,  # noqa: A002
) -> None:
    """Capture passes of all widths over every attended length the jobs come to, if any is captured.

    A size is captured where it is first met, which takes as long as many passes: in a process that
    goes on answering once, in a short measurement often.
    """
    if model.graphs is None:
        return
    if compile:
        model.compile()
    engine = Engine(model, kept_prefixes=0)
    for length in contexts(jobs, engine.max_rows):
        room = length if model.max_positions is None else min(length, model.max_positions - 2)
        measure_passes(engine, context=room, repeats=1)


def contexts(jobs: Sequence[Job], max_rows: int) -> list[int]:
    """One length of each bucket that attended tokens fall into, from shortest to longest."""
    first = min(len(job.prompt_ids) for job in jobs)
    last = max(len(job.prompt_ids) + job.max_new_tokens for job in jobs)
    found: dict[int, int] = {}
    for length in range(first, last + _STEP, _STEP):
        found.setdefault((num_splits(length + max_rows) - 1).bit_length(), length)
    return list(found.values())
