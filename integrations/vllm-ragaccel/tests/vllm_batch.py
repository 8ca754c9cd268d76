"""How vLLM 0.32 calls a proposer, as recorded: slots that move, chunked prompts, preemption."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False)
class Running:
    """A request: its prompt, and the answer that the model gives whatever is drafted."""

    prompt: list[int]
    target: list[int]
    said: list[int] = field(default_factory=list)
    num_computed: int = 0
    draft: list[int] = field(default_factory=list)

    @property
    def ids(self):
        return self.prompt + self.said

    def verify(self):
        """The tokens of one step: right draft tokens and the one after them."""
        new = []
        for i, token in enumerate(self.target[len(self.said) :]):
            new.append(token)
            if i >= len(self.draft) or self.draft[i] != token:
                break
        return new


class Engine:
    """A batch that calls ``propose`` as vLLM's runner does, and is as strict with the result."""

    def __init__(self, proposer, *, slots=4, max_len=512, chunk=64, num_tokens=16, vocab_size=1000):
        self.propose, self.max_len, self.chunk = proposer.propose, max_len, chunk
        self.num_tokens, self.vocab_size = num_tokens, vocab_size
        self.token_ids = np.zeros((slots, max_len), np.int32)
        self.sizes = np.zeros(slots, np.int32)
        self.waiting, self.running, self.ended = [], [], []
        self.num_steps = self.num_accepted = self.num_drafted = 0

    def add(self, prompt, target):
        request = Running(list(prompt), list(target)[: self.max_len - len(prompt)])
        self.waiting.append(request)
        return request

    def preempt(self, request):
        """Take a request out of the batch; it reads its tokens again later."""
        self.running.remove(request)
        request.num_computed, request.draft = 0, []
        self.waiting.insert(0, request)

    def run(self):
        while self.waiting or self.running:
            self.step()

    def step(self):
        self._schedule()
        new_ids = [self._advance(request) for request in self.running]
        for slot, request in enumerate(self.running):
            self.token_ids[slot, : len(request.ids)] = request.ids
            self.sizes[slot] = len(request.ids)
        self.num_steps += 1
        # Near the end of the context, vLLM asks for no drafts at all.
        if max(self.sizes[: len(self.running)], default=0) + self.num_tokens <= self.max_len:
            drafts = self.propose(new_ids, self.sizes, self.token_ids, slot_mappings=None)
            self._take(drafts, new_ids)
        self.ended += [one for one in self.running if len(one.said) == len(one.target)]
        self.running = [one for one in self.running if len(one.said) < len(one.target)]

    def _schedule(self):
        while self.waiting and len(self.running) < len(self.sizes):
            self.running.append(self.waiting.pop(0))
        # vLLM fills the slot of an ended request with the last one.
        if len(self.running) > 2:
            self.running.insert(0, self.running.pop())

    def _advance(self, request):
        left = len(request.ids) - request.num_computed
        if left > self.chunk:
            request.num_computed += self.chunk
            return []
        new = request.verify()
        self.num_accepted += len(new) - 1
        request.num_computed = len(request.ids) + len(new) - 1
        request.said += new
        request.draft = []
        return new

    def _take(self, drafts, new_ids):
        assert type(drafts) is list
        assert len(drafts) == len(self.running)
        for slot, (request, draft) in enumerate(zip(self.running, drafts, strict=True)):
            assert type(draft) is list
            assert all(type(token) is int for token in draft), draft
            assert all(0 <= token < self.vocab_size for token in draft), draft
            assert len(draft) <= min(self.num_tokens, self.max_len - self.sizes[slot] - 1)
            assert new_ids[slot] or not draft
            request.draft = draft
            self.num_drafted += len(draft)
