"""Cancelling: telling whoever computes that nobody waits for it any more."""

from __future__ import annotations


class Cancelled(RuntimeError):  # noqa: N818 - nothing went wrong
    """What was asked for was cancelled before its end."""


class Cancellation:
    """Asked for from any thread, for good; whoever computes looks between two rounds.

    A plain attribute: it may be set wherever garbage is collected, where no lock may be waited for.
    """

    __slots__ = ("is_asked",)

    def __init__(self) -> None:
        self.is_asked = False

    def ask(self) -> None:
        """Have the work end after the round that it is in."""
        self.is_asked = True
