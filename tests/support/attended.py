"""Sequences whose rows attend, and what the textbook's attention gives them in float64."""

from dataclasses import replace

import torch

from ragaccel.decoding import DraftTree
from ragaccel.engine import (
    AttentionMasks,
    KVCache,
    PassAttention,
    causal_rows,
    concat_rows,
    tree_rows,
)

CPU = torch.device("cpu")
SCALING = 0.3


def chain_of(n):
    return [-1, *range(n - 1)]


def tree_of(parents):
    n = len(parents)
    return DraftTree(tuple(range(n)), tuple(parents), (1.0,) * n, ((),) * n)


def states_of(generator, heads, n, size, dtype=torch.float64):
    return torch.randn(1, heads, n, size, generator=generator, dtype=torch.float64).to(dtype)


class Sequence:
    """Some cached tokens and the rows of a pass behind them."""

    def __init__(self, generator, start, parents, heads, groups, sizes=(8, 8), dtype=torch.float64):
        self.start, self.parents = start, parents
        key_size, value_size = sizes
        length = start + len(parents)
        self.keys = states_of(generator, heads, length, key_size, dtype)
        self.values = states_of(generator, heads, length, value_size, dtype)
        self.queries = states_of(generator, heads * groups, len(parents), key_size, dtype)

    def lay_out(self, is_run=False):
        """Fill a cache with the tokens before, and begin the pass."""
        cache = KVCache()
        if self.start:
            cache.begin(self.start)
            cache.write(0, self.keys[:, :, : self.start], self.values[:, :, : self.start])
            cache.keep(range(self.start))
        if is_run:
            return causal_rows(range(len(self.parents)), cache, CPU)
        return tree_rows(tree_of(self.parents), cache, CPU)

    @property
    def states(self):
        return self.queries, self.keys[:, :, self.start :], self.values[:, :, self.start :]

    def reference(self, window=None, softcap=None):
        """What each row attends to, one row and one head at a time. [1, n, H, D]."""
        tree, depths = tree_of(self.parents), tree_of(self.parents).depths()
        heads, groups = self.keys.shape[1], self.queries.shape[1] // self.keys.shape[1]
        rows = []
        for node in range(len(self.parents)):
            at = self.start + depths[node]
            seen = [(slot, slot) for slot in range(self.start)]
            seen += [(self.start + other, self.start + depths[other]) for other in tree.path(node)]
            slots = [slot for slot, position in seen if window is None or at - position < window]
            own = self.queries[0, :, node].double().view(heads, groups, -1)
            scores = own @ self.keys[0][:, slots].double().transpose(1, 2) * SCALING
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            found = scores.softmax(-1) @ self.values[0][:, slots].double()
            rows.append(found.reshape(heads * groups, -1))
        return torch.stack(rows)[None]


def attend(sequences, window=None, softcap=None, *, deterministic=False, is_run=False):
    rows = concat_rows([sequence.lay_out(is_run) for sequence in sequences])
    rows = replace(rows, deterministic=deterministic)
    masks = AttentionMasks(sequences[0].queries.dtype, CPU)
    states = [torch.cat(parts, dim=2) for parts in zip(*(s.states for s in sequences), strict=True)]
    found = PassAttention(rows, masks).attend(
        0, tuple(states), scaling=SCALING, window=window, softcap=softcap
    )
    assert found.is_contiguous()
    return found
