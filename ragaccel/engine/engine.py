"""The engine: opens verifiers over one target model and runs all forward passes."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import torch

from ragaccel.decoding.session import Verifier
from ragaccel.engine.interrupts import inference_mode, is_interrupt
from ragaccel.engine.latency import LatencyProfile, PassProfile, sampling_mode
from ragaccel.engine.memory import check_capacity, memory_share, with_memory_retry
from ragaccel.engine.model_input import (
    Rows,
    concat_rows,
    deterministic_rows,
    prompt_rows,
    replace_unreadable_tokens,
    tree_rows,
)
from ragaccel.engine.prefix_cache import PrefixCache
from ragaccel.engine.sampling import (
    Sampler,
    read_sampled,
    read_top_masks,
    to_host,
    wait_until_computed,
)
from ragaccel.engine.target import check_deterministic
from ragaccel.engine.thread_team import TEAM
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from ragaccel.decoding.request import Request
    from ragaccel.decoding.session import SampledTokens
    from ragaccel.decoding.tree import DraftTree
    from ragaccel.engine.kv_cache import KVCache
    from ragaccel.engine.latency import PassCost
    from ragaccel.engine.prefix_cache import PrefixEntry
    from ragaccel.engine.target import TargetModel


# Assumed cost of one more row, as a share of a one-row pass, until passes have been measured.
_ROW_SHARE = {"cpu": 0.04}
_ROW_SHARE_ACCELERATOR = 0.003
_KEPT_SHARE = 0.05  # of the device's memory
# A short chunk reads all weights for few rows, and a GPU would wait for the launches of its
# operations; behind a long one wait other requests, and whoever cancels. Deterministic mode reuses
# whole chunks alone.
_PREFILL_CHUNK, _DETERMINISTIC_CHUNK, _GPU_CHUNK = 1024, 512, 2048
_MAX_RESERVED_TOKENS = 1024  # tokens of an answer to reserve slots for at the start

Result = TypeVar("Result")

DETERMINISTIC_ROWS = 16
"""Rows of every pass in deterministic mode."""


class EngineVerifier(Verifier):
    """The state of one request in an engine, which reads and changes it in its passes.

    Open it with ``Engine.open``. It serves one session. ``close`` releases the cache.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self.request = engine, request
        self.max_rows, self.chains_only = engine.max_rows, engine.deterministic
        self.vocab_size = engine.vocab_size
        self.prefill_ids = request.prompt_ids[:-1]
        """Tokens that must be in the cache before the next verification pass."""
        self.mask_ids: tuple[int, ...] = ()
        """Mask tokens to append to the last prefill pass."""
        self.sampler = Sampler.of(request)
        self.mode = sampling_mode(request)
        self.entry: PrefixEntry | None = None
        """The cache, from the first prefill pass on."""
        self.tree: DraftTree | None = None
        """The tree that was verified and not committed yet."""
        self.is_closed = False
        self.cost, self.cost_until = engine.own_cost(self.mode, 0)
        """Latencies of this request alone, and the cached length up to which they apply."""

    @property
    def cache(self) -> KVCache:
        """The KV cache of this request.

        Raises:
            RuntimeError: prefill has not begun, or the request is closed.
        """
        if self.entry is None:
            raise RuntimeError(
                "this request is closed: open a new verifier for it"
                if self.is_closed
                else "this request has no cache yet: call prefill first"
            )
        return self.entry.cache

    @property
    def graphs_status(self) -> str:
        """Whether passes are replayed as CUDA graphs, or why not; see ``TargetModel``."""
        return self._engine.model.graphs_status

    @property
    def num_cached(self) -> int:
        """How many tokens the cache holds."""
        return 0 if self.entry is None else len(self.entry.token_ids)

    @property
    def is_prefilled(self) -> bool:
        """Whether the cache holds the whole prompt except its last token."""
        return self.entry is not None and len(self.entry.token_ids) >= len(self.prefill_ids)

    def predict_masks(self, mask_ids: Sequence[int]) -> None:
        """Append mask tokens to the last prefill pass, which then sets ``mask_predictions``.

        Do nothing if the whole prompt is already cached, in deterministic mode, or if the model has
        no embedding for one of the mask tokens.
        """
        model = self._engine.model
        if max(mask_ids, default=0) < model.vocab_size + model.num_masks and not self.chains_only:
            self.mask_ids = tuple(mask_ids)

    def prefill(self, request: Request) -> None:
        """Compute the missing part of the prompt, except its last token, in chunks.

        Raises:
            RuntimeError: another request, or this one was decoded before.
        """
        if request is not self.request or self._is_used:
            raise RuntimeError("a verifier serves one session: open a new one for this request")
        while not self.is_prefilled:
            self._engine.prefill(self)

    def verify(self, tree: DraftTree, num_alternatives: int = 0) -> SampledTokens:
        """Sample the next token after every node, in one forward pass.

        Only token ids are copied from the device: one synchronization.
        """
        (sampled,) = self._engine.verify([(self, tree, num_alternatives)])
        if isinstance(sampled, BaseException):
            raise sampled
        return sampled

    def commit(self, path: Sequence[int]) -> None:
        """Keep these nodes of the last tree in the cache; the next pass moves them into place.

        Raises:
            RuntimeError: no tree was verified since the last commit.
        """
        if self.tree is None or self.entry is None:
            raise RuntimeError("no tree was verified since the last commit: call verify first")
        tree, self.tree = self.tree, None
        tokens = [tree.token_ids[node] for node in path]
        self.entry.cache.keep(path)
        self.entry.token_ids += tokens
        self.sampler.commit(tokens)

    def cost_seconds(self, rows: int) -> float:
        """Estimate the seconds of a verification pass over ``rows`` rows, from earlier passes."""
        return self.cost.seconds(DETERMINISTIC_ROWS if self.chains_only else rows)

    def step_costs(self) -> Callable[[int], float]:
        """Return ``cost_seconds`` for up to ``max_rows`` rows, as a look-up in one table."""
        return self.cost_seconds if self.chains_only else self.cost.step_costs(self.max_rows)

    def mask_seconds(self) -> float:
        """Estimate the seconds that mask tokens add to a pass, from earlier passes."""
        return self.cost.mask_seconds

    def restart(self) -> bool:
        """Drop the cached states, so that the next pass computes them again.

        Return whether decoding then samples the same tokens. It may not if a stateful logits
        processor has seen the interrupted pass, or in deterministic mode after verification passes.
        """
        is_used, had_read = self._is_used, self.is_prefilled
        entry, self.entry, self.tree = self.entry, None, None
        if entry is None:
            return True
        self._engine.prefix_cache.drop(entry)
        if len(entry.token_ids) > len(self.prefill_ids):
            self.prefill_ids = tuple(entry.token_ids)
        self.sampler = Sampler.of(self.request)
        return not (self.chains_only and is_used) and not (self.request.is_plain and had_read)

    def close(self) -> None:
        """Release the cache. Closing twice is harmless."""
        self.is_closed, self.tree = True, None
        entry, self.entry = self.entry, None
        if entry is not None:
            self._engine.release(entry)

    @property
    def _is_used(self) -> bool:
        """Whether a tree was verified, or tokens after the prompt were committed."""
        kept = max(self.num_cached, len(self.prefill_ids))  # an interruption may empty the cache
        return self.tree is not None or kept >= len(self.request.prompt_ids)


