"""Waiting: for the drafting functions, where an answer is to be fast or remembered at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragaccel.rehearsal import REHEARSAL

if TYPE_CHECKING:
    from ragaccel.cli.terminal import Terminal

_PATIENCE = 60.0  # seconds


def wait_for_rehearsal(terminal: Terminal) -> None:
    """Wait until token trees can be drafted: about ten seconds, once on a machine."""
    with terminal.working("compiling, once on a machine"):
        REHEARSAL.wait(_PATIENCE)
