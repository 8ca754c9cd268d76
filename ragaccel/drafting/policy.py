"""The drafting policy: it selects the drafters of a request and warms up their JIT functions."""

from __future__ import annotations

import logging
import os
from heapq import nlargest
from threading import RLock
from typing import TYPE_CHECKING, Protocol

from ragaccel.decoding.session import Drafter, Session
from ragaccel.decoding.tree import graft, merge
from ragaccel.drafting.ngram import CopyDrafter
from ragaccel.errors import ConfigurationError
from ragaccel.jit import JitWarmup

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from os import PathLike

    from ragaccel.decoding.request import Request
    from ragaccel.decoding.session import Context, Verifier
    from ragaccel.decoding.tree import DraftTree
    from ragaccel.drafting.memory import Memory, NamespaceMemory


MAX_CONTINUED = 3
"""Maximum number of mask predictions that other drafters continue from."""
MIN_CONTINUED_PROB = 0.1
"""Lowest probability of a mask prediction that other drafters continue from."""


class Mixture(Drafter):
    """A drafter that merges the trees of several drafters and keeps the likeliest nodes.

    A node that several drafters propose gets the highest of their probabilities. If one drafter
    uses mask tokens, the others continue from its likeliest predictions (``draft_after``): the
    model predicts what it will quote, and the rest of the quote is copied.

    Raises:
        ConfigurationError: there is no drafter, or several use mask tokens, of which a pass has
            one set.
    """

    def __init__(self, *drafters: Drafter) -> None:
        if not drafters:
            raise ConfigurationError("Mixture needs at least one drafter, got none")
        mask_drafters = [drafter for drafter in drafters if drafter.mask_ids]
        if len(mask_drafters) > 1:
            raise ConfigurationError(
                "several drafters of a Mixture use mask tokens: keep one of them"
            )
        self.drafters = drafters
        self.num_alternatives = max(drafter.num_alternatives for drafter in drafters)
        self._mask_drafter = mask_drafters[0] if mask_drafters else None
        if self._mask_drafter is not None:
            self.mask_ids = self._mask_drafter.mask_ids
            self.selects_masks = self._mask_drafter.selects_masks

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Return a merged tree of at most ``budget`` draft tokens."""
        trees = [drafter.draft(context, budget) for drafter in self.drafters]
        for drafter, tree in zip(self.drafters, tuple(trees), strict=True):
            if drafter is self._mask_drafter:
                trees += self._continue(context, tree, budget)
        return merge(trees, budget)

    def mask_gains(self, context: Context, tree: DraftTree) -> Sequence[float]:
        """Rate masks under the merged tree: they add less where the other drafters draft well."""
        if self._mask_drafter is None:
            return super().mask_gains(context, tree)
        return self._mask_drafter.mask_gains(context, tree)

    def _continue(self, context: Context, tree: DraftTree, budget: int) -> Iterator[DraftTree]:
        """Yield trees in which other drafters continue from the likeliest nodes of a tree."""
        probs = tree.path_probs
        for node in nlargest(MAX_CONTINUED, range(1, len(tree)), key=probs.__getitem__):
            if probs[node] >= MIN_CONTINUED_PROB:
                drafted = [tree.token_ids[i] for i in tree.path(node)[1:]]
                for drafter in self.drafters:
                    branch = drafter.draft_after(context, drafted, budget)
                    if len(branch) > 1:
                        yield graft(tree, node, branch)


logger = logging.getLogger("ragaccel")


def warm_up_jit() -> None:
    """Compile the drafting functions by drafting and learning on a few tokens."""
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


JIT_WARMUP = JitWarmup(
    f"{__name__}:warm_up_jit", "ragaccel.drafting.calibration:update_corrections"
)
"""The warm-up of the drafting functions, in this process; they serve all models."""


class _TreesOnceCompiled(Drafter):
    """The drafter of one request: a copied span until the warm-up has ended, then token trees.

    It starts the warm-up after the first token, which needs no draft, so that this token does not
    wait for the import of numba.
    """

    def __init__(self) -> None:
        self._drafter: Drafter = CopyDrafter()
        self._drafts_trees = False

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Return a tree of at most ``budget`` draft tokens."""
        if not self._drafts_trees and len(context.token_ids) > context.num_prompt:
            self._select()
        return self._drafter.draft(context, budget)

    def draft_after(self, context: Context, drafted: Sequence[int], budget: int) -> DraftTree:
        """Return a tree that continues another drafter's tokens; its root is the last of them."""
        return self._drafter.draft_after(context, drafted, budget)

    def _select(self) -> None:
        JIT_WARMUP.start()
        if JIT_WARMUP.is_ready():
            self._drafter, self._drafts_trees = _make_trie_drafter(None), True