class Engine:
    """An engine that opens verifiers over a target model and runs their passes. Thread-safe.

    Every open request has a KV cache of its own; passes run one at a time.

    Args:
        model: the target model.
        capacity: most tokens of a request; ``None`` grows as needed up to the model's limit.
        max_rows: most nodes of one verification pass.
        prefill_chunk: rows of one prefill pass; ``None`` means 2,048 on a GPU, elsewhere
            1,024, or 512 where reused prefixes end at a chunk's boundary (see ``exact``).
        latency_file: file that stores pass latencies between runs; ``None`` stores nothing.
        exact: deterministic mode, which equals plain decoding in the same mode to the last bit.
            Passes of a model that ``is_batch_invariant`` are as without it. Of others, every pass
            has ``DETERMINISTIC_ROWS`` rows of one sequence, drafts are chains, attention reduces in
            a fixed order, and reused prefixes end at a chunk boundary.
        kept_prefixes: most caches kept for later prompts with the same prefix.
        kept_bytes: most bytes of kept states; ``None`` means 5 % of the device's memory.

    Raises:
        ConfigurationError: the capacity exceeds what the model can read, a size is below 1, or
            ``exact`` is set for a model that runs its own attention or whose rows are not
            independent.
    """

    def __init__(
        self,
        model: TargetModel,
        *,
        capacity: int | None = None,
        max_rows: int = 64,
        prefill_chunk: int | None = None,
        latency_file: Path | None = None,
        exact: bool = False,
        kept_prefixes: int = 8,
        kept_bytes: int | None = None,
    ) -> None:
        limit = model.max_positions
        self.deterministic = exact and not _is_batch_invariant(model)
        if prefill_chunk is None:
            on_cpu = _DETERMINISTIC_CHUNK if self.deterministic else _PREFILL_CHUNK
            prefill_chunk = _GPU_CHUNK if model.device.type == "cuda" else on_cpu
        if max_rows < 1 or prefill_chunk < 1 or (capacity is not None and capacity < 1):
            raise ConfigurationError(
                "capacity, max_rows and prefill_chunk must be 1 or more, "
                f"not {capacity}, {max_rows} and {prefill_chunk}"
            )
        if capacity is not None and limit is not None and capacity > limit:
            raise ConfigurationError(
                f"capacity={capacity:,} exceeds the {limit:,} tokens that this model can read: "
                f"choose {limit:,} or less"
            )
        if exact and not model.batchable:
            raise ConfigurationError(
                "exact=True needs a model that runs with ragaccel's attention: "
                f"{model.unbatchable_reason}"
            )
        self.model = model
        self.max_rows = min(max_rows, DETERMINISTIC_ROWS) if self.deterministic else max_rows
        self.prefill_chunk = prefill_chunk
        self.max_tokens = capacity if capacity is not None else limit
        share = _ROW_SHARE.get(model.device.type, _ROW_SHARE_ACCELERATOR)
        self.latency_profile = LatencyProfile(share, latency_file)
        self._pass_lock = model.pass_lock
        # The last pass needs slots for its rows after the longest answer.
        max_slots = self.max_tokens
        max_slots = None if max_slots is None else max_slots + self.padded_rows(self.max_rows)
        # A partial of the model, not a method of the engine: a reference cycle would delay freeing.
        self.prefix_cache = PrefixCache(
            partial(model.new_cache, None, max_slots),
            max_kept=kept_prefixes,
            max_bytes=memory_share(model.device, _KEPT_SHARE) if kept_bytes is None else kept_bytes,
        )
        self.vocab_size = model.vocab_size
        """One more than the largest token id that can be sampled; lowered to the logits' width."""
        self.prefilled_rows = self._num_freed = 0
        if self.deterministic:
            check_deterministic(model, DETERMINISTIC_ROWS, deterministic=True)

    def open(self, request: Request) -> EngineVerifier:
        """Return a verifier for one request; its ``close`` releases the cache.

        Raises:
            CapacityError: the prompt and the longest answer do not fit.
        """
        num_prompt, num_new = len(request.prompt_ids), request.max_new_tokens
        check_capacity(num_prompt, num_new, self.max_tokens, self.model.max_positions)
        return EngineVerifier(self, request)

    def release(self, entry: PrefixEntry) -> None:
        """Keep the states of a closed request for later prompts."""
        self.prefix_cache.release(entry)
        self.latency_profile.save_if_due()

    @property
    def separate_passes(self) -> bool:
        """Whether every request runs in a pass of its own."""
        return self.deterministic or not self.model.batchable

    def padded_rows(self, rows: int) -> int:
        """Return how many rows a pass over ``rows`` nodes computes."""
        return DETERMINISTIC_ROWS if self.deterministic else rows

    def capture_passes(self, context: int, num_sequences: int) -> None:
        """Capture all CUDA graphs that requests of up to ``context`` tokens use.

        Args:
            context: most cached tokens before a pass.
            num_sequences: most sequences that share a pass.
        """
        capture = partial(
            self.model.capture_passes,
            context + self.max_rows,
            num_rows=self.max_rows,
            num_sequences=num_sequences,
        )
        with self._pass_lock:
            self._with_memory_retry(capture, "CUDA graphs")

    def prefill(self, verifier: EngineVerifier) -> None:
        """Compute the next chunk of a request's prompt; the first call reuses a cached prefix.

        The lock is released between chunks, so a long prompt delays others by one chunk only.

        Raises:
            RuntimeError: the request is closed.
        """
        with self._pass_lock, inference_mode():
            self.prefix_cache.hold(partial(self._prefill_chunk, verifier))

    def _prefill_chunk(self, verifier: EngineVerifier) -> None:
        """Compute the next chunk; the caller holds the pass lock."""
        entry = verifier.entry or self._acquire_cache(verifier)
        start = len(entry.token_ids)
        chunk = verifier.prefill_ids[start : start + self.prefill_chunk]
        self._look_up_cost(verifier, start + len(chunk))
        if not chunk:
            return
        is_last = start + len(chunk) == len(verifier.prefill_ids)
        mask_ids = verifier.mask_ids if is_last else ()
        cache = entry.cache
        make_rows = partial(prompt_rows, chunk, cache, mask_ids, self.model.max_positions)
        rows = self._with_memory_retry(make_rows, "a larger cache")
        logits = self._run(replace(rows, deterministic=self.deterministic), 1 + len(mask_ids))
        verifier.vocab_size = self.vocab_size
        # Wait here, or the measured time of the next pass would include this one.
        if mask_ids:
            ranks = verifier.sampler.rank_masks(logits[1:], len(verifier.prefill_ids))
            verifier.mask_predictions = read_top_masks(ranks.tolist())
        else:
            wait_until_computed(logits)
        cache.keep(range(len(chunk)))
        if entry.num_block_aligned == start and len(chunk) == self.prefill_chunk:
            entry.num_block_aligned += len(chunk)
        entry.token_ids += chunk
        self.prefilled_rows += len(chunk)

    def _acquire_cache(self, verifier: EngineVerifier) -> PrefixEntry:
        """Give a request a cache that holds as much as possible of the tokens that it needs.

        The caller holds the pass lock: states may be copied from other requests' caches.
        """
        if verifier.is_closed:
            raise RuntimeError("this request is closed: open a new verifier for it")
        self.prefix_cache.set_weights_version(self.model.refresh())
        request, wanted = verifier.request, verifier.prefill_ids
        chunk = self.prefill_chunk if self.deterministic else None
        answer = min(request.max_new_tokens, _MAX_RESERVED_TOKENS)
        room = len(request.prompt_ids) + answer + self.padded_rows(self.max_rows)
        verifier.entry = entry = self._with_memory_retry(
            lambda: self.prefix_cache.acquire(wanted, request.namespace, room=room, chunk=chunk),
            f"a cache of {room:,} tokens",
        )
        verifier.sampler.commit(wanted)
        return entry

    def verify(
        self, batch: Sequence[tuple[EngineVerifier, DraftTree, int]]
    ) -> list[SampledTokens | BaseException]:
        """Verify a tree of each request; a batch has (verifier, tree, number of alternatives).

        All requests share one pass if the model is batchable; else each has a pass of its own, as
        in deterministic mode.

        Returns:
            The sampled tokens of each tree, or the error of its request.

        Raises:
            ValueError: a tree has more than ``max_rows`` rows.
            Exception: the shared pass failed.
        """
        for _, tree, _ in batch:
            if len(tree) > self.max_rows:
                raise ValueError(
                    f"a tree of {len(tree)} rows exceeds max_rows={self.max_rows}: "
                    "draft fewer tokens"
                )
        with self._pass_lock, inference_mode():
            if not self.separate_passes:
                return self.prefix_cache.hold(partial(self._verify, batch))
            return [self.prefix_cache.hold(partial(self._verify_alone, one)) for one in batch]

    def _verify_alone(
        self, one: tuple[EngineVerifier, DraftTree, int]
    ) -> SampledTokens | BaseException:
        try:
            return self._verify([one])[0]
        except Exception as error:
            if is_interrupt(error):
                raise
            return error

    def _verify(
        self, batch: Sequence[tuple[EngineVerifier, DraftTree, int]]
    ) -> list[SampledTokens | BaseException]:
        started, one_offs = perf_counter(), self._num_one_offs
        rows = self._with_memory_retry(partial(self._batch_rows, batch), "a larger cache")
        logits = self._run(rows, rows.num_rows)
        greedy = self.model.greedy_ids(logits)
        found: list[Tensor | BaseException] = []
        for span, (verifier, tree, num_alternatives) in zip(rows.spans, batch, strict=True):
            own_rows = slice(span.first, span.first + len(tree))
            is_argmax = verifier.sampler.is_argmax and not num_alternatives and not tree.num_masks
            if greedy is not None and is_argmax:
                found.append(greedy[own_rows])
                continue
            own = logits[own_rows]
            try:
                found.append(self._sample(verifier, own, (tree, span.start, num_alternatives)))
            except BaseException as error:
                if is_interrupt(error):
                    raise
                found.append(error)
        sampled = iter(to_host([ids for ids in found if not isinstance(ids, BaseException)]))
        if self._num_one_offs == one_offs:
            cost = self.cost_of([verifier for verifier, _, _ in batch])
            has_masks = rows.is_mask is not None
            cost.observe(rows.num_rows, perf_counter() - started, has_masks=has_masks)
        for verifier, tree, _ in batch:
            verifier.tree, verifier.vocab_size = tree, self.vocab_size
            self._look_up_cost(verifier, verifier.num_cached + len(tree))
        return [
            ids
            if isinstance(ids, BaseException)
            else read_sampled(next(sampled), num_alternatives, tree.num_masks)
            for ids, (_, tree, num_alternatives) in zip(found, batch, strict=True)
        ]

    def _batch_rows(self, batch: Sequence[tuple[EngineVerifier, DraftTree, int]]) -> Rows:
        rows = concat_rows([self._rows(verifier.cache, tree) for verifier, tree, _ in batch])
        for span, (verifier, tree, _) in zip(rows.spans, batch, strict=True):
            verifier.sampler.prepare(tree, span.start, self.model.device)
        return rows

    def _rows(self, cache: KVCache, tree: DraftTree) -> Rows:
        model = self.model
        readable = replace_unreadable_tokens(tree, model.vocab_size, model.num_masks)
        if self.deterministic:
            return deterministic_rows(
                readable, cache, DETERMINISTIC_ROWS, max_positions=model.max_positions
            )
        return tree_rows(readable, cache, max_positions=model.max_positions)

    def _run(self, rows: Rows, keep: int) -> Tensor:
        what = f"a pass of {rows.num_rows} rows over {rows.attended:,} tokens"
        forward = self._on_cpu(partial(self.model.forward, rows, keep))
        threads = self.latency_profile.threads
        if threads in (None, torch.get_num_threads()) or self.model.device.type != "cpu":
            logits = self._with_memory_retry(forward, what)
        else:
            with use_threads(threads):
                logits = self._with_memory_retry(forward, what)
        self.vocab_size = min(self.vocab_size, logits.shape[-1])
        return logits

    def _sample(
        self, verifier: EngineVerifier, logits: Tensor, asked: tuple[DraftTree, int, int]
    ) -> Tensor:
        sample = partial(verifier.sampler.sample, logits, *asked)
        if verifier.request.processors:  # must not be called twice, nor with other threads
            return sample()
        what = f"sampling from {len(logits)} rows of logits"
        return self._with_memory_retry(self._on_cpu(sample), what)

    def _on_cpu(self, compute: Callable[[], Result]) -> Callable[[], Result]:
        """Return a function that computes with the threads that gain by it, if on a CPU.

        Not in deterministic mode, where no bit may depend on their number.
        """
        if self.deterministic or self.model.device.type != "cpu":
            return compute
        return partial(TEAM.run, compute)

    def _with_memory_retry(self, compute: Callable[[], Result], what: str) -> Result:
        return with_memory_retry(compute, what, self.model.device, self.free_memory)

    @property
    def _num_one_offs(self) -> int:
        """Number of events so far that slow down one pass: graph captures and ``free_memory``."""
        return self.model.num_captures + self._num_freed

    def free_memory(self) -> None:
        """Drop kept prefixes and the buffers that the model keeps for speed."""
        self._num_freed += 1
        self.prefix_cache.clear()
        self.model.free_memory()

    def cost_of(self, verifiers: Sequence[EngineVerifier]) -> PassCost:
        """Return the latencies of a joint pass, in the slowest of the requests' sampling modes."""
        if len(verifiers) == 1:
            return verifiers[0].cost
        attended = max(verifier.num_cached for verifier in verifiers)
        modes = dict.fromkeys(verifier.mode for verifier in verifiers)
        costs = [self.latency_profile.of(mode, attended, len(verifiers)) for mode in modes]
        return max(costs, key=lambda cost: cost.seconds(1))

    def own_cost(self, mode: str, num_cached: int) -> tuple[PassCost, int]:
        """Return a single request's latencies and the cached length up to which they apply."""
        profile = PassProfile.of(mode, num_cached)
        return self.latency_profile.of(profile.mode, profile.attended), profile.attended

    def _look_up_cost(self, verifier: EngineVerifier, num_cached: int) -> None:
        if num_cached > verifier.cost_until:
            verifier.cost, verifier.cost_until = self.own_cost(verifier.mode, num_cached)


def _is_batch_invariant(model: TargetModel) -> bool:
    """Return whether a model is batch-invariant, and its passes show it."""
    if not model.is_batch_invariant:
        return False
    try:
        check_deterministic(model, DETERMINISTIC_ROWS, deterministic=False)
    except ConfigurationError:
        return False
    return True


@contextmanager
def use_threads(number: int) -> Iterator[None]:
    """Set how many threads torch uses on the CPU in this context."""
    usual = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
