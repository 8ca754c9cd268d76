"""The scheduler: many sessions, one forward pass.

There is no thread of its own. Whoever wants a step of a session queues it, and one of those who
wait leads: it runs one round for all that is queued, then hands over. So requests join and leave
between any two passes (continuous batching, as in Orca, Yu et al., OSDI 2022), nothing is computed
that nobody waits for, and a single caller pays for no hand-over.
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
        """Whether there is a step, or will be none."""
        return self.step is not None or self.error is not None

    @property
    def is_done(self) -> bool:
        """Whether nobody waits any longer."""
        asked = self.cancellation is not None and self.cancellation.is_cancelled
        return asked or self.step is not None or self.error is not None

    @property
    def verifier(self) -> EngineVerifier:
        """The session's verifier."""
        return cast("EngineVerifier", self.session.verifier)

    def draft(self) -> DraftTree | None:
        """Draft for the next pass; None if the drafter fails."""
        self.phase = "drafting"
        try:
            tree = self.session.draft(self.session.budget())
        except BaseException as error:
            self.fail(error)
            return None
        self.phase = ""
        return tree

    def prune(self, tree: DraftTree) -> DraftTree | None:
        """Narrow a draft to what is worth verifying alone; None if that fails."""
        try:
            return self.session.prune(tree)
        except BaseException as error:
            self.fail(error)
            return None

    def accept(self, sampled: SampledTokens | BaseException) -> None:
        """Take what the pass chose as the step, or what failed in it as the error."""
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
        """Take what this session's own code raised as its error; a signal's is the leader's.

        Raises:
            BaseException: the error, if a signal raised it.
        """
        if is_interrupt(error):
            raise error
        self.error = error

    def recover(self) -> None:
        """Make ready for another round after an interruption; where that is not sure, fail."""
        if self.has_outcome or not self.phase:
            return
        phase, self.phase = self.phase, ""
        if phase == "drafting":
            self.session.context.forget()
        elif not self.verifier.restart() or phase == "accepting":
            # What is absorbed is several changes that belong together.
            self.verifier.close()
            self.error = RuntimeError("the pass was interrupted by another caller of this process")


logger = logging.getLogger("ragaccel")

_MAX_WAIT_SHARE = 0.25  # of a pass: how long it waits for the sessions of the one before
_MAX_WAIT_SECONDS = 0.02  # seconds
_SEVERAL_THREADS = -1  # asked for by thread after thread


