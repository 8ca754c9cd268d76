"""The engine: opens verifiers over one target model and runs all forward passes."""

from __future__ import annotations

import dis
import signal
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from threading import Event, Lock, Thread, current_thread, main_thread
from time import perf_counter
from traceback import walk_tb
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch

from ragaccel.decoding.request import Request, Sampling
from ragaccel.decoding.session import Verifier
from ragaccel.decoding.tree import DraftTree, attach_masks
from ragaccel.engine import attention
from ragaccel.engine.latency import LatencyProfile, PassProfile, sampling_mode
from ragaccel.engine.memory import check_capacity, memory_share, with_memory_retry
from ragaccel.engine.model_input import (
    Rows,
    causal_rows,
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
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor

    from ragaccel.decoding.session import SampledTokens
    from ragaccel.engine.kv_cache import KVCache
    from ragaccel.engine.latency import PassCost
    from ragaccel.engine.prefix_cache import PrefixEntry


_SHIFT = 5
_NUM_SHIFTS = 4
_CONTEXT_CHUNK = 64  # rows of a pass over the context; with separate experts each row needs memory
_NOT_DETERMINISTIC = (
    "exact=True is not supported for this model: what it computes for a token depends on the "
    "other tokens of the pass. If it is a mixture of experts, load it with "
    "experts_implementation='batched_mm'"
)


@torch.inference_mode()
def check_deterministic(model: TargetModel, num_rows: int) -> None:
    """Check that a token's logits do not depend on the pass that computes it or on its row.

    Compare overlapping passes at the start of a sequence and, if the model reads that far, around
    the first boundary between the chunks that attention reduces.

    Args:
        model: a model that runs with the engine's attention.
        num_rows: rows of a deterministic pass.

    Raises:
        ConfigurationError: the logits differ.
    """
    max_shift = _NUM_SHIFTS * _SHIFT
    edge = max(0, attention.CHUNK + 1 - num_rows)
    for first in dict.fromkeys((0, edge)):
        if model.max_positions is None or first + max_shift + num_rows <= model.max_positions:
            passes = _shifted_passes(first, model, num_rows)
            if not all(
                torch.equal(one[_SHIFT:], next_[:-_SHIFT]) for one, next_ in pairwise(passes)
            ):
                raise ConfigurationError(_NOT_DETERMINISTIC)


def _shifted_passes(first: int, model: TargetModel, num_rows: int) -> list[Tensor]:
    """Return the logits of overlapping passes: the first begins after ``first`` tokens.

    Each later pass begins ``_SHIFT`` tokens after the previous one.
    """
    length = first + _NUM_SHIFTS * _SHIFT + num_rows
    tokens = [(7919 * i + i * i + 1) % model.vocab_size for i in range(length)]
    cache = model.new_cache(None, None)
    for start in range(0, first, _CONTEXT_CHUNK):
        rows = causal_rows(tokens[start : min(start + _CONTEXT_CHUNK, first)], cache)
        model.forward(replace(rows, deterministic=True), 1)
        cache.keep(range(rows.num_rows))
    passes = []
    for start in range(first, first + _NUM_SHIFTS * _SHIFT, _SHIFT):
        rows = replace(causal_rows(tokens[start : start + num_rows], cache), deterministic=True)
        passes.append(model.forward(rows, num_rows).clone())
        cache.keep(range(_SHIFT))
    return passes


_RAISE = {dis.opmap[name] for name in ("RAISE_VARARGS", "RERAISE")}


def is_interrupt(error: BaseException) -> bool:
    """Return whether a signal handler raised this error, rather than the interrupted code.

    Python runs signal handlers in the main thread, between any two instructions. A handler written
    in Python appears in the traceback. Python's own handler for Ctrl-C does not, but unlike a
    callback it never raises from a ``raise`` statement.
    """
    if current_thread() is not main_thread():
        return False
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    if _handler_codes() & {frame.f_code for frame in frames}:
        return True
    if not isinstance(error, KeyboardInterrupt):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is None or trace.tb_frame.f_code.co_code[trace.tb_lasti] not in _RAISE


def run_uninterrupted(work: Callable[[], None]) -> None:
    """Run ``work`` completely or not at all, even if a signal arrives during the call.

    It runs in a separate thread, where Python does not handle signals. A signal's error is raised
    here after the work; if the signal arrives before the work begins, the work does not run.
    """
    claim, done = Lock(), Event()

    def run() -> None:
        if claim.acquire(blocking=False):
            try:
                work()
            finally:
                done.set()

    interrupt: BaseException | None = None
    try:
        Thread(target=run, name="ragaccel-uninterrupted", daemon=True).start()
        done.wait()
    except BaseException as error:
        if claim.acquire(blocking=False):
            raise
        interrupt = error
    while not done.is_set():
        try:
            done.wait()
        except BaseException as error:  # noqa: PERF203 - keep waiting
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _handler_codes() -> set[CodeType]:
    """Return the code objects of all signal handlers written in Python."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    return {code for handler in handlers if (code := _code_of(handler)) is not None}


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    code = getattr(function, "__code__", None)
    if code is None:  # an object with a __call__ method
        code = getattr(getattr(type(handler), "__call__", None), "__code__", None)  # noqa: B004
    return code if isinstance(code, CodeType) else None


@contextmanager
def use_threads(number: int | None, device: torch.device) -> Iterator[None]:
    """Set how many threads torch uses in this context.

    Change nothing if ``number`` is None or the device is not a CPU.
    """
    usual = torch.get_num_threads()
    if number is None or number == usual or device.type != "cpu":
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


class EngineVerifier(Verifier):
    """A verifier of one request's draft trees; the engine runs the forward passes."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self.request = engine, request
        self.max_rows, self.chains_only = engine.max_rows, engine.deterministic
        self.vocab_size = engine.vocab_size
        self.tree: DraftTree | None = None
        self._entry: PrefixEntry | None = None
        self.prefill_ids = request.prompt_ids[:-1]
        """Tokens that must be in the cache before the next verification pass."""
        self.sampler = Sampler(request)
        self.mode = sampling_mode(request)
        self._cost, self._cost_until = engine.own_cost(self)
        self._is_closed = False
        self._mask_ids: tuple[int, ...] = ()

    @property
    def cache(self) -> KVCache:
        """The KV cache of this request.

        Raises:
            RuntimeError: prefill has not begun, or the request is closed.
        """
        return self._open_entry().cache

    @property
    def num_cached(self) -> int:
        """How many tokens the cache holds."""
        return 0 if self._entry is None else len(self._entry.token_ids)

    @property
    def is_prefilled(self) -> bool:
        """Whether the cache holds the whole prompt except its last token."""
        wanted = len(self.prefill_ids)
        return self._entry is not None and len(self._entry.token_ids) >= wanted

    def prefill(self, request: Request) -> None:
        """Compute the missing part of the prompt, except its last token, in chunks.

        A request other than the one the verifier was opened for, or the same one a second time,
        starts from an empty cache.

        Raises:
            CapacityError: the prompt and the longest answer do not fit.
        """
        if request is not self.request or self._is_used:
            self._engine.check_fits(request)
            self.request, self.tree, self.mask_predictions = request, None, ()
            self.prefill_ids = request.prompt_ids[:-1]
            self.sampler = Sampler(request)
            self.mode = sampling_mode(request)
            self._cost, self._cost_until = self._engine.own_cost(self)
            self._release_entry()
        while not self.is_prefilled:
            self._engine.prefill_chunk_of(self)

    def predict_masks(self, mask_ids: Sequence[int]) -> None:
        """Append mask tokens to the last prefill pass, which then sets ``mask_predictions``.

        Do nothing if the whole prompt is already cached, in deterministic mode, or if the model has
        no embedding for one of the mask tokens.
        """
        model = self._engine.model
        limit = model.vocab_size + model.num_masks
        if max(mask_ids, default=0) < limit and not self._engine.deterministic:
            self._mask_ids = tuple(mask_ids)

    def masks_after(self, num_cached: int) -> tuple[int, ...]:
        """Return the mask tokens to append to a prefill pass that ends at this length, if any."""
        return self._mask_ids if num_cached == len(self.prefill_ids) else ()

    def read_mask_predictions(self, logits: Tensor) -> None:
        """Set ``mask_predictions`` from the logits [M, V] of mask tokens after the prompt."""
        ranks = self.sampler.rank_masks(logits, len(self.prefill_ids))
        self.mask_predictions = read_top_masks(ranks.tolist())

    def begin(self) -> PrefixEntry:
        """Return the request's cache entry; the first call acquires it, with any cached prefix.

        Called by the engine, under the pass lock.

        Raises:
            RuntimeError: the request is closed.
        """
        if self._is_closed:
            raise RuntimeError("this request is closed: open a new verifier for it")
        if self._entry is None:
            self._entry = self._engine.acquire_cache(self.request, self.prefill_ids)
            self.sampler.commit(self.prefill_ids)
        return self._entry

    def verify(self, tree: DraftTree, num_alternatives: int = 0) -> SampledTokens:
        """Sample the next token after every node, in one forward pass.

        Only token ids are copied from the device: one synchronization.
        """
        return self._engine.verify_many([(self, tree, num_alternatives)])[0]

    def commit(self, path: Sequence[int]) -> None:
        """Keep these nodes of the last tree in the cache; the next pass moves them into place.

        Raises:
            RuntimeError: no tree was verified since the last commit.
        """
        if self.tree is None:
            raise RuntimeError("no tree was verified since the last commit: call verify first")
        tree, self.tree = self.tree, None
        tokens = [tree.token_ids[node] for node in path]
        entry = self._open_entry()
        entry.cache.keep(path)
        entry.token_ids += tokens
        self.sampler.commit(tokens)

    def cost_seconds(self, rows: int) -> float:
        """Estimate the seconds of a verification pass over ``rows`` rows, from earlier passes."""
        if self.num_cached > self._cost_until:  # keep the result: every step asks for many widths
            self._cost, self._cost_until = self._engine.own_cost(self)
        return self._cost.seconds(self._engine.padded_rows(rows))

    def restart(self) -> bool:
        """Drop the cached states, so that the next pass computes them again.

        An interrupted pass may have moved only some of them.

        Returns:
            Whether decoding then samples the same tokens. It may not if a stateful logits processor
            has seen the interrupted pass, or in deterministic mode after verification passes.
        """
        is_used, had_read = self._is_used, self.is_prefilled
        entry, self._entry, self.tree = self._entry, None, None
        if entry is None:
            return True
        self._engine.prefix_cache.drop(entry)
        if len(entry.token_ids) > len(self.prefill_ids):
            self.prefill_ids = tuple(entry.token_ids)
        self.sampler = Sampler(self.request)
        return not (self.chains_only and is_used) and not (self.request.is_plain and had_read)

    def close(self) -> None:
        """Release the cache. Closing twice is harmless."""
        self._is_closed, self.tree = True, None
        if self._entry is not None:
            self._release_entry()
            self._engine.latency_profile.save_if_due()

    @property
    def _is_used(self) -> bool:
        """Whether a tree was verified, or tokens after the prompt were committed."""
        kept = max(self.num_cached, len(self.prefill_ids))  # an interruption may empty the cache
        return self.tree is not None or kept >= len(self.request.prompt_ids)

    def _open_entry(self) -> PrefixEntry:
        if self._is_closed or self._entry is None:
            raise RuntimeError(
                "this request is closed: open a new verifier for it"
                if self._is_closed
                else "this request has no cache yet: call prefill first"
            )
        return self._entry

    def _release_entry(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            self._engine.prefix_cache.release(entry)


# Assumed cost of one more row, as a share of a one-row pass, until passes have been measured.
_ROW_SHARE = {"cpu": 0.04}
_ROW_SHARE_ACCELERATOR = 0.003
_KEPT_SHARE = 0.05  # of the device's memory
_MAX_RESERVED_TOKENS = 1024  # tokens of an answer to reserve slots for at the start

Result = TypeVar("Result")

DETERMINISTIC_ROWS = 16
"""Rows of every pass in deterministic mode."""


class Engine:
    """An engine that opens verifiers over a target model and runs their passes. Thread-safe.

    Every open request has a KV cache of its own; passes run one at a time.

    Args:
        model: the target model.
        capacity: most tokens of a request; ``None`` grows as needed up to the model's limit.
        max_rows: most nodes of one verification pass.
        prefill_chunk: rows of one prefill pass.
        latency_file: file that stores pass latencies between runs; ``None`` stores nothing.
        exact: deterministic (batch-invariant) mode, which equals plain decoding in the same mode to
            the last bit: every pass has ``DETERMINISTIC_ROWS`` rows of one sequence, drafts are
            chains, attention reduces in a fixed order, and reused prefixes end at a chunk boundary.
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
        prefill_chunk: int = 512,
        latency_file: Path | None = None,
        exact: bool = False,
        kept_prefixes: int = 8,
        kept_bytes: int | None = None,
    ) -> None:
        limit = model.max_positions
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
        self.deterministic = exact
        self.max_rows = min(max_rows, DETERMINISTIC_ROWS) if exact else max_rows
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
        if exact:
            check_deterministic(model, DETERMINISTIC_ROWS)

    def open(self, request: Request) -> EngineVerifier:
        """Return a verifier for one request; its ``close`` releases the cache.

        Raises:
            CapacityError: the prompt and the longest answer do not fit.
        """
        self.check_fits(request)
        return EngineVerifier(self, request)

    def check_fits(self, request: Request) -> None:
        """Check that the prompt and the longest answer fit.

        Raises:
            CapacityError: the prompt and the longest answer are too long.
        """
        num_prompt, num_new = len(request.prompt_ids), request.max_new_tokens
        check_capacity(num_prompt, num_new, self.max_tokens, self.model.max_positions)

    def acquire_cache(self, request: Request, wanted: Sequence[int]) -> PrefixEntry:
        """Acquire a cache entry that holds as much as possible of the tokens ``wanted``.

        The caller holds the pass lock: states may be copied from other requests' caches.
        """
        self.prefix_cache.set_weights_version(self.model.refresh())
        chunk = self.prefill_chunk if self.deterministic else None
        answer = min(request.max_new_tokens, _MAX_RESERVED_TOKENS)
        room = len(request.prompt_ids) + answer + self.padded_rows(self.max_rows)
        return self._with_memory_retry(
            lambda: self.prefix_cache.acquire(wanted, request.namespace, room=room, chunk=chunk),
            f"a cache of {room:,} tokens",
        )

    def prefill_chunk_of(self, verifier: EngineVerifier) -> None:
        """Compute the next chunk of a request's prompt; the first call reuses a cached prefix.

        The lock is released between chunks, so a long prompt delays others by one chunk only.
        """
        with self._pass_lock, torch.inference_mode():
            entry = verifier.begin()
            start = len(entry.token_ids)
            chunk = verifier.prefill_ids[start : start + self.prefill_chunk]
            if not chunk:
                return
            cache, mask_ids = entry.cache, verifier.masks_after(start + len(chunk))
            make_rows = partial(prompt_rows, chunk, cache, mask_ids, self.model.max_positions)
            rows = self._with_memory_retry(make_rows, "a larger cache")
            logits = self._run(replace(rows, deterministic=self.deterministic), 1 + len(mask_ids))
            # Wait here, or the measured time of the next pass would include this one.
            verifier.read_mask_predictions(logits[1:]) if mask_ids else wait_until_computed(logits)
            verifier.vocab_size = self.vocab_size
            cache.keep(range(len(chunk)))
            if entry.num_block_aligned == start and len(chunk) == self.prefill_chunk:
                entry.num_block_aligned += len(chunk)
            entry.token_ids += chunk
            self.prefilled_rows += len(chunk)

    def verify_many(
        self, batch: Sequence[tuple[EngineVerifier, DraftTree, int]]
    ) -> list[SampledTokens]:
        """Verify a tree of each request; a batch has (verifier, tree, number of alternatives).

        All requests share one pass if the model is batchable; else each has a pass of its own, as
        in deterministic mode. Results are in the order of the batch.

        Raises:
            ValueError: a tree has more than ``max_rows`` rows.
            BaseException: the error of the first request whose logits processor raised one.
        """
        found = self.verify_each(batch)
        for sampled in found:
            if isinstance(sampled, BaseException):
                raise sampled
        return cast("list[SampledTokens]", found)

    def verify_each(
        self, batch: Sequence[tuple[EngineVerifier, DraftTree, int]]
    ) -> list[SampledTokens | BaseException]:
        """Verify as ``verify_many`` does, but return a request's error in place of its tokens."""
        for _, tree, _ in batch:
            if len(tree) > self.max_rows:
                raise ValueError(
                    f"a tree of {len(tree)} rows exceeds max_rows={self.max_rows}: "
                    "draft fewer tokens"
                )
        with self._pass_lock, torch.inference_mode():
            groups = [[each] for each in batch] if self.separate_passes else [list(batch)]
            return [sampled for group in groups for sampled in self._verify_group(group)]

    @property
    def separate_passes(self) -> bool:
        """Whether every request runs in a pass of its own."""
        return self.deterministic or not self.model.batchable

    def _verify_group(
        self, group: Sequence[tuple[EngineVerifier, DraftTree, int]]
    ) -> list[SampledTokens | BaseException]:
        """Verify in one pass; if requests run separately, return the error of a failed pass."""
        if not self.separate_passes:
            return self._verify(group)
        try:
            return self._verify(group)
        except Exception as error:
            if is_interrupt(error):
                raise
            return [error]

    def _verify(
        self, batch: Sequence[tuple[EngineVerifier, DraftTree, int]]
    ) -> list[SampledTokens | BaseException]:
        started, delays = perf_counter(), self._num_one_offs
        rows = self._with_memory_retry(
            lambda: concat_rows([self._rows(verifier, tree) for verifier, tree, _ in batch]),
            "a larger cache",
        )
        logits = self._run(rows, rows.num_rows)
        parts: list[Tensor | BaseException] = []
        for span, (verifier, tree, num_alternatives) in zip(rows.spans, batch, strict=True):
            own = logits[span.first : span.first + len(tree)]
            try:
                parts.append(self._sample(verifier, own, (tree, span.start, num_alternatives)))
            except BaseException as error:
                if is_interrupt(error):
                    raise
                parts.append(error)
        chosen = iter(to_host([part for part in parts if not isinstance(part, BaseException)]))
        if self._num_one_offs == delays:
            cost = self.cost_of([verifier for verifier, _, _ in batch])
            cost.observe(rows.num_rows, perf_counter() - started)
        found: list[SampledTokens | BaseException] = []
        for part, (verifier, tree, num_alternatives) in zip(parts, batch, strict=True):
            verifier.tree, verifier.vocab_size = tree, self.vocab_size
            found.append(
                part
                if isinstance(part, BaseException)
                else read_sampled(next(chosen), num_alternatives, tree.num_masks)
            )
        return found

    def _sample(
        self, verifier: EngineVerifier, logits: Tensor, asked: tuple[DraftTree, int, int]
    ) -> Tensor:
        if verifier.request.processors:  # processors must not be called twice
            return verifier.sampler.sample(logits, *asked)
        sample = partial(verifier.sampler.sample, logits, *asked)
        return self._with_memory_retry(sample, f"sampling from {len(logits)} rows of logits")

    def _rows(self, verifier: EngineVerifier, tree: DraftTree) -> Rows:
        model, cache = self.model, verifier.cache
        readable = replace_unreadable_tokens(tree, model.vocab_size, model.num_masks)
        if self.deterministic:
            return deterministic_rows(
                readable, cache, DETERMINISTIC_ROWS, max_positions=model.max_positions
            )
        return tree_rows(readable, cache, max_positions=model.max_positions)

    def _run(self, rows: Rows, keep: int) -> Tensor:
        what = f"a pass of {rows.num_rows} rows over {rows.attended:,} tokens"
        with use_threads(self.latency_profile.threads, self.model.device):
            logits = self._with_memory_retry(lambda: self.model.forward(rows, keep), what)
        self.vocab_size = min(self.vocab_size, logits.shape[-1])
        return logits

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

    def padded_rows(self, rows: int) -> int:
        """Return how many rows a pass over ``rows`` nodes computes."""
        return DETERMINISTIC_ROWS if self.deterministic else rows

    def cost_of(self, verifiers: Sequence[EngineVerifier]) -> PassCost:
        """Return the latencies of a joint pass, in the slowest of the requests' sampling modes."""
        attended = max(verifier.num_cached for verifier in verifiers)
        modes = dict.fromkeys(verifier.mode for verifier in verifiers)
        costs = [self.latency_profile.of(mode, attended, len(verifiers)) for mode in modes]
        return costs[0] if len(costs) == 1 else max(costs, key=lambda cost: cost.seconds(1))

    def own_cost(self, verifier: EngineVerifier) -> tuple[PassCost, int]:
        """Return a single request's latencies and the cached length up to which they apply."""
        profile = PassProfile.of(verifier.mode, verifier.num_cached)
        return self.latency_profile.of(profile.mode, profile.attended), profile.attended


class TargetModel(Protocol):
    """A causal language model whose output must be reproduced exactly."""

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        ...

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the model reads, in tokens; ``None`` for no limit."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id that the model reads, mask tokens not counted."""
        ...

    @property
    def num_masks(self) -> int:
        """How many mask tokens the model reads; their ids begin at ``vocab_size``."""
        ...

    @property
    def num_captures(self) -> int:
        """How many passes were captured as CUDA graphs, failed captures included."""
        ...

    @property
    def pass_lock(self) -> AbstractContextManager[Any]:
        """Lock held while a pass is computed and read, shared by all engines over the model."""
        ...

    @property
    def batchable(self) -> bool:
        """Whether one pass can hold rows of several sequences, and deterministic passes work."""
        ...

    @property
    def unbatchable_reason(self) -> str:
        """Why the model is not ``batchable``, and what to do; empty if it is."""
        ...

    def refresh(self) -> int:
        """Use changed weights from now on; return how many changes there were so far.

        Raises:
            ConfigurationError: the model must be loaded again after this change.
        """
        ...

    def new_cache(self, capacity: int | None, limit: int | None) -> KVCache:
        """Return an empty cache for passes of this model; arguments are those of ``KVCache``."""
        ...

    def free_memory(self) -> None:
        """Free the memory that only makes later passes faster."""
        ...

    def forward(self, rows: Rows, keep: int) -> Tensor:
        """Write the rows' keys and values to their caches; return the logits of the last rows.

        Args:
            rows: inputs in host memory; ``begin`` has been called on every cache.
            keep: how many of the last rows need logits.

        Returns:
            [keep, V], valid until the next pass.
        """
        ...


_MAX_THREAD_COUNTS = 5
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
SAMPLING_MODES = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.0),
    "filtered": Sampling(temperature=1.0, top_p=0.9),
}
"""Sampling modes of different cost: greedy, sampled, and sampled with a top-p filter."""


