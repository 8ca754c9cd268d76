"""Options: the arguments and flags that several commands share."""

import math
from pathlib import Path
from typing import Annotated, Literal

import typer

Target = Annotated[
    str | None,
    typer.Argument(
        metavar="DIR", help="Folder of documents (or an index file).", show_default=False
    ),
]
Index = Annotated[
    Path | None,
    typer.Option("--index", metavar="PATH", help="Index file; default: DIR/.ragaccel/index.db."),
]
Include = Annotated[
    list[str] | None,
    typer.Option("--include", metavar="GLOB", help="Only files that match; may be repeated."),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="GLOB", help="No files that match; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
NoAccel = Annotated[
    bool, typer.Option("--no-accel", help="Plain decoding, one token a pass; the same answer.")
]
Compare = Annotated[bool, typer.Option("--compare", help="Also decode plainly; show the speed-up.")]
NoStream = Annotated[bool, typer.Option("--no-stream", help="Print the answer when it is whole.")]
Plain = Annotated[bool, typer.Option("--plain", help="The answer's text alone, without marks.")]
ShowSources = Annotated[
    bool, typer.Option("--show-sources", help="List every passage read, with score and text.")
]
ShowStats = Annotated[bool, typer.Option("--stats", help="Show where the time went.")]
Continue = Annotated[
    bool, typer.Option("--continue", "-c", help="Go on with the last conversation about DIR.")
]


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise typer.BadParameter(f"{number} is not a finite number")
    return number


# Settings: what a RAGACCEL_* variable or ragaccel.toml may say as well (settings.py).
Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Language model: a folder or a hub name.",
        show_default="the bundled reader",
    ),
]
Embedder = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Embedding model: a folder or a hub name.",
        show_default="all-MiniLM-L6-v2",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Where the model runs, e.g. cpu or cuda.",
        show_default="the best there is",
    ),
]
Dtype = Annotated[
    str, typer.Option(metavar="TYPE", help="Number format of the model's weights, e.g. bfloat16.")
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Remember answers there, to guess from; off: nowhere, within a run either.",
        show_default="within a run",
    ),
]
Drafter = Annotated[
    Literal["trees", "copy", "space", "mixed"] | None,
    typer.Option(
        metavar="HOW",
        help="How tokens are guessed: trees, copy, space or mixed (trees and space).",
        show_default="trees, or mixed with an adapter",
    ),
]
Space = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="SPACE adapter: a folder or a hub name.",
        show_default="the model's own",
    ),
]
FollowLinks = Annotated[
    bool, typer.Option("--follow-links", help="Read what links lead to outside of DIR, too.")
]
Shared = Annotated[
    bool, typer.Option("--shared", help="Let other users of this machine read the index.")
]
K = Annotated[int, typer.Option("-k", metavar="N", min=1, max=1000, help="Passages to retrieve.")]
MaxTokens = Annotated[int, typer.Option(metavar="N", min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[
    float,
    typer.Option(
        metavar="T", min=0, callback=_finite, help="0: the likeliest token; above: sample."
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Seed of sampling.")]
Color = Annotated[
    Literal["auto", "always", "never"],
    typer.Option(metavar="WHEN", help="Colours: auto, always or never."),
]