class Fingerprinted(Protocol):
    """A tokenizer with a fingerprint, which a memory of its token ids stores."""

    @property
    def fingerprint(self) -> str:
        """Return a string that differs between tokenizers."""
        ...


class DraftingPolicy:
    """The choice of a drafter for each session: by default, one that drafts from all known texts.

    These are the texts of the request and of earlier requests of its namespace.

    Until the drafting functions are compiled, sessions copy a single span. The first answer's
    first token, or ``warm_up``, starts the compilation.

    Args:
        drafter: replaces the default drafter; memory is not used then.
        memory: a memory of earlier requests, or the file that holds one; opened when first needed.
            If None, the memory lives as long as this object.
        tokenizer: the tokenizer of the token ids in memory; needed only with a file.
        vocab_size: exclusive upper bound of the token ids.
        mask_ids: mask tokens of the model's attached SPACE adapter, which then drafts as well.
        remember: whether sessions use the memory.
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
        self._lock = RLock()  # reentrant: garbage collection may end a session in any thread

    @property
    def memory(self) -> Memory:
        """Return the memory of earlier requests, by namespace."""
        with self._lock:
            if self._memory is None:
                self._memory = self._open_memory()
            return self._memory

    def warm_up(self) -> None:
        """Wait until the drafting functions are compiled, if the default drafters are used."""
        if self.drafter is None:
            JIT_WARMUP.wait()

    def open(
        self,
        verifier: Verifier,
        request: Request,
        *,
        drafter: Drafter | None = None,
        remember: bool = True,
        token_budget: int | None = None,
    ) -> tuple[Session, NamespaceMemory | None]:
        """Open a session; return it with the memory that it drafts from, if any.

        Pass both to ``remember`` when the session has ended, for any reason.

        Args:
            verifier: checks the drafts.
            request: what to generate.
            drafter: replaces the drafter of this policy; the memory is not used then.
            remember: whether to draft from the memory.
            token_budget: the maximum number of draft tokens per step; see ``Session``.
        """
        drafter, learned = self.drafter if drafter is None else drafter, None
        if drafter is None:
            ready = JIT_WARMUP.is_ready()
            if remember and ready and self._is_remembering:
                learned = self.memory.of(request.namespace)
            drafter = _make_trie_drafter(learned) if ready else _TreesOnceCompiled()
            if self._mask_ids:
                drafter = _add_space_drafter(drafter, self._mask_ids, learned)
        return Session(verifier, drafter, request, token_budget=token_budget), learned

    def remember(self, session: Session, learned: NamespaceMemory | None) -> None:
        """Add the tokens of a session to the memory, if the policy's default drafter uses it."""
        if not self._is_remembering or self.drafter is not None:
            return
        if not session.answer_ids:
            return
        JIT_WARMUP.start()  # if the answer was a single token
        if JIT_WARMUP.is_ready():
            request = session.request
            try:
                # The compiled functions may have become ready only after the session began.
                learned = learned or self.memory.of(request.namespace)
                learned.remember(request.prompt_ids, session.answer_ids)
            except Exception as error:  # the answer is complete; only later drafts lose
                logger.warning("cannot remember an answer for later drafts: %s", error)

    def _open_memory(self) -> Memory:
        from ragaccel.drafting.memory import Memory  # imports numba, so as late as possible

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
    from ragaccel.drafting.space import SpaceDrafter  # imports numba, so as late as possible

    if learned is None:
        return Mixture(drafter, SpaceDrafter(mask_ids))
    return Mixture(drafter, SpaceDrafter(mask_ids, learned.space_calibration))


def _make_trie_drafter(learned: NamespaceMemory | None) -> Drafter:
    from ragaccel.drafting.trie import TrieDrafter

    if learned is None:
        return TrieDrafter()
    return TrieDrafter(past=learned.history, calibration=learned.calibration)
