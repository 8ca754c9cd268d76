"""Targets that run static passes on a CPU, by the operations that a CUDA graph captures."""

import torch
from tiny_models import tiny_model
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ragaccel.models import HuggingFaceModel


class PlainKernel:
    """What the Triton kernel computes, from the same tables, in plain torch operations."""

    buffers = ()

    def move(self, states, sources, targets, count):
        """Move slots, one after another."""
        for source, target in zip(
            *(part[:count].tolist() for part in (sources, targets)), strict=True
        ):
            states[:, :, target] = states[:, :, source]

    def __call__(self, q, keys, values, blocks, *, scaling, num_splits, window, softcap):
        """Attend with rows [N, H, D], row by row; return [N, H, D]."""
        found = torch.zeros_like(q)
        group = q.shape[1] // keys.shape[0]
        for first, count, base, start, segment, causal in blocks.table[:, :6].tolist():
            for row in range(first, first + count):
                own = row - segment
                words = blocks.sees[row].tolist()
                among = [
                    other
                    for other in range(own + 1)
                    if causal or words[other // 64] >> (other % 64) & 1
                ]
                slots = [*range(start), *(start + other for other in among)]
                positions = [*range(start), *(int(blocks.positions[segment + j]) for j in among)]
                near = int(blocks.positions[row])
                kept = [
                    base + slot
                    for slot, position in zip(slots, positions, strict=True)
                    if window is None or near - position < window
                ]
                seen = keys[:, kept].repeat_interleave(group, 0)
                scores = torch.einsum("hd,hsd->hs", q[row], seen) * scaling
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.softmax(-1)
                found[row] = torch.einsum(
                    "hs,hsd->hd", weights, values[:, kept].repeat_interleave(group, 0)
                )
        return found


class PlainLayers:
    """What the Triton kernels for layers compute, in plain torch operations."""

    def normalize(self, states, norm):
        """Return the norm of rows [N, E], as transformers' modules compute it."""
        wide = states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.epsilon)
        return norm.weight * wide.to(states.dtype)

    def add_and_normalize(self, states, residual, norm):
        """Return the norm of the sum, and the sum."""
        total = residual + (states.sum(0) if states.dim() == 3 else states)
        return self.normalize(total, norm), total

    def rotate_and_store(self, states, angles, pool, slots, norms=None):
        """Rotate queries and keys; write keys and values into [K, S, D]; return [N, H, D]."""
        queries, keys, values = (one.unflatten(-1, (-1, pool[0].shape[2])) for one in states)
        if norms is not None:
            queries, keys = (
                self.normalize(*one) for one in zip((queries, keys), norms, strict=True)
            )
        turned = [one[None] for one in (queries, keys)]
        cosines, sines = (one[None] for one in angles)
        queries, keys = apply_rotary_pos_emb(*turned, cosines, sines, unsqueeze_dim=2)
        for part, found in zip(pool, (keys[0], values), strict=True):
            part.index_copy_(1, slots, found.transpose(0, 1))
        return queries[0]

    def gate(self, gates, values):
        """Return values times the SiLU of gates."""
        return torch.nn.functional.silu(gates) * values

    def supports(self, states, weights):
        """Return whether ``multiply`` computes these products."""
        return True

    def multiply(self, states, weights):
        """Return the product of rows [N, E] by each matrix."""
        return [torch.nn.functional.linear(states, *one) for one in weights]

    def multiply_in_parts(self, states, weights):
        """Return the product in one part."""
        return self.multiply(states, [weights])[0][None]

    def multiply_gated(self, states, gate, values):
        """Return the values, times the SiLU of the gates."""
        return self.gate(*self.multiply(states, (gate, values)))


def static_target(family="llama", model=None, *, fused=False):
    """Make a target model of a shared tiny one, or of a given one, maybe with fused layers."""
    target = HuggingFaceModel(tiny_model(family) if model is None else model)
    target.enable_graphs(PlainKernel, capture=False, layers=PlainLayers() if fused else None)
    assert target._static.is_fused == fused
    assert target.kv_pool is not None
    return target
