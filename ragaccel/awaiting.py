"""Awaiting: answers for asyncio callers, computed in threads that end in the same scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ragaccel.decoding.request import Cancellation
from ragaccel.forking import claim_torch

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from ragaccel.answer import Answer, Stream

_MOST = 64  # callers waiting at one time; the others queue
_NAME = "ragaccel-async"


_THREADS = ThreadPoolExecutor(_MOST, thread_name_prefix=_NAME)  # started when needed

Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result]) -> Result:
    """Run blocking work beside the event loop.

    Raises:
        ForkError: this process was forked from one that had used a model.
        RuntimeError: in place of a SystemExit or KeyboardInterrupt, which would end the event loop
            and with it the requests of all others. No signal raises one in these threads: a
            callback of the request did.
    """
    claim_torch()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, _kept_in, work)


def _kept_in(work: Callable[[], Result]) -> Result:
    try:
        return work()
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"a callback of this request raised {error!r}") from error


async def unless_cancelled(work: Callable[[Cancellation], Result]) -> Result:
    """Run blocking work beside the event loop; if the caller is cancelled, so is the work."""
    cancellation = Cancellation()
    try:
        return await in_thread(partial(work, cancellation))
    finally:
        cancellation.ask()


async def answered(stream: Stream) -> Answer:
    """Await the answer of a stream; if the caller is cancelled, so is the answer."""
    try:
        return await in_thread(stream.finish)
    finally:
        stream.close()


class AsyncStream(AsyncIterator[str]):
    """An answer being generated, for asyncio: iterate it for pieces, then ask for ``answer``.

    Leaving the loop over it, cancelling whoever waits for it, or ``aclose`` ends it.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream, self._pieces = stream, _pieces_of(stream)

    async def __anext__(self) -> str:
        return await anext(self._pieces)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens generated so far: those that are no text too, and those held back."""
        return self._stream.token_ids

    @property
    def answer(self) -> Answer:
        """The finished answer; raises RuntimeError before the stream has been read to its end."""
        return self._stream.answer

    async def aclose(self) -> None:
        """Stop generating and free what the request held; safe to call twice."""
        await self._pieces.aclose()
        self._stream.close()

    async def finish(self) -> Answer:
        """Wait for the rest, and return the answer."""
        return await answered(self._stream)


async def _pieces_of(stream: Stream) -> AsyncGenerator[str, None]:
    """Iterate a stream's pieces without holding up the event loop; leaving ends it."""
    try:
        while (piece := await in_thread(lambda: next(stream, None))) is not None:
            yield piece
    finally:
        with suppress(RuntimeError):  # the loop may be gone when this is dropped
            stream.close()
