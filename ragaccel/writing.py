"""Writing: from checked requests to answers, their text piece by piece."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from ragaccel.answer import Answer, Stream
from ragaccel.decode.cancelling import Cancellation
from ragaccel.models.detokenizer import IncrementalDecoder

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from ragaccel.decode.result import Step
    from ragaccel.decode.session import Session
    from ragaccel.engine.scheduler import Scheduler
    from ragaccel.guessing import Guessing
    from ragaccel.models.tokenizer import Tokenizer
    from ragaccel.planning import Plan


class Writer:
    """Decodes requests beside one another and writes their answers.

    Args:
        scheduler: runs the steps.
        guessing: opens the sessions.
        tokenizer: turns tokens into text.
        token_budget: most guesses a verify pass takes; None for what pays.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        guessing: Guessing,
        tokenizer: Tokenizer,
        token_budget: int | None,
    ) -> None:
        self._scheduler, self._guessing, self._tokenizer = scheduler, guessing, tokenizer
        self._token_budget = token_budget

    def stream(self, plan: Plan) -> Stream:
        """Write one answer while it is read."""
        cancellation = Cancellation()
        return Stream(self._pieces(plan, cancellation), plan.passages, cancellation)

    def _pieces(self, plan: Plan, cancellation: Cancellation) -> Generator[str, None, Answer]:
        with ExitStack() as stack:
            text = self._open(plan, stack)
            for step in self._scheduler.steps(text.session, cancellation):
                if piece := text.add(step):
                    yield piece
        if piece := text.finish():
            yield piece
        return text.answer()

    def all(self, plans: Sequence[Plan], cancellation: Cancellation | None = None) -> list[Answer]:
        """Write several answers, as many at a time as a pass takes sequences; in order.

        Raises:
            Cancelled: this was asked for before their end.
        """
        answers: dict[int, Answer] = {}
        waiting = deque(enumerate(plans))
        running: dict[Session, tuple[int, Writing, ExitStack]] = {}
        with ExitStack() as everything:
            while waiting or running:
                while waiting and len(running) < self._scheduler.max_batch:
                    number, plan = waiting.popleft()
                    own = everything.enter_context(ExitStack())
                    text = self._open(plan, own)
                    running[text.session] = number, text, own
                for session, step in self._scheduler.advance(list(running), cancellation):
                    number, text, own = running[session]
                    text.add(step)
                    if session.finish_reason is not None:
                        del running[session]
                        own.close()
                        text.finish()
                        answers[number] = text.answer()
        return [answers[number] for number in range(len(plans))]

    def _open(self, plan: Plan, stack: ExitStack) -> Writing:
        verifier = stack.enter_context(closing(self._scheduler.engine.open(plan.request)))
        session = stack.enter_context(
            self._guessing.session(
                verifier,
                plan.request,
                drafter=plan.drafter,
                remember=plan.remember,
                token_budget=self._token_budget,
            )
        )
        stack.callback(self._scheduler.leave, session)
        stack.callback(session.close)
        return Writing(plan, session, self._tokenizer)


class Writing:
    """The text of one answer: steps in, pieces that nothing takes back out."""

    def __init__(self, plan: Plan, session: Session, tokenizer: Tokenizer) -> None:
        self.session, self._plan = session, plan
        self._decoder, self._text = IncrementalDecoder(tokenizer), plan.stop.hold_back()
        self._pieces: list[str] = []

    def add(self, step: Step) -> str:
        """Write a step; return the piece of text that is certain now, possibly empty."""
        tokens, session = step.token_ids, self.session
        if session.finish_reason == "stop" and tokens[-1] in session.request.eos_ids:
            tokens = tokens[:-1]
        return self._keep(self._text.push(self._decoder.push(tokens)))

    def finish(self) -> str:
        """Return what was held back, at the end."""
        return self._keep(self._text.push(self._decoder.finish()) + self._text.finish())

    def answer(self) -> Answer:
        """Put the finished answer together."""
        plan, text = self._plan, "".join(self._pieces)
        return Answer.of(text, self.session.result(), plan.passages, plan.dropped)

    def _keep(self, piece: str) -> str:
        self._pieces.append(piece)
        return piece