def measure_passes(
    engine: Engine,
    *,
    context: int = 512,
    repeats: int = 5,
    rows: Sequence[int] = ROWS,
    sampling: Sampling | None = None,
    mask_ids: Sequence[int] = (),
    advance: Callable[[], None] = lambda: None,
    typical: Callable[[Sequence[float]], float] = median,
) -> Mapping[int, float]:
    """Measure the seconds of a pass by its number of rows, over ``context`` cached tokens.

    Sizes are interleaved, so that a busy moment of the machine affects all alike. The trees are
    chains of fixed tokens, with the mask tokens ``mask_ids`` at the root.

    Args:
        engine: the engine to measure.
        context: cached tokens before each pass.
        repeats: measured passes of each size, after one that warms up.
        rows: sizes to measure; those above ``engine.max_rows`` are skipped.
        sampling: how to sample; greedy by default.
        mask_ids: mask tokens in every tree.
        advance: called after each pass, to show progress: ``(repeats + 1) * len(rows)`` times.
        typical: summarizes the measured seconds of one size.

    Raises:
        CapacityError: the model does not read so many tokens.
    """
    rows = [number for number in rows if len(mask_ids) < number <= engine.max_rows]
    tokens = [(7919 * i + 13) % engine.model.vocab_size for i in range(context + 1)]
    request = Request(tuple(tokens), max_new_tokens=1, sampling=sampling or Sampling())
    seconds: dict[int, list[float]] = {number: [] for number in rows}
    verifier = engine.open(request)
    try:
        verifier.prefill(request)
        for repeat in range(repeats + 1):
            for number in rows:
                count = number - len(mask_ids)
                tree = DraftTree.chain((tokens * (count // len(tokens) + 1))[:count])
                tree = attach_masks(tree, mask_ids, [0])
                started = perf_counter()
                verifier.verify(tree)  # the ids are on the host, so the device has finished
                elapsed = perf_counter() - started
                verifier.commit(())
                if repeat:
                    seconds[number].append(elapsed)
                advance()
    finally:
        verifier.close()
    return {number: typical(values) for number, values in seconds.items()}


def warm_up_passes(engine: Engine, *, context: int) -> None:
    """Run passes of all sizes, so that kernels are compiled and CUDA graphs captured.

    If the model has mask tokens, run passes with and without them: their graphs differ.

    Args:
        engine: the engine to warm up.
        context: cached tokens before each pass, reduced to what the model reads.
    """
    limit = engine.max_tokens
    rows = list(ROWS)
    if limit is not None:  # some models' causal masks end at their longest sequence
        rows = [number for number in rows if engine.padded_rows(number) <= max(1, limit // 2)]
        context = min(context, limit - engine.padded_rows(max(rows, default=1)))
    if not rows or context < 1:
        return
    measure_passes(engine, context=context, repeats=1, rows=rows)
    if engine.model.num_masks and not engine.deterministic:
        mask_ids = [engine.model.vocab_size]
        measure_passes(engine, context=context, repeats=1, rows=rows, mask_ids=mask_ids)


def measure_threads(engine: Engine, *, context: int = 512, repeats: int = 3) -> dict[int, float]:
    """Measure how long passes take on a CPU by the number of threads.

    Start with the threads that torch uses and halve, for at most five numbers. Afterwards restore
    the number in use, ``engine.latency_profile.threads``.

    Returns:
        Mean seconds of passes of one and eight rows, by threads; empty for other devices.
    """
    if engine.model.device.type != "cpu":
        return {}
    before, number = engine.latency_profile.threads, torch.get_num_threads()
    seconds: dict[int, float] = {}
    try:
        while number >= 1 and len(seconds) < _MAX_THREAD_COUNTS:
            engine.latency_profile.threads = number
            passes = measure_passes(
                engine, context=context, repeats=repeats, rows=(1, 8), typical=min
            )
            seconds[number] = fmean(passes.values())
            number //= 2
    finally:
        engine.latency_profile.threads = before
    return seconds
