"""Running: sessions of requests, as many beside one another as a pass takes."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragaccel.forking import keep_forever, owns_torch

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from ragaccel.decoding.request import Cancellation, Request
    from ragaccel.decoding.session import Drafter, Session
    from ragaccel.decoding.stats import Step
    from ragaccel.engine.scheduler import Scheduler
    from ragaccel.guessing import Guessing


class _Resources(ExitStack):
    """What requests hold until they end; what a forked process inherits is not freed there.

    Other threads of its parent may have held the locks that this takes.
    """

    def __exit__(self, *details: Any) -> bool:
        if not owns_torch():
            keep_forever(self.pop_all())
        return bool(super().__exit__(*details))


@dataclass(frozen=True, slots=True)
class Job:
    """A request and how its tokens are guessed: by a drafter of its own, out of the past or not."""

    request: Request
    drafter: Drafter | None = None
    remember: bool = True


class Runner:
    """Decodes requests beside one another.

    Args:
        scheduler: runs the steps.
        guessing: opens the sessions.
        token_budget: most guesses a verify pass takes; None for what pays.
    """

    def __init__(
        self, scheduler: Scheduler, guessing: Guessing, token_budget: int | None = None
    ) -> None:
        self.scheduler, self._guessing = scheduler, guessing
        self._token_budget = token_budget

    def one(
        self, job: Job, cancellation: Cancellation
    ) -> Generator[tuple[Session, Step], None, None]:
        """Decode one request, step by step.

        Raises:
            Cancelled: this was asked for before its end.
        """
        with _Resources() as stack:
            session = self._open(job, stack)
            for step in self.scheduler.steps(session, cancellation):
                yield session, step

    def all(
        self, jobs: Sequence[Job], cancellation: Cancellation | None = None
    ) -> Generator[tuple[int, Session, Step], None, None]:
        """Decode several requests, step by step, each step with the number of its job.

        What a request holds is free when its last step is there.

        Raises:
            Cancelled: this was asked for before their end.
        """
        waiting = deque(enumerate(jobs))
        running: dict[Session, tuple[int, _Resources]] = {}
        with _Resources() as everything:
            while waiting or running:
                while waiting and len(running) < self.scheduler.max_batch:
                    number, job = waiting.popleft()
                    own = everything.enter_context(_Resources())
                    running[self._open(job, own)] = number, own
                for session, step in self.scheduler.advance(list(running), cancellation):
                    number, own = running[session]
                    if session.finish_reason is not None:
                        del running[session]
                        own.close()
                    yield number, session, step

    def _open(self, job: Job, stack: _Resources) -> Session:
        verifier = stack.enter_context(closing(self.scheduler.engine.open(job.request)))
        session = stack.enter_context(
            self._guessing.session(
                verifier,
                job.request,
                drafter=job.drafter,
                remember=job.remember,
                token_budget=self._token_budget,
            )
        )
        stack.callback(self.scheduler.leave, session)
        stack.callback(session.close)
        return session
