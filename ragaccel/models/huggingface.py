"""Hugging Face models as targets: stock modeling code over our own KV caches.

No modeling file is patched. Models whose attention can be exchanged run with ours; to others a
``transformers`` cache object hands our buffers, full-length for every layer, with the sliding
window put into the mask, so that any layer can roll back.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from threading import RLock
from typing import TYPE_CHECKING, Any, cast

import torch

from ragaccel.engine.attention import PassAttention
from ragaccel.engine.cuda_graphs import CaptureError
from ragaccel.engine.kv_cache import KVCache
from ragaccel.engine.memory import free_bytes
from ragaccel.engine.model_input import Masks, Rows
from ragaccel.errors import ConfigurationError
from ragaccel.models.architecture import Architecture, read_architecture
from ragaccel.models.attention import attending
from ragaccel.models.caches import CacheAdapter, PassCache, stock_mask
from ragaccel.models.length_check import UNBATCHABLE, Findings, check_lengths
from ragaccel.models.packing import PackedLinear, has_packed, pack_linears, packed_bytes
from ragaccel.models.packing_choices import PackingChoices
from ragaccel.models.row_by_row import activate_row_by_row
from ragaccel.models.self_check import check_model, expected_passes, passes_check
from ragaccel.models.space import WornSpace
from ragaccel.models.static import StaticNetwork, make_graphs, triton_kernel
from ragaccel.models.twin import make_twin
from ragaccel.models.watching import StructureWatch, WeightWatch
from ragaccel.models.weights import cost_key, input_device, weight_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

    from ragaccel.engine.cuda_graphs import Arena, Kernel, StepGraphs
    from ragaccel.models.self_check import Expected
    from ragaccel.models.space_adapter import SpaceAdapter


_GRAPHED = (torch.bfloat16, torch.float16, torch.float32)  # what the kernels multiply

logger = logging.getLogger("ragaccel")


class HuggingFaceModel:
    """A causal language model of transformers as a target model.

    Puts the model into evaluation mode and otherwise leaves it as it is: passes run through a twin
    of its modules over the same weights, with attention that goes over our caches and, on a CPU,
    with packed weights. Where there can be no twin they run through the model itself. Unless
    ``self_check`` is off, a small tree and its compaction are first verified against
    transformers' own passes.

    Args:
        model: a causal language model. Weights and buffers that are written to in place are
            followed, and adapters of PEFT that are switched; writes through ``data`` are not seen:
            see ``weights_changed``. A model that was moved or given another type or other modules
            is refused at the next request. Hooks are followed where passes run through the model
            itself, else refused; training mode is refused there, and elsewhere the model answers
            as in evaluation mode. Forward methods are those it had when this was made.
        self_check: verify a small tree first.
        pack: keep packed copies of the weights on a CPU; ``None`` does where that is faster and
            half of the free memory holds them.
        owned: nobody else uses the model: packed weights take the place of stored ones.
        packing_file: where it is kept for which layers that is faster; ``None`` measures anew.
        check_folder: where it is remembered what a small copy of an architecture showed; ``None``
            remembers it in this process only.
        findings: what it showed, for targets that are such copies themselves.

    Raises:
        ModelRefusedError: if the model cannot be decoded exactly; the message names the cause.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        self_check: bool = True,
        pack: bool | None = None,
        owned: bool = False,
        packing_file: Path | None = None,
        check_folder: Path | None = None,
        findings: Findings | None = None,
    ) -> None:
        # What torch.compile wraps a model in knows nothing of caches: passes run uncompiled.
        model = getattr(model, "_orig_mod", model)
        self.architecture: Architecture = read_architecture(model)
        self.model = cast("Any", model)
        self.model.eval()
        self.findings = findings or Findings()
        """What its architecture showed past its lengths."""
        if self_check:
            self.findings = check_lengths(model, self.architecture, _copy_target, check_folder)
        self.architecture = self.findings.applied_to(self.architecture)
        # The mask meets the queries, which have the type of what the first layer is given.
        embedding: Tensor = self.model.get_input_embeddings().weight
        self.device: torch.device = input_device(self.model, embedding)
        dtype = embedding.dtype if embedding.dtype.is_floating_point else model.dtype
        self._masks = Masks(dtype, self.device)
        self.vocab_size: int = embedding.shape[0]
        self.cost_key: str = cost_key(self.model, self.device)
        self.weight_bytes: int = weight_bytes(self.model)
        """How much of its weights one pass reads, in bytes."""
        self.pass_lock = RLock()  # two engines may share the model, and what its passes write to
        self.network: Any = self.model
        """The modules that passes run through."""
        self._attends = False
        self._why_apart = "load it with attn_implementation='sdpa'"
        self._packed: list[PackedLinear] = []
        self.arena: Arena | None = None
        """Where caches must lie for passes to be replayed as CUDA graphs."""
        self.graphs: StepGraphs | None = None
        """What runs passes of few rows over static buffers, where there are such."""
        self._static: StaticNetwork | None = None
        self._num_captures = 0  # of graphs that are no longer used
        self.num_masks = 0  # that it reads, numbered from ``vocab_size`` on
        self._space: WornSpace | None = None
        expected = expected_passes(self) if self_check else None
        self._choose_network(expected)
        if self._attends and pack is not False:
            self._pack(PackingChoices(packing_file), forced=bool(pack), owned=owned)
        if has_packed(self.network):
            self.cost_key += "-packed"
        if self._attends and self.device.type == "cuda" and self.dtype in _GRAPHED:
            self._make_graphs(expected)
        self._watch = WeightWatch(self.model, list(self.network.parameters()))
        self._watch_structure()

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model reads, in tokens."""
        return self.architecture.max_positions

    @property
    def dtype(self) -> torch.dtype:
        """The type of the activations."""
        return self._masks.dtype

    @property
    def num_captures(self) -> int:
        """How many passes were captured so far, or were to be; they took longer than others."""
        return self._num_captures if self.graphs is None else self.graphs.num_captures

    @property
    def joins_sequences(self) -> bool:
        """Whether one pass can take the rows of several sequences."""
        return self._attends and self.findings.joins

    @property
    def attends(self) -> bool:
        """Whether passes run with our attention, not the model's own."""
        return self._attends

    @property
    def why_apart(self) -> str:
        """Why no pass can, and what helps; empty where ``joins_sequences``."""
        return "" if self.joins_sequences else self._why_apart

    def use_space(self, adapter: SpaceAdapter) -> None:
        """Wear a SPACE adapter from now on: what real tokens give stays the same to the last bit.

        Raises:
            ConfigurationError: it is for another model, or another one is worn.
        """
        if self._space is not None:
            raise ConfigurationError("this model wears a SPACE adapter already: load it anew")
        adapter.check(self.model)
        self._space = WornSpace(adapter, self.network, self.dtype)
        self.num_masks, self.cost_key = adapter.num_masks, f"{self.cost_key}-space"
        if self._static is not None:
            self._static.use_space(self._space)
            self.free_memory()  # passes captured before know nothing of it
        self._watch_structure()

    def _choose_network(self, expected: Expected | None) -> None:
        """Take a twin with our attention where that works, else the model itself."""
        is_exchanged = self.architecture.exchanges_attention
        twin = make_twin(self.model) if is_exchanged else None
        if twin is not None and self.findings.takes_ours:
            activate_row_by_row(twin)
            self.network, self._attends = twin, True
            if not self.findings.joins:
                self._why_apart = UNBATCHABLE
            if expected is None or passes_check(self, expected):
                return
            self.network, self._attends = self.model, False
        if twin is not None:
            self._why_apart = "with it, it answers otherwise"
        elif is_exchanged:
            self._why_apart = "its modules cannot be copied, or their attention not exchanged"
        if expected is not None:
            check_model(self, expected)

    def refresh(self) -> int:
        """Follow what was changed of the model; return how many times anything was.

        Raises:
            ConfigurationError: the model has another type or place than when this was made, other
                parameters, modules, hooks or forward methods, or its passes would be those of
                training.
        """
        if self.network is self.model and self._structure.is_training:
            raise ConfigurationError("the model is in training mode: call model.eval() first")
        self._watch.refuse_others()
        if self._structure.look():
            self._watch.count()
            if self._structure.take_merged():
                self._watch.mark()
            if self.graphs is not None:
                self.graphs.clear()
        changed = {id(weight) for weight in self._watch.look()}
        for layer in self._packed:
            if id(layer.weight) in changed:
                layer.pack_again()
        if changed and self.graphs is not None:
            self.graphs.clear()
        return self._watch.version

    def _watch_structure(self) -> None:
        trees = [] if self.network is self.model else [self.network]
        if self._static is not None:
            trees.append(self._static.eager)
        self._structure = StructureWatch(self.model, trees)

    def weights_changed(self) -> None:
        """Tell that weights were written to in a way that ``refresh`` does not see.

        That is a write through a parameter's or buffer's ``data``, or by other code than torch's.
        The next request follows.
        """
        self._watch.mark()

    def new_cache(self, capacity: int | None, limit: int | None) -> KVCache:
        """Make an empty cache, where this model's passes read it fastest."""
        if self.arena is not None:
            return self.arena.new_cache(capacity, limit)
        return KVCache(capacity, limit)

    def free_memory(self) -> None:
        """Free captured passes; they are captured anew when they are wanted again."""
        if self.graphs is not None:
            self.graphs.clear()

    def forward(self, rows: Rows, keep: int) -> Tensor:
        """Run the rows; return the logits of the last ``keep`` of them, [keep, V].

        Raises:
            ValueError: rows of several sequences, where ``joins_sequences`` is false.
        """
        if self.graphs is not None and keep == rows.num_rows and self.graphs.takes(rows):
            try:
                return self.graphs.run(rows)
            except CaptureError as error:
                logger.warning("passes are launched operation by operation: %s", error)
                self._num_captures = self.graphs.num_captures
                self.graphs = None  # caches stay where they are, other passes read them as well
        space = None if rows.is_probe is None else self._space
        with nullcontext() if space is None else space.marked(rows.token_ids):
            return self._forward(rows.to(self.device), keep)

    def _forward(self, rows: Rows, keep: int) -> Tensor:
        for span in rows.spans:
            span.cache.settle()
        if self._attends:
            attention = PassAttention(rows, self._masks)
            with attending(attention, self.architecture.windows):
                # Which rows see which: the attention needs no mask, but whoever looks may.
                return self._run(rows, rows.sees()[None, None], PassCache(rows), keep)
        if len(rows.spans) > 1:
            raise ValueError("this model takes the rows of one sequence a pass")
        cache = rows.spans[0].cache
        if not isinstance(cache.adapter, CacheAdapter):
            cache.adapter = CacheAdapter(cache, self.architecture.num_layers)
        mask = stock_mask(rows, self._masks, self.architecture)
        return self._run(rows, mask, cache.adapter, keep)

    def _run(self, rows: Rows, mask: Any, cache: Cache, keep: int) -> Tensor:
        given: dict[str, Any] = {"input_ids": rows.token_ids}
        if self._space is not None and rows.is_probe is not None:
            given = {"inputs_embeds": self._space.embed(self.network, rows.token_ids)}
        output = self.network(
            **given,
            attention_mask=mask,
            position_ids=rows.positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: Tensor = output.logits[0]
        return logits

    def _pack(self, choices: PackingChoices, *, forced: bool, owned: bool) -> None:
        needed = packed_bytes(self.network)
        if forced or owned or (needed and 2 * needed <= free_bytes()):
            trees = [self.network, self.model] if owned else [self.network]
            self._packed = pack_linears(trees, keep=not owned, choices=choices)

    def _make_graphs(self, expected: Expected | None) -> None:
        kernel = triton_kernel()
        if kernel is not None:
            self.use_graphs(kernel, capture=True)
            if expected is not None and not passes_check(self, expected):
                self.launch_each()

    def use_graphs(self, make_kernel: Callable[[], Kernel], *, capture: bool) -> None:
        """Run passes of few rows over static buffers with this attention, if the model can."""
        made = make_graphs(self, make_kernel, capture=capture)
        if made is not None:
            self.arena, self.graphs, self._static = made
            self._watch_structure()

    def launch_each(self) -> None:
        """Launch passes operation by operation from now on: no static buffers, no graphs."""
        self.arena, self.graphs, self._static = None, None, None

    def compile(self) -> bool:
        """Have torch compile the passes that are replayed; say whether there are such."""
        if self._static is None:
            return False
        self._static.compile()
        self.free_memory()  # graphs replay what was captured before
        return True

    @property
    def is_compiled(self) -> bool:
        """Whether replayed passes are compiled; not where torch did not take the model."""
        return self._static is not None and self._static.is_compiled


def _copy_target(copy: Any, findings: Findings) -> HuggingFaceModel:
    return HuggingFaceModel(copy, self_check=False, pack=False, findings=findings)
