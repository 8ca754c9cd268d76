"""The drafting rules of other engines, to replay recorded answers through them without a model.

All but Arctic's are written anew from the rules of the versions named; what they draft, not how
fast. With a history, a drafter is also its own memory of earlier requests: call ``add`` when a
request ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from ragaccel.decoding import Context, Drafter, DraftTree
from ragaccel.drafting import TrieDrafter

Node = dict[int, Any]
"""A node of a trie: its children by token, the one that was seen last at the end."""


class OursAsChain(Drafter):
    """Our likeliest branch as far as its estimated probability is at least ``min_prob``.

    This is the form in which engines that verify no trees can take our drafts.
    """

    def __init__(self, min_prob: float, num_tokens: int, **options: Any) -> None:
        self._drafter = TrieDrafter(num_tokens, mode="one", **options)
        self._min_prob = min_prob

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Draft a chain."""
        chain = self._drafter.draft(context, budget)
        kept = sum(prob >= self._min_prob for prob in chain.path_probs[1:])
        return DraftTree.chain(chain.token_ids[: 1 + kept], chain.path_probs[: 1 + kept])


class VllmNgram(Drafter):
    """vLLM's ``ngram`` (0.32.0, ``v1/spec_decode/ngram_proposer.py``).

    Of the last ``longest`` to ``shortest`` tokens the most that occurred before are matched, at
    their first place in prompt and output; what follows there is drafted.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Draft a chain."""
        tokens = context.token_ids
        first = context.shared(self._open)
        first.grow(tokens, len(tokens))
        for length in self._lengths:
            end = first.ends.get(tuple(tokens[-length:]), len(tokens))
            if end < len(tokens):
                return DraftTree.chain([tokens[-1], *tokens[end : end + budget]])
        return DraftTree.chain(tokens[-1:])

    def _open(self, _context: Context) -> _Places:
        return _Places(self._lengths, keep_first=True)


class _Places:
    """The first or last end of every n-gram of a text that grows."""

    def __init__(self, lengths: Sequence[int], *, keep_first: bool) -> None:
        self.ends: dict[tuple[int, ...], int] = {}
        self._lengths, self._keep_first, self._known = lengths, keep_first, 0

    def grow(self, tokens: Sequence[int], size: int) -> None:
        """Enter the n-grams that end within the first ``size`` tokens."""
        for end in range(self._known + 1, size + 1):
            for length in self._lengths:
                if length <= end:
                    ngram = tuple(tokens[end - length : end])
                    if not self._keep_first or ngram not in self.ends:
                        self.ends[ngram] = end
        self._known = max(self._known, size)


class LlamaCppNgramSimple(Drafter):
    """llama.cpp's ``ngram-simple`` (b11434, ``common/ngram-map.cpp``).

    The last place of the last ``length`` tokens is continued, unless fewer than ``length`` tokens
    follow it. The place may not be the very beginning, and its continuation ends before the newest
    token. Length 12 is the default of ``--spec-ngram-simple-size-n``.
    """

    def __init__(self, length: int = 12) -> None:
        self._length = length

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Draft a chain."""
        tokens, length = context.token_ids, self._length
        before = len(tokens) - 1
        last = context.shared(self._open)
        last.grow(tokens, before - 1)
        end = last.ends.get(tuple(tokens[-length:]), 0)
        copied = tokens[end : min(end + budget, before)]
        if end <= length or len(copied) < length or before <= length + budget + 1:
            copied = []
        return DraftTree.chain([tokens[-1], *copied])

    def _open(self, _context: Context) -> _Places:
        return _Places((self._length,), keep_first=False)


class LlamaCppNgramMod(Drafter):
    """llama.cpp's ``ngram-mod`` (b11434, ``common/ngram-mod.cpp``, ``common/speculative.cpp``).

    A table that all requests share keeps the token that followed each run of ``length`` tokens
    last. A draft follows the table token by token, and is dropped if it ends before ``min_tokens``.
    After five drafts in a row of which less than a quarter was accepted the table is emptied. The
    defaults are length 24 and at least 48 of at most 64 tokens. Here the table has no limit, and
    two runs never share an entry.
    """

    CHUNK, LOW, MAX_LOW = 32, 0.25, 5

    def __init__(self, length: int, min_tokens: int, *, has_history: bool) -> None:
        self._length, self._min_tokens, self._has_history = length, min_tokens, has_history
        self._table: dict[int, int] = {}

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Draft a chain."""
        tokens = context.token_ids
        request = context.shared(self._open)
        self._judge(request, context)
        if request.entered + self.CHUNK < len(tokens) - 1:
            self._enter(request, tokens, len(tokens) - 1)
        run, drafted = list(tokens[-self._length :]), list[int]()
        while len(drafted) < budget:
            token = self._table.get(hash(tuple(run)))
            if token is None:
                break
            drafted.append(token)
            run = [*run[1:], token]
        if len(drafted) < min(self._min_tokens, budget):
            drafted = []
        request.drafted = len(drafted)
        return DraftTree.chain([tokens[-1], *drafted])

    def _judge(self, request: _ModRequest, context: Context) -> None:
        if context.last is None or not request.drafted:
            return
        is_low = (len(context.last.path) - 1) / request.drafted < self.LOW
        request.num_low = request.num_low + 1 if is_low else 0
        if request.num_low >= self.MAX_LOW:
            self._table.clear()
            request.num_low = request.entered = 0

    def _enter(self, request: _ModRequest, tokens: Sequence[int], size: int) -> None:
        for start in range(request.entered, size - self._length):
            end = start + self._length
            self._table[hash(tuple(tokens[start:end]))] = tokens[end]
        request.entered = max(0, size - self._length)

    def _open(self, context: Context) -> _ModRequest:
        if not self._has_history:
            self._table.clear()
        request = _ModRequest()
        self._enter(request, context.token_ids, context.num_prompt)
        return request


