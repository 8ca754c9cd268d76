"""Decode several recorded answers one by one and together."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from eval import cli
from eval.data import Job, as_recorded, jobs_for, shortened
from eval.decoders import ForcedTokens, capture_passes, greedy
from eval.measure import paired_ratio, synchronize, to_device
from eval.models import Target, chosen_target, describe_target
from eval.report.tables import show
from eval.runner import (
    ResultsLog,
    in_turns,
    open_results_log,
    result,
    settings_of,
)
from eval.tasks import load_task
from ragaccel.decoding import DraftTree, NoDrafter, Request, Session
from ragaccel.drafting import TrieDrafter
from ragaccel.engine import Engine, Sampler, Scheduler

ONE_BY_ONE, TOGETHER, PLAIN, GENERATE = "one_by_one", "together", "together_plain", "generate"
BATCH_DECODERS = (ONE_BY_ONE, TOGETHER, PLAIN, GENERATE)


@dataclass(frozen=True, slots=True)
class Group:
    """The tokens and decoding seconds of one group."""

    tokens: int
    seconds: float
    passes: int

    @property
    def speed(self) -> float:
        """Return the tokens per second."""
        return self.tokens / self.seconds


class RecordingSampler(Sampler):
    """A sampler that chooses the recorded next token in rows whose tokens equal the recording."""

    def __init__(self, request: Request, recording: Sequence[int]) -> None:
        super().__init__(request)
        self._recording = list(recording)
        self.is_argmax = False  # nor can the pass itself choose the recorded tokens

    def sample(
        self, logits: Tensor, tree: DraftTree, start: int, num_alternatives: int = 0
    ) -> Tensor:
        """Sample as usual, to take the same time, then replace the choices by the recording's."""
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
    """Decode a group with the decoder ``name``."""
    if name == GENERATE:
        return run_generate(target, group)
    return run_ours(engine, group, together=name != ONE_BY_ONE, drafts=name != PLAIN)


