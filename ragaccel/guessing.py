"""Guessing: which drafter a request is given, and what the request leaves behind for later ones."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING

from ragaccel.decoding.session import Session
from ragaccel.drafting.mixture import Mixture
from ragaccel.drafting.ngram import CopyDrafter
from ragaccel.drafting.space import SpaceDrafter
from ragaccel.rehearsal import REHEARSAL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from os import PathLike

    from ragaccel.decoding.request import Request
    from ragaccel.decoding.session import Drafter, Verifier
    from ragaccel.drafting.memory import Memory, Recollection
    from ragaccel.models.tokenizer import Tokenizer

logger = logging.getLogger("ragaccel")


class Guessing:
    """Opens sessions: token trees over a request's texts and its namespace's past by default.

    Until the drafting functions are compiled one copied span is guessed.

    Args:
        drafter: in place of the default; then memory is not used.
        memory: what earlier requests taught, or the file it is kept in; without it nothing outlives
            this object. Read, or made, when it is first needed.
        tokenizer: whose token ids the memory holds; None is enough without a file.
        vocab_size: token ids are below.
        probe_ids: the mask tokens of the SPACE adapter that the model wears: it guesses as well.
        remember: whether any session uses the memory.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        memory: Memory | str | PathLike[str] | None,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        *,
        probe_ids: Sequence[int] = (),
        remember: bool = True,
    ) -> None:
        self._probe_ids, self._remembers = probe_ids, remember
        self.drafter, self._given = drafter, memory
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._memory: Memory | None = None
        self._lock = RLock()  # an answer that is dropped may be remembered anywhere, here too
        if drafter is None:
            REHEARSAL.start()

    @property
    def memory(self) -> Memory:
        """What earlier requests taught, by namespace."""
        with self._lock:
            if self._memory is None:
                self._memory = self._opened()
            return self._memory

    def warm_up(self) -> None:
        """Wait until drafting goes at full speed."""
        if self.drafter is None:
            REHEARSAL.wait()

    @contextmanager
    def session(
        self,
        verifier: Verifier,
        request: Request,
        *,
        drafter: Drafter | None = None,
        remember: bool = True,
        token_budget: int | None = None,
    ) -> Iterator[Session]:
        """Open a session; however it ends, what it emitted is remembered."""
        drafter = self.drafter if drafter is None else drafter
        remember = remember and self._remembers and drafter is None
        kept: Recollection | None = None
        if drafter is None:
            ready = REHEARSAL.is_ready()
            kept = self.memory.of(request.namespace) if ready and remember else None
            drafter = _over_the_past(kept) if ready else CopyDrafter()
            if self._probe_ids:
                drafter = _with_space(drafter, self._probe_ids, kept)
        session = Session(verifier, drafter, request, token_budget=token_budget)
        try:
            yield session
        finally:
            if remember and session.token_ids and REHEARSAL.is_ready():
                self._remember(kept, request, session.token_ids)

    def _remember(self, kept: Recollection | None, request: Request, token_ids: list[int]) -> None:
        try:
            kept = kept or self.memory.of(request.namespace)  # ready only since it began
            kept.remember(request.prompt_ids, token_ids)
        except Exception as error:  # the answer is there, and worth more than a guess later on
            logger.warning("an answer is not remembered: %s", error)

    def _opened(self) -> Memory:
        from ragaccel.drafting.memory import Memory  # imports numba: not any sooner

        if isinstance(self._given, Memory):
            return self._given
        if self._given is None:
            return Memory(vocab_size=self._vocab_size)
        assert self._tokenizer is not None
        path, fingerprint = os.fspath(self._given), self._tokenizer.fingerprint
        return Memory(path=path, fingerprint=fingerprint, vocab_size=self._vocab_size)


def _with_space(drafter: Drafter, probe_ids: Sequence[int], kept: Recollection | None) -> Drafter:
    if kept is None:
        return Mixture(drafter, SpaceDrafter(probe_ids))
    return Mixture(drafter, SpaceDrafter(probe_ids, kept.space_calibration))


def _over_the_past(kept: Recollection | None) -> Drafter:
    from ragaccel.drafting.trie import TrieDrafter

    if kept is None:
        return TrieDrafter()
    return TrieDrafter(past=kept.history, calibration=kept.calibration)
