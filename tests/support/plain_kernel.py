"""The attention of static passes in plain torch operations, for devices without Triton."""

from __future__ import annotations

import torch


class PlainKernel:
    """What the Triton kernel computes, from the same tables, row by row."""

    num_bytes = 0

    def __call__(self, q, keys, values, blocks, **settings):
        """Attend with rows [N, H, D]; return [N, H, D]."""
        return plain_kernel(q, keys, values, blocks, **settings)


def plain_kernel(q, keys, values, blocks, *, scaling, num_splits, window, softcap):
    """What the Triton kernel computes, from the same tables, row by row."""
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
