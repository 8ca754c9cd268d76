"""Question: what is asked and of whom, from the arguments and from stdin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragaccel.cli.exits import UsageError
from ragaccel.cli.piped import piped_text
from ragaccel.cli.source import Source, locate

if TYPE_CHECKING:
    from pathlib import Path

    from ragaccel.cli.terminal import Terminal


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a source; ``context`` is a text that was piped in beside it."""

    source: Source
    text: str
    context: str = ""


def read_question(
    terminal: Terminal,
    target: str | None,
    text: str | None,
    index: Path | None,
    *,
    verb: str = "ask",
) -> Question:
    """Put a question together, for ``ragaccel ask`` or another verb.

    With --index the folder may be left out: a single argument is then the question. Without a
    question on the command line stdin holds it; beside one, stdin is extra context.

    Raises:
        UsageError: there is no question, or nothing to ask it of.
    """
    if index is not None and text is None and target is not None and not _is_folder(target):
        target, text = None, target
    source = locate(target, index)
    piped = piped_text(terminal)
    if text is not None and text.strip() not in ("", "-"):
        return Question(source, text.strip(), piped)
    if not piped:
        raise UsageError(f'what is the question? e.g. ragaccel {verb} {source.argument} "Who …?"')
    return Question(source, piped)


def _is_folder(text: str) -> bool:
    """Whether there is such a folder; a question is longer than a name may be."""
    import os
    from pathlib import Path

    return os.path.isdir(Path(text).expanduser())
