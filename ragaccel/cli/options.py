"""Options: the arguments and flags that several commands share."""

from pathlib import Path
from typing import Annotated

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
FollowLinks = Annotated[
    bool, typer.Option("--follow-links", help="Read what links lead to outside of DIR, too.")
]
Shared = Annotated[
    bool, typer.Option("--shared", help="Let other users of this machine read the index.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
K = Annotated[
    int | None,
    typer.Option("-k", metavar="N", help="Passages to retrieve. [6]"),
]
Model = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Language model: a folder or a hub name. [bundled reader]"),
]
Embedder = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Embedding model: a folder or a hub name. [MiniLM]"),
]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", metavar="N", help="Longest answer, in tokens. [256]")
]
Temperature = Annotated[
    float | None, typer.Option(metavar="T", help="0: the likeliest token; above: sample. [0]")
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Seed of sampling. [0]")]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="FILE", help="Remember answers there, to guess from; off: nowhere."
    ),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        metavar="HOW",
        help="How tokens are guessed: trees, copy, space or mixed (trees and space). [trees]",
    ),
]
Space = Annotated[
    str | None,
    typer.Option("--space", metavar="DIR", help="SPACE adapter of the model. [its own]"),
]
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


def switched(**switches: bool) -> dict[str, str | None]:
    """The switches that were given, as flags of the settings that they switch on."""
    return {name: "yes" if given else None for name, given in switches.items()}