class Scheduler:
    """Runs the steps of an engine's sessions, those that are wanted at one time in one pass.

    A round is at most one chunk of one prompt and one verify pass of each queued session, so that
    nobody waits longer than these for a step of his own. Prompts are read whole in the order in
    which they came. A pass waits at most 0.02 seconds, or a quarter of the last one, for sessions
    that took part in the last, unless the thread that asked for them waits itself. The
    callers' threads do the work; what one session's drafter, stop rules or processors raise
    reaches its owner alone, whether it is an Exception or not. What a signal raises in the main
    thread, such as a KeyboardInterrupt, is the main thread's, and others go on. Whoever cancels is
    gone after the round that is running.

    Args:
        engine: of the sessions' verifiers.
        max_batch: most sequences in one pass.
        max_rows: most rows of one pass of several sequences.
    """

    def __init__(self, engine: Engine, *, max_batch: int = 16, max_rows: int = 256) -> None:
        self.max_batch, self._max_rows = max(1, max_batch), max_rows
        self.engine = engine
        self._queue: list[ScheduledStep] = []
        self._changed = Condition()
        self._leader: int | None = None  # the thread that runs a round
        self._expected: dict[Session, int] = {}  # those of the last pass, and who asked for them
        self._arrivals: WeakKeyDictionary[Session, int] = WeakKeyDictionary()
        self._ticks = count()
        self._pass_seconds = 0.0

    def steps(self, session: Session, cancellation: Cancellation | None = None) -> Iterator[Step]:
        """Decode one session to its end, beside whatever else is queued.

        Raises:
            Cancelled: this was asked for before its end.
        """
        while session.finish_reason is None:
            yield self.advance([session], cancellation)[0][1]

    def advance(
        self, sessions: Sequence[Session], cancellation: Cancellation | None = None
    ) -> list[tuple[Session, Step]]:
        """Wait until at least one of these sessions has made a step; return those that have.

        Raises:
            BaseException: what the first of them raised that raised anything.
            Cancelled: this was asked for, at the latest before the last round; none has a step.
            ConfigurationError: this process was forked from one that had used a model.
            ValueError: there are none.
        """
        if not sessions:
            raise ValueError("nothing would ever come of no sessions")
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
            raise Cancelled("what was asked for was cancelled before its end")
        return made

    def _run_as_leader(self) -> None:
        """Run a round and hand over; where it is interrupted, the others' go on in the next."""
        try:
            self._run_iteration()
        except BaseException:
            for item in self._queue:
                item.recover()
            raise
        finally:
            self._release_lead()

    def _dequeue(self, items: list[ScheduledStep]) -> None:
        """Whatever happened, none of these is queued or running afterwards."""
        with self._changed:
            if self._leader == get_ident():  # interrupted before it could begin, or hand over
                self._release_lead()
            try:
                while any(item.is_running for item in items):
                    self._changed.wait()
            finally:  # whoever is interrupted once more leaves the pass to end without him
                self._queue = [item for item in self._queue if item not in items]
            for session in tuple(self._expected):
                if session.finish_reason is not None:
                    self.discard(session)

    def discard(self, session: Session) -> None:
        """Expect nothing more of a session; called wherever its owner drops it, with any lock."""
        self._expected.pop(session, None)

    def _wait_to_lead(self, items: list[ScheduledStep]) -> bool:
        """Wait until nobody leads or a turn is over; lead in the first case."""
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
        """The turn whose session came first: a place in the queue is lost with every step."""
        for item in items:
            if item.session not in self._arrivals:
                self._arrivals[item.session] = next(self._ticks)
        return min(items, key=lambda item: self._arrivals[item.session])

    def _collect(self) -> list[ScheduledStep]:
        """Take what is queued, after a short wait for the sessions of the last pass."""
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
        """Whether a session of the last pass may come yet, by a thread that does not wait here."""
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
        """Draft for each session, verify together, accept."""
        drafted = [(item, tree) for item in items if (tree := item.draft()) is not None]
        for group in self._split_into_passes(drafted):
            started = perf_counter()
            verified = self._verify(group)
            self._pass_seconds = perf_counter() - started
            self._accept([item for item, _ in group], verified)

    def _accept(
        self, items: Sequence[ScheduledStep], verified: Sequence[SampledTokens | BaseException]
    ) -> None:
        """Let each session take what was chosen.

        The main thread, where a signal may interrupt it half-way, does not do so for others.
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
        batch = [(item.verifier, tree, item.session.num_alternatives) for item, tree in group]
        try:
            return self.engine.verify_each(batch)
        except Exception as error:
            if is_interrupt(error):
                raise
            if len(batch) == 1:
                return [error]
        # It may have been too much at once: what is wrong with one must not end the others.
        return [found for each in zip(group) for found in self._verify(each)]

    def _split_into_passes(
        self, drafted: Sequence[tuple[ScheduledStep, DraftTree]]
    ) -> Iterator[list[tuple[ScheduledStep, DraftTree]]]:
        """Settle the trees of a pass; in several passes where they would be too many rows."""
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
        """Narrow the trees to what is worth verifying in one pass of all."""
        if len(drafted) > 1 and not self.engine.separate_passes:
            sessions, trees = [item.session for item, _ in drafted], [tree for _, tree in drafted]
            cost = self.engine.cost_of([item.verifier for item, _ in drafted])
            try:
                allocated = allocate(sessions, trees, cost.seconds, self._max_rows)
            except BaseException as error:  # of one of them: found when each is narrowed alone
                if is_interrupt(error):
                    raise
                logger.warning("trees are not allocated together: %s", error)
            else:
                yield from zip((item for item, _ in drafted), allocated, strict=True)
                return
        for item, tree in drafted:
            if (pruned := item.prune(tree)) is not None:
                yield item, pruned


def _accept_each(pairs: Sequence[tuple[ScheduledStep, SampledTokens | BaseException]]) -> None:
    for item, sampled in pairs:
        item.accept(sampled)
