"""The scheduler: batch the steps of many sessions into one forward pass.

There is no worker thread. A caller queues the next step of its session, and one of the waiting
callers becomes the leader: it runs one iteration for all queued steps, then releases the lead. So
requests join and leave between any two passes (continuous batching, as in Orca, Yu et al., OSDI
2022), no step is computed unless a caller waits for it, and a single caller pays for no thread
switch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import count
from threading import Condition, current_thread, get_ident, main_thread
from time import perf_counter
from typing import TYPE_CHECKING, Literal, cast
from weakref import WeakKeyDictionary

from ragaccel.decoding.request import Cancelled
from ragaccel.decoding.session import allocate
from ragaccel.engine.engine import is_interrupt, run_uninterrupted
from ragaccel.paths import claim_torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ragaccel.decoding.request import Cancellation
    from ragaccel.decoding.session import SampledTokens, Session
    from ragaccel.decoding.stats import Step
    from ragaccel.decoding.tree import DraftTree
    from ragaccel.engine.engine import Engine, EngineVerifier


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """A session whose owner waits for its next step.

    ``owner_thread`` is the thread that waits; ``phase`` is the part of a step that is running and
    that an interruption leaves incomplete.
    """

    session: Session
    owner_thread: int
    cancellation: Cancellation | None = None
    step: Step | None = None
    error: BaseException | None = None
    is_running: bool = False
    phase: Literal["", "drafting", "computing", "accepting"] = ""

    @property
    def has_outcome(self) -> bool:
        """Whether the step was made or has failed."""
        return self.step is not None or self.error is not None

    @property
    def is_done(self) -> bool:
        """Whether the caller can stop waiting: the step was made, failed or was cancelled."""
        asked = self.cancellation is not None and self.cancellation.is_cancelled
        return asked or self.step is not None or self.error is not None

    @property
    def verifier(self) -> EngineVerifier:
        """The session's verifier."""
        return cast("EngineVerifier", self.session.verifier)

    def draft(self) -> DraftTree | None:
        """Return the draft tree for the next pass, or None if the drafter fails."""
        self.phase = "drafting"
        try:
            tree = self.session.draft(self.session.budget())
        except BaseException as error:
            self.fail(error)
            return None
        self.phase = ""
        return tree

    def prune(self, tree: DraftTree) -> DraftTree | None:
        """Return the nodes worth verifying in a separate pass, or None if pruning fails."""
        try:
            return self.session.prune(tree)
        except BaseException as error:
            self.fail(error)
            return None

    def accept(self, sampled: SampledTokens | BaseException) -> None:
        """Accept the draft tokens that were sampled; store the step, or the error of the pass."""
        if isinstance(sampled, BaseException):
            self.error = sampled
            return
        self.phase = "accepting"
        try:
            self.step = self.session.accept(sampled)
        except BaseException as error:
            self.fail(error)
        self.phase = ""

    def fail(self, error: BaseException) -> None:
        """Store an error that this session's drafter, stop rule or processor raised.

        Raises:
            BaseException: the error, if a signal handler raised it: it belongs to the leader.
        """
        if is_interrupt(error):
            raise error
        self.error = error

    def recover(self) -> None:
        """Prepare to repeat an interrupted step; store an error if that is impossible."""
        if self.has_outcome or not self.phase:
            return
        phase, self.phase = self.phase, ""
        if phase == "drafting":
            self.session.context.forget()
        elif not self.verifier.restart() or phase == "accepting":
            # An interrupted accept may have made only some of its changes.
            self.verifier.close()
            self.error = RuntimeError(
                "another caller of this process was interrupted while it computed this request's "
                "pass, which cannot be repeated exactly: ask again"
            )


logger = logging.getLogger("ragaccel")

_MAX_WAIT_SHARE = 0.25  # longest wait for the last pass's sessions, as a share of its time
_MAX_WAIT_SECONDS = 0.02
_SEVERAL_THREADS = -1  # in place of a thread's id: several threads wait for steps in turn


