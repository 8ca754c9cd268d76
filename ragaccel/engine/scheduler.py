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
class Turn:
    """A session whose owner waits for its next step.

    ``asker`` is the thread that waits; ``amid`` names what an interruption would leave half done.
    """

    session: Session
    asker: int
    cancellation: Cancellation | None = None
    step: Step | None = None
    error: BaseException | None = None
    is_running: bool = False
    amid: Literal["", "drafting", "computing", "absorbing"] = ""

    @property
    def is_done(self) -> bool:
        """Whether there is a step, or will be none."""
        return self.step is not None or self.error is not None

    @property
    def is_over(self) -> bool:
        """Whether nobody waits any longer."""
        asked = self.cancellation is not None and self.cancellation.is_cancelled
        return asked or self.step is not None or self.error is not None

    @property
    def verifier(self) -> EngineVerifier:
        """The session's verifier."""
        return cast("EngineVerifier", self.session.verifier)

    def draft(self) -> DraftTree | None:
        """Draft for the next pass; None if the drafter fails."""
        self.amid = "drafting"
        try:
            tree = self.session.draft(self.session.budget())
        except BaseException as error:
            self.fail(error)
            return None
        self.amid = ""
        return tree

    def prune(self, tree: DraftTree) -> DraftTree | None:
        """Narrow a draft to what is worth verifying alone; None if that fails."""
        try:
            return self.session.prune(tree)
        except BaseException as error:
            self.fail(error)
            return None

    def accept(self, choices: SampledTokens | BaseException) -> None:
        """Take what the pass chose as the step, or what failed in it as the error."""
        if isinstance(choices, BaseException):
            self.error = choices
            return
        self.amid = "absorbing"
        try:
            self.step = self.session.accept(choices)
        except BaseException as error:
            self.fail(error)
        self.amid = ""

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
        if self.is_done or not self.amid:
            return
        amid, self.amid = self.amid, ""
        if amid == "drafting":
            self.session.context.forget()
        elif not self.verifier.restart() or amid == "absorbing":
            # What is absorbed is several changes that belong together.
            self.verifier.close()
            self.error = RuntimeError("the pass was interrupted by another caller of this process")


logger = logging.getLogger("ragaccel")

