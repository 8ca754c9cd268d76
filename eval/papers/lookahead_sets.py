"""Lookahead's sets: questions on passages, and prompts without any, GSM8K's and HumanEval's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eval import recordings
from eval.examples import load_task
from eval.jobs import make_jobs
from eval.papers.recorded_sets import answered_rows, has_data, laid_out, set_paths
from eval.recordings import MAX_ANSWER, Recorded
from ragaccel.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    import argparse

PROMPTS = ("gsm8k", "humaneval")
"""Tasks whose prompts are continued as they stand."""
SETS = (*recordings.SETS, *PROMPTS)
SHIPPED = ("handbook", "demo")

Sets = dict[str, list[Recorded]]


def read_sets(options: argparse.Namespace, tokenizer: Any, limit: int | None) -> Sets:
    """Read the first answered rows of each set that the options name; without data, what ships.

    Raises:
        MissingDataError: a set that the data folder lacks.
    """
    if not has_data(options):
        paths = [set_paths(options, options.sets, shipped) for shipped in SHIPPED]
    else:
        paths = [
            {name: None} if name in PROMPTS else set_paths(options, name)
            for name in options.sets.split(",")
        ]
    return {
        name: laid_out(answered_rows(path, limit), tokenizer)
        if path
        else continued(options, name, tokenizer, limit)
        for one in paths
        for name, path in one.items()
    }


def continued(
    options: argparse.Namespace, name: str, tokenizer: Any, limit: int | None
) -> list[Recorded]:
    """Lay out a task's prompts, each followed by its reference solution."""
    examples = load_task(name, limit, options.data)
    jobs = make_jobs(examples, Tokenizer(tokenizer), max_new_tokens=MAX_ANSWER + 1)
    return [Recorded(one.prompt_ids, (), (), one.answer_ids) for one in jobs]
