"""The engine: opens verifiers over one target model and runs every forward pass."""

from __future__ import annotations

from threading import RLock
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import torch

from ragaccel.decode.interfaces import Choices
from ragaccel.engine.kept_costs import KeptCosts, way_of_choosing
from ragaccel.engine.kv_cache import KVCache
from ragaccel.engine.layout import Rows, impossible_tokens_replaced, run_rows, tree_rows
from ragaccel.engine.select import Chooser
from ragaccel.errors import CapacityError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from ragaccel.decode.request import Request
    from ragaccel.decode.tree import DraftTree
    from ragaccel.engine.cost import PassCost

# Prior share of a one-row pass that one more row costs, until passes have been measured.
_ROW_SHARE = {"cpu": 0.04}
_ROW_SHARE_ACCELERATOR = 0.003
_IDLE_CACHES = 2


class TargetModel(Protocol):
    """A causal language model whose output must be reproduced exactly.

    ``max_positions`` is the longest sequence it can read, ``None`` if there is no limit;
    ``vocab_size`` how many different tokens it can read.
    """

    @property
    def device(self) -> torch.device:
        """Where token ids go in and logits come out."""
        ...

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model reads, in tokens."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id the model reads."""
        ...

    def forward(self, rows: Rows, cache: KVCache, keep: int) -> Tensor:
        """Write the rows' states to the cache; return the logits of the last ``keep``: [keep, V].

        The engine has called ``cache.begin`` for these rows.
        """
        ...


class Engine:
    """Opens verifiers over a target model. Safe to use from several threads.

    Every open request holds a cache of its own; passes run one at a time.

    Args:
        model: the target model.
        capacity: tokens a request may hold; ``None`` grows as needed up to the model's limit.
        max_rows: most nodes one verify pass takes.
        prefill_chunk: rows of one prefill pass.
        cost_file: where it is kept what passes cost; ``None`` keeps nothing.

    Raises:
        ConfigurationError: a capacity beyond what the model can read, or a size below 1.
    """

    def __init__(
        self,
        model: TargetModel,
        *,
        capacity: int | None = None,
        max_rows: int = 64,
        prefill_chunk: int = 512,
        cost_file: Path | None = None,
    ) -> None:
        limit = model.max_positions
        if max_rows < 1 or prefill_chunk < 1 or (capacity is not None and capacity < 1):
            raise ConfigurationError("capacity, max_rows and prefill_chunk must be 1 or more")
        if capacity is not None and limit is not None and capacity > limit:
            raise ConfigurationError(
                f"capacity={capacity:,} exceeds the {limit:,} tokens this model can read"
            )
        self.model = model
        self.max_rows = max_rows
        self.prefill_chunk = prefill_chunk
        self.max_tokens = capacity if capacity is not None else limit
        share = _ROW_SHARE.get(model.device.type, _ROW_SHARE_ACCELERATOR)
        self.costs = KeptCosts(share, cost_file)
        self._fixed = capacity is not None
        self._pass_lock = RLock()
        self._pool_lock = RLock()  # a request that is dropped may be closed anywhere, here too
        self._idle: list[KVCache] = []

    def open(self, request: Request) -> EngineVerifier:
        """Return a verifier for one request; its cache is given back by ``close``.

        Raises:
            CapacityError: if the prompt and the longest answer do not fit.
        """
        self.check_fits(request)
        return EngineVerifier(self, request, self._take_cache())

    def check_fits(self, request: Request) -> None:
        """Raise CapacityError if a request could outgrow what the model reads."""
        num_prompt, num_new = len(request.prompt_ids), request.max_new_tokens
        if self.max_tokens is None or num_prompt + num_new <= self.max_tokens:
            return
        needed = num_prompt + num_new
        limit = self.model.max_positions
        advice = (
            f"load with capacity={needed:,} or more"
            if limit is None or needed <= limit
            else f"the model reads at most {limit:,}: shorten the prompt or ask for fewer tokens"
        )
        raise CapacityError(
            f"prompt ({num_prompt:,}) + max_new_tokens ({num_new:,}) exceed the capacity of "
            f"{self.max_tokens:,} tokens: {advice}"
        )

    def verify_many(
        self, batch: Sequence[tuple[EngineVerifier, DraftTree]], num_runner_ups: int = 0
    ) -> list[Choices]:
        """Verify one tree of each of several requests, in order."""
        return [verifier.verify(tree, num_runner_ups) for verifier, tree in batch]

    def run(self, rows: Rows, cache: KVCache, keep: int) -> Tensor:
        """Run one forward pass; the caller holds ``exclusive`` and inference mode."""
        return self.model.forward(rows, cache, keep)

    def cost_of(self, request: Request) -> PassCost:
        """What passes cost for the way this request chooses its tokens."""
        return self.costs.of(way_of_choosing(request))

    @property
    def exclusive(self) -> RLock:
        """The lock under which passes run."""
        return self._pass_lock

    def give_back(self, cache: KVCache) -> None:
        """Keep a closed request's buffers for the next one; few are kept."""
        cache.truncate(0)
        with self._pool_lock:
            self._idle.append(cache)
            self._idle.sort(key=lambda idle: idle.capacity)
            del self._idle[:-_IDLE_CACHES]

    def _take_cache(self) -> KVCache:
        with self._pool_lock:
            if self._idle:
                return self._idle.pop()
        if self.max_tokens is None:
            return KVCache()
        slots = self.max_tokens + self.max_rows  # the rows of the last pass stand past the answer
        return KVCache(slots) if self._fixed else KVCache(limit=slots)


