"""Stock: transformers' own decoders as contenders, over its own caches and modules."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import CompileConfig, StaticCache

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

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Do nothing."""

    def following(self, job: Job) -> AbstractContextManager[Forcing]:
        """Make the model follow the job's recorded answer while the context is open."""
        return following(self._model, job.prompt_ids, job.answer_ids)

    def forget(self) -> None:
        """Do nothing: it learns nothing."""

    def held_bytes(self, allocated: int) -> int:  # noqa: ARG002
        """The weights; our KV pool and graphs, which lie beside them, are not its own."""
        return stored_bytes(self._model.parameters())

    def run(self, job: Job) -> Run:
        """Generate greedily, timed."""
        model, device = self._model, self._model.device
        ids = torch.tensor([job.prompt_ids], device=device)
        synchronize(device)
        start = perf_counter()
        with watching(self._model) as passes:
            output = greedy(model, ids, job, **self._settings)
            synchronize(device)
            end = perf_counter()
        new = output[0, len(job.prompt_ids) :].tolist()
        first_rows = passes.rows_of_each[0] - len(job.prompt_ids) + 1  # prompt lookup guesses there
        return Run(
            token_ids=tuple(new),
            prefill_seconds=passes.first_end - start,
            decode_seconds=end - passes.first_end,
            passes=passes.count,
            rows=passes.rows - len(job.prompt_ids) + 1,
            draft_tokens=passes.rows - len(job.prompt_ids) + 1 - passes.count,
            accepted_tokens=len(new) - passes.count,
            stages=model_stage(device, passes.seconds - passes.first_seconds),
            rows_of_each=(first_rows, *passes.rows_of_each[1:]),
            tokens_of_each=_emitted(passes.starts, len(job.prompt_ids), len(new)),
            first_token_seconds=passes.first_end - start,
        )


def _emitted(starts: Sequence[int], num_prompt: int, num_new: int) -> tuple[int, ...]:
    """Tell what each pass emitted from what the cache held before it: the last token is not in."""
    ends = [at - num_prompt + 1 for at in starts[1:]] + [num_new]
    return tuple(end - begin for begin, end in pairwise([0, *ends]))


class GenerateStatic:
    """transformers' greedy ``generate`` over a static cache, its passes compiled.

    On a GPU one cache, long enough for all jobs, is used again and again, so that no graph is
    captured anew. On a CPU transformers compiles only when told to: for any length at once, each
    job with a cache as long as it needs, since a pass reads all of it. Timed and forced from a
    logits processor: a hook would break the compiled pass.
    """

    def __init__(self, name: str, target: Target) -> None:
        self.name, self._model = name, cast("Any", target.model)
        self._settings = compiling(self._model.device)
        self._cache: Any = None
        self._answer: tuple[int, ...] = ()

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Make the cache; have passes compiled by runs that are not timed."""
        longest = max(jobs, key=_length)
        self._cache = self._new_cache(longest)
        for job in (jobs[0], longest, longest):
            self.run(replace(job, max_new_tokens=min(_COMPILING_TOKENS, job.max_new_tokens)))

    def _new_cache(self, job: Job) -> Any:
        return StaticCache(config=self._model.config, max_cache_len=_length(job))

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
        if device.type == "cpu":
            self._cache = self._new_cache(job)
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
            **self._settings,
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
            tokens_of_each=(1,) * len(new),
            first_token_seconds=timer.first_end - start,
        )


def compiling(device: torch.device) -> dict[str, Any]:
    """The settings with which ``generate`` compiles its passes: on a GPU it does so by itself.

    Raises:
        ValueError: on a CPU, where no C++ compiler is found.
    """
    if device.type != "cpu":
        return {}
    if not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        raise ValueError(
            "generate_static compiles its passes, which needs a C++ compiler: install g++, or "
            "leave it out of --contenders"
        )
    asked = CompileConfig(dynamic=True)
    asked._compile_all_devices = True  # the only way transformers has to ask for it on a CPU
    return {"compile_config": asked}


def _length(job: Job) -> int:
    return len(job.prompt_ids) + job.max_new_tokens


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