_PATIENCE = 0.25  # of a pass: how long it waits for the sessions of the one before
_LONGEST_PATIENCE = 0.02  # seconds
_ANY = -1  # asked for by thread after thread


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
        self._turns: list[Turn] = []
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
        asker = get_ident()
        turns = [Turn(session, asker, cancellation) for session in sessions]
        with self._changed:
            self._turns += turns
            self._changed.notify_all()
        try:
            while not any(turn.is_over for turn in turns):
                if self._takes_lead(turns):
                    self._lead()
        finally:
            self._withdraw(turns)
        for turn in turns:
            if turn.error is not None:
                raise turn.error
        made = [(turn.session, turn.step) for turn in turns if turn.step is not None]
        if not made:
            raise Cancelled("what was asked for was cancelled before its end")
        return made

    def _lead(self) -> None:
        """Run a round and hand over; where it is interrupted, the others' go on in the next."""
        try:
            self._round()
        except BaseException:
            for turn in self._turns:
                turn.recover()
            raise
        finally:
            self._hand_over()

    def _withdraw(self, turns: list[Turn]) -> None:
        """Whatever happened, none of these is queued or running afterwards."""
        with self._changed:
            if self._leader == get_ident():  # interrupted before it could begin, or hand over
                self._hand_over()
            try:
                while any(turn.is_running for turn in turns):
                    self._changed.wait()
            finally:  # whoever is interrupted once more leaves the pass to end without him
                self._turns = [turn for turn in self._turns if turn not in turns]
            for session in tuple(self._expected):
                if session.finish_reason is not None:
                    self.leave(session)

    def leave(self, session: Session) -> None:
        """Expect nothing more of a session; called wherever its owner drops it, with any lock."""
        self._expected.pop(session, None)

    def _takes_lead(self, turns: list[Turn]) -> bool:
        """Wait until nobody leads or a turn is over; lead in the first case."""
        with self._changed:
            while self._leader is not None and not any(turn.is_over for turn in turns):
                self._changed.wait()
            if any(turn.is_over for turn in turns):
                return False
            self._leader = get_ident()
            return True

    def _hand_over(self) -> None:
        with self._changed:
            self._leader = None
            for turn in self._turns:
                turn.is_running = False
            self._turns = [turn for turn in self._turns if not turn.is_done]
            self._changed.notify_all()

    def _round(self) -> None:
        turns = self._gather()
        unread = [turn for turn in turns if not turn.verifier.is_prefilled]
        if unread:
            self._prefill(self._first_come(unread))
        ready = [turn for turn in turns if turn.verifier.is_prefilled and not turn.is_over]
        for start in range(0, len(ready), self.max_batch):
            self._pass(ready[start : start + self.max_batch])

    def _first_come(self, turns: Sequence[Turn]) -> Turn:
        """The turn whose session came first: a place in the queue is lost with every step."""
        for turn in turns:
            if turn.session not in self._arrivals:
                self._arrivals[turn.session] = next(self._ticks)
        return min(turns, key=lambda turn: self._arrivals[turn.session])

    def _gather(self) -> list[Turn]:
        """Take what is queued, after a short wait for the sessions of the last pass."""
        until = perf_counter() + min(_LONGEST_PATIENCE, _PATIENCE * self._pass_seconds)
        with self._changed:
            queued = {turn.session: turn.asker for turn in self._turns}
            while self._may_grow(queued) and (left := until - perf_counter()) > 0.0:
                self._changed.wait(left)
                queued = {turn.session: turn.asker for turn in self._turns}
            if self._expected != queued:
                last = self._expected
                self._expected = {
                    session: asker if last.get(session, asker) == asker else _ANY
                    for session, asker in queued.items()
                }
            turns = [turn for turn in self._turns if not turn.is_over]
            for turn in turns:
                turn.is_running = True
            return turns

    def _may_grow(self, queued: dict[Session, int]) -> bool:
        """Whether a session of the last pass may come yet, by a thread that does not wait here."""
        if self._expected.keys() <= queued.keys() or self.engine.separate_passes:
            return False
        here = set(queued.values())
        return any(
            session not in queued and asker not in here and session.finish_reason is None
            for session, asker in tuple(self._expected.items())
        )

    def _prefill(self, turn: Turn) -> None:
        started = perf_counter()
        turn.amid = "computing"
        try:
            self.engine.prefill_chunk_of(turn.verifier)
        except BaseException as error:
            turn.fail(error)
        turn.amid = ""
        turn.session.charge_prefill(perf_counter() - started)

    def _pass(self, turns: Sequence[Turn]) -> None:
        """Draft for each session, verify together, accept."""
        drafted = [(turn, tree) for turn in turns if (tree := turn.draft()) is not None]
        for group in self._fitting(drafted):
            started = perf_counter()
            verified = self._verify(group)
            self._pass_seconds = perf_counter() - started
            self._absorb([turn for turn, _ in group], verified)

    def _absorb(
        self, turns: Sequence[Turn], verified: Sequence[SampledTokens | BaseException]
    ) -> None:
        """Let each session take what was chosen.

        The main thread, where a signal may interrupt it half-way, does not do so for others.
        """
        own = list(zip(turns, verified, strict=True))
        if current_thread() is main_thread():
            others = [pair for pair in own if pair[0].asker != get_ident()]
            own = [pair for pair in own if pair[0].asker == get_ident()]
            if others:
                run_uninterrupted(lambda: _absorb_each(others))
        _absorb_each(own)

    def _verify(
        self, group: Sequence[tuple[Turn, DraftTree]]
    ) -> list[SampledTokens | BaseException]:
        for turn, _ in group:
            turn.amid = "computing"
        batch = [(turn.verifier, tree, turn.session.num_alternatives) for turn, tree in group]
        try:
            return self.engine.verify_each(batch)
        except Exception as error:
            if is_interrupt(error):
                raise
            if len(batch) == 1:
                return [error]
        # It may have been too much at once: what is wrong with one must not end the others.
        return [found for each in zip(group) for found in self._verify(each)]

    def _fitting(
        self, drafted: Sequence[tuple[Turn, DraftTree]]
    ) -> Iterator[list[tuple[Turn, DraftTree]]]:
        """Settle the trees of a pass; in several passes where they would be too many rows."""
        group: list[tuple[Turn, DraftTree]] = []
        rows = 0
        for turn, tree in self._settled(drafted):
            if group and rows + len(tree) > self._max_rows:
                yield group
                group, rows = [], 0
            group.append((turn, tree))
            rows += len(tree)
        if group:
            yield group

    def _settled(
        self, drafted: Sequence[tuple[Turn, DraftTree]]
    ) -> Iterator[tuple[Turn, DraftTree]]:
        """Narrow the trees to what is worth verifying in one pass of all."""
        if len(drafted) > 1 and not self.engine.separate_passes:
            sessions, trees = [turn.session for turn, _ in drafted], [tree for _, tree in drafted]
            cost = self.engine.cost_of([turn.verifier for turn, _ in drafted])
            try:
                settled = allocate(sessions, trees, cost.seconds, self._max_rows)
            except BaseException as error:  # of one of them: found when each is narrowed alone
                if is_interrupt(error):
                    raise
                logger.warning("trees are not settled together: %s", error)
            else:
                yield from zip((turn for turn, _ in drafted), settled, strict=True)
                return
        for turn, tree in drafted:
            if (pruned := turn.prune(tree)) is not None:
                yield turn, pruned


def _absorb_each(pairs: Sequence[tuple[Turn, SampledTokens | BaseException]]) -> None:
    for turn, choices in pairs:
        turn.accept(choices)
