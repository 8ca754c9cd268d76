"""An adapter for a model from nothing: its own continuations, and some minutes of SAR-SFT."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from eval.ledger import write_whole
from eval.papers.scratch_text import draw_prompts
from eval.papers.space_curves import curve_of, read_run
from eval.script import note
from ragaccel.llm import LLM
from ragaccel.training.config import Recipe, make_recipe
from ragaccel.training.data import Sample, answer_samples, read_answers
from ragaccel.training.trainer import Job, Listener, train_space

if TYPE_CHECKING:
    from pathlib import Path

    from eval.papers.scratch_text import Text

EVALUATIONS = 8
_TRIED, _FIRST = 10, 3  # steps that tell what one takes; the first ones take longer
_CONTENTS = "training.json"


@dataclass(frozen=True, slots=True)
class Lessons:
    """How an adapter is trained: for how long, on how many answers of what length."""

    minutes: float
    num_masks: int = 8
    rank: int = 32
    samples: int = 2000
    judged: int = 64
    shortest: int = 48
    longest: int = 160
    answer_tokens: int = 128
    row_tokens: int = 2048


def own_answers(
    model: Path, text: Text, lessons: Lessons, work: Path, *, device: str
) -> tuple[Path, Path]:
    """Have a model go on from pieces of text, greedily; what is there already is kept.

    Returns:
        The file to learn from, of held-in pieces, and the one to be judged on, of held-out ones.
    """
    sides = (
        (work / "answers.jsonl", text.held_in, lessons.samples),
        (work / "held-out-answers.jsonl", text.held_out, lessons.judged),
    )
    for seed, (path, documents, count) in enumerate(sides, start=1):
        prompts = draw_prompts(
            documents, count, shortest=lessons.shortest, longest=lessons.longest, seed=seed
        )
        samples = [Sample(prompt, ()) for prompt in prompts]
        if len(read_answers(path, samples)) < count:
            note(f"{path.name}: {count} continuations")
            llm = LLM.load(model, device=device, keep_costs=False)
            answer_samples(llm, samples, path, max_new_tokens=lessons.answer_tokens)
    return sides[0][0], sides[1][0]


class Watch(Listener):
    """Notes when steps end."""

    def __init__(self) -> None:
        self.ended: dict[int, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Keep the time."""
        self.ended[state.global_step] = time.perf_counter()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Say where the run stands."""
        told = state.log_history[-1]["figures"]["tokens_per_pass"]
        lengths = ", ".join(f"{one:.2f}" for one in told)
        note(f"the adapter: step {state.global_step} of {state.max_steps}, tokens a pass {lengths}")

    @property
    def each(self) -> float:
        """Seconds of a step, the first ones left out."""
        last = max(self.ended)
        return (self.ended[last] - self.ended[_FIRST]) / (last - _FIRST)


def train_adapter(
    model: Path,
    answers: tuple[Path, Path],
    lessons: Lessons,
    work: Path,
    *,
    device: str,
    dtype: str,
) -> dict[str, Any]:
    """Train an adapter for as many steps as the minutes are expected to take.

    Returns:
        What it took, and its evaluations; of a run that is there already, those of that one.
    """
    out = work / "adapter"
    file = out / _CONTENTS
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    samples, held_out = answers
    place = "cpu" if device == "cpu" else None
    job = Job(samples, out, model=model, held_out=held_out, device=place)
    recipe = make_recipe(
        num_masks=lessons.num_masks,
        rank=lessons.rank,
        row_tokens=lessons.row_tokens,
        precision=dtype,
    )
    steps = _steps_for(job, recipe, lessons.minutes, work)
    every = -(-steps // EVALUATIONS)
    told = train_space(job, replace(recipe, steps=steps, evaluate_every=every), Watch())
    assert told is not None, "one process trains"
    log, _ = read_run(job.checkpoint_folder)
    kept = {"steps": steps, "seconds": told["seconds"], "curve": curve_of(log)}
    write_whole(file, json.dumps(kept) + "\n")
    return kept


def _steps_for(job: Job, recipe: Recipe, minutes: float, work: Path) -> int:
    """Try some steps on a run that is thrown away; return how many the minutes hold."""
    file, trial, checkpoint_folder = work / "steps.json", work / "trial", work / "trial-run"
    if file.exists():  # of the run that was stopped, which goes on
        return int(json.loads(file.read_text(encoding="utf-8")))
    for folder in (trial, checkpoint_folder):
        shutil.rmtree(folder, ignore_errors=True)
    watch = Watch()
    tried = replace(job, out=trial, run_folder=checkpoint_folder, max_evaluated=0)
    train_space(tried, replace(recipe, steps=_TRIED), watch)
    for folder in (trial, checkpoint_folder):
        shutil.rmtree(folder, ignore_errors=True)
    steps = max(_TRIED, round(60.0 * minutes / max(1e-6, watch.each)))
    write_whole(file, f"{steps}\n")
    return steps
