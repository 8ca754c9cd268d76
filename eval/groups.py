"""Groups: several recorded answers decoded one by one or together, by ours and by transformers."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from eval.forced import to_device
from eval.passes import synchronize
from eval.stock import FollowAll, greedy
from ragaccel.decoding.request import Request
from ragaccel.decoding.session import NoDrafter, Session
from ragaccel.drafting.trie import TrieDrafter
from ragaccel.engine.sampling import Sampler
from ragaccel.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from eval.jobs import Job
    from eval.targets import Target
    from ragaccel.decoding.tree import DraftTree
    from ragaccel.engine.engine import Engine

ONE_BY_ONE, TOGETHER, PLAIN, GENERATE = "one_by_one", "together", "together_plain", "generate"
CONTENDERS = (ONE_BY_ONE, TOGETHER, PLAIN, GENERATE)


@dataclass(frozen=True, slots=True)
class Group:
    """What a contender took for one group: tokens written and seconds of decoding."""

    tokens: int
    seconds: float
    passes: int

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class RecordingSampler(Sampler):
    """Chooses the recorded next token wherever a row's tokens are the recording's."""

    def __init__(self, request: Request, recording: Sequence[int]) -> None:
        super().__init__(request)
        self._recording = list(recording)

    def sample(
        self, logits: Tensor, tree: DraftTree, start: int, num_alternatives: int = 0
    ) -> Tensor:
        """Choose as usual, which is paid for, then put the recording in its place."""
        chosen = super().sample(logits, tree, start, num_alternatives)
        known, depths = self._recording, tree.depths()
        on_path = [False] * len(tree)
        rows, tokens = [], []
        for node, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
            at = start + depths[node]
            on_path[node] = (parent < 0 or on_path[parent]) and known[at : at + 1] == [token]
            if on_path[node] and at + 1 < len(known):
                rows.append(node)
                tokens.append(known[at + 1])
        if rows:
            places = to_device([rows, tokens], chosen.device)
            chosen[places[0], 0] = places[1]
        return chosen


def run(name: str, target: Target, engine: Engine, group: Sequence[Job]) -> Group:
    """Decode a group by one of the contenders.

    Raises:
        ValueError: the recordings were not followed.
    """
    if name == GENERATE:
        return run_generate(target, group)
    return run_ours(engine, group, together=name != ONE_BY_ONE, drafts=name != PLAIN)


def run_ours(engine: Engine, group: Sequence[Job], *, together: bool, drafts: bool) -> Group:
    """Decode a group; prompts are read before the clock starts, texts sorted for drafting after."""
    scheduler, device = Scheduler(engine, max_batch=len(group)), engine.model.device
    passes = 0
    forward = engine.model.forward

    def counted(rows: Any, keep: int) -> Tensor:
        nonlocal passes
        passes += 1
        return forward(rows, keep)

    with ExitStack() as stack:
        sessions = [open_session(engine, job, stack, drafts=drafts) for job in group]
        for session in sessions:
            session.prefill()
        engine.model.forward = counted  # type: ignore[method-assign]
        stack.callback(setattr, engine.model, "forward", forward)
        synchronize(device)
        started = perf_counter()
        for running in [sessions] if together else [[session] for session in sessions]:
            left = list(running)
            while left:
                scheduler.advance(left)
                left = [session for session in left if session.finish_reason is None]
        synchronize(device)
        seconds = perf_counter() - started
        for session, job in zip(sessions, group, strict=True):
            if tuple(session.token_ids) != job.answer_ids:
                raise ValueError(f"{job.job_id}: the recording was not followed")
    return Group(sum(len(job.answer_ids) for job in group), seconds, passes)


def open_session(engine: Engine, job: Job, stack: ExitStack, *, drafts: bool) -> Session:
    request = Request(
        prompt_ids=job.prompt_ids,
        references=job.references,
        max_new_tokens=job.max_new_tokens,
        eos_ids=job.eos_ids,
    )
    verifier = stack.enter_context(closing(engine.open(request)))
    verifier.sampler = RecordingSampler(request, (*job.prompt_ids, *job.answer_ids))
    if drafts:
        return Session(verifier, TrieDrafter(), request)
    return Session(verifier, NoDrafter(), request, token_budget=0)


def run_generate(target: Target, group: Sequence[Job]) -> Group:
    """Decode a group by transformers, greedily, left-padded; timed from the first logits on."""
    model: Any = target.model
    device = model.device
    longest = max(len(job.prompt_ids) for job in group)
    ids = torch.zeros(len(group), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, job in enumerate(group):
        ids[row, longest - len(job.prompt_ids) :] = torch.tensor(job.prompt_ids)
        mask[row, longest - len(job.prompt_ids) :] = 1
    follow = FollowAll([job.answer_ids for job in group], device)
    most = max(group, key=lambda job: job.max_new_tokens)
    ids, mask = ids.to(device), mask.to(device)
    output = greedy(model, ids, most, attention_mask=mask, logits_processor=[follow])
    synchronize(device)
    seconds = perf_counter() - follow.first_end
    for row, job in enumerate(group):
        if tuple(output[row, longest:][: len(job.answer_ids)].tolist()) != job.answer_ids:
            raise ValueError(f"{job.job_id}: the recording was not followed")
    # The first token of each came with the prompt.
    return Group(sum(len(job.answer_ids) for job in group) - len(group), seconds, follow.calls - 1)