def run_ours(engine: Engine, group: Sequence[Job], *, together: bool, drafts: bool) -> Group:
    """Decode a group with our engine; time everything after prefill, with indexing for drafts."""
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
            if tuple(session.answer_ids) != job.answer_ids:
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
    """Decode a left-padded group greedily with ``model.generate``, timed from the first logits."""
    model: Any = target.model
    device = model.device
    longest = max(len(job.prompt_ids) for job in group)
    ids = torch.zeros(len(group), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, job in enumerate(group):
        ids[row, longest - len(job.prompt_ids) :] = torch.tensor(job.prompt_ids)
        mask[row, longest - len(job.prompt_ids) :] = 1
    follow = ForcedTokens([job.answer_ids for job in group], device)
    most = max(group, key=lambda job: job.max_new_tokens)
    ids, mask = ids.to(device), mask.to(device)
    output = greedy(model, ids, most, attention_mask=mask, logits_processor=[follow])
    synchronize(device)
    seconds = perf_counter() - follow.first_end
    for row, job in enumerate(group):
        if tuple(output[row, longest:][: len(job.answer_ids)].tolist()) != job.answer_ids:
            raise ValueError(f"{job.job_id}: the recording was not followed")
    # Each answer's first token came with the prompt's pass, which is not timed.
    return Group(sum(len(job.answer_ids) for job in group) - len(group), seconds, follow.calls - 1)


WARM_UP_TOKENS = 48


@cli.experiment(
    *cli.TARGET, cli.DTYPE, cli.TASK,
    cli.option("--sizes", default="2,4,8,16", help="sequences of a group"),
    cli.integer("--groups", 2, "groups of each size"),
    cli.integer("--max-new-tokens", 128), cli.COMPILE,
    table=show, shown=("sizes",), model="random:llama-135m", task="llma",
)  # fmt: skip
def run_batch(options: Namespace) -> dict[str, Any]:
    """Batch: how much faster are many answers that share passes?

        python -m eval batch --model random:llama-135m --task llma --data DATA --sizes 2,4,8,16

    Groups of recorded answers are decoded one by one, together by our scheduler with and without
    draft tokens, and by ``model.generate`` on a padded batch. All follow the recordings, so that
    all give the same tokens. The decoders alternate group by group; prefill is not timed.
    ``generate`` gets each first token with its prompt, so only its other tokens count.
    """
    sizes = cli.numbers_of(options.sizes)
    target = chosen_target(options, options.dtype)
    examples = load_task(options.task, options.groups * max(sizes), options.data)
    jobs = jobs_for(target, examples, options.max_new_tokens)
    # A single token comes with prefill: there is no decoding to time.
    jobs = [as_recorded(job) for job in jobs if len(job.answer_ids) > 1]
    if len(jobs) < max(sizes):
        raise ValueError(f"task {options.task} has {len(jobs)} recorded answers: take less")
    settings = describe_target(options) | settings_of(
        options, "task", "max_new_tokens", "sizes", "groups", "compile",
        forced=True, answers=len(jobs),  # groups depend on it
    )  # fmt: skip
    results_log = open_results_log(options.out, settings)
    capture_passes(target.ours, jobs, compile=options.compile)
    for size in sizes:
        measure_size(target, jobs, size, options.groups, results_log)
    found = {
        str(size): compare_group_speeds([row for row in results_log.rows if row["size"] == size])
        for size in sizes
    }
    return result("batch", settings, device=options.device, sizes=found)


def measure_size(
    target: Target, jobs: Sequence[Job], size: int, groups: int, results_log: ResultsLog
) -> None:
    """Decode groups of one size with every decoder, except those in the results log."""
    grouped = [
        [jobs[(number * size + i) % len(jobs)] for i in range(size)] for number in range(groups)
    ]
    engine = Engine(target.ours, kept_prefixes=0)  # other decoders had the same prompts

    def decode(name: str, group: Sequence[Job]) -> dict[str, Any]:
        return {"size": size, **asdict(run(name, target, engine, group))}

    in_turns(
        results_log,
        BATCH_DECODERS,
        {f"{size} sequences, group {at}": group for at, group in enumerate(grouped, start=1)},
        decode,
        lambda row: f"{row['tokens'] / row['seconds']:.1f} tokens/s",
        warm_up=lambda name: warm_up(target, engine, grouped, name),
    )


def warm_up(target: Target, engine: Engine, grouped: Sequence[Sequence[Job]], name: str) -> None:
    """Decode without timing: a few tokens of one group, or all groups if CUDA graphs are captured.

    Passes of several sequences are captured at their first use, so every group must run once.
    """
    if target.ours.graphs is None:
        grouped = [[shortened(job, WARM_UP_TOKENS) for job in grouped[0]]]
    for group in grouped:
        run(name, target, engine, group)


def compare_group_speeds(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the decoders' speeds on the groups of one size, and their ratios paired by group."""
    found: dict[str, dict[tuple[str, int], Group]] = {name: {} for name in BATCH_DECODERS}
    for row in rows:
        group = Group(row["tokens"], row["seconds"], row["passes"])
        found[row["decoder"]][row["example"], row["round"]] = group
    speeds = {name: {key: one.speed for key, one in each.items()} for name, each in found.items()}
    return {
        "decoders": {
            name: {
                "tokens_per_second": median(each.values()),
                "tokens_per_pass": sum(one.tokens for one in found[name].values())
                / sum(one.passes for one in found[name].values()),
                "tokens": sum(one.tokens for one in found[name].values()),
            }
            for name, each in speeds.items()
        },
        "together_over": {
            name: asdict(paired_ratio(speeds[TOGETHER], speeds[name]))
            for name in BATCH_DECODERS
            if name != TOGETHER
        },
        "plain_over_generate": asdict(paired_ratio(speeds[PLAIN], speeds[GENERATE])),
    }
