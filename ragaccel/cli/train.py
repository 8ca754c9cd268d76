"""The command train space: its options, its progress and a table of its results."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from rich.table import Table
from typer import Argument, Option

from ragaccel.cli.settings import Json, flag, option
from ragaccel.cli.terminal import ExitCode, Terminal

if TYPE_CHECKING:
    from transformers import TrainerState


@dataclass(frozen=True, slots=True)
class RecipeOptions:
    """The options of a ``Recipe``; None for its default."""

    num_masks: int | None = option(None, "K", "Mask tokens: tokens predicted ahead. [5]", "--masks")
    rank: int | None = option(None, "R", "Rank of the adapter's weights. [32]")
    learning_rate: float | None = option(
        None, "RATE", "Peak learning rate. [0.002; with --paper 0.00005]"
    )
    steps: int | None = option(None, "N", "Optimizer steps, in place of --epochs.")
    epochs: int | None = option(None, "N", "Times that all samples are seen. [2]")
    row_tokens: int | None = option(None, "N", "Maximum tokens of a packed row. [2048]")
    accumulate: int | None = option(None, "N", "Rows of a step, on each device. [1]")
    precision: str | None = option(None, "TYPE", "Compute in float32 or bfloat16. [float32]")
    seed: int | None = option(None, "N", "Seed of initial weights and sample order. [0]")
    evaluate_every: int | None = option(None, "STEPS", "Also evaluate every STEPS steps.")
    save_every: int | None = option(None, "STEPS", "Steps between checkpoints. [100]")


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The options of a ``Job``, beside its files and model."""

    held_out: Path | None = option(  # noqa: RUF009
        None, "FILE", "Samples to evaluate on. [one in 20 of SAMPLES]"
    )
    max_evaluated: int = option(
        200, "N", "Maximum number of samples to evaluate on.", "--evaluate-on"
    )
    own_answers: bool = flag(
        "Train on answers that the model first writes to the prompts.", "--own-answers"
    )
    answer_tokens: int = option(256, "N", "Maximum length of those answers, in tokens.")
    device: str | None = option(None, "NAME", "cpu: use no GPU. [all visible GPUs, else the CPU]")
    run_folder: Path | None = option(  # noqa: RUF009
        None, "DIR", "Folder of checkpoints. [DIR-run]", "--run"
    )


def space(
    terminal: Terminal,
    samples: Annotated[
        Path,
        Argument(
            metavar="SAMPLES",
            help="Samples as JSON lines: {prompt, answer}, {messages} or {prompt_ids, answer_ids}.",
        ),
    ],
    out: Annotated[Path, Option("--out", metavar="DIR", help="Folder to write the result to.")],
    model: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Language model: a folder or a hub name.",
            show_default="the bundled reader",
        ),
    ] = None,
    paper: Annotated[
        bool,
        Option(
            "--paper",
            help="Train all weights, as the paper does, which changes the model's answers; else an"
            " adapter is trained, which leaves them as they are.",
        ),
    ] = False,
    *,
    recipe: RecipeOptions,
    job: JobOptions,
    json: Json = False,
) -> ExitCode | None:
    """Train a SPACE adapter, with which a model drafts its own next tokens.

    After an interruption the same command goes on where it stopped. For several GPUs: torchrun
    --nproc-per-node N -m ragaccel train space …
    """
    from ragaccel.training.config import make_recipe
    from ragaccel.training.trainer import Job, Listener, train_space

    class Progress(TrainingProgress, Listener):
        """A progress display that the trainer calls."""

    terminal.show_log_warnings()
    progress = Progress(terminal)
    try:
        with progress.bars:
            result = train_space(
                Job(samples, out, model=model, **asdict(job)),
                make_recipe("paper" if paper else "gated", **asdict(recipe)),
                progress,
            )
    except KeyboardInterrupt:
        terminal.note("interrupted: run the same command again to go on from here")
        return ExitCode.INTERRUPTED
    if result is None:  # not the first of several processes
        return None
    if result["held_out"]:
        _show_metrics(terminal, result["held_out"])
    terminal.note(
        f"{result['steps']:,} steps over {result['tokens']:,} tokens, "
        f"{result['seconds_per_step']:.2f} s each; the result is in {out}"
    )
    if json:
        terminal.json(result)
    return None


_MAX_LINES = 20  # of progress if stderr is not a terminal


class TrainingProgress:
    """A display of progress: bars, or a few lines if stderr is not a terminal."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self.bars = terminal.progress(
            MofNCompleteColumn(), TimeRemainingColumn(), "[dim]{task.fields[text]}"
        )
        self._answers = self.bars.add_task("answering", total=None, text="", visible=False)
        self._steps = self.bars.add_task("training", total=None, text="", visible=False)
        self._last_share = 0

    def note(self, text: str) -> None:
        """Write a note of the run to stderr."""
        self._terminal.note(text)

    def answered(self, done: int, total: int) -> None:
        """Show how many prompts the model has answered."""
        self.bars.update(self._answers, completed=done, total=total, visible=done < total)
        self._line(done, total, f"answered {done:,} of {total:,}")

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Show the step and the latest loss."""
        done, total = state.global_step, state.max_steps
        losses = [row["loss"] for row in state.log_history if "loss" in row]
        text = f": loss {losses[-1]:.3f}" if losses else ""
        self.bars.update(self._steps, completed=done, total=total, visible=True, text=text[2:])
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
