"""Stock: transformers' own decoders as contenders, over its own caches and modules."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import StaticCache

from eval.forced import FORCED_LOGIT, Forcing, following
from eval.passes import synchronize, watching
from eval.runs import Run, model_stage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from eval.jobs import Job
    from eval.targets import Target

_COMPILING_TOKENS = 16  # passes enough to compile, record and replay
# Spelled out, so that a checkpoint's own sampling settings and penalties do not apply.
GREEDY = {
    "do_sample": False,
    "temperature": None,
    "top_k": None,
    "top_p": None,
    "repetition_penalty": 1.0,
}


class Generate:
    """transformers' ``model.generate``, greedy, over its default cache."""

    def __init__(self, name: str, target: Target, **settings: Any) -> None:
        self.name, self._settings, self._model = (
            name,
            settings,
            cast("Any", target.model),
        )
        self._networks = target.networks

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Do nothing."""

    def following(self, job: Job) -> AbstractContextManager[Forcing]:
        """Make the model follow the job's recorded answer while the context is open."""
        return following(self._networks, job.prompt_ids, job.answer_ids)

    def forget(self) -> None:
        """Do nothing: it learns nothing."""

    def held_bytes(self, allocated: int) -> int:  # noqa: ARG002
        """The weights; our arena and graphs, which lie beside them, are not its own."""
        return stored_bytes(self._model.parameters())

    def run(self, job: Job) -> Run:
        """Generate greedily, timed."""
        model, device = self._model, self._model.device
        ids = torch.tensor([job.prompt_ids], device=device)
        synchronize(device)
        start = perf_counter()
        with watching(self._networks) as passes:
            output = greedy(model, ids, job, **self._settings)
            synchronize(device)
            end = perf_counter()
        new = output[0, len(job.prompt_ids) :].tolist()
        return Run(
            token_ids=tuple(new),
            prefill_seconds=passes.first_end - start,
            decode_seconds=end - passes.first_end,
            passes=passes.count,
            rows=passes.rows - len(job.prompt_ids) + 1,
            draft_tokens=passes.rows - len(job.prompt_ids) + 1 - passes.count,
            accepted_tokens=len(new) - passes.count,
            stages=model_stage(device, passes.seconds - passes.first_seconds),
            rows_of_each=(1, *passes.rows_of_each[1:]),
        )


class GenerateStatic:
    """transformers' greedy ``generate`` over a static cache, which on a GPU compiles its passes.

    One cache, long enough for all jobs, is used again and again, so that nothing is compiled or
    captured anew. Timed and forced from a logits processor: a hook would break the compiled pass.
    """

    def __init__(self, name: str, target: Target, *, compile: bool = True) -> None:  # noqa: A002
        self.name, self._model, self._compile = name, cast("Any", target.model), compile
        self._cache: Any = None
        self._answer: tuple[int, ...] = ()

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Make the cache; have passes compiled by a run that is not timed."""
        length = max(len(job.prompt_ids) + job.max_new_tokens for job in jobs)
        self._cache = StaticCache(config=self._model.config, max_cache_len=length)
        short = replace(jobs[0], max_new_tokens=min(_COMPILING_TOKENS, jobs[0].max_new_tokens))
        for _ in range(2):
            self.run(short)

    @contextmanager
    def following(self, job: Job) -> Iterator[Forcing]:
        """Make the model follow the job's recorded answer while the context is open."""
        self._answer = job.answer_ids
        try:
            yield Forcing()
        finally:
            self._answer = ()

    def forget(self) -> None:
        """Do nothing: it learns nothing."""

    def held_bytes(self, allocated: int) -> int:  # noqa: ARG002
        """The weights and its cache."""
        states = [state for layer in self._cache.layers for state in (layer.keys, layer.values)]
        return stored_bytes(self._model.parameters()) + stored_bytes(states)

    def run(self, job: Job) -> Run:
        """Generate greedily, timed."""
        device = self._model.device
        if self._cache is None:
            self.prepare([job])
        self._cache.reset()
        timer = FollowAll([self._answer], device)
        synchronize(device)
        start = perf_counter()
        output = greedy(
            self._model,
            torch.tensor([job.prompt_ids], device=device),
            job,
            past_key_values=self._cache,
            logits_processor=[timer],
            disable_compile=not self._compile,
        )
        synchronize(device)
        end = perf_counter()
        new = output[0, len(job.prompt_ids) :].tolist()
        return Run(
            token_ids=tuple(new),
            prefill_seconds=timer.first_end - start,
            decode_seconds=end - timer.first_end,
            passes=len(new),
            rows=len(new),
            rows_of_each=(1,) * len(new),
        )


class FollowAll:
    """A logits processor: notes when the prompts were read, and has each row follow its answer.

    Rows [B] of a padded batch, each with an answer in token ids; where it is empty, or at its end,
    the model chooses.
    """

    def __init__(self, answers: Sequence[Sequence[int]], device: torch.device) -> None:
        longest = max(map(len, answers))
        rows = [[*answer, *[-1] * (longest - len(answer))] for answer in answers]
        self._tokens = torch.tensor(rows, dtype=torch.int64, device=device)
        self.calls, self.first_end = 0, 0.0

    def __call__(self, _ids: Tensor, scores: Tensor) -> Tensor:
        """Raise each row's next token above all others."""
        if self.calls == 0:
            synchronize(scores.device)
            self.first_end = perf_counter()
        at, self.calls = self.calls, self.calls + 1
        if at >= self._tokens.shape[1]:
            return scores
        wanted = self._tokens[:, at, None]
        index = wanted.clamp(min=0)
        own = scores.gather(1, index)
        return scores.scatter(1, index, own.masked_fill(wanted >= 0, FORCED_LOGIT))


def greedy(model: Any, ids: Tensor, job: Job, **settings: Any) -> Tensor:
    """Call ``generate`` as all its contenders do: greedily, to the job's end tokens or length."""
    output: Tensor = model.generate(
        ids,
        **{"attention_mask": torch.ones_like(ids), **settings},
        max_new_tokens=job.max_new_tokens,
        eos_token_id=sorted(job.eos_ids) or None,
        pad_token_id=min(job.eos_ids, default=0),
        **GREEDY,
    )
    return output


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
