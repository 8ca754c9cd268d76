"""``ragaccel train``: teach a model to guess its own next tokens."""

from typing import TYPE_CHECKING

import typer

from ragaccel.cli import options
from ragaccel.cli import train_options as given
from ragaccel.cli.verb import verb

if TYPE_CHECKING:
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.terminal import Terminal

train = typer.Typer(
    help="Train what makes answers faster.", no_args_is_help=True, rich_markup_mode=None
)


def space(
    terminal: "Terminal",
    samples: given.Samples,
    out: given.Out,
    model: options.Model = None,
    paper: given.Paper = False,
    masks: given.Masks = None,
    rank: given.Rank = None,
    learning_rate: given.LearningRate = None,
    steps: given.Steps = None,
    epochs: given.Epochs = None,
    row_tokens: given.RowTokens = None,
    accumulate: given.Accumulate = None,
    precision: given.Precision = None,
    seed: given.Seed = None,
    evaluate_every: given.EvaluateEvery = None,
    save_every: given.SaveEvery = None,
    held_out: given.HeldOut = None,
    evaluate_on: given.EvaluateOn = 200,
    own_answers: given.OwnAnswers = False,
    answer_tokens: given.AnswerTokens = 256,
    device: given.Device = None,
    run: given.Run = None,
    json: options.Json = False,
) -> "ExitCode":
    """Train a model to guess its own next tokens (SPACE), and write an adapter.

    Interrupted, the same command goes on where it stopped. For several GPUs: torchrun
    --nproc-per-node N -m ragaccel train space …
    """
    from ragaccel.cli.training import train_with
    from ragaccel.train.space.recipe import make_recipe
    from ragaccel.train.space.run import Job

    recipe = make_recipe(
        "paper" if paper else "gated",
        num_masks=masks,
        rank=rank,
        learning_rate=learning_rate,
        steps=steps,
        epochs=epochs,
        row_tokens=row_tokens,
        accumulate=accumulate,
        precision=precision,
        seed=seed,
        evaluate_every=evaluate_every,
        save_every=save_every,
    )
    job = Job(
        samples,
        out,
        model=model,
        held_out=held_out,
        evaluated=evaluate_on,
        own_answers=own_answers,
        answer_tokens=answer_tokens,
        device=device,
        run_folder=run,
    )
    return train_with(terminal, job, recipe, as_json=json)


@train.callback()
def _verbs() -> None:
    """Keep ``space`` a word of its own: an only command would need no name."""


train.command("space")(verb(space))