class Scheduler:
    """A scheduler of an engine's sessions, which batches steps that are queued at the same time.

    An iteration computes at most one chunk of one prompt and one verification pass of each queued
    session; no step waits longer than that. Prompts are prefilled whole, in the order of arrival.
    Before a pass, the leader waits for sessions of the last pass, at most 0.02 seconds or a quarter
    of the last pass, unless their thread is already waiting for another session.

    The callers' threads do the work. An error of a session's drafter, stop rule or processor
    reaches that session's caller only, whether it is an Exception or not. An error that a signal
    handler raises in the main thread, such as KeyboardInterrupt, stays in the main thread; other
    sessions continue. A cancelled request ends after the running iteration.

    Args:
        engine: the engine of the sessions' verifiers.
        max_batch: most sequences in one pass.
        max_rows: most rows in one pass of several sequences.
    """

    def __init__(self, engine: Engine, *, max_batch: int = 16, max_rows: int = 256) -> None:
        self.max_batch, self._max_rows = max(1, max_batch), max_rows
        self.engine = engine
        self._queue: list[ScheduledStep] = []
        self._changed = Condition()
        self._leader: int | None = None  # the thread that runs an iteration
        self._expected: dict[Session, int] = {}  # sessions of the last pass, and their threads
        self._arrivals: WeakKeyDictionary[Session, int] = WeakKeyDictionary()
        self._ticks = count()
        self._pass_seconds = 0.0

    def steps(self, session: Session, cancellation: Cancellation | None = None) -> Iterator[Step]:
        """Decode one session to its end, batched with other queued sessions.

        Raises:
            Cancelled: the request was cancelled before its end.
        """
        while session.finish_reason is None:
            yield self.advance([session], cancellation)[0][1]

    def advance(
        self, sessions: Sequence[Session], cancellation: Cancellation | None = None
    ) -> list[tuple[Session, Step]]:
        """Wait until at least one of these sessions has made a step; return those that have.

        Raises:
            BaseException: the error of the first session that failed.
            Cancelled: the request was cancelled before any session made a step.
            ConfigurationError: this process was forked from one that had used a model.
            ValueError: ``sessions`` is empty.
        """
        if not sessions:
            raise ValueError("sessions must not be empty")
        claim_torch()
        owner_thread = get_ident()
        items = [ScheduledStep(session, owner_thread, cancellation) for session in sessions]
        with self._changed:
            self._queue += items
            self._changed.notify_all()
        try:
            while not any(item.is_done for item in items):
                if self._wait_to_lead(items):
                    self._run_as_leader()
        finally:
            self._dequeue(items)
        for item in items:
            if item.error is not None:
                raise item.error
        made = [(item.session, item.step) for item in items if item.step is not None]
        if not made:
            raise Cancelled("the request was cancelled before its end")
        return made

    def _run_as_leader(self) -> None:
        """Run one iteration and release the lead; after an interruption, others can continue."""
        try:
            self._run_iteration()
        except BaseException:
            for item in self._queue:
                item.recover()
            raise
        finally:
            self._release_lead()

    def _dequeue(self, items: list[ScheduledStep]) -> None:
        """Wait until none of these items runs, and remove them from the queue."""
        with self._changed:
            if self._leader == get_ident():  # interrupted before the iteration or the release
                self._release_lead()
            try:
                while any(item.is_running for item in items):
                    self._changed.wait()
            finally:  # a second interruption stops the wait; the pass ends without this caller
                self._queue = [item for item in self._queue if item not in items]
            for session in tuple(self._expected):
                if session.finish_reason is not None:
                    self.discard(session)

    def discard(self, session: Session) -> None:
        """Stop expecting a session's next step, without a lock: finalizers may call this."""
        self._expected.pop(session, None)

    def _wait_to_lead(self, items: list[ScheduledStep]) -> bool:
        """Wait until there is no leader or an item is done; return True after taking the lead."""
        with self._changed:
            while self._leader is not None and not any(item.is_done for item in items):
                self._changed.wait()
            if any(item.is_done for item in items):
                return False
            self._leader = get_ident()
            return True

    def _release_lead(self) -> None:
        with self._changed:
            self._leader = None
            for item in self._queue:
                item.is_running = False
            self._queue = [item for item in self._queue if not item.has_outcome]
            self._changed.notify_all()

    def _run_iteration(self) -> None:
        items = self._collect()
        unread = [item for item in items if not item.verifier.is_prefilled]
        if unread:
            self._prefill(self._earliest_arrival(unread))
        ready = [item for item in items if item.verifier.is_prefilled and not item.is_done]
        for start in range(0, len(ready), self.max_batch):
            self._pass(ready[start : start + self.max_batch])

    def _earliest_arrival(self, items: Sequence[ScheduledStep]) -> ScheduledStep:
        """Return the item whose session was queued first; later steps keep that position."""
        for item in items:
            if item.session not in self._arrivals:
                self._arrivals[item.session] = next(self._ticks)
        return min(items, key=lambda item: self._arrivals[item.session])

    def _collect(self) -> list[ScheduledStep]:
        """Return the queued items, after a short wait for the sessions of the last pass."""
        until = perf_counter() + min(_MAX_WAIT_SECONDS, _MAX_WAIT_SHARE * self._pass_seconds)
        with self._changed:
            queued = {item.session: item.owner_thread for item in self._queue}
            while self._should_wait(queued) and (left := until - perf_counter()) > 0.0:
                self._changed.wait(left)
                queued = {item.session: item.owner_thread for item in self._queue}
            if self._expected != queued:
                last = self._expected
                self._expected = {
                    session: owner_thread
                    if last.get(session, owner_thread) == owner_thread
                    else _SEVERAL_THREADS
                    for session, owner_thread in queued.items()
                }
            items = [item for item in self._queue if not item.is_done]
            for item in items:
                item.is_running = True
            return items

    def _should_wait(self, queued: dict[Session, int]) -> bool:
        """Return whether a thread that is not waiting may soon queue a session of the last pass."""
        if self._expected.keys() <= queued.keys() or self.engine.separate_passes:
            return False
        here = set(queued.values())
        return any(
            session not in queued and owner_thread not in here and session.finish_reason is None
            for session, owner_thread in tuple(self._expected.items())
        )

    def _prefill(self, item: ScheduledStep) -> None:
        started = perf_counter()
        item.phase = "computing"
        try:
            self.engine.prefill_chunk_of(item.verifier)
        except BaseException as error:
            item.fail(error)
        item.phase = ""
        item.session.charge_prefill(perf_counter() - started)

    def _pass(self, items: Sequence[ScheduledStep]) -> None:
        """Draft for each session, verify all drafts in as few passes as fit, and accept tokens."""
        drafted = [(item, tree) for item in items if (tree := item.draft()) is not None]
        for group in self._split_into_passes(drafted):
            started = perf_counter()
            verified = self._verify(group)
            self._pass_seconds = perf_counter() - started
            self._accept([item for item, _ in group], verified)

    def _accept(
        self, items: Sequence[ScheduledStep], verified: Sequence[SampledTokens | BaseException]
    ) -> None:
        """Let each session accept its sampled tokens.

        A signal may interrupt the main thread half-way, so there the sessions of other callers are
        handled in a separate thread.
        """
        own = list(zip(items, verified, strict=True))
        if current_thread() is main_thread():
            others = [pair for pair in own if pair[0].owner_thread != get_ident()]
            own = [pair for pair in own if pair[0].owner_thread == get_ident()]
            if others:
                run_uninterrupted(lambda: _accept_each(others))
        _accept_each(own)

    def _verify(
        self, group: Sequence[tuple[ScheduledStep, DraftTree]]
    ) -> list[SampledTokens | BaseException]:
        for item, _ in group:
            item.phase = "computing"
        batch = [
            (item.verifier, tree, item.session.drafter.num_alternatives) for item, tree in group
        ]
        try:
            return self.engine.verify_each(batch)
        except Exception as error:
            if is_interrupt(error):
                raise
            if len(batch) == 1:
                return [error]
        # The batch may be too large, or one request faulty: verify each request by itself.
        return [found for each in zip(group) for found in self._verify(each)]

    def _split_into_passes(
        self, drafted: Sequence[tuple[ScheduledStep, DraftTree]]
    ) -> Iterator[list[tuple[ScheduledStep, DraftTree]]]:
        """Yield the pruned trees in groups, one for each pass, of at most ``max_rows`` rows."""
        group: list[tuple[ScheduledStep, DraftTree]] = []
        rows = 0
        for item, tree in self._allocated(drafted):
            if group and rows + len(tree) > self._max_rows:
                yield group
                group, rows = [], 0
            group.append((item, tree))
            rows += len(tree)
        if group:
            yield group

    def _allocated(
        self, drafted: Sequence[tuple[ScheduledStep, DraftTree]]
    ) -> Iterator[tuple[ScheduledStep, DraftTree]]:
        """Yield each tree, pruned to the nodes worth verifying in a pass with the others."""
        if len(drafted) > 1 and not self.engine.separate_passes:
            sessions, trees = [item.session for item, _ in drafted], [tree for _, tree in drafted]
            cost = self.engine.cost_of([item.verifier for item, _ in drafted])
            try:
                allocated = allocate(sessions, trees, cost.seconds, self._max_rows)
            except BaseException as error:
                if is_interrupt(error):
                    raise
                # Prune each tree alone, so that only the session at fault fails.
                logger.warning("cannot prune drafts jointly, so each is pruned alone: %s", error)
            else:
                yield from zip((item for item, _ in drafted), allocated, strict=True)
                return
        for item, tree in drafted:
            if (pruned := item.prune(tree)) is not None:
                yield item, pruned


def _accept_each(pairs: Sequence[tuple[ScheduledStep, SampledTokens | BaseException]]) -> None:
    for item, sampled in pairs:
        item.accept(sampled)
