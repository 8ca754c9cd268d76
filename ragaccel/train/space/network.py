"""The network that is trained: a stock language model over packed rows, mask embeddings put in.

Shapes: N tokens of a row, M of them wanted, V vocabulary, D hidden size, K mask tokens.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache

from ragaccel.errors import MissingExtraError
from ragaccel.models.architecture import read_architecture
from ragaccel.models.gated import MaskRows, gate_linears
from ragaccel.models.space_adapter import SpaceAdapter, base_of, new_adapter
from ragaccel.train.space.layout import IGNORED

if TYPE_CHECKING:
    from torch import Tensor
    from transformers.cache_utils import Cache

    from ragaccel.train.space.layout import Layout
    from ragaccel.train.space.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Losses:
    """What a row gives: ``loss`` is learned from, the others are told.

    ``guessed`` is the share of mask tokens whose likeliest token is the label, ``real`` that of
    real tokens; without any it is 0.
    """

    loss: Tensor
    guessed: Tensor
    real: Tensor


class SpaceNetwork(nn.Module):
    """A causal language model that reads mask tokens, and what the recipe lets it learn.

    The model is changed in place: its layers are wrapped in mode "gated" and "lora".

    Raises:
        ModelRefusedError: the model cannot be decoded exactly, so there is no use in training it.
        MissingExtraError: mode "lora" without peft.
        ConfigurationError: no layer of the recipe's targets.
    """

    def __init__(self, model: Any, recipe: Recipe) -> None:
        super().__init__()
        self.architecture = read_architecture(model)
        self.base = base_of(model)
        self.recipe = recipe
        self._rows = MaskRows()
        torch.manual_seed(recipe.seed)
        rank = recipe.rank if recipe.mode == "gated" else 0
        adapter = new_adapter(
            model,
            recipe.num_masks,
            rank,
            shared_mask=recipe.shared_mask,
            targets=recipe.targets,
            seed=recipe.seed,
        )
        self.model: Any = _prepared(model, recipe, adapter, self._rows)
        place = self.model.get_input_embeddings().weight.device
        self.mask_embeddings = nn.Parameter(adapter.mask_embeddings.to(place))
        self._changed = list(adapter.changes)

    def train(self, mode: bool = True) -> SpaceNetwork:
        """Turn dropout on or off; a gated base never drops: it decodes as it is."""
        super().train(mode)
        if self.recipe.mode == "gated":
            self.model.eval()
        return self

    def trained(self) -> dict[str, nn.Parameter]:
        """What is learned, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def forward(self, layout: Layout) -> Losses:
        """Compute a packed row's losses, mask tokens' labels weighted as the recipe says."""
        rows = (layout.labels != IGNORED).nonzero()[:, 0]
        teachers = layout.teachers[rows]
        if not self.recipe.distill or not bool((teachers >= 0).any()):
            logits, targets = self.logits(layout, rows).float(), layout.labels[rows]
            each, right = F.cross_entropy(logits, targets, reduction="none"), targets
        else:
            logits, soft, right = self._taught(layout, rows, teachers)
            each = F.cross_entropy(logits, soft, reduction="none")
        is_mask = layout.is_mask[rows]
        number = (layout.token_ids[rows] - self.base.vocab_size).clamp(min=0)
        weights = self.recipe.loss_weight * self.recipe.mask_decay**number
        weights = torch.where(is_mask, weights, 1.0)
        loss = (each * weights).sum() / weights.sum().clamp(min=1e-9)
        with torch.no_grad():
            hits = (logits.argmax(-1) == right).float()
            guessed, real = (
                (hits * chosen).sum() / chosen.sum().clamp(min=1) for chosen in (is_mask, ~is_mask)
            )
        return Losses(loss, guessed, real)

    def logits(self, layout: Layout, rows: Tensor) -> Tensor:
        """Run a packed row; return the logits of the wanted tokens, [M, V]."""
        masked = layout.is_mask.nonzero()[:, 0]
        embedded = self._embedded(layout, masked)
        if self.recipe.mode == "gated":
            return self._logits_apart(layout, embedded, rows)
        everything = torch.arange(len(layout), device=rows.device)
        return self._run(layout, embedded, everything, rows)

    def _logits_apart(self, layout: Layout, embedded: Tensor, rows: Tensor) -> Tensor:
        """Real tokens first, then mask tokens over the keys and values that those left.

        Nothing that real tokens compute is learned where the base is gated: no gradient needs to
        pass through their rows, which are most.
        """
        is_mask = layout.is_mask
        real, masked = (~is_mask).nonzero()[:, 0], is_mask.nonzero()[:, 0]
        # Where a token stands among those of its kind.
        place = torch.where(is_mask, is_mask.cumsum(0), (~is_mask).cumsum(0)) - 1
        of_masks = is_mask[rows]
        cache = DynamicCache()
        with torch.no_grad():
            said = self._run(layout, embedded, real, place[rows[~of_masks]], cache=cache)
        if not len(masked):
            return said
        self._rows.index = torch.arange(len(masked), device=rows.device)
        try:
            guessed = self._run(layout, embedded, masked, place[rows[of_masks]], cache=cache)
        finally:
            self._rows.clear()
        order = torch.cat(((~of_masks).nonzero()[:, 0], of_masks.nonzero()[:, 0])).argsort()
        return torch.cat((said, guessed))[order]

    def _run(
        self,
        layout: Layout,
        embedded: Tensor,
        queries: Tensor,
        wanted: Tensor,
        *,
        cache: Cache | None = None,
    ) -> Tensor:
        """Run some tokens behind those whose keys and values are cached; wanted ones' logits."""
        before = cache.get_seq_length() if cache is not None else 0
        keys = queries
        if before:
            keys = torch.cat(((~layout.is_mask).nonzero()[:, 0], queries))
        output = self.model(
            inputs_embeds=embedded[queries][None],
            attention_mask=self._masks(layout, queries, keys),
            position_ids=layout.positions[queries][None],
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=wanted,
        )
        logits: Tensor = output.logits[0]
        return logits

    def adapter(self, training: dict[str, Any] | None = None) -> SpaceAdapter:
        """What was learned beside the model's own weights, rounded to bfloat16."""
        changes = {}
        for name in self._changed:
            layer = self.model.get_submodule(name)
            changes[name] = (_rounded(layer.down), _rounded(layer.up))
        masks = _rounded(self.mask_embeddings)
        return SpaceAdapter(self.base, self.recipe.num_masks, masks, changes, training or {})

    def _taught(
        self, layout: Layout, rows: Tensor, teachers: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, what they should be as a distribution, and its likeliest token.

        A mask token learns what the model says after the real tokens that it stands for, which
        stand in the same row; a token without such learns its label.
        """
        known = teachers >= 0
        wanted, place = torch.unique(teachers[known], return_inverse=True)
        logits = self.logits(layout, torch.cat((rows, wanted))).float()
        own, said = logits[: len(rows)], logits[len(rows) :].detach()
        right = layout.labels[rows]
        right[known] = said.argmax(-1)[place]
        soft = torch.zeros_like(own).scatter_(1, right[:, None], 1.0)
        soft[known] = said.softmax(-1)[place]
        return own, soft, right

    def _embedded(self, layout: Layout, masked: Tensor) -> Tensor:
        """Token embeddings [N, D]; the masks' are learned, even by a row that has none."""
        embedding = self.model.get_input_embeddings()
        ids = layout.token_ids.masked_fill(layout.is_mask, 0)
        found: Tensor = embedding(ids)
        number = layout.token_ids[masked] - self.base.vocab_size
        masks = self.mask_embeddings[number.clamp(max=len(self.mask_embeddings) - 1)]
        return found.index_copy(0, masked, masks.to(found.dtype))

    def _masks(self, layout: Layout, queries: Tensor, keys: Tensor) -> Tensor | dict[str, Tensor]:
        """Additive masks as the model's attention takes them."""
        window = self.architecture.window
        near = self._additive(layout.sees(window)[queries][:, keys])
        if not self.architecture.is_mixed:
            return near
        far = self._additive(layout.sees()[queries][:, keys])
        return {"full_attention": far, "sliding_attention": near}

    def _additive(self, sees: Tensor) -> Tensor:
        dtype = self.model.get_input_embeddings().weight.dtype
        mask = torch.zeros(sees.shape, dtype=dtype, device=sees.device)
        return mask.masked_fill_(~sees, float("-inf"))[None, None]


def _prepared(model: Any, recipe: Recipe, adapter: SpaceAdapter, rows: MaskRows) -> Any:
    """The model with what the recipe lets it learn, and nothing else, marked for learning."""
    if recipe.mode == "full":
        return model.requires_grad_(True)
    model.requires_grad_(False)
    if recipe.mode == "lora":
        return _with_lora(model, recipe)
    place = model.get_input_embeddings().weight.device
    changes = {name: (down.to(place), up.to(place)) for name, (down, up) in adapter.changes.items()}
    for layer in gate_linears(model, changes, rows):
        layer.down.requires_grad_(True)
        layer.up.requires_grad_(True)
    return model


def _with_lora(model: Any, recipe: Recipe) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise MissingExtraError("peft", "train") from None
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=2 * recipe.rank,
        target_modules="all-linear" if recipe.targets is None else list(recipe.targets),
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # of names that it asks transformers for, and that it sees itself how a layer lies
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "fan_in_fan_out", UserWarning)
        return get_peft_model(model, config)


def _rounded(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.bfloat16).cpu()
