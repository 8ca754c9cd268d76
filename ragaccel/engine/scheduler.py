"""The scheduler: batch the steps of many sessions into one forward pass.

There is no worker thread. A caller queues the next step of its session, and one of the waiting
callers becomes the leader: it runs one iteration for all queued steps, then releases the lead. So
requests join and leave between any two passes (continuous batching, as in Orca, Yu et al., OSDI
2022), no step is computed unless a caller waits for it, and a single caller pays for no thread
switch.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from threading import RLock, get_ident, main_thread
from time import perf_counter
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

from ragaccel.decoding.request import Cancelled
from ragaccel.decoding.session import allocate, allocate_alone
from ragaccel.engine.interrupts import is_interrupt, run_uninterrupted
from ragaccel.paths import claim_torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ragaccel.decoding.request import Cancellation
    from ragaccel.decoding.session import SampledTokens, Session
    from ragaccel.decoding.stats import Step
    from ragaccel.decoding.tree import DraftTree
    from ragaccel.engine.engine import Engine, EngineVerifier


logger = logging.getLogger("ragaccel")

_MAX_WAIT_SHARE = 0.25  # longest wait for the last pass's sessions, as a share of its time
_MAX_WAIT_SECONDS = 0.02
_TAKEN_BY_ANOTHER = (
    "another thread decodes or has closed this session: decode it in one thread at a time"
)
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
        # The sessions whose callers wait, with the thread of each and its cancellation.
        self._queue: dict[Session, tuple[int, Cancellation | None]] = {}
        self._running: Sequence[Session] = ()  # those of the iteration
        self._outcomes: dict[Session, Step | BaseException] = {}  # until their callers take them
        # Written in C, so that no signal can leave a ``with`` half-way, unlike a Condition.
        self._lock = RLock()
        self._waiting: list[SimpleQueue[None]] = []  # each gets an item at the next change
        self._leader: int | None = None  # the thread that runs an iteration
        self._accepting: int | None = None  # a thread that accepts tokens for the leader
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
            RuntimeError: a drafter, stop rule or processor of a running request asks; or another
                thread waits for the same session.
        """
        if not sessions:
            raise ValueError("sessions must not be empty")
        if get_ident() in (self._leader, self._accepting):
            raise RuntimeError(
                "a drafter, stop rule or processor cannot ask the model that waits for it: "
                "give it a model of its own"
            )
        claim_torch()
        caller = get_ident(), cancellation
        outcomes: list[Step | BaseException | None] = []
        try:
            with self._lock:
                for session in sessions:
                    self._queue[session] = caller
                self._notify()
            while not self._is_done(sessions, cancellation):
                if self._wait_to_lead(sessions, cancellation):
                    self._run_as_leader()
        finally:
            outcomes = self._dequeue(sessions)
        made: list[tuple[Session, Step]] = []
        for session, outcome in zip(sessions, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise outcome
            if outcome is not None:
                made.append((session, outcome))
        if not made:
            if cancellation is None or not cancellation.is_cancelled:
                raise RuntimeError(_TAKEN_BY_ANOTHER)
            raise Cancelled("the request was cancelled before its end")
        return made

    @property
    def is_idle(self) -> bool:
        """Return whether no caller waits and no pass runs."""
        return not self._queue and self._leader is None

    def discard(self, session: Session) -> None:
        """Forget a session that ends, without a lock: finalizers may call this."""
        self._queue.pop(session, None)  # an interruption can keep its caller from unqueueing it
        self._expected.pop(session, None)
        self._outcomes.pop(session, None)

    def _is_done(self, sessions: Sequence[Session], cancellation: Cancellation | None) -> bool:
        """Return whether a caller can stop waiting: one step was made or failed, or a cancel."""
        if cancellation is not None and cancellation.is_cancelled:
            return True
        return not self._outcomes.keys().isdisjoint(sessions)

    def _is_waiting(self, session: Session) -> bool:
        caller = self._queue.get(session)
        return caller is not None and not self._is_done([session], caller[1])

    def _wait_to_lead(self, sessions: Sequence[Session], cancellation: Cancellation | None) -> bool:
        """Wait until the caller is done or there is no leader; return whether it leads now."""
        while True:
            with self._lock:
                if self._is_done(sessions, cancellation):
                    return False
                if not any(session in self._queue for session in sessions):
                    raise RuntimeError(_TAKEN_BY_ANOTHER)
                if self._leader is None:
                    self._leader = get_ident()
                    return True
                change = self._next_change()
            change.get()

    def _next_change(self) -> SimpleQueue[None]:
        """Return a queue that gets an item at the next change; the caller holds the lock."""
        change = SimpleQueue[None]()
        self._waiting.append(change)
        return change

    def _notify(self) -> None:
        """Wake all that wait for a change; the caller holds the lock, and may do this again."""
        for change in self._waiting:
            change.put(None)
        self._waiting = []

    def _run_as_leader(self) -> None:
        """Run one iteration and release the lead; after an interruption, others can continue."""
        try:
            self._run_iteration()
        except BaseException:
            run_uninterrupted(self._recover)
            raise
        finally:
            self._give_up_lead()

    def _recover(self) -> None:
        for session in self._running:
            if session not in self._outcomes:
                try:
                    session.recover()
                except RuntimeError as error:
                    self._outcomes[session] = error

    def _give_up_lead(self) -> None:
        """Release the lead if this thread has it, again after each interruption."""
        interrupt: BaseException | None = None
        while self._leader == get_ident():
            try:
                self._release_lead()
            except BaseException as error:  # noqa: PERF203
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _release_lead(self) -> None:
        """Unqueue the sessions that have an outcome; drop outcomes whose callers have left.

        An interruption may come between any two calls, and then this is done again.
        """
        with self._lock:
            queue, outcomes, ran = self._queue.copy(), self._outcomes.copy(), self._running
            queued = {session: queue[session] for session in queue if session not in outcomes}
            wanted = {
                session: outcomes[session]
                for session in outcomes
                if session in queue or session not in ran
            }
            self._queue, self._outcomes, self._running = queued, wanted, ()
            self._notify()
            self._leader = None

    def _dequeue(self, sessions: Sequence[Session]) -> list[Step | BaseException | None]:
        """Wait until none of these sessions runs; unqueue them and return their outcomes."""
        self._give_up_lead()  # if interrupted before the iteration
        try:
            while change := self._end_of_pass(sessions):
                change.get()
        finally:  # a second interruption stops the wait; the pass ends without this caller
            with self._lock:
                for session in sessions:
                    self._queue.pop(session, None)
        with self._lock:
            for session in tuple(self._expected):
                if session.finish_reason is not None:
                    self._expected.pop(session, None)
            return [self._outcomes.pop(session, None) for session in sessions]

    def _end_of_pass(self, sessions: Sequence[Session]) -> SimpleQueue[None] | None:
        """Return the next change if one of these sessions runs; else None."""
        with self._lock:
            runs = any(session in self._running for session in sessions)
            return self._next_change() if runs else None

    def _run_iteration(self) -> None:
        sessions = self._collect()
        unread = [session for session in sessions if not _verifier(session).is_prefilled]
        if unread:
            self._prefill(self._earliest_arrival(unread))
        ready = [
            session
            for session in sessions
            if _verifier(session).is_prefilled and self._is_waiting(session)
        ]
        for start in range(0, len(ready), self.max_batch):
            self._pass(ready[start : start + self.max_batch])

    def _earliest_arrival(self, sessions: Iterable[Session]) -> Session:
        """Return the session that was queued first; later steps keep that position."""
        for session in sessions:
            if session not in self._arrivals:
                self._arrivals[session] = next(self._ticks)
        return min(sessions, key=self._arrivals.__getitem__)

    def _collect(self) -> Sequence[Session]:
        """Return the queued sessions, after a short wait for those of the last pass."""
        until = perf_counter() + min(_MAX_WAIT_SECONDS, _MAX_WAIT_SHARE * self._pass_seconds)
        while True:
            with self._lock:
                left = until - perf_counter()
                if left <= 0 or not self._should_wait():
                    return self._start_iteration()
                change = self._next_change()
            with suppress(Empty):
                change.get(timeout=left)

    def _start_iteration(self) -> Sequence[Session]:
        last = self._expected
        self._expected = {
            session: owner if last.get(session, owner) == owner else _SEVERAL_THREADS
            for session, (owner, _) in self._queue.copy().items()
        }
        self._running = [session for session in self._queue.copy() if self._is_waiting(session)]
        return self._running

    def _should_wait(self) -> bool:
        """Return whether a thread that is not waiting may soon queue a session of the last pass."""
        if self.engine.separate_passes or self._expected.keys() <= self._queue.keys():
            return False
        here = {owner for owner, _ in self._queue.copy().values()}
        return any(
            session not in self._queue and owner not in here and session.finish_reason is None
            for session, owner in tuple(self._expected.items())
        )

    def _fail(self, session: Session, error: BaseException) -> None:
        """Store an error that this session's drafter, stop rule or processor raised.

        Raises:
            BaseException: the error, if a signal handler raised it: it belongs to the leader.
        """
        if is_interrupt(error):
            raise error
        session.phase = ""
        self._outcomes[session] = error

    def _prefill(self, session: Session) -> None:
        started = perf_counter()
        session.phase = "computing"
        try:
            self.engine.prefill(_verifier(session))
            session.phase = ""
        except BaseException as error:
            self._fail(session, error)
        session.prefill_seconds += perf_counter() - started

    def _pass(self, sessions: Sequence[Session]) -> None:
        """Draft for each session, verify all drafts in as few passes as fit, and accept tokens."""
        drafted = [session for session in sessions if self._draft(session)]
        for group in self._split_into_passes(drafted):
            started = perf_counter()
            verified = self._verify(group)
            self._pass_seconds = perf_counter() - started
            self._accept([session for session, _ in group], verified)

    def _draft(self, session: Session) -> bool:
        try:
            session.draft()
        except BaseException as error:
            self._fail(session, error)
            return False
        return True

    def _accept(
        self, sessions: Sequence[Session], verified: Sequence[SampledTokens | BaseException]
    ) -> None:
        """Let each session accept its sampled tokens.

        A signal may interrupt the main thread half-way, so there the sessions of other callers are
        handled in a separate thread.
        """
        pairs = list(zip(sessions, verified, strict=True))
        here = get_ident()
        if here == main_thread().ident:
            others = [pair for pair in pairs if self._owner(pair[0]) != here]
            pairs = [pair for pair in pairs if self._owner(pair[0]) == here]
            if others:
                run_uninterrupted(partial(self._accept_for_leader, others))
        self._accept_each(pairs)

    def _accept_for_leader(
        self, pairs: Sequence[tuple[Session, SampledTokens | BaseException]]
    ) -> None:
        self._accepting = get_ident()
        try:
            self._accept_each(pairs)
        finally:
            self._accepting = None

    def _owner(self, session: Session) -> int:
        """Return the thread that waits for a session; 0 if it was interrupted and has left."""
        return self._queue.get(session, (0, None))[0]

    def _accept_each(self, pairs: Iterable[tuple[Session, SampledTokens | BaseException]]) -> None:
        for session, sampled in pairs:
            if isinstance(sampled, BaseException):
                session.phase = ""
                self._outcomes[session] = sampled
                continue
            try:
                self._outcomes[session] = session.accept(sampled)
            except BaseException as error:
                self._fail(session, error)

    def _verify(
        self, group: Sequence[tuple[Session, DraftTree]]
    ) -> list[SampledTokens | BaseException]:
        for session, _ in group:
            session.phase = "computing"
        batch = [
            (_verifier(session), tree, session.drafter.num_alternatives) for session, tree in group
        ]
        try:
            return self.engine.verify(batch)
        except Exception as error:
            if is_interrupt(error):
                raise
            if len(batch) == 1:
                return [error]
        # The batch may be too large, or one request faulty: verify each request by itself.
        return [found for each in group for found in self._verify([each])]

    def _split_into_passes(
        self, sessions: Sequence[Session]
    ) -> Iterator[list[tuple[Session, DraftTree]]]:
        """Yield the allocated trees in groups, one for each pass, of at most ``max_rows`` rows."""
        group: list[tuple[Session, DraftTree]] = []
        rows = 0
        for session, tree in self._allocated(sessions):
            if group and rows + len(tree) > self._max_rows:
                yield group
                group, rows = [], 0
            group.append((session, tree))
            rows += len(tree)
        if group:
            yield group

    def _allocated(self, sessions: Sequence[Session]) -> list[tuple[Session, DraftTree]]:
        """Return each session's tree: the nodes worth verifying in a pass with the others."""
        if len(sessions) > 1 and not self.engine.separate_passes:
            cost = self.engine.cost_of([_verifier(session) for session in sessions])
            try:
                trees = allocate(sessions, cost.seconds, self._max_rows, cost.mask_seconds)
                return list(zip(sessions, trees, strict=True))
            except BaseException as error:
                if is_interrupt(error):
                    raise
                # Allocate each alone, so that only the session at fault fails.
                logger.warning("cannot prune drafts jointly, so each is pruned alone: %s", error)
        pairs = zip(sessions, map(self._allocated_alone, sessions), strict=True)
        return [(session, tree) for session, tree in pairs if tree is not None]

    def _allocated_alone(self, session: Session) -> DraftTree | None:
        """Return the part of a session's draft for a pass of its own; None if that fails."""
        try:
            return allocate_alone(session)
        except BaseException as error:
            self._fail(session, error)
            return None


def _verifier(session: Session) -> EngineVerifier:
    return cast("EngineVerifier", session.verifier)
