"""Stopping: Ctrl-C is heeded between two steps, so that what is saved is whole."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Wish:
    """Whether somebody asked to stop."""

    def __init__(self) -> None:
        self.stop = False


@contextmanager
def heeding_interrupts() -> Iterator[Wish]:
    """Take the first Ctrl-C as a wish; a second one interrupts at once, as ever.

    Outside the main thread, where signals cannot be taken, nothing is changed.
    """
    wish = Wish()
    if threading.current_thread() is not threading.main_thread():
        yield wish
        return
    before = signal.getsignal(signal.SIGINT)

    def heed(*_: object) -> None:
        wish.stop = True
        signal.signal(signal.SIGINT, before)

    if before is None or before == signal.SIG_IGN:  # another's, or switched off
        yield wish
        return
    signal.signal(signal.SIGINT, heed)
    try:
        yield wish
    finally:
        signal.signal(signal.SIGINT, before)
