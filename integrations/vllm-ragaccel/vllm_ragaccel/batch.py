"""Drafts for the running requests of an engine that tells only their tokens."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from ragaccel.decoding import (
    Context,
    DraftTree,
    Reference,
    SpeculationController,
    likeliest_chain,
)
from ragaccel.drafting import Calibration, History, TrieDrafter

from vllm_ragaccel.step_costs import StepCosts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Ids = NDArray[np.integer[Any]]

MAX_UNSEEN_STEPS = 64
"""Steps after which a request that is not in the batch is dropped; preempted ones come back."""
MIN_UNSEEN_ROWS = 16
"""Requests that are not in the batch and are kept, at least; at most as many as it has slots."""
MAX_SKIPPED_STEPS = 4
"""Full steps that the engine may take without asking for drafts before a request starts anew."""
RETRY_STEPS = 64
"""Steps after which drafts that did not pay are tried again, because the load may have changed."""
MIN_PROB = 0.1
"""Least chance of a draft token where lengths are reproducible; more are not worth their rows."""
MIN_PLAIN_STEPS = 3
"""Steps of a number of requests before the first drafts: what drafts cost is held against them."""
MAX_DRAFTED_STEPS = 64
"""Steps with drafts in a row, after which one without is taken to measure its time again."""
SMOOTHING = 0.02
"""Weight of the newest step in the speed-up that a draft token is held against."""

logger = logging.getLogger("ragaccel")


class DraftSelector:
    """Choose how long the chains of a step are, so that many steps give the most tokens a second.

    A draft token pays if the tokens it is expected to add come sooner than at the speed of recent
    steps. Its own step alone would ask for too many in slow steps and too few in fast ones.
    """

    def __init__(self) -> None:
        # Mean tokens and time of recent steps, in those of steps without drafts, by requests.
        self._means: dict[int, tuple[float, float]] = {}
        # Steps without drafts, and steps since the last of them, by requests.
        self._plain: dict[int, tuple[int, int]] = {}

    def needs_plain_step(self, num_rows: int) -> bool:
        """Return whether the next step should draft nothing, so that its time is known."""
        num_plain, since = self._plain.get(num_rows.bit_length(), (0, 0))
        return num_plain < MIN_PLAIN_STEPS or since >= MAX_DRAFTED_STEPS

    def select(self, trees: Sequence[DraftTree], costs: Sequence[float]) -> list[DraftTree]:
        """Return the part of each chain that pays.

        Args:
            trees: the chain of each running request.
            costs: the seconds of a step with 0, 1, 2 … draft tokens.
        """
        num, plain = len(trees), costs[0]
        drafts = sorted(
            ((prob, i) for i, tree in enumerate(trees) for prob in tree.path_probs[1:]),
            key=lambda draft: -draft[0],
        )
        mean_tokens, mean_time = self._means.get(num.bit_length(), (1.0, 1.0))
        speed = mean_tokens / mean_time / plain
        best, tokens, best_tokens, gain = 0, 1.0, 1.0, 0.0
        for count, (prob, _) in enumerate(drafts, 1):
            tokens += prob / num
            if tokens - 1.0 - speed * (costs[count] - plain) > gain:
                best, best_tokens = count, tokens
                gain = tokens - 1.0 - speed * (costs[count] - plain)
        self._means[num.bit_length()] = (
            mean_tokens + SMOOTHING * (best_tokens - mean_tokens),
            mean_time + SMOOTHING * (costs[best] / plain - mean_time),
        )
        num_plain, since = self._plain.get(num.bit_length(), (0, 0))
        self._plain[num.bit_length()] = (num_plain, since + 1) if best else (num_plain + 1, 0)
        num_kept = Counter(i for _, i in drafts[:best])
        return [_beginning(tree, num_kept[i]) for i, tree in enumerate(trees)]


class _Row:
    """One request: the tokens that it is recognised by, and what its drafts learned."""

    def __init__(self, prompt: Ids) -> None:
        self.num_prompt = self.size = len(prompt)
        self._ids = np.array(prompt, np.int32)
        self.context = Context(self._ids.tolist())
        self.controller = SpeculationController()
        self.drafter: TrieDrafter | None = None  # of its own, where drafts are reproducible
        self.has_references = False  # whether they were looked for
        self.num_unseen = 0
        self.is_remembered = False
        self.num_requested = 0
        self.draft_seconds = -1.0  # of the last draft; below 0 before the first one
        self.relative_cost = 0.0  # of the last draft, in plain steps of one request

    @property
    def token_ids(self) -> Ids:
        """Return the prompt and the answer so far."""
        return self._ids[: self.size]

    def precedes(self, ids: Ids) -> bool:
        """Return whether ``ids`` begin with the tokens of this request."""
        return self.size <= len(ids) and bool((self.token_ids == ids[: self.size]).all())

    def extend(self, ids: Ids) -> None:
        """Append new tokens."""
        size = self.size + len(ids)
        if size > len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(size, np.int32)])
        self._ids[self.size : size] = ids
        self.size = size
        self.context.token_ids += ids.tolist()


class BatchDrafter:
    """A drafter of one likely chain for each running request.

    The engine passes all tokens of every slot and names neither requests nor their ends. A request
    is recognised by its tokens, in whatever slot they are; everything before the first new token
    of one that is not recognised is its prompt. Chains are as long as the measured time of a step
    pays for, given the chance that their tokens are right.

    Args:
        num_tokens: the maximum number of draft tokens of a request.
        max_len: the maximum number of tokens of a request, prompt and answer.
        vocab_size: exclusive upper bound of the draft tokens.
        history: whether to draft from earlier requests as well, whoever sent them.
        reproducible: whether drafts depend on the tokens of their request alone, neither on time
            nor on other requests, so that an engine gives a seed the same text again.
        references: returns texts beside a prompt to draft from; asked once before a request's first
            draft.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        num_tokens: int,
        max_len: int,
        vocab_size: int,
        *,
        history: bool = False,
        reproducible: bool = False,
        references: Callable[[Sequence[int]], Iterable[Reference]] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.num_tokens, self.max_len, self.vocab_size = num_tokens, max_len, vocab_size
        self.costs = StepCosts()
        self._history = History(vocab_size=vocab_size) if history else None
        self._drafter = TrieDrafter(
            decoding_length=num_tokens,
            branch_length=num_tokens,
            mode="one",
            past=self._history or History(),
            calibration=Calibration(),
        )
        self._reproducible = reproducible
        self._references = references
        self._clock = clock
        # Of all requests together: a new one need not learn again that drafts do not pay.
        self._controller = SpeculationController()
        self._selector = DraftSelector()
        self._rows: list[_Row] = []
        self._step = 0
        self._last: tuple[float, int, int] | None = None  # end, requests and draft tokens
        self._is_plain_step = False  # whether the last step read no prompt, of the same requests
        self._has_failed = False

    def warm_up(self) -> None:
        """Compile the drafting functions with a short request, which is forgotten."""
        other = BatchDrafter(
            self.num_tokens, 1 << 16, self.vocab_size, history=self._history is not None
        )
        text = np.array([[1, 2, 3, 1, 2, 3, 1, 2, 3, 1] * 4], np.int32)
        for size in (20, 21, 23, 24):
            other._draft([[1]], [size], text)
        other._draft([[]], [5], text)  # the first request has ended
        for size in (30, 31):
            other._draft([[1]], [size], text)

    @property
    def num_rows(self) -> int:
        """Return the number of requests that are held."""
        return len(self._rows)

    def draft(
        self, new_ids: Sequence[Sequence[int]], sizes: Sequence[int] | Ids, token_ids: Ids
    ) -> list[list[int]]:
        """Return the draft tokens of every slot; none if drafting fails, which is logged once.

        Args:
            new_ids: for each slot the tokens sampled in this step; none while it reads its prompt.
            sizes: [slots or more] the number of tokens of each slot, the new ones included.
            token_ids: [slots or more, length] the tokens of each slot.
        """
        started = self._clock()
        try:
            chains = self._draft(new_ids, [int(size) for size in sizes[: len(new_ids)]], token_ids)
        except Exception:
            self._log_failure()
            self._rows, self._last = [], None
            return [[] for _ in new_ids]
        if self._last is not None and self._is_plain_step:
            end, num_rows, num_drafts = self._last
            self.costs.record(num_rows, num_drafts, max(1e-9, started - end))
        num_running = sum(1 for new in new_ids if len(new))
        self._last = (self._clock(), num_running, sum(map(len, chains)))
        if num_running < len(new_ids) or not num_running:
            self._last = None  # the next step also reads prompts
        return chains

    def _draft(
        self, new_ids: Sequence[Sequence[int]], sizes: Sequence[int], token_ids: Ids
    ) -> list[list[int]]:
        self._step += 1
        slots = [slot for slot, new in enumerate(new_ids) if len(new)]
        rows, num_known = self._recognise(new_ids, sizes, token_ids)
        self._is_plain_step = self._last is not None and num_known == len(new_ids) == self._last[1]
        if not slots:
            return [[] for _ in new_ids]
        costs = self.costs.table(
            len(slots), len(slots) * self.num_tokens, measured=self._step % RETRY_STEPS != 0
        )
        is_worth = self._reproducible or (
            not self._selector.needs_plain_step(len(slots))
            and _may_pay(len(slots), costs)
            and self._controller.next_length(1) > 0
        )
        trees = [
            self._draft_row(rows[slot], sizes[slot] if is_worth else self.max_len) for slot in slots
        ]
        kept = self._select([rows[slot] for slot in slots], trees, costs)
        chains: list[list[int]] = [[] for _ in new_ids]
        for slot, tree in zip(slots, kept, strict=True):
            chains[slot] = list(tree.token_ids[1:])
        return chains

    def _recognise(
        self, new_ids: Sequence[Sequence[int]], sizes: Sequence[int], token_ids: Ids
    ) -> tuple[dict[int, _Row], int]:
        """Return the request of each slot with new tokens, and how many were known before."""
        by_size: dict[int, list[_Row]] = defaultdict(list)
        for row in self._rows:
            by_size[row.size].append(row)
        rows: dict[int, _Row] = {}
        added: list[int] = []
        gains: list[float] = []
        slots = [slot for slot, new in enumerate(new_ids) if len(new)]
        for slot in slots:
            known = _take(by_size[sizes[slot] - len(new_ids[slot])], token_ids[slot])
            if known is not None:
                rows[slot] = known
                if known.num_requested:
                    added.append(len(new_ids[slot]) - 1)
                    gains.append(added[-1] - known.relative_cost)
                    known.controller.record(added[-1], gains[-1])
        if gains:
            self._controller.record(sum(added), sum(gains) / len(gains))
        num_known = len(rows)
        for slot in slots:
            if slot not in rows:
                before = sizes[slot] - len(new_ids[slot])
                rows[slot] = self._take_shorter(by_size, before, token_ids[slot]) or _Row(
                    token_ids[slot, :before]
                )
        for slot, row in rows.items():
            row.extend(token_ids[slot, row.size : sizes[slot]])
        waiting = [
            held
            for slot, new in enumerate(new_ids)  # preempted requests, read again
            if not len(new)
            if (held := _take(by_size[sizes[slot]], token_ids[slot])) is not None
        ]
        self._rows = [*rows.values(), *waiting]
        for row in self._rows:
            row.num_requested = row.num_unseen = 0
        self._keep_unseen((row for group in by_size.values() for row in group), len(new_ids))
        return rows, num_known

    def _take_shorter(
        self, by_size: dict[int, list[_Row]], size: int, token_ids: Ids
    ) -> _Row | None:
        """Return a request that grew while the engine did not ask for drafts."""
        shortest = size - MAX_SKIPPED_STEPS * (self.num_tokens + 1)
        for known in sorted((s for s in by_size if shortest <= s < size), reverse=True):
            if (row := _take(by_size[known], token_ids)) is not None:
                return row
        return None

    def _keep_unseen(self, rows: Iterable[_Row], num_slots: int) -> None:
        """Keep requests that may come back: the engine preempts some, and the others have ended."""
        unseen = sorted(rows, key=lambda row: row.num_unseen)
        for row in unseen:
            row.num_unseen += 1
            if self._history is not None and not row.is_remembered:
                row.is_remembered = True
                ids = row.token_ids.tolist()
                self._history.add(ids[: row.num_prompt], ids[row.num_prompt :])
        max_rows = max(MIN_UNSEEN_ROWS, num_slots)
        for i, row in enumerate(unseen):
            if i < max_rows and row.num_unseen < MAX_UNSEEN_STEPS:
                self._rows.append(row)
            else:
                row.context.forget()  # the texts of a request refer to it, so it would go late

    def _draft_row(self, row: _Row, size: int) -> DraftTree:
        """Return a chain for a request; the root alone if nothing may be drafted."""
        room = min(self.num_tokens, self.max_len - size - 1)
        row.num_requested = self._next_length(row, room) if room > 0 else 0
        if row.num_requested:
            started = self._clock()
            try:
                self._find_references(row)
                drafter = self._drafter_of(row)
                tree = likeliest_chain(drafter.draft(row.context, row.num_requested))
            except Exception:
                self._log_failure()
                row.context.forget()
                row.num_requested = 0
            else:
                # The first draft includes sorting the prompt, which happens only once.
                row.draft_seconds = 0.0 if row.draft_seconds < 0 else self._clock() - started
                return self._within_vocabulary(tree)
        return DraftTree.chain(row.context.token_ids[-1:])

    def _find_references(self, row: _Row) -> None:
        if self._references is not None and not row.has_references:
            row.has_references = True  # also if it fails: it would fail again
            prompt_ids = row.context.token_ids[: row.num_prompt]
            row.context.references = tuple(self._references(prompt_ids))

    def _drafter_of(self, row: _Row) -> TrieDrafter:
        """Return the drafter that all requests share, or one that learns from this one alone."""
        if self._reproducible and row.drafter is None:
            row.drafter = replace(self._drafter, calibration=Calibration())
        return row.drafter or self._drafter

    def _next_length(self, row: _Row, room: int) -> int:
        return room if self._reproducible else row.controller.next_length(room)

    def _within_vocabulary(self, tree: DraftTree) -> DraftTree:
        for node in range(1, len(tree)):
            if not 0 <= tree.token_ids[node] < self.vocab_size:
                return _beginning(tree, node - 1)
        return tree

    def _select(
        self, rows: list[_Row], trees: list[DraftTree], costs: Sequence[float]
    ) -> list[DraftTree]:
        """Return the part of each chain that pays, and note what the rest of the step costs."""
        if self._reproducible:
            return [_likely_part(tree) for tree in trees]
        kept = self._selector.select(trees, costs)
        total = sum(tree.num_drafts for tree in kept)
        plain = costs[0] / len(rows)
        extra = (costs[total] - costs[0]) / max(1, total)
        for row, tree in zip(rows, kept, strict=True):
            if row.num_requested:
                row.controller.record_length(tree.num_drafts, row.num_requested)
                row.relative_cost = (row.draft_seconds + extra * tree.num_drafts) / plain
        return kept

    def _log_failure(self) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.exception("drafting failed: answers stay the same, but may come more slowly")


def _take(rows: list[_Row], token_ids: Ids) -> _Row | None:
    """Remove and return the first request that the tokens begin with."""
    for i, row in enumerate(rows):
        if row.precedes(token_ids):
            return rows.pop(i)
    return None


def _likely_part(tree: DraftTree) -> DraftTree:
    """Return the draft tokens of a chain whose chance is at least ``MIN_PROB``."""
    return _beginning(tree, sum(prob >= MIN_PROB for prob in tree.path_probs[1:]))


def _beginning(tree: DraftTree, num_drafts: int) -> DraftTree:
    """Return the first draft tokens of a chain."""
    return DraftTree.chain(tree.token_ids[: num_drafts + 1], tree.path_probs[: num_drafts + 1])


def _may_pay(num_rows: int, costs: Sequence[float]) -> bool:
    """Return whether draft tokens would pay if all were right."""
    return any(
        drafts * costs[0] > num_rows * (seconds - costs[0]) for drafts, seconds in enumerate(costs)
    )
