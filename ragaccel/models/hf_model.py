"""A model of transformers as the engine's target, and the tracking of changes between requests.

Modeling files are not patched. Models whose attention can be replaced run with ragaccel's. Other
models get a ``transformers`` cache object over ragaccel's buffers. It has the full length in every
layer, and the mask applies the sliding window, so that every layer can drop rejected tokens.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from copy import copy
from itertools import chain
from operator import attrgetter, is_, itemgetter
from threading import RLock
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ragaccel.engine.attention import PassAttention
from ragaccel.engine.capture import CaptureError
from ragaccel.engine.interrupts import in_inference_mode
from ragaccel.engine.kv_cache import KVCache
from ragaccel.engine.memory import free_bytes
from ragaccel.engine.model_input import AttentionMasks, Rows
from ragaccel.errors import ConfigurationError, UnsupportedModelError
from ragaccel.models.fused_decoder import FusedDecoder, has_fused_form, packed_groups
from ragaccel.models.hf_attention import (
    CacheAdapter,
    PassCache,
    attention_of_pass,
    make_shared_copy,
    stock_mask,
    use_rowwise_activations,
)
from ragaccel.models.packing import (
    PackedLinear,
    has_packed,
    latency_key,
    pack_linears,
    packed_bytes,
    weight_bytes,
)
from ragaccel.models.self_check import (
    UNBATCHABLE,
    Findings,
    PassedCheck,
    check_lengths,
    check_model,
    check_wide_passes,
    expected_passes,
    passes_check,
)
from ragaccel.models.space_adapter import AttachedAdapter, device_of
from ragaccel.models.static_network import StaticNetwork, make_graphs, triton_kernels
from ragaccel.models.support import Architecture, cache_keyword, read_architecture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

    from ragaccel.engine.cuda_graphs import AttentionKernel, KVPool, LayerKernels, StepGraphs
    from ragaccel.models.self_check import Expected
    from ragaccel.models.space_adapter import SpaceAdapter


_STOCK = (nn.Parameter, torch.Tensor)  # subclasses may have no storage of their own
# Attributes of a PEFT layer that tell which adapters it uses, with transformers' adapters too.
_ADAPTERS = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
_RELOAD = "make a new LLM of it, or load it anew"
_version = attrgetter("_version")


class WeightVersions:
    """A detector of weights that were written in place or got other storage between requests.

    Torch does not count writes through ``data`` into the same storage: call ``mark_changed`` after
    those.

    Args:
        model: the model whose parameters must stay the same objects.
        weights: the tensors to track.
    """

    def __init__(self, model: nn.Module, weights: Sequence[Tensor]) -> None:
        self.version = 0
        """Number of changes so far."""
        self._parameters = [
            (module._parameters, name, weight)
            for module in model.modules()
            for name, weight in module.named_parameters(recurse=False)
            if weight.device.type != "meta"  # accelerate's hooks replace offloaded weights
        ]
        self._weights = list(weights)
        self._dtypes_and_devices = [_dtype_and_device(weight) for weight in weights]
        self._shapes = [weight.shape for weight in weights]
        self._is_marked_changed = False
        self._versions, self._storage_refs = _versions(self._weights), _storage_refs(self._weights)

    def mark_changed(self) -> None:
        """Treat all weights as changed at the next check."""
        self._is_marked_changed = True

    def changed_weights(self) -> Sequence[Tensor]:
        """Return the weights that changed since the last call, or all after ``mark_changed``.

        Raises:
            ConfigurationError: weights have another shape, dtype or device than before.
        """
        versions = _versions(self._weights)
        # New storage may have the address of freed storage, e.g. after half().float().
        freed = [storage is not None and storage.expired() for storage in self._storage_refs]
        if versions == self._versions and not self._is_marked_changed and not any(freed):
            return []
        self._check_dtypes_and_devices()
        known = zip(self._weights, self._versions, versions, freed, strict=True)
        changed = [
            one for one, old, new, gone in known if gone or old != new or self._is_marked_changed
        ]
        self._versions, self._is_marked_changed = versions, False
        self._storage_refs = _storage_refs(self._weights)
        self.version += 1
        return changed

    def check_parameters(self) -> None:
        """Raise ConfigurationError if a parameter is another object than before."""
        for parameters, name, known in self._parameters:
            if parameters.get(name) is not known:
                raise ConfigurationError(
                    f"parameters of this model, such as {name!r}, were replaced after the LLM was "
                    f"made: {_RELOAD}"
                )

    def _check_dtypes_and_devices(self) -> None:
        if [weight.shape for weight in self._weights] != self._shapes:
            raise ConfigurationError(
                f"weights of this model have other shapes than when the LLM was made: {_RELOAD}"
            )
        for weight, kind in zip(self._weights, self._dtypes_and_devices, strict=True):
            if _dtype_and_device(weight) != kind:
                before, now = (
                    f"{dtype} on {place}" for dtype, place in (kind, _dtype_and_device(weight))
                )
                raise ConfigurationError(
                    f"this model was {before.removeprefix('torch.')} when the LLM was made and is "
                    f"{now.removeprefix('torch.')} now: {_RELOAD}"
                )


class StructureVersion:
    """A detector of changes of a model's modules, hooks, adapters and buffers between requests.

    Switched adapters and changed buffers are copied to the weight-sharing copies of the model.
    Added, removed or replaced modules are refused. So are changed hooks if there are copies,
    because copies do not run them.

    Args:
        model: the model that callers change.
        copies: other module trees over the same tensors.
    """

    def __init__(self, model: nn.Module, copies: Sequence[nn.Module] = ()) -> None:
        self.modules = list(model.modules())
        self._states: list[dict[str, Any]] = [module.__dict__ for module in self.modules]
        self._children = list(map(itemgetter("_modules"), self._states))
        self._hooks = [
            hooks
            for state in self._states
            for hooks in (state["_forward_hooks"], state["_forward_pre_hooks"])
        ]
        self._known_parts, self._has_copies = self._parts(), bool(copies)
        trees = [dict(tree.named_modules()) for tree in copies]
        named = [
            (module, [tree[name] for tree in trees if name in tree])
            for name, module in model.named_modules()
        ]
        self._adapter_layers = [pair for pair in named if "_disable_adapters" in pair[0].__dict__]
        self._buffers = [
            (module, name, shared_copies)
            for module, shared_copies in named
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.device.type != "meta"
        ]
        self._adapters = _copy_states(self._adapters_now())
        self._record_buffers()

    @property
    def is_training(self) -> bool:
        """Whether any module is in training mode."""
        return any(map(itemgetter("training"), self._states))

    def follow_changes(self) -> set[str]:
        """Apply changes to the copies; return what changed: "parts", "adapters" and so on.

        Raises:
            ConfigurationError: modules or hooks were changed in a way that cannot be followed.
        """
        return self._follow_parts() | self._follow_adapters() | self._follow_buffers()

    def _parts(self) -> tuple[list[Any], list[Any]]:
        """Return the current modules and hooks."""
        return _all_values(self._children), _all_values(self._hooks)

    def _follow_parts(self) -> set[str]:
        now = self._parts()
        if now == self._known_parts:
            return set()
        for what, before, part in zip(("modules", "hooks"), self._known_parts, now, strict=True):
            if before != part and (self._has_copies or what == "modules"):
                raise ConfigurationError(
                    f"{what} of this model were added, removed or replaced after the LLM was made, "
                    f"which is not supported: undo that, or {_RELOAD}"
                )
        self._known_parts = now
        return {"parts"}

    def _adapters_now(self) -> list[tuple[Any, ...]]:
        return [tuple(map(module.__dict__.get, _ADAPTERS)) for module, _ in self._adapter_layers]

    def _follow_adapters(self) -> set[str]:
        if not self._adapter_layers or (now := self._adapters_now()) == self._adapters:
            return set()
        for off, _, merged, _ in now:
            if off and merged:  # running such a layer would unmerge shared weights
                raise ConfigurationError(
                    "adapters of this model are disabled while merged into its weights: call "
                    "unmerge_adapter() first"
                )
        for (module, shared_copies), state in zip(self._adapter_layers, now, strict=True):
            for shared_copy in shared_copies:
                known = zip(_ADAPTERS, state, strict=True)
                shared_copy.__dict__.update(
                    {name: copy(value) for name, value in known if name in module.__dict__}
                )
        merged = [[state[2] for state in states] for states in (self._adapters, now)]
        self._adapters = _copy_states(now)
        return {"adapters"} if merged[0] == merged[1] else {"adapters", "merges"}

    def _follow_buffers(self) -> set[str]:
        now = self._buffers_now()
        if all(map(is_, now, self._known_buffers)) and _versions(now) == self._buffer_versions:
            return set()
        for (_, name, shared_copies), buffer in zip(self._buffers, now, strict=True):
            for shared_copy in shared_copies:
                shared_copy._buffers[name] = buffer
        self._record_buffers()
        return {"buffers"}

    def _buffers_now(self) -> list[Any]:
        return [module._buffers.get(name) for module, name, _ in self._buffers]

    def _record_buffers(self) -> None:
        self._known_buffers = self._buffers_now()
        self._buffer_versions = _versions(self._known_buffers)


def _all_values(mappings: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, mappings)))


def _copy_states(states: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Copy states one level deep, so that the copies keep their values if lists change."""
    return [tuple(map(copy, state)) for state in states]


