"""Targets that run static passes on a CPU, by the operations that a CUDA graph captures."""

import torch
from tiny_models import tiny_model

from ragaccel.models import HuggingFaceModel


class PlainKernel:
    """What the Triton kernel computes, from the same tables, in plain torch operations."""

    num_bytes = 0

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


def static_target(family="llama", model=None):
    """Make a target model of a shared tiny one, or of a given one."""
    target = HuggingFaceModel(tiny_model(family) if model is None else model)
    target.enable_graphs(PlainKernel, capture=False)
    assert target.kv_pool is not None
    return target
