"""The engine: opens verifiers over one target model and runs every forward pass."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from ragaccel.engine.exactness import check_exact
from ragaccel.engine.interrupts import is_interrupt
from ragaccel.engine.kept_costs import KeptCosts, PassKind
from ragaccel.engine.layout import (
    Rows,
    exact_rows,
    impossible_tokens_replaced,
    prompt_rows,
    together,
    tree_rows,
)
from ragaccel.engine.memory_limits import check_room, memory_share, within_memory
from ragaccel.engine.prefixes import PrefixPool
from ragaccel.engine.select import read_choices, to_host, wait_for
from ragaccel.engine.threads import on_threads
from ragaccel.engine.verifier import EngineVerifier
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from ragaccel.decoding.request import Request
    from ragaccel.decoding.session import Choices
    from ragaccel.decoding.tree import DraftTree
    from ragaccel.engine.cost import PassCost
    from ragaccel.engine.prefixes import Holding
    from ragaccel.engine.target import TargetModel

# Prior share of a one-row pass that one more row costs, until passes have been measured.
_ROW_SHARE = {"cpu": 0.04}
_ROW_SHARE_ACCELERATOR = 0.003
_KEPT_SHARE = 0.05  # of the device's memory
_FORESEEN = 1024  # tokens of an answer that room is made for beforehand

Result = TypeVar("Result")

EXACT_ROWS = 16
"""Rows of every pass in exact mode."""


class Engine:
    """Opens verifiers over a target model. Safe to use from several threads.

    Every open request holds a cache of its own; passes run one at a time.

    Args:
        model: the target model.
        capacity: tokens a request may hold; ``None`` grows as needed up to the model's limit.
        max_rows: most nodes one verify pass takes.
        prefill_chunk: rows of one prefill pass.
        cost_file: where it is kept what passes cost; ``None`` keeps nothing.
        exact: give, to the last bit, what plain decoding in this mode gives: every pass has
            ``EXACT_ROWS`` rows of one sequence, drafts do not branch, attention is reduced in a
            fixed order and kept prefixes end where a prefill chunk does.
        kept_prefixes: most caches kept for prompts that begin alike.
        kept_bytes: most bytes of states kept; ``None`` is a twentieth of the device's memory.

    Raises:
        ConfigurationError: a capacity beyond what the model can read, a size below 1, or exact mode
            for a model that attends by itself or whose rows depend on one another.
    """

    def __init__(
        self,
        model: TargetModel,
        *,
        capacity: int | None = None,
        max_rows: int = 64,
        prefill_chunk: int = 512,
        cost_file: Path | None = None,
        exact: bool = False,
        kept_prefixes: int = 8,
        kept_bytes: int | None = None,
    ) -> None:
        limit = model.max_positions
        if max_rows < 1 or prefill_chunk < 1 or (capacity is not None and capacity < 1):
            raise ConfigurationError("capacity, max_rows and prefill_chunk must be 1 or more")
        if capacity is not None and limit is not None and capacity > limit:
            raise ConfigurationError(
                f"capacity={capacity:,} exceeds the {limit:,} tokens this model can read"
            )
        if exact and not model.joins_sequences:
            raise ConfigurationError(
                f"exact mode needs a model that runs with our attention: {model.why_apart}"
            )
        self.model = model
        self.exact = exact
        self.max_rows = min(max_rows, EXACT_ROWS) if exact else max_rows
        self.prefill_chunk = prefill_chunk
        self.max_tokens = capacity if capacity is not None else limit
        share = _ROW_SHARE.get(model.device.type, _ROW_SHARE_ACCELERATOR)
        self.costs = KeptCosts(share, cost_file)
        self._pass_lock = model.pass_lock
        # The rows of the last pass stand past the answer.
        most = self.max_tokens
        most = None if most is None else most + self.padded(self.max_rows)
        self.pool = PrefixPool(
            partial(model.new_cache, None, most),  # not of this object: they die at once together
            max_kept=kept_prefixes,
            max_bytes=memory_share(model.device, _KEPT_SHARE) if kept_bytes is None else kept_bytes,
        )
        self.vocab_size = model.vocab_size
        """Token ids that may be chosen are below; fewer once a pass has shown fewer scores."""
        self.prefilled_rows = self._num_freed = 0
        if exact:
            check_exact(model, EXACT_ROWS)

    def open(self, request: Request) -> EngineVerifier:
        """Return a verifier for one request; its cache is given back by ``close``.

        Raises:
            CapacityError: if the prompt and the longest answer do not fit.
        """
        self.check_fits(request)
        return EngineVerifier(self, request)

    def check_fits(self, request: Request) -> None:
        """Raise CapacityError if a request could outgrow what the model reads."""
        num_prompt, num_new = len(request.prompt_ids), request.max_new_tokens
        check_room(num_prompt, num_new, self.max_tokens, self.model.max_positions)

    def take_cache(self, request: Request, wanted: Sequence[int]) -> Holding:
        """Hand out a cache for a request, with what is known of ``wanted``; given back to the pool.

        The caller computes nothing meanwhile.
        """
        self.pool.follow(self.model.refresh())
        chunk = self.prefill_chunk if self.exact else None
        answer = min(request.max_new_tokens, _FORESEEN)
        room = len(request.prompt_ids) + answer + self.padded(self.max_rows)
        return self._in_memory(
            lambda: self.pool.take(wanted, request.namespace, room=room, chunk=chunk),
            f"a cache of {room:,} tokens",
        )

    def prefill_chunk_of(self, verifier: EngineVerifier) -> None:
        """Compute the next chunk of a prompt; the first call finds out what is known of it.

        The lock is let go between chunks: a long prompt delays others by one only.
        """
        with self._pass_lock, torch.inference_mode():
            holding = verifier.begin()
            start = len(holding.token_ids)
            chunk = verifier.wanted_ids[start : start + self.prefill_chunk]
            if not chunk:
                return
            cache, probes = holding.cache, verifier.probes_after(start + len(chunk))
            lay_out = partial(prompt_rows, chunk, cache, probes, self.model.max_positions)
            rows = self._in_memory(lay_out, "a larger cache")
            logits = self._run(replace(rows, exact=self.exact), 1 + len(probes))
            # Else what comes next, which may be another request's, would seem to take as long.
            verifier.read_foreseen(logits[1:]) if probes else wait_for(logits)
            cache.keep(range(len(chunk)))
            if holding.num_settled == start and len(chunk) == self.prefill_chunk:
                holding.num_settled += len(chunk)
            holding.token_ids += chunk
            self.prefilled_rows += len(chunk)

    def verify_many(self, batch: Sequence[tuple[EngineVerifier, DraftTree, int]]) -> list[Choices]:
        """Verify one tree of each of several requests, in order; the last item counts runner-ups.

        One pass for all where the model can join sequences; in exact mode, one for each.

        Raises:
            ValueError: a tree of more rows than a pass takes.
        """
        found = self.verify_each(batch)
        for choices in found:
            if isinstance(choices, BaseException):
                raise choices
        return cast("list[Choices]", found)

    def verify_each(
        self, batch: Sequence[tuple[EngineVerifier, DraftTree, int]]
    ) -> list[Choices | BaseException]:
        """Verify as ``verify_many``; what one request's processors raise stands in its place."""
        for _, tree, _ in batch:
            if len(tree) > self.max_rows:
                raise ValueError(f"a tree of {len(tree)} rows exceeds max_rows={self.max_rows}")
        with self._pass_lock, torch.inference_mode():
            groups = [[each] for each in batch] if self.passes_apart else [list(batch)]
            return [choices for group in groups for choices in self._verify_group(group)]

    @property
    def passes_apart(self) -> bool:
        """Whether every request has a pass of its own."""
        return self.exact or not self.model.joins_sequences

    def _verify_group(
        self, group: Sequence[tuple[EngineVerifier, DraftTree, int]]
    ) -> list[Choices | BaseException]:
        """Verify in one pass; what fails in a pass of its own is told of that request alone."""
        if not self.passes_apart:
            return self._verify(group)
        try:
            return self._verify(group)
        except Exception as error:
            if is_interrupt(error):
                raise
            return [error]

    def _verify(
        self, batch: Sequence[tuple[EngineVerifier, DraftTree, int]]
    ) -> list[Choices | BaseException]:
        started, delays = perf_counter(), self._delays
        rows = self._in_memory(
            lambda: together([self._rows(verifier, tree) for verifier, tree, _ in batch]),
            "a larger cache",
        )
        logits = self._run(rows, rows.num_rows)
        parts: list[Tensor | BaseException] = []
        for span, (verifier, tree, num_runner_ups) in zip(rows.spans, batch, strict=True):
            own = logits[span.first : span.first + len(tree)]
            try:
                parts.append(self._choose(verifier, own, (tree, span.start, num_runner_ups)))
            except BaseException as error:
                if is_interrupt(error):
                    raise
                parts.append(error)
        chosen = iter(to_host([part for part in parts if not isinstance(part, BaseException)]))
        if self._delays == delays:
            cost = self.cost_of([verifier for verifier, _, _ in batch])
            cost.observe(rows.num_rows, perf_counter() - started)
        found: list[Choices | BaseException] = []
        for part, (verifier, tree, num_runner_ups) in zip(parts, batch, strict=True):
            verifier.tree = tree
            found.append(
                part
                if isinstance(part, BaseException)
                else read_choices(next(chosen), num_runner_ups, tree.num_probes)
            )
        return found

    def _choose(
        self, verifier: EngineVerifier, logits: Tensor, asked: tuple[DraftTree, int, int]
    ) -> Tensor:
        if verifier.request.processors:  # not to be called twice
            return verifier.chooser.choose(logits, *asked)
        choose = partial(verifier.chooser.choose, logits, *asked)
        return self._in_memory(choose, f"choosing from {len(logits)} rows of logits")

    def _rows(self, verifier: EngineVerifier, tree: DraftTree) -> Rows:
        model, cache = self.model, verifier.cache
        readable = impossible_tokens_replaced(tree, model.vocab_size, model.num_masks)
        if self.exact:
            return exact_rows(readable, cache, EXACT_ROWS, max_positions=model.max_positions)
        return tree_rows(readable, cache, max_positions=model.max_positions)

    def _run(self, rows: Rows, keep: int) -> Tensor:
        what = f"a pass of {rows.num_rows} rows over {rows.attended:,} tokens"
        with on_threads(self.costs.threads, self.model.device):
            logits = self._in_memory(lambda: self.model.forward(rows, keep), what)
        self.vocab_size = min(self.vocab_size, logits.shape[-1])
        return logits

    def _in_memory(self, compute: Callable[[], Result], what: str) -> Result:
        return within_memory(compute, what, self.model.device, self.free_memory)

    @property
    def _delays(self) -> int:
        """What passes took that later ones of their kind will not: captures, repeats."""
        return self.model.num_captures + self._num_freed

    def free_memory(self) -> None:
        """Drop what is kept of earlier requests, and what the model keeps to be faster."""
        self._num_freed += 1
        self.pool.clear()
        self.model.free_memory()

    def padded(self, rows: int) -> int:
        """How many rows a pass over so many nodes computes."""
        return EXACT_ROWS if self.exact else rows

    def cost_of(self, verifiers: Sequence[EngineVerifier]) -> PassCost:
        """What passes of these requests cost now: of as many, as long, chosen the dearest way."""
        attended = max(verifier.num_cached for verifier in verifiers)
        ways = dict.fromkeys(verifier.way for verifier in verifiers)
        costs = [self.costs.of(way, attended, len(verifiers)) for way in ways]
        return costs[0] if len(costs) == 1 else max(costs, key=lambda cost: cost.seconds(1))

    def cost_alone(self, verifier: EngineVerifier) -> tuple[PassCost, int]:
        """What passes of a request by itself cost, and up to how many cached tokens that holds."""
        kind = PassKind.of(verifier.way, verifier.num_cached)
        return self.costs.of(kind.way, kind.attended), kind.attended
