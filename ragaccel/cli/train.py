"""Training from the command line: progress and a table of results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ragaccel.cli.terminal import ExitCode
from ragaccel.training.trainer import Listener, train_space

if TYPE_CHECKING:
    from types import TracebackType

    from transformers import TrainerState

    from ragaccel.cli.terminal import Terminal
    from ragaccel.training.config import Recipe
    from ragaccel.training.trainer import Job


_MAX_LINES = 20  # of progress if stderr is not a terminal


def run_training(terminal: Terminal, job: Job, recipe: Recipe, *, as_json: bool) -> ExitCode:
    """Run a training job, with progress on stderr, and show its metrics."""
    terminal.show_log_warnings()
    with TrainingProgress(terminal) as progress:
        try:
            result = train_space(job, recipe, progress)
        except KeyboardInterrupt:
            progress.stop()
            terminal.note("interrupted: run the same command again to go on from here")
            return ExitCode.INTERRUPTED
    if result is None:  # not the first of several processes
        return ExitCode.OK
    if result["held_out"]:
        _show_metrics(terminal, result["held_out"])
    terminal.note(
        f"{result['steps']:,} steps over {result['tokens']:,} tokens, "
        f"{result['seconds_per_step']:.2f} s each; the result is in {job.out}"
    )
    if as_json:
        terminal.json(result)
    return ExitCode.OK


class TrainingProgress(Listener):
    """A listener that shows progress as bars, or as a few lines if stderr is not a terminal."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._bars = Progress(
            TextColumn("[dim]{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[text]}"),
            console=terminal.err,
            transient=True,
            disable=not terminal.interactive,
        )
        self._answers = self._bars.add_task("answering", total=None, text="", visible=False)
        self._steps = self._bars.add_task("training", total=None, text="", visible=False)
        self._last_share = 0

    def __enter__(self) -> TrainingProgress:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the bars from the screen."""
        self._bars.stop()

    def note(self, text: str) -> None:
        """Write a note of the run to stderr."""
        self._terminal.note(text)

    def answered(self, done: int, total: int) -> None:
        """Show how many prompts the model has answered."""
        self._bars.update(self._answers, completed=done, total=total, visible=done < total)
        self._line(done, total, f"answered {done:,} of {total:,}")

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Show the step and the latest loss."""
        done, total = state.global_step, state.max_steps
        losses = [row["loss"] for row in state.log_history if "loss" in row]
        text = f": loss {losses[-1]:.3f}" if losses else ""
        self._bars.update(self._steps, completed=done, total=total, visible=True, text=text[2:])
        self._line(done, total, f"step {done:,} of {total:,}{text}")

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Write the tokens per verification pass on held-out answers, by number of mask tokens."""
        metrics: Any = state.log_history[-1]["figures"]
        values = metrics["tokens_per_pass"]
        text = ", ".join(f"{value:.2f}" for value in values)
        self._terminal.note(
            f"step {state.global_step:,}: {text} tokens a pass with 1 to {len(values)} mask tokens"
        )

    def _line(self, done: int, total: int, text: str) -> None:
        share = done * _MAX_LINES // max(1, total)
        if not self._terminal.interactive and (share != self._last_share or done == total):
            self._last_share = share
            self._terminal.note(text)


def _show_metrics(terminal: Terminal, metrics: dict[str, Any]) -> None:
    """Show a table of the metrics, a row for each number of mask tokens."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("mask tokens", "tokens a pass", "predictions right"):
        table.add_column(heading, justify="right")
    rows = zip(metrics["tokens_per_pass"], metrics["right"], strict=True)
    for count, (per_pass, right) in enumerate(rows, start=1):
        table.add_row(str(count), f"{per_pass:.2f}", f"{right:.1%}")
    terminal.note(table)
    own = f"{metrics['own']:.1%} of their tokens are what the model itself would choose"
    terminal.note(f"{metrics['samples']:,} held-out answers; {own}")
