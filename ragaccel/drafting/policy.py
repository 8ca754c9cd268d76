"""The drafting policy: which drafters a request has, and their JIT warm-up."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import contextmanager, suppress
from heapq import nlargest
from pathlib import Path
from threading import Event, Lock, RLock, Thread
from typing import TYPE_CHECKING, Any, Protocol

from ragaccel.decoding.session import Session
from ragaccel.decoding.tree import graft, merge
from ragaccel.drafting.ngram import CopyDrafter
from ragaccel.drafting.space import SpaceDrafter
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from os import PathLike

    from ragaccel.decoding.request import Request
    from ragaccel.decoding.session import Context, Drafter, Verifier
    from ragaccel.decoding.tree import DraftTree
    from ragaccel.drafting.memory import Memory, NamespaceMemory


MAX_CONTINUED = 3
"""How many of the model's own guesses others go on from."""
MIN_CONTINUED_PROB = 0.1
"""The least chance of a guess that others go on from."""


class Mixture:
    """Merges what its drafters guess and keeps the likeliest nodes of all.

    A node that several guessed counts as likely as the surest of them says. Where one drafter
    wants probes and so guesses a few tokens of the model's own, drafters with a method
    ``draft_after`` go on from the likeliest of these: the model chooses what to quote, and what
    follows is copied.

    Raises:
        ConfigurationError: no drafter, or two that want probes: a verify pass has one set.
    """

    def __init__(self, *drafters: Drafter) -> None:
        if not drafters:
            raise ConfigurationError("a mixture needs at least one drafter")
        mask_drafters = [drafter for drafter in drafters if drafter.mask_ids]
        if len(mask_drafters) > 1:
            raise ConfigurationError("two drafters of a mixture want probes: take one of them")
        self.drafters = drafters
        self.mask_ids: Sequence[int] = mask_drafters[0].mask_ids if mask_drafters else ()
        self.num_alternatives = max(getattr(drafter, "num_alternatives", 0) for drafter in drafters)
        # It judges the merged tree: where others guess well, its probes have less to add.
        self.mask_gains = getattr(mask_drafters[0], "mask_gains", None) if mask_drafters else None
        self._mask_drafter = mask_drafters[0] if mask_drafters else None
        self._continuing_drafters: list[Any] = [
            drafter for drafter in drafters if hasattr(drafter, "draft_after")
        ]

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Guess at most ``budget`` tokens, from all drafters together."""
        trees = [drafter.draft(context, budget) for drafter in self.drafters]
        for drafter, tree in zip(self.drafters, tuple(trees), strict=True):
            if drafter is self._mask_drafter:
                trees += self._continue(context, tree, budget)
        return merge(trees, budget)

    def _continue(self, context: Context, tree: DraftTree, budget: int) -> Iterator[DraftTree]:
        """Let others go on from the likeliest guesses of a tree."""
        probs = tree.path_probs
        for node in nlargest(MAX_CONTINUED, range(1, len(tree)), key=probs.__getitem__):
            if probs[node] >= MIN_CONTINUED_PROB:
                drafted = [tree.token_ids[i] for i in tree.path(node)[1:]]
                for drafter in self._continuing_drafters:
                    branch = drafter.draft_after(context, drafted, budget)
                    yield graft(tree, node, branch)


_COMPILE_TIMEOUT = 300.0  # seconds for another process to compile; it takes about ten
# The paths are this process's own: else what lies in the current folder would be imported first.
_COMMAND = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from ragaccel.drafting.policy import warm_up_jit; warm_up_jit()"
)

logger = logging.getLogger("ragaccel")


class JitWarmup:
    """Makes the drafting functions ready beside whatever else goes on.

    The first time on a machine they are compiled, about ten seconds, by a process of its own: in a
    thread of this one that would hold up the decoding. Later they are read from where numba keeps
    them, in well under a second.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._thread: Thread | None = None
        self._ready = Event()

    def start(self) -> None:
        """Begin, unless it has begun before; returns at once."""
        with self._lock:
            if self._thread is None:
                self._thread = Thread(target=self._run, name="ragaccel-jit-warmup", daemon=True)
                self._thread.start()

    def is_ready(self) -> bool:
        """Whether drafting goes at full speed from now on."""
        return self._ready.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Begin if need be and wait for the end; say whether drafting is ready."""
        self.start()
        if self._thread is not None:
            self._thread.join(seconds)
        return self.is_ready()

    def _run(self) -> None:
        try:
            from ragaccel.drafting.arrays import is_jit_disabled, is_uncompiled
            from ragaccel.drafting.calibration import (
                update_corrections,  # the last one that the warm-up compiles
            )

            if is_jit_disabled():
                return
            if is_uncompiled(update_corrections) and _can_start_python():
                _compile_in_subprocess()
            warm_up_jit()
        except Exception as error:  # answers come without, only more slowly
            logger.warning("token trees are not drafted, one copied span is: %s", error)
        else:
            self._ready.set()


def warm_up_jit() -> None:
    """Draft, learn and remember on a few tokens: compiles all that these need."""
    from ragaccel.decoding.session import Context
    from ragaccel.drafting.memory import Memory
    from ragaccel.drafting.trie import TrieDrafter

    learned = Memory().of("")
    learned.history.add([1, 2, 3, 1, 2], [3, 1])
    context = Context([1, 2, 3, 1, 2])
    drafter = TrieDrafter(past=learned.history, calibration=learned.calibration)
    drafter.draft(context, 4)
    context.token_ids.append(3)
    drafter.draft(context, 4)


def _can_start_python() -> bool:
    """Whether ``sys.executable`` is Python, not a program that Python is a part of."""
    return "python" in Path(sys.executable or "").name.lower() and not hasattr(sys, "frozen")


def _compile_in_subprocess() -> None:
    """Compile in a process that goes on to its end even if this one is interrupted or ends."""
    folder = str(Path(__file__).parents[2])
    with suppress(OSError, subprocess.SubprocessError):  # then it is compiled here
        subprocess.run(
            [sys.executable, "-c", _COMMAND, folder, *filter(None, sys.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_COMPILE_TIMEOUT,
            start_new_session=True,
            check=False,
        )


JIT_WARMUP = JitWarmup()
"""The one of this process: what is compiled serves all models."""


class Fingerprinted(Protocol):
    """A tokenizer, as far as a memory of its token ids needs it."""

    @property
    def fingerprint(self) -> str:
        """What tells it from other tokenizers."""
        ...


class DraftingPolicy:
    """Opens sessions: token trees over a request's texts and its namespace's past by default.

    Until the drafting functions are compiled one copied span is guessed.

    Args:
        drafter: in place of the default; then memory is not used.
        memory: what earlier requests taught, or the file it is kept in; without it nothing outlives
            this object. Read, or made, when it is first needed.
        tokenizer: whose token ids the memory holds; None is enough without a file.
        vocab_size: token ids are below.
        mask_ids: the mask tokens of the SPACE adapter that the model wears: it guesses as well.
        remember: whether any session uses the memory.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        memory: Memory | str | PathLike[str] | None,
        tokenizer: Fingerprinted | None,
        vocab_size: int,
        *,
        mask_ids: Sequence[int] = (),
        remember: bool = True,
    ) -> None:
        self._mask_ids, self._is_remembering = mask_ids, remember
        self.drafter, self._memory_source = drafter, memory
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._memory: Memory | None = None
        self._lock = RLock()  # an answer that is dropped may be remembered anywhere, here too
        if drafter is None:
            JIT_WARMUP.start()

    @property
    def memory(self) -> Memory:
        """What earlier requests taught, by namespace."""
        with self._lock:
            if self._memory is None:
                self._memory = self._open_memory()
            return self._memory

    def warm_up(self) -> None:
        """Wait until drafting goes at full speed."""
        if self.drafter is None:
            JIT_WARMUP.wait()

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
        remember = remember and self._is_remembering and drafter is None
        learned: NamespaceMemory | None = None
        if drafter is None:
            ready = JIT_WARMUP.is_ready()
            learned = self.memory.of(request.namespace) if ready and remember else None
            drafter = _make_trie_drafter(learned) if ready else CopyDrafter()
            if self._mask_ids:
                drafter = _add_space_drafter(drafter, self._mask_ids, learned)
        session = Session(verifier, drafter, request, token_budget=token_budget)
        try:
            yield session
        finally:
            if remember and session.token_ids and JIT_WARMUP.is_ready():
                self._remember(learned, request, session.token_ids)

    def _remember(
        self, learned: NamespaceMemory | None, request: Request, token_ids: list[int]
    ) -> None:
        try:
            # The compiled functions may have become ready only after the session began.
            learned = learned or self.memory.of(request.namespace)
            learned.remember(request.prompt_ids, token_ids)
        except Exception as error:  # the answer is there, and worth more than a guess later on
            logger.warning("an answer is not remembered: %s", error)

    def _open_memory(self) -> Memory:
        from ragaccel.drafting.memory import Memory  # imports numba: not any sooner

        if isinstance(self._memory_source, Memory):
            return self._memory_source
        if self._memory_source is None:
            return Memory(vocab_size=self._vocab_size)
        assert self._tokenizer is not None
        path, fingerprint = os.fspath(self._memory_source), self._tokenizer.fingerprint
        return Memory(path=path, fingerprint=fingerprint, vocab_size=self._vocab_size)


def _add_space_drafter(
    drafter: Drafter, mask_ids: Sequence[int], learned: NamespaceMemory | None
) -> Drafter:
    if learned is None:
        return Mixture(drafter, SpaceDrafter(mask_ids))
    return Mixture(drafter, SpaceDrafter(mask_ids, learned.space_calibration))


def _make_trie_drafter(learned: NamespaceMemory | None) -> Drafter:
    from ragaccel.drafting.trie import TrieDrafter

    if learned is None:
        return TrieDrafter()
    return TrieDrafter(past=learned.history, calibration=learned.calibration)