class EngineVerifier:
    """The engine's side of one request: its cache, its choices and its last tree."""

    def __init__(self, engine: Engine, request: Request, cache: KVCache) -> None:
        self._engine, self._request = engine, request
        self._cache: KVCache | None = cache
        self._chooser = Chooser(request)
        self._cost = engine.cost_of(request)
        self._tree: DraftTree | None = None

    @property
    def max_rows(self) -> int:
        """The most nodes one verify pass takes: root, guesses and probes."""
        return self._engine.max_rows

    @property
    def cache(self) -> KVCache:
        """The cache of this request.

        Raises:
            RuntimeError: after ``close``.
        """
        if self._cache is None:
            raise RuntimeError("this request is closed")
        return self._cache

    def prefill(self, request: Request) -> None:
        """Cache the prompt but for its last token, in chunks.

        ``request`` must be the one the verifier was opened for, or one that fits as well.
        """
        if request is not self._request:
            self._engine.check_fits(request)
            self._request, self._chooser = request, Chooser(request)
            self._cost = self._engine.cost_of(request)
        engine, cache = self._engine, self.cache
        prompt = request.prompt_ids[:-1]
        for start in range(0, len(prompt), engine.prefill_chunk):
            chunk = prompt[start : start + engine.prefill_chunk]
            # The lock is let go between chunks, so that a long prompt delays others by one only.
            with engine.exclusive, torch.inference_mode():
                if start == 0:
                    cache.truncate(0)
                rows = run_rows(chunk, cache.begin(len(chunk)), engine.model.device)
                engine.run(rows, cache, 1)
            cache.keep(range(len(chunk)))
        self._chooser.commit(prompt)

    def verify(self, tree: DraftTree, num_runner_ups: int = 0) -> Choices:
        """Choose the next token after every node, in one forward pass.

        Only the chosen ids cross from the device: one synchronization.
        """
        engine, cache, model = self._engine, self.cache, self._engine.model
        n = len(tree)
        if n > engine.max_rows:
            raise ValueError(f"a tree of {n} rows exceeds max_rows={engine.max_rows}")
        with engine.exclusive, torch.inference_mode():
            started = perf_counter()
            start = cache.begin(n)
            readable = impossible_tokens_replaced(tree, model.vocab_size)
            rows = tree_rows(readable, start, model.device, model.max_positions)
            logits = engine.run(rows, cache, n)
            ids: list[list[int]] = self._chooser.choose(
                logits, tree, start, num_runner_ups
            ).tolist()
            self._cost.observe(n, perf_counter() - started)
        self._tree = tree
        chosen = [row[0] for row in ids]
        if num_runner_ups == 0:
            return Choices(chosen)
        others = [[token for token in row[1:] if token != row[0]] for row in ids]
        return Choices(chosen, [row[:num_runner_ups] for row in others])

    def commit(self, path: Sequence[int]) -> None:
        """Keep these nodes of the last tree in the cache; moved when the next pass starts."""
        if self._tree is None:
            raise RuntimeError("commit follows verify: there is no tree to keep nodes of")
        tree, self._tree = self._tree, None
        self.cache.keep(path)
        self._chooser.commit([tree.token_ids[node] for node in path])

    def cost_seconds(self, rows: int) -> float:
        """Estimate a verify pass over so many rows from the passes seen so far."""
        return self._cost.seconds(rows)

    def close(self) -> None:
        """Give the cache back. Closing twice is harmless."""
        cache, self._cache, self._tree = self._cache, None, None
        if cache is not None:
            self._engine.give_back(cache)
            self._engine.costs.save_in_time()
