"""Piped input: a question, or a text to take into account, that comes from stdin."""

from __future__ import annotations

import os
import select
import stat
import sys
from typing import TYPE_CHECKING

from ragaccel.cli.exits import UsageError

if TYPE_CHECKING:
    from ragaccel.cli.terminal import Terminal

_PATIENCE = 2.0  # seconds before saying what is being waited for
_LARGEST = 4 << 20  # bytes; more than this is a document and belongs into the folder


def piped_text(terminal: Terminal) -> str:
    """What is piped in, whole; "" where stdin is a terminal, closed or nothing at all.

    Raises:
        UsageError: it is not text, or more than a question's context can be.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return ""
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return ""
    from ragaccel.retrieval.loaders import decode_text

    _say_when_waiting(terminal)
    raw = sys.stdin.buffer.read(_LARGEST + 1)
    if len(raw) > _LARGEST:
        raise UsageError("more than 4 MB on stdin: put it into a file of the folder and index that")
    if b"\0" in raw[:8192]:
        raise UsageError("stdin holds a binary; only text can be read from there")
    return decode_text(raw)[0].strip()


def _say_when_waiting(terminal: Terminal) -> None:
    try:
        ready, _, _ = select.select([sys.stdin], [], [], _PATIENCE)
    except (OSError, ValueError):  # no select on pipes here
        return
    if not ready:
        terminal.note("reading stdin to its end (no input wanted? add </dev/null)")
