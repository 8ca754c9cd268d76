"""Options of ``ragaccel train``: what a run is told, and the numbers of its recipe."""

from pathlib import Path
from typing import Annotated

import typer

Samples = Annotated[
    Path,
    typer.Argument(
        metavar="SAMPLES",
        help="JSON lines: {prompt, answer}, {messages} or {prompt_ids, answer_ids}.",
    ),
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the result.")]
Paper = Annotated[
    bool,
    typer.Option(
        "--paper",
        help="Train all weights as the paper does, in place of an adapter that leaves the model's"
        " own answers as they are.",
    ),
]
Masks = Annotated[int | None, typer.Option(metavar="K", help="Tokens guessed ahead. [5]")]
Rank = Annotated[int | None, typer.Option(metavar="R", help="Of the adapter's changes. [32]")]
LearningRate = Annotated[
    float | None, typer.Option(metavar="RATE", help="The peak. [0.002; paper 0.00005]")
]
Steps = Annotated[int | None, typer.Option(metavar="N", help="Steps, in place of epochs.")]
Epochs = Annotated[
    int | None, typer.Option(metavar="N", help="How often all samples are seen. [2]")
]
RowTokens = Annotated[int | None, typer.Option(metavar="N", help="Tokens of a packed row. [2048]")]
Accumulate = Annotated[
    int | None, typer.Option(metavar="N", help="Rows of a step, on each device. [1]")
]
Precision = Annotated[
    str | None, typer.Option(metavar="TYPE", help="float32 or bfloat16. [float32]")
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Of first weights, order, cuts. [0]")]
EvaluateEvery = Annotated[
    int | None, typer.Option(metavar="STEPS", help="Evaluate while training too.")
]
SaveEvery = Annotated[int | None, typer.Option(metavar="STEPS", help="Between checkpoints. [100]")]
HeldOut = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Evaluate on these. [one in 20 of SAMPLES]")
]
EvaluateOn = Annotated[int, typer.Option(metavar="N", help="Most held-out samples that are used.")]
OwnAnswers = Annotated[
    bool,
    typer.Option("--own-answers", help="Have the model answer first: its own words are guessed."),
]
AnswerTokens = Annotated[int, typer.Option(metavar="N", help="Longest of those answers.")]
Device = Annotated[
    str | None, typer.Option(metavar="NAME", help="cpu: use no GPU. [what there is]")
]
Run = Annotated[
    Path | None, typer.Option("--run", metavar="DIR", help="Folder of checkpoints. [DIR-run]")
]