def _versions(tensors: Sequence[Any]) -> list[tuple[int, int] | None]:
    """Return each tensor's version counter and storage address; None for a missing tensor."""
    try:
        return list(zip(map(_version, tensors), map(torch.Tensor.data_ptr, tensors), strict=True))
    except (AttributeError, RuntimeError, TypeError):
        return [None if one is None else _version_and_address(one) for one in tensors]


def _version_and_address(tensor: Tensor) -> tuple[int, int]:
    """Return the version and address of any tensor; 0 as the version of inference tensors."""
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr() if type(tensor) in _STOCK else 0


def _storage_refs(tensors: Sequence[Tensor]) -> list[Any]:
    """Return a weak reference to each tensor's storage; None for tensor subclasses."""
    weak: Any = StorageWeakRef
    return [weak(one.untyped_storage()) if type(one) in _STOCK else None for one in tensors]


def _dtype_and_device(weight: Tensor) -> tuple[torch.dtype, torch.device]:
    return weight.dtype, weight.device


GRAPH_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that the GPU kernels support."""

logger = logging.getLogger("ragaccel")


class HuggingFaceModel:
    """A causal language model of transformers as a target model.

    Puts the model into evaluation mode and otherwise leaves it unchanged. Passes run through a
    weight-sharing copy of its modules, with attention over ragaccel's caches and, on a CPU, packed
    weights. If no such copy can be made, passes run through the model itself. Unless
    ``self_check`` is off, a small tree and its compaction are first verified against
    transformers' own passes.

    Args:
        model: a causal language model. In-place writes to weights and buffers and switched PEFT
            adapters take effect at the next request; call ``mark_weights_changed`` after writes
            through ``data``. The next request is refused if the device, the dtype or modules have
            changed. When passes run through the model itself, changed hooks take effect and
            training mode is refused; when they run through a copy, changed hooks are refused and
            answers are those of evaluation mode. Forward methods that are replaced later are not
            detected.
        self_check: verify a small tree first.
        pack: keep packed copies of the weights on a CPU; ``None`` packs if the copies fit in
            half of the free memory.
        owned: nobody else uses the model: packed weights replace the stored ones.
        check_folder: folder for findings of the self-check; ``None`` keeps them in memory.
        findings: findings of an earlier self-check.
        files: the unchanged model's files (``describe_files``): once checked, they are not checked
            again; empty checks the model each time.

    Raises:
        UnsupportedModelError: the model cannot be decoded exactly; the message names the cause.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        self_check: bool = True,
        pack: bool | None = None,
        owned: bool = False,
        check_folder: Path | None = None,
        findings: Findings | None = None,
        files: str = "",
    ) -> None:
        # torch.compile's wrapper does not support these caches: passes run uncompiled.
        model = getattr(model, "_orig_mod", model)
        self.architecture: Architecture = read_architecture(model)
        self.model = cast("Any", model)
        self.model.eval()
        self.findings = findings or Findings()
        """Findings of the self-check about this architecture."""
        if self_check:
            self.findings = check_lengths(model, self.architecture, _make_copy_target, check_folder)
        self.architecture = self.findings.apply_to(self.architecture)
        # Masks are added to scores, so they have the dtype of the activations.
        embedding: Tensor = self.model.get_input_embeddings().weight
        own = device_of(self.model, embedding.device)
        self.device: torch.device = device_of(self.model.get_input_embeddings(), own)
        dtype = embedding.dtype if embedding.dtype.is_floating_point else model.dtype
        self._masks = AttentionMasks(dtype, self.device)
        self._cache_keyword = cache_keyword(self.model)
        self._pass_cache = PassCache()  # one will do: ``pass_lock`` is held during a pass
        self.vocab_size: int = embedding.shape[0]
        self.latency_key: str = latency_key(self.model, self.device)
        self.weight_bytes: int = weight_bytes(self.model)
        """Bytes of weights that one pass reads."""
        self.pass_lock = RLock()  # two engines may share the model and its buffers
        self.network: Any = self.model
        """The modules that passes run through: the copy, or the model itself."""
        self._uses_own_attention = False
        self._unbatchable_reason = "load it with attn_implementation='sdpa'"
        self._packed: list[PackedLinear] = []
        self._fused: FusedDecoder | None = None
        self.kv_pool: KVPool | None = None
        """The memory for caches that CUDA graphs read; None without static passes."""
        self.graphs: StepGraphs | None = None
        """Runs passes of few rows over static buffers; None if the model does not support that."""
        self.graphs_status: str = ""
        """On a GPU "on" if passes are replayed as CUDA graphs, else "off" and why; else empty."""
        self._checks_graphs = False
        self._static: StaticNetwork | None = None
        self._num_captures = 0  # captures of graphs that were given up
        self.num_masks = 0  # mask tokens, numbered from ``vocab_size`` on
        self._space: AttachedAdapter | None = None
        groups = packed_groups(self.model)
        packs = pack is not False and (bool(pack) or owned or _copies_fit(self.model, groups))
        record = PassedCheck(
            self.model, self.findings, files if self_check else "", check_folder, packs, owned
        )
        self._prepare_passes(record, groups if packs else None, self_check=self_check, owned=owned)
        self._weight_versions = WeightVersions(self.model, list(self.network.parameters()))
        self._track_structure()

    def _prepare_passes(
        self,
        record: PassedCheck,
        groups: Sequence[Sequence[str]] | None,
        *,
        self_check: bool,
        owned: bool,
    ) -> None:
        """Choose the modules that passes run through, pack, fuse or capture them, and check all.

        ``groups`` are the layers to pack together; None packs nothing.
        """
        has_passed = record.is_stored()
        expected = expected_passes(self) if self_check and not has_passed else None
        self._select_network(expected)
        if has_passed and not self._uses_own_attention:
            check_model(self, expected_passes(self))  # the record is of the other network
        if self._uses_own_attention:
            if groups is not None:
                trees = [self.network, self.model] if owned else [self.network]
                self._packed = pack_linears(trees, keep=not owned, groups=groups)
            if self._fuse(expected) and expected is not None:
                record.store()
        if has_packed(self.network):
            self.latency_key += "-packed" if self._fused is None else "-fused"
        if self.device.type == "cuda":
            self._make_graphs(expected)

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the model reads, in tokens; None for no limit."""
        return self.architecture.max_positions

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations."""
        return self._masks.dtype

    @property
    def num_captures(self) -> int:
        """Number of passes that captured a graph or tried to, and so took longer than others."""
        return self._num_captures if self.graphs is None else self.graphs.num_captures

    @property
    def batchable(self) -> bool:
        """Whether one pass can take the rows of several sequences."""
        return self._uses_own_attention and self.findings.batchable

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row has the same bits in any ordinary pass."""
        return self.batchable and self._fused is not None and self._fused.is_batch_invariant

    @property
    def uses_own_attention(self) -> bool:
        """Whether passes run with ragaccel's attention instead of the model's."""
        return self._uses_own_attention

    @property
    def is_fused(self) -> bool:
        """Whether passes run through fused layers (``FusedDecoder``); deterministic ones do not."""
        return self._fused is not None

    @property
    def runner(self) -> StepGraphs | FusedDecoder | None:
        """What runs passes without calling the modules of ``network``, for measurements."""
        return self._fused if self.graphs is None else self.graphs

    @property
    def unbatchable_reason(self) -> str:
        """Why passes cannot be batched, and what helps; empty if ``batchable``."""
        return "" if self.batchable else self._unbatchable_reason

    def attach_space(self, adapter: SpaceAdapter) -> None:
        """Attach a SPACE adapter; rows of real tokens stay the same to the last bit.

        Raises:
            ConfigurationError: the adapter is for another model, or one is attached already.
        """
        if self._space is not None:
            raise ConfigurationError(
                "a SPACE adapter is attached to this model already: load the model anew"
            )
        adapter.check(self.model)
        self._space = AttachedAdapter(adapter, self.network, self.dtype)
        if self._fused is not None:
            self._fused.attach_space(self._space)
        self.num_masks, self.latency_key = adapter.num_masks, f"{self.latency_key}-space"
        if self._static is not None:
            self._static.attach_space(self._space)
            self.free_memory()  # passes captured before run without the adapter
        self._track_structure()

    def _select_network(self, expected: Expected | None) -> None:
        """Use a copy with ragaccel's attention if it passes the check, else the model itself."""
        is_replaceable = self.architecture.has_replaceable_attention
        shared_copy = make_shared_copy(self.model) if is_replaceable else None
        if shared_copy is not None and self.findings.own_attention:
            use_rowwise_activations(shared_copy)
            self.network, self._uses_own_attention = shared_copy, True
            if not self.findings.batchable:
                self._unbatchable_reason = UNBATCHABLE
            if expected is None or passes_check(self, expected):
                return
            self.network, self._uses_own_attention = self.model, False
        if shared_copy is not None:
            self._unbatchable_reason = "this model fails the self-check with it"
        elif is_replaceable:
            self._unbatchable_reason = (
                "its modules cannot be copied, or their attention cannot be replaced"
            )
        if expected is not None:
            check_model(self, expected)

    def refresh(self) -> int:
        """Repack changed weights and drop outdated CUDA graphs; return the number of changes.

        Raises:
            ConfigurationError: the model's dtype, device, parameters, modules or hooks changed, or
                it is in training mode.
        """
        if self.network is self.model and self._structure.is_training:
            raise ConfigurationError("the model is in training mode: call model.eval() first")
        self._weight_versions.check_parameters()
        if parts := self._structure.follow_changes():
            self._weight_versions.version += 1
        if "merges" in parts:
            self._weight_versions.mark_changed()
        changed = {id(weight) for weight in self._weight_versions.changed_weights()}
        for group in {layer.group for layer in self._packed if id(layer.weight) in changed}:
            group.repack()
        if parts or changed:
            self.free_memory()
        return self._weight_versions.version

    def _track_structure(self) -> None:
        trees = [] if self.network is self.model else [self.network]
        if self._static is not None:
            trees.append(self._static.eager)
        self._structure = StructureVersion(self.model, trees)

    def mark_weights_changed(self) -> None:
        """Report a write to weights that ``refresh`` cannot detect.

        Such writes go through a parameter's or buffer's ``data``, or come from code outside
        torch. The next request uses the new weights.
        """
        self._weight_versions.mark_changed()

    def new_cache(self, capacity: int | None, limit: int | None) -> KVCache:
        """Return an empty cache, in the KV pool if this model has one."""
        if self.kv_pool is not None:
            return self.kv_pool.new_cache(capacity, limit)
        return KVCache(capacity, limit)

    def free_memory(self) -> None:
        """Free captured passes; they are captured anew at their next use."""
        if self.graphs is not None:
            self.graphs.clear()

    def finish_compiling(self) -> None:
        """Wait for functions that are compiled in the background and make later passes faster."""
        if self._fused is not None:
            self._fused.finish_compiling()

    @in_inference_mode
    def capture_passes(self, attended: int, *, num_rows: int, num_sequences: int) -> None:
        """Capture all sizes of pass up to these numbers as CUDA graphs, where there are any."""
        if self.graphs is None:
            return
        try:
            self.graphs.capture_all(
                attended,
                num_rows=num_rows,
                num_sequences=num_sequences if self.batchable else 1,
                has_masks=self.num_masks > 0,
            )
        except CaptureError as error:
            self._stop_graphs(error)

    def forward(self, rows: Rows, keep: int) -> Tensor:
        """Run the rows; return the logits of the last ``keep`` of them, [keep, V].

        Raises:
            ValueError: the rows are of several sequences, and the model is not ``batchable``.
        """
        if self.graphs is not None and keep == rows.num_rows and self.graphs.supports(rows):
            try:
                return self.graphs.run(rows)
            except CaptureError as error:
                if self._checks_graphs:
                    raise
                self._stop_graphs(error)
        space = None if rows.is_mask is None or self.is_fused else self._space
        with nullcontext() if space is None else space.mark_rows(rows.token_ids):
            return self._forward(rows.to(self.device), keep)

    def greedy_ids(self, logits: Tensor) -> Tensor | None:
        """Return the greedy tokens of the last pass's logits, if the pass computed them."""
        return None if self.graphs is None else self.graphs.greedy_ids(logits)

    def _forward(self, rows: Rows, keep: int) -> Tensor:
        if self._fused is not None and not rows.deterministic:
            return self._fused.run(rows, keep)
        for span in rows.spans:
            span.cache.flush_moves()
        if self._uses_own_attention:
            attention = PassAttention(rows, self._masks)
            with attention_of_pass(attention, self.architecture.windows):
                # This attention does not need the mask, but modeling code may inspect it.
                return self._run(rows, rows.sees()[None, None], self._pass_cache.begin(rows), keep)
        if len(rows.spans) > 1:
            raise ValueError("this model takes the rows of one sequence per pass")
        cache = rows.spans[0].cache
        if not isinstance(cache.model_cache, CacheAdapter):
            cache.model_cache = CacheAdapter(cache, self.architecture.num_layers)
        mask = stock_mask(rows, self._masks, self.architecture)
        return self._run(rows, mask, cache.model_cache, keep)

    def _run(self, rows: Rows, mask: Any, cache: Cache, keep: int) -> Tensor:
        given: dict[str, Any] = {self._cache_keyword: cache}
        if self._space is not None and rows.is_mask is not None:
            given["inputs_embeds"] = self._space.embed(self.network, rows.token_ids)
        else:
            given["input_ids"] = rows.token_ids
        output = self.network(
            **given,
            attention_mask=mask,
            position_ids=rows.positions,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: Tensor = output.logits[0]
        return logits

    def _fuse(self, expected: Expected | None) -> bool:
        """Compute passes by a ``FusedDecoder`` if the model has one; return False if it fails."""
        if not has_fused_form(self.network) or not has_packed(self.network):
            return True
        try:
            self._fused = FusedDecoder(self.network, self._masks, self.architecture.windows)
        except (AttributeError, ValueError) as error:
            logger.debug("passes run through the model's modules: %s", error)
            return True
        if expected is not None and not passes_check(self, expected, "fused passes"):
            self._fused = None
        return self._fused is not None

    def _make_graphs(self, expected: Expected | None) -> None:
        """Replay passes of few rows as CUDA graphs if they pass the check; warn if they do not."""
        try:
            if not self._uses_own_attention:
                raise CaptureError(f"its own attention is used: {self._unbatchable_reason}")
            if self.dtype not in GRAPH_DTYPES:
                raise CaptureError(f"there are no kernels for {self.dtype}")
            kernel, layers = triton_kernels()
            if not self._try_graphs(kernel, layers, expected):
                self.disable_graphs()  # the next KV pool needs the memory of this one
                self._try_graphs(kernel, None, expected)
        except (CaptureError, UnsupportedModelError, torch.OutOfMemoryError) as error:
            self.disable_graphs()
            self._give_up_graphs(error)

    def _try_graphs(
        self,
        kernel: Callable[[], AttentionKernel],
        layers: LayerKernels | None,
        expected: Expected | None,
    ) -> bool:
        """Make graphs and check them; return False if fused layers fail, which are optional.

        Raises:
            CaptureError: the model's passes cannot be captured.
            UnsupportedModelError: they compute something else.
        """
        self._build_graphs(kernel, capture=True, layers=layers)
        self.graphs_status, self._checks_graphs = "on", True
        try:
            if expected is not None:
                check_model(self, expected)
                if layers is not None:
                    check_wide_passes(self, expected)
        except UnsupportedModelError as error:
            # Raises what no later pass would survive, such as an illegal access.
            torch.cuda.synchronize(self.device)
            if self._static is None or not self._static.is_fused:
                raise
            # As text: its frames hold the KV pool.
            logger.warning("CUDA graphs run without fused layers, so more slowly: %s", str(error))
            return False
        finally:
            self._checks_graphs = False
        return True

    def _stop_graphs(self, error: CaptureError) -> None:
        if self.graphs is not None:
            self._num_captures = self.graphs.num_captures
        self.graphs = None  # caches stay in the pool: other passes can read it
        self._give_up_graphs(error)

    def _give_up_graphs(self, error: Exception) -> None:
        self.graphs_status = f"off: {error}"
        logger.warning("CUDA graphs are not used, so answers come more slowly: %s", error)

    def enable_graphs(
        self,
        make_kernel: Callable[[], AttentionKernel],
        *,
        capture: bool,
        layers: LayerKernels | None = None,
    ) -> None:
        """Run passes of few rows over static buffers with such kernels, if the model can."""
        try:
            self._build_graphs(make_kernel, capture=capture, layers=layers)
        except CaptureError as error:
            logger.info("passes do not run over static buffers: %s", error)

    def _build_graphs(
        self,
        make_kernel: Callable[[], AttentionKernel],
        *,
        capture: bool,
        layers: LayerKernels | None,
    ) -> None:
        made = make_graphs(self, make_kernel, capture=capture, layers=layers)
        self.kv_pool, self.graphs, self._static = made
        self._track_structure()

    def disable_graphs(self) -> None:
        """Run all passes without static buffers and CUDA graphs from now on."""
        self.kv_pool, self.graphs, self._static = None, None, None
        self.graphs_status = "off: they were disabled" if self.graphs_status else ""

    def compile(self) -> bool:
        """Let torch compile static passes; return whether the model has such passes."""
        if self._static is None:
            return False
        self._static.compile()
        if self.graphs is not None:
            self.graphs.expect_compiled_passes()
        self.free_memory()  # captured graphs would replay uncompiled passes
        return True

    @property
    def is_compiled(self) -> bool:
        """Whether static passes are compiled; False after torch.compile failed."""
        return self._static is not None and self._static.is_compiled


def _copies_fit(model: Any, groups: Sequence[Sequence[str]]) -> bool:
    """Return whether packed copies of a model's weights fit in half of the free memory."""
    needed = packed_bytes(model, groups)
    return needed > 0 and 2 * needed <= free_bytes()


def _make_copy_target(copy: Any, findings: Findings) -> HuggingFaceModel:
    return HuggingFaceModel(copy, self_check=False, pack=False, findings=findings)
