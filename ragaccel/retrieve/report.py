"""Progress and report: what indexing is doing, and what it did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Progress:
    """Where indexing stands.

    ``stage`` is ``"scanning"``, ``"reading"``, ``"embedding"`` or ``"done"``. Files are those that
    must be read; ``passages_done`` of ``passages_total`` are embedded, where the total grows while
    files are read. ``work_done`` of ``work_total`` says how far embedding is in all, in bytes of
    the files: it knows those that are not read yet, and leaves out what need not be embedded.
    """

    stage: str
    files_done: int = 0
    files_total: int = 0
    passages_done: int = 0
    passages_total: int = 0
    path: str = ""
    work_done: float = 0.0
    work_total: float = 0.0


class ProgressCallback(Protocol):
    """What may be given to be told of progress; called often, so it should be quick."""

    def __call__(self, progress: Progress, /) -> None:
        """Take note of where indexing stands."""


@dataclass(slots=True)
class IndexReport:
    """What an indexing run did: files by what became of them, and passages.

    ``failed`` gives the reason by path; what the index had of a failed file it keeps. ``skipped``
    counts what was passed over and ``skip_reasons`` says why; ``passed_over`` names those of them
    that no rule or pattern named. ``doubtful`` are files that were read by a guess, which the
    reason names. Failed and doubtful files that an earlier run told of, for the same reason, are
    in ``told_before``. ``passages`` is how many the index
    has now, ``embedded`` how many of them are new to it. ``warnings`` are for people to read.
    """

    added: int = 0
    changed: int = 0
    removed: int = 0
    unchanged: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    skip_reasons: dict[str, int] = field(default_factory=dict)
    passed_over: dict[str, str] = field(default_factory=dict)
    doubtful: dict[str, str] = field(default_factory=dict)
    told_before: set[str] = field(default_factory=set)
    passages: int = 0
    embedded: int = 0
    seconds: float = 0.0
    embed_seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)

    @property
    def skipped(self) -> int:
        """How many files and folders were passed over."""
        return sum(self.skip_reasons.values())

    @property
    def is_current(self) -> bool:
        """Whether there was nothing to do."""
        return not (self.added or self.changed or self.removed)


def ignore_progress(progress: Progress, /) -> None:
    """Take no note."""
