"""Turns: sessions whose owners wait for their next step, and what is being done with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from ragaccel.engine.interrupts import is_interrupt

if TYPE_CHECKING:
    from ragaccel.decoding.request import Cancellation
    from ragaccel.decoding.session import Choices, Session
    from ragaccel.decoding.stats import Step
    from ragaccel.decoding.tree import DraftTree
    from ragaccel.engine.verifier import EngineVerifier


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
        asked = self.cancellation is not None and self.cancellation.is_asked
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

    def narrow(self, tree: DraftTree) -> DraftTree | None:
        """Narrow a draft to what is worth verifying alone; None if that fails."""
        try:
            return self.session.narrow(tree)
        except BaseException as error:
            self.fail(error)
            return None

    def absorb(self, choices: Choices | BaseException) -> None:
        """Take what the pass chose as the step, or what failed in it as the error."""
        if isinstance(choices, BaseException):
            self.error = choices
            return
        self.amid = "absorbing"
        try:
            self.step = self.session.absorb(choices)
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
        elif not self.verifier.start_over() or amid == "absorbing":
            # What is absorbed is several changes that belong together.
            self.verifier.close()
            self.error = RuntimeError("the pass was interrupted by another caller of this process")
