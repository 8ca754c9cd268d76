"""The engine's side of one request: its cache, its choices and its last tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragaccel.engine.kept_costs import way_of_choosing
from ragaccel.engine.select import Chooser, read_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ragaccel.decoding.request import Request
    from ragaccel.decoding.session import Choices
    from ragaccel.decoding.tree import DraftTree
    from ragaccel.engine.engine import Engine
    from ragaccel.engine.kv_cache import KVCache
    from ragaccel.engine.prefixes import Holding


class EngineVerifier:
    """Verifies one request's trees; what it needs of the model is computed by its engine."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self.request = engine, request
        self.tree: DraftTree | None = None
        self._holding: Holding | None = None
        self.wanted_ids = request.prompt_ids[:-1]
        """What is to be cached before the next pass."""
        self.chooser = Chooser(request)
        self.way = way_of_choosing(request)
        self._cost, self._cost_until = engine.cost_alone(self)
        self._is_closed = False
        self._probe_ids: tuple[int, ...] = ()
        self.foreseen: Sequence[Sequence[tuple[int, float]]] = ()
        """What mask tokens behind the prompt showed, as ``Choices.probed``."""

    @property
    def max_rows(self) -> int:
        """The most nodes one verify pass takes: root, guesses and probes."""
        return self._engine.max_rows

    @property
    def vocab_size(self) -> int:
        """Token ids that may be chosen are below."""
        return self._engine.vocab_size

    @property
    def chains_only(self) -> bool:
        """Whether trees must not branch: so in exact mode."""
        return self._engine.exact

    @property
    def cache(self) -> KVCache:
        """The cache of this request.

        Raises:
            RuntimeError: before the prompt was begun, or after ``close``.
        """
        return self._held().cache

    @property
    def num_cached(self) -> int:
        """How many tokens its cache holds."""
        return 0 if self._holding is None else len(self._holding.token_ids)

    @property
    def is_prefilled(self) -> bool:
        """Whether the prompt, but for its last token, is in the cache."""
        wanted = len(self.wanted_ids)
        return self._holding is not None and len(self._holding.token_ids) >= wanted

    def prefill(self, request: Request) -> None:
        """Cache what is missing of the prompt but for its last token, in chunks.

        ``request`` must be the one the verifier was opened for, or one that fits as well. Another
        one, or the same for a second time, starts over.
        """
        if request is not self.request or self._is_used:
            self._engine.check_fits(request)
            self.request, self.tree, self.foreseen = request, None, ()
            self.wanted_ids = request.prompt_ids[:-1]
            self.chooser = Chooser(request)
            self.way = way_of_choosing(request)
            self._cost, self._cost_until = self._engine.cost_alone(self)
            self._give_back()
        while not self.is_prefilled:
            self._engine.prefill_chunk_of(self)

    def foresee(self, probe_ids: Sequence[int]) -> None:
        """Have mask tokens read with the end of the prompt; not where all of it is known already.

        Those that the model does not read are left out.
        """
        model = self._engine.model
        limit = model.vocab_size + model.num_masks
        if max(probe_ids, default=0) < limit and not self._engine.exact:
            self._probe_ids = tuple(probe_ids)

    def probes_after(self, num_cached: int) -> tuple[int, ...]:
        """Which mask tokens are to be read once so many tokens are cached."""
        return self._probe_ids if num_cached == len(self.wanted_ids) else ()

    def read_foreseen(self, logits: Tensor) -> None:
        """Note what mask tokens behind the prompt show, from their logits [M, V]."""
        ranks = self.chooser.rank(logits, len(self.wanted_ids))
        self.foreseen = read_ranks(ranks.tolist())

    def begin(self) -> Holding:
        """Take a cache, with what of the prompt is known already; the engine calls it.

        Raises:
            RuntimeError: the request is closed.
        """
        if self._is_closed:
            raise RuntimeError("this request is closed")
        if self._holding is None:
            self._holding = self._engine.take_cache(self.request, self.wanted_ids)
            self.chooser.commit(self.wanted_ids)
        return self._holding

    def verify(self, tree: DraftTree, num_runner_ups: int = 0) -> Choices:
        """Choose the next token after every node, in one forward pass.

        Only the chosen ids cross from the device: one synchronization.
        """
        return self._engine.verify_many([(self, tree, num_runner_ups)])[0]

    def commit(self, path: Sequence[int]) -> None:
        """Keep these nodes of the last tree in the cache; moved when the next pass starts."""
        if self.tree is None:
            raise RuntimeError("commit follows verify: there is no tree to keep nodes of")
        tree, self.tree = self.tree, None
        tokens = [tree.token_ids[node] for node in path]
        holding = self._held()
        holding.cache.keep(path)
        holding.token_ids += tokens
        self.chooser.commit(tokens)

    def cost_seconds(self, rows: int) -> float:
        """Estimate a verify pass over so many rows from the passes seen so far."""
        if self.num_cached > self._cost_until:  # asked for every width of every step
            self._cost, self._cost_until = self._engine.cost_alone(self)
        return self._cost.seconds(self._engine.padded(rows))

    def start_over(self) -> bool:
        """Have what is cached computed again, as an interrupted pass may have moved half of it.

        Returns:
            Whether that is sure to choose the same: not where a stateful processor may have seen
            the pass, nor in exact mode once tokens are cached that passes of a few rows computed.
        """
        is_used, had_read = self._is_used, self.is_prefilled
        holding, self._holding, self.tree = self._holding, None, None
        if holding is None:
            return True
        self._engine.pool.drop(holding)
        if len(holding.token_ids) > len(self.wanted_ids):
            self.wanted_ids = tuple(holding.token_ids)
        self.chooser = Chooser(self.request)
        return not (self.chains_only and is_used) and not (self.request.is_plain and had_read)

    def close(self) -> None:
        """Give the cache back. Closing twice is harmless."""
        self._is_closed, self.tree = True, None
        if self._holding is not None:
            self._give_back()
            self._engine.costs.save_in_time()

    @property
    def _is_used(self) -> bool:
        """Whether anything was verified or kept behind the prompt."""
        kept = max(self.num_cached, len(self.wanted_ids))  # the latter after an interruption
        return self.tree is not None or kept >= len(self.request.prompt_ids)

    def _held(self) -> Holding:
        if self._is_closed or self._holding is None:
            raise RuntimeError("this request is closed" if self._is_closed else "not begun yet")
        return self._holding

    def _give_back(self) -> None:
        holding, self._holding = self._holding, None
        if holding is not None:
            self._engine.pool.give_back(holding)