class _ModRequest:
    """How much of a request is in the table, the length of its last draft, drafts that failed."""

    entered = drafted = num_low = 0


class SglangNgram(Drafter):
    """SGLang's ``NGRAM`` (0.5.23, ``srt/speculative/ngram_worker.py``, ``ngram_corpus/trie.cpp``).

    After each step the last 18 tokens and all their ends are entered in a trie that all requests
    share; a prompt is not entered but for its last tokens. From every match of the last tokens, the
    longest first, a draft tree grows breadth-first, newest continuations first: up to 10 children
    of a node behind the shortest match, one behind the longest, and fewer the deeper. These are
    the defaults (``BFS``). ``enters_prompt`` also enters the prompt, which SGLang's code has
    commented out.
    """

    DEPTH, MIN_BREADTH, MAX_BREADTH = 18, 1, 10

    def __init__(self, *, has_history: bool, enters_prompt: bool = False) -> None:
        self._has_history, self._enters_prompt = has_history, enters_prompt
        self._trie: Node = {}

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Draft a tree."""
        tokens = context.token_ids
        context.shared(self._open)
        if len(tokens) > context.num_prompt + 1:
            self._enter(tokens[-self.DEPTH :])
        ids, parents = [tokens[-1]], [-1]
        children: list[dict[int, int]] = [{}]
        loss = (self.MAX_BREADTH - self.MIN_BREADTH) / (self.DEPTH - 1)
        for depth, match in self._matches(tokens):
            queue = deque([(0, (self.DEPTH - 1 - depth) * loss + self.MIN_BREADTH, match)])
            while queue and len(ids) <= budget:
                parent, breadth, node = queue.popleft()
                for token, child in _newest(node, max(1, int(breadth))):
                    if len(ids) > budget:
                        break
                    if token not in children[parent]:
                        children[parent][token] = len(ids)
                        ids.append(token)
                        parents.append(parent)
                        children.append({})
                    queue.append((children[parent][token], breadth - loss, child))
        num = len(ids)
        return DraftTree(tuple(ids), tuple(parents), (1.0,) * num, ((),) * num)

    def add(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """Enter the end of a request."""
        self._enter((*prompt_ids, *answer_ids)[-self.DEPTH :])

    def _matches(self, tokens: Sequence[int]) -> Iterator[tuple[int, Node]]:
        for depth in range(min(self.DEPTH, len(tokens)), 0, -1):
            node: Node | None = self._trie
            for token in tokens[-depth:]:
                node = node.get(token) if node else None
            if node:
                yield depth, node

    def _enter(self, tokens: Sequence[int]) -> None:
        for start in range(len(tokens)):
            node = self._trie
            for token in tokens[start : start + self.DEPTH]:
                child = node.pop(token, None)
                node[token] = child = {} if child is None else child
                node = child

    def _open(self, context: Context) -> bool:
        if not self._has_history:
            self._trie = {}
        if self._enters_prompt:
            self._enter(context.token_ids[: context.num_prompt])
        return True


def _newest(node: Node, most: int) -> Iterator[tuple[int, Node]]:
    for _, token in zip(range(most), reversed(node), strict=False):
        yield token, node[token]


class ArcticSuffix(Drafter):
    """Suffix decoding by Arctic Inference's own compiled tree, with vLLM 0.32.0's settings.

    Raises:
        ImportError: ``arctic_inference.suffix_decoding`` cannot be imported.
    """

    DEPTH, MAX_REQUESTS, FACTOR, MIN_PROB = 24, 10_000, 1.0, 0.1

    def __init__(self, *, has_history: bool, as_tree: bool = False) -> None:
        arctic = import_module("arctic_inference.suffix_decoding")
        kept = self.MAX_REQUESTS if has_history else 0
        self._cache = arctic.SuffixDecodingCache(self.DEPTH, kept)
        self._as_tree, self._request, self._known = as_tree, 0, 0

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Draft a chain, or a tree."""
        tokens = context.token_ids
        context.shared(self._open)
        self._extend(tokens)
        found = self._cache.speculate(
            self._request, np.array(tokens[-self.DEPTH :], np.int32),
            max_spec_tokens=budget, max_spec_factor=self.FACTOR, min_token_prob=self.MIN_PROB,
            use_tree_spec=self._as_tree,
        )  # fmt: skip
        num = 1 + len(found.token_ids)
        parents = (-1, *(1 + parent for parent in found.parents))
        return DraftTree((tokens[-1], *found.token_ids), parents, (1.0,) * num, ((),) * num)

    def add(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """End a request; its answer stays in the cache if there is one."""
        if self._request in self._cache.active_requests:
            self._extend((*prompt_ids, *answer_ids))
            self._cache.stop_request(self._request)

    def _extend(self, tokens: Sequence[int]) -> None:
        new = tokens[self._known :]
        if len(new):
            self._cache.add_active_response(self._request, np.array(new, np.int32))
        self._known = len(tokens)

    def _open(self, context: Context) -> bool:
        self._request += 1
        prompt = context.token_ids[: context.num_prompt]
        self._cache.start_request(self._request, np.array(prompt, np.int32))
        self._known = context.num_prompt
        return True
