"""Attention of a forward pass: each sequence attends over its own cache.

Keys and values that several query heads share are not copied.

Shapes: H query heads, K heads of keys and values, G = H / K, D head size, N rows of a pass, n rows
of one sequence, P cached tokens before them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from ragaccel.engine import bfloat16
from ragaccel.engine.model_input import AttentionMasks, is_causal, is_plain, reaches_past

if TYPE_CHECKING:
    from torch import Tensor

    from ragaccel.engine.model_input import Rows, RowSpan

CHUNK = 256
"""Tokens that deterministic attention reduces at a time."""
_MIN_FUSED_ROWS = 64  # with more rows, packing query heads would copy too large a mask
_GROUPED_MASK_DEVICES = ("cpu",)  # their fused kernels accept a mask with grouped heads


@dataclass(frozen=True, slots=True, eq=False)
class PassAttention:
    """Attention of one pass: write and read the caches, layer by layer.

    In deterministic passes, attention reduces chunks of fixed size in a fixed order, so a row's
    result depends neither on the attended length nor on the other rows of an equally large pass.

    Args:
        rows: the rows of the pass.
        masks: makes masks in the model's dtype, on its device.
    """

    rows: Rows
    masks: AttentionMasks
    _mask_cache: dict[tuple[int, int | None, int, torch.device], Tensor] = field(
        default_factory=dict, init=False
    )

    @property
    def deterministic(self) -> bool:
        """Whether this is a pass of deterministic mode."""
        return self.rows.deterministic

    def attend(
        self,
        layer: int,
        states: tuple[Tensor, Tensor, Tensor],
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Store the rows' keys and values; return the attention output. [1, N, H, D].

        Args:
            layer: the layer's index.
            states: queries [1, H, N, D], keys and values [1, K, N, D].
            scaling: factor of the scores.
            window: size of the sliding window in positions, the row's included; ``None`` for all.
            softcap: bound that scores approach through a tanh, as in Gemma 2; ``None`` for none.
        """
        queries, keys, values = states
        parts = []
        for span in self.rows.spans:
            own = span.rows
            all_keys, all_values = span.cache.write(layer, keys[:, :, own], values[:, :, own])
            asked = queries[:, :, own] if len(self.rows.spans) > 1 else queries
            parts.append(
                self.attend_span(
                    span,
                    (asked, all_keys, all_values),
                    scaling=scaling,
                    window=window,
                    softcap=softcap,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def attend_span(
        self,
        span: RowSpan,
        states: tuple[Tensor, Tensor, Tensor],
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attend with queries [1, H, n, D] of one sequence over all its keys and values, stored.

        They are [1, K, P + n, D]. Returns the attention output, [1, n, H, D].
        """
        queries, keys, values = states
        if softcap is None and not self.deterministic and queries.dtype == torch.bfloat16:
            compiled = bfloat16.kernels("attention")
            if compiled is not None and compiled.takes(*states):
                mask = self.window_mask(span, window)
                attended: Tensor = compiled.attend(states, scaling, mask, span.sees)
                return attended
        _, num_heads, n, size = queries.shape
        groups, device = num_heads // keys.shape[1], queries.device
        is_fused = n > _MIN_FUSED_ROWS and softcap is None and not self.deterministic
        if is_fused and is_causal(span, window) and _has_flash_kernel(queries, keys, values):
            return _attend_causally(queries, keys, values, scaling).transpose(1, 2).contiguous()
        is_bare = is_plain(span, window) and (is_fused or n == 1)
        mask = None if is_bare else self._mask(span, window, device)
        if is_fused:
            return _attend_fused(queries, keys, values, mask, scaling).transpose(1, 2).contiguous()
        # A group's query heads read the same keys: pack them as more rows of one head.
        packed = queries.reshape(-1, groups * n, size)
        if self.deterministic:
            shown = self._mask(span, window, device)
            found = _attend_in_chunks(packed, keys[0], values[0], shown, scaling, softcap)
        elif softcap is not None:
            found = _attend_softcapped(packed, keys[0], values[0], mask, scaling, softcap)
        else:
            added = None if mask is None else self._group_mask(span, window, groups, mask)[:, None]
            found = scaled_dot_product_attention(
                packed[None], keys, values, attn_mask=added, scale=scaling
            )
        return found.reshape(1, num_heads, n, -1).transpose(1, 2).contiguous()

    def window_mask(self, span: RowSpan, window: int | None) -> Tensor | None:
        """Return the mask of a span's rows if a sliding window hides tokens. [n, P + n]."""
        is_masked = reaches_past(span, window)
        return self._mask(span, window, self.rows.inputs.device)[0] if is_masked else None

    def _mask(self, span: RowSpan, window: int | None, device: torch.device) -> Tensor:
        """Return the mask of a span's rows, built once per pass. [1, n, P + n]."""
        key = (span.first, window, 1, device)
        if key not in self._mask_cache:
            self._mask_cache[key] = self.masks.make(self.rows, span, window).to(device)[None]
        return self._mask_cache[key]

    def _group_mask(self, span: RowSpan, window: int | None, groups: int, mask: Tensor) -> Tensor:
        """Return a span's mask repeated for the heads of a group, built once. [1, G * n, P + n].

        A fused kernel needs one mask row for each packed row, which a view cannot provide.
        """
        key = (span.first, window, groups, mask.device)
        if key not in self._mask_cache:
            self._mask_cache[key] = mask.expand(groups, -1, -1).reshape(1, -1, mask.shape[-1])
        return self._mask_cache[key]


def _attend_fused(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Attend without storing the scores of all rows; causally if there is no mask. [1, H, n, D]."""
    groups = queries.shape[1] // keys.shape[1]
    if mask is None or groups == 1 or queries.device.type in _GROUPED_MASK_DEVICES:
        return scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=None if mask is None else mask[:, None],
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=groups > 1,
        )
    # With a mask and grouped heads together, other devices compute all scores at once. One call
    # per head of a group avoids that, and copies neither the mask nor keys and values.
    outputs = [
        scaled_dot_product_attention(
            queries[:, offset::groups], keys, values, attn_mask=mask[:, None], scale=scaling
        )
        for offset in range(groups)
    ]
    return torch.stack(outputs, dim=2).flatten(1, 2)


def _has_flash_kernel(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return whether a GPU attends causally behind a prefix without a mask, which is fastest."""
    if queries.device.type != "cuda":
        return False
    is_grouped = queries.shape[1] != keys.shape[1]
    return can_use_flash_attention(SDPAParams(queries, keys, values, None, 0.0, False, is_grouped))


def _attend_causally(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attend causally with the last rows of a sequence, whose keys are all here. [1, H, n, D]."""
    from torch.nn.attention.bias import causal_lower_right  # not needed on a CPU

    return scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=causal_lower_right(queries.shape[2], keys.shape[2]),
        scale=scaling,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )


def _attend_softcapped(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float,
) -> Tensor:
    """Attend by two matrix products, because fused kernels do not cap scores. [K, G * n, D]."""
    scores = _softcap(_scores(queries, keys, scaling), softcap)
    scores = scores if mask is None else _add_mask(scores, mask)
    return torch.bmm(scores.softmax(-1), values.to(scores.dtype)).to(values.dtype)


def _scores(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Return the products of queries and keys, in float32 at least. [K, G * n, ..].

    In bfloat16, rounding errors are as large as the gaps between likely tokens, and oneDNN compiles
    new kernels for every length, which takes ten times as long as the product.
    """
    wide = torch.float64 if queries.dtype == torch.float64 else torch.float32
    return torch.bmm(queries.to(wide), keys.to(wide).transpose(1, 2)).mul_(scaling)


def _attend_in_chunks(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Attend over the tokens chunk by chunk, with running maxima. [K, G * n, D].

    After Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). A chunk that
    is masked for a row leaves the row's sums unchanged, to the last bit.
    """
    wide = torch.float64 if queries.dtype == torch.float64 else torch.float32
    heads, rows, _ = queries.shape
    best = queries.new_full((heads, rows, 1), float("-inf"), dtype=wide)
    total = queries.new_zeros((heads, rows, 1), dtype=wide)
    found = queries.new_zeros((heads, rows, values.shape[-1]), dtype=wide)
    for start in range(0, keys.shape[1], CHUNK):
        own_keys, own_values = (
            _pad_chunk(part[:, start : start + CHUNK]) for part in (keys, values)
        )
        scores = _scores(queries, own_keys, scaling)
        scores = scores if softcap is None else _softcap(scores, softcap)
        own_mask = mask[:, :, start : start + CHUNK].to(wide)
        missing = CHUNK - own_mask.shape[-1]
        _add_mask(scores, pad(own_mask, (0, missing), value=float("-inf")) if missing else own_mask)
        higher = torch.maximum(best, scores.amax(-1, keepdim=True))
        # A fully masked row has a maximum of -inf, and -inf - -inf would be NaN.
        floor = higher.masked_fill(higher == float("-inf"), 0.0)
        weights = scores.sub_(floor).exp_()
        fading = (best - floor).exp_()
        total = total * fading + weights.sum(-1, keepdim=True)
        found = found * fading + torch.bmm(weights, own_values.to(wide))
        best = higher
    return (found / total).to(queries.dtype)


def _pad_chunk(chunk: Tensor) -> Tensor:
    """Pad a chunk with zeros to ``CHUNK`` tokens, so that products always have the same shape."""
    missing = CHUNK - chunk.shape[1]
    return pad(chunk, (0, 0, 0, missing)) if missing else chunk


def _add_mask(scores: Tensor, mask: Tensor) -> Tensor:
    """Add the mask of n rows, [1, n, ..], to the scores of all heads of a group, [K, G * n, ..]."""
    scores.view(len(scores), -1, *mask.shape[1:]).add_(mask)
    return scores


def _softcap(scores: Tensor, softcap: float) -> Tensor:
    return scores.div_(softcap).tanh_().mul_(softcap)
