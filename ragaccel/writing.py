"""Writing: from checked requests to answers, their text piece by piece."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from ragaccel.answer import Answer, Stream
from ragaccel.decoding.request import Cancellation
from ragaccel.models.streaming import IncrementalDecoder
from ragaccel.running import Job

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from ragaccel.decoding.session import Session
    from ragaccel.decoding.stats import Step
    from ragaccel.models.tokenizer import Tokenizer
    from ragaccel.planning import Plan
    from ragaccel.running import Runner


class Writer:
    """Has requests decoded and writes their answers.

    Args:
        runner: decodes them.
        tokenizer: turns tokens into text.
    """

    def __init__(self, runner: Runner, tokenizer: Tokenizer) -> None:
        self._runner, self._tokenizer = runner, tokenizer

    def stream(self, plan: Plan) -> Stream:
        """Write one answer while it is read."""
        cancellation, written = Cancellation(), list[int]()
        pieces = self._pieces(plan, cancellation, written)
        return Stream(pieces, plan.passages, cancellation, written)

    def _pieces(
        self, plan: Plan, cancellation: Cancellation, written: list[int]
    ) -> Generator[str, None, Answer]:
        text: Writing | None = None
        with closing(self._runner.one(_job(plan), cancellation)) as steps:
            for session, step in steps:
                text = text or Writing(plan, session, self._tokenizer)
                written += step.token_ids
                if piece := text.add(step):
                    yield piece
        assert text is not None
        if piece := text.finish():
            yield piece
        return text.answer()

    def all(self, plans: Sequence[Plan], cancellation: Cancellation | None = None) -> list[Answer]:
        """Write several answers, as many at a time as a pass takes sequences; in order.

        Raises:
            Cancelled: this was asked for before their end.
        """
        texts: dict[int, Writing] = {}
        with closing(self._runner.all([_job(plan) for plan in plans], cancellation)) as steps:
            for number, session, step in steps:
                if number not in texts:
                    texts[number] = Writing(plans[number], session, self._tokenizer)
                texts[number].add(step)
        for text in texts.values():
            text.finish()
        return [texts[number].answer() for number in range(len(plans))]


def _job(plan: Plan) -> Job:
    return Job(plan.request, plan.drafter, plan.remember)


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
