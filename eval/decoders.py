"""Decoders, ours and transformers': each runs a job and returns its tokens and seconds."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor
from transformers import CompileConfig, StaticCache
from typing_extensions import override

from eval.data import Job
from eval.measure import FORCED_LOGIT, ForcingCost, count_passes, synchronize, teacher_forced
from eval.models import Target, chosen_adapter, useful_masks, with_adapter, with_graphs
from ragaccel.decoding import Drafter, NoDrafter, Request, Session, Verifier
from ragaccel.drafting import (
    CopyDrafter,
    DraftingPolicy,
    Memory,
    TrieDrafter,
)
from ragaccel.engine import Engine, warm_up_passes
from ragaccel.models import HuggingFaceModel


@dataclass(frozen=True, slots=True)
class Run:
    """One generation: its new tokens and its time by stage.

    ``decode_seconds`` is the time after prefill. Prefill is the prompt's pass: with ``generate`` it
    also yields the first token, with our decoders the first verify pass does. ``stages`` splits
    the decoding time into ``draft``, ``verify`` and ``model`` (inside the model's passes), as far
    as they were measured. ``rows_of_each`` has the rows of every pass after prefill.
    ``tokens_of_each`` has the number of tokens that each pass emitted, with the prompt's pass if it
    yields a token, and is empty if that is unknown. ``first_token_seconds`` is the time from the
    start to the first token.
    """

    token_ids: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    passes: int
    rows: int
    draft_tokens: int = 0
    accepted_tokens: int = 0
    stages: dict[str, float] = field(default_factory=dict)
    rows_of_each: tuple[int, ...] = ()
    tokens_of_each: tuple[int, ...] = ()
    first_token_seconds: float = 0.0


def model_stage(device: torch.device, seconds: float) -> dict[str, float]:
    return {"model": seconds} if device.type == "cpu" else {}


_COMPILING_TOKENS = 16  # enough passes to compile, record and replay
# Spelled out, so that a checkpoint's own sampling settings and penalties do not apply.
GREEDY = {
    "do_sample": False,
    "temperature": None,
    "top_k": None,
    "top_p": None,
    "repetition_penalty": 1.0,
}


class Decoder(ABC):
    """A way to decode jobs; several decoders are compared on the same jobs."""

    name: str

    def prepare(self, jobs: Sequence[Job]) -> None:  # noqa: B027
        """Do the work that is needed once for all jobs, before anything is timed."""

    @abstractmethod
    def teacher_forced(self, job: Job) -> AbstractContextManager[ForcingCost]:
        """Make the model follow the job's recorded answer while the context is open."""

    def forget(self) -> None:  # noqa: B027
        """Forget the earlier jobs, but not the latency profile."""

    @abstractmethod
    def run(self, job: Job) -> Run:
        """Decode a job greedily and return its tokens and times."""

    def held_bytes(self, allocated: int) -> int:
        """Return how many of the ``allocated`` bytes (those in use between runs) this one needs."""
        return allocated


class Generate(Decoder):
    """transformers' ``model.generate``, greedy, over its default cache."""

    def __init__(self, name: str, target: Target, **settings: Any) -> None:
        self.name, self._settings, self._model = (
            name,
            settings,
            cast("Any", target.model),
        )

    @override
    def teacher_forced(self, job: Job) -> AbstractContextManager[ForcingCost]:
        return teacher_forced(self._model, job.prompt_ids, job.answer_ids)

    def held_bytes(self, allocated: int) -> int:  # noqa: ARG002
        """Return the bytes of the weights, without our KV pool and graphs in the same process."""
        return stored_bytes(self._model.parameters())

    @override
    def run(self, job: Job) -> Run:
        model, device = self._model, self._model.device
        ids = torch.tensor([job.prompt_ids], device=device)
        synchronize(device)
        start = perf_counter()
        with count_passes(self._model) as passes:
            output = greedy(model, ids, job, **self._settings)
            synchronize(device)
            end = perf_counter()
        new = output[0, len(job.prompt_ids) :].tolist()
        first_rows = passes.rows_of_each[0] - len(job.prompt_ids) + 1  # prompt lookup drafts in it
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
    """Return the tokens that each pass emitted, from the cache length before each pass."""
    ends = [at - num_prompt + 1 for at in starts[1:]] + [num_new]
    return tuple(end - begin for begin, end in pairwise([0, *ends]))


class GenerateStatic(Decoder):
    """transformers' greedy ``generate`` over a static cache, its passes compiled.

    On a GPU all jobs share one cache that is long enough for each, so that graphs are captured
    once. On a CPU transformers compiles only on request, here for any length; each job gets a cache
    of its own length, since a pass reads all of it. A logits processor takes the times and forces
    the recorded tokens, since a hook would break the compiled pass.
    """

    def __init__(self, name: str, target: Target) -> None:
        self.name, self._model = name, cast("Any", target.model)
        self._settings = compiling(self._model.device)
        self._cache: Any = None
        self._answer: tuple[int, ...] = ()

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Make the cache, and compile the passes in runs that are not timed."""
        longest = max(jobs, key=_length)
        self._cache = self._new_cache(longest)
        for job in (jobs[0], longest, longest):
            self.run(replace(job, max_new_tokens=min(_COMPILING_TOKENS, job.max_new_tokens)))

    def _new_cache(self, job: Job) -> Any:
        return StaticCache(config=self._model.config, max_cache_len=_length(job))

    @override
    @contextmanager
    def teacher_forced(self, job: Job) -> Iterator[ForcingCost]:
        self._answer = job.answer_ids
        try:
            yield ForcingCost()
        finally:
            self._answer = ()

    def held_bytes(self, allocated: int) -> int:  # noqa: ARG002
        """Return the bytes of the weights and of this decoder's cache."""
        states = [state for layer in self._cache.layers for state in (layer.keys, layer.values)]
        return stored_bytes(self._model.parameters()) + stored_bytes(states)

    @override
    def run(self, job: Job) -> Run:
        device = self._model.device
        if self._cache is None:
            self.prepare([job])
        if device.type == "cpu":
            self._cache = self._new_cache(job)
        self._cache.reset()
        timer = ForcedTokens([self._answer], device)
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
    """Return the settings that make ``generate`` compile; on a GPU it needs none."""
    if device.type != "cpu":
        return {}
    if not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        raise ValueError(
            "generate_static compiles its passes, which needs a C++ compiler: install g++, or "
            "leave it out of --decoders"
        )
    asked = CompileConfig(dynamic=True)
    asked._compile_all_devices = True  # the only way transformers has to ask for it on a CPU
    return {"compile_config": asked}


def _length(job: Job) -> int:
    return len(job.prompt_ids) + job.max_new_tokens


class ForcedTokens:
    """A logits processor that forces each row's answer and records when prefill ended.

    ``answers`` has the token ids of an answer for each row [B] of a padded batch. The model chooses
    the tokens after an answer's end.
    """

    def __init__(self, answers: Sequence[Sequence[int]], device: torch.device) -> None:
        longest = max(map(len, answers))
        rows = [[*answer, *[-1] * (longest - len(answer))] for answer in answers]
        self._tokens = torch.tensor(rows, dtype=torch.int64, device=device)
        self.calls, self.first_end = 0, 0.0

    def __call__(self, _ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores in which each row's next recorded token has the highest score."""
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
    """Call ``generate`` greedily until an end token of the job or ``max_new_tokens``."""
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
    """Return the total size of tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


PAPER_K = 20
PROMPT_LOOKUP_TOKENS = 10  # transformers' own example


class Ours(Decoder):
    """Our decoding loop with a drafter.

    The engine and its latency profile last for all jobs, as in an application. The drafter keeps
    what it learns until ``forget``. ``modes`` are options of the engine, such as ``exact``.
    """

    def __init__(
        self,
        name: str,
        target: Target,
        make_drafter: Callable[[], Drafter],
        *,
        token_budget: int | None = None,
        apart: bool = False,
        **modes: Any,
    ) -> None:
        self.name, self._make_drafter = name, make_drafter
        self._token_budget, self._apart = token_budget, apart
        self.forget()
        # Every run must prefill its whole prompt, so no prefix is kept from an earlier run.
        self._engine = Engine(target.ours, kept_prefixes=0, **modes)
        self._network, self._device = target.ours.network, target.ours.device
        self._runner = target.ours.runner

    def forget(self) -> None:
        """Replace the drafter with a new one that knows no earlier jobs."""
        self._drafter = self._make_drafter()

    @override
    def teacher_forced(self, job: Job) -> AbstractContextManager[ForcingCost]:
        return teacher_forced(self._network, job.prompt_ids, job.answer_ids, self._runner)

    def know_costs(self, seconds: dict[int, float]) -> None:
        """Set the latency profile of greedy decoding: seconds of a pass by its number of rows."""
        self._engine.latency_profile.replace("greedy", seconds)

    @override
    def run(self, job: Job) -> Run:
        synchronize(self._device)
        start = perf_counter()  # generate() too makes its cache and settings within its time
        request = self._request(job)
        verifier = self._engine.open(request)
        try:
            with self._session(verifier, request) as session:
                run = self._timed(session, start)
                ended = perf_counter()
            return self._ended(run, perf_counter() - ended)
        finally:
            verifier.close()

    def _request(self, job: Job) -> Request:
        return Request(
            prompt_ids=job.prompt_ids,
            references=job.apart if self._apart else job.references,
            max_new_tokens=job.max_new_tokens,
            eos_ids=job.eos_ids,
        )

    @contextmanager
    def _session(self, verifier: Verifier, request: Request) -> Iterator[Session]:
        yield Session(verifier, self._drafter, request, token_budget=self._token_budget)

    def _ended(self, run: Run, seconds: float) -> Run:  # noqa: ARG002
        """Return the run with the seconds of closing its session added, if that remembers it."""
        return run

    def _timed(self, session: Session, start: float) -> Run:
        device = self._device
        session.prefill()
        synchronize(device)
        prefilled = perf_counter()
        tokens_of_each: list[int] = []
        first = prefilled
        with count_passes(self._network, self._runner) as passes:
            for step in session:
                if not tokens_of_each:
                    first = perf_counter()
                tokens_of_each.append(len(step.token_ids))
            synchronize(device)
            end = perf_counter()
        stats = session.stats
        stages = {"draft": stats.draft_seconds, "verify": stats.verify_seconds}
        return Run(
            token_ids=session.result().token_ids,
            prefill_seconds=prefilled - start,
            decode_seconds=end - prefilled,
            passes=stats.verify_passes,
            rows=passes.rows,
            draft_tokens=stats.draft_tokens,
            accepted_tokens=stats.accepted_tokens,
            stages=stages | model_stage(device, passes.seconds),
            rows_of_each=tuple(passes.rows_of_each),
            tokens_of_each=tuple(tokens_of_each),
            first_token_seconds=first - start,
        )


class Remembering(Ours):
    """Our loop as ``LLM`` runs it: draft trees from prompts and answers of earlier requests too.

    With a SPACE adapter attached to the target, mask tokens draft as well. The memory begins with
    the answers of the jobs ``warming``, which are not measured, or empty without them. Remembering
    an answer counts as decoding time.
    """

    def __init__(self, name: str, target: Target, warming: Sequence[Job] = ()) -> None:
        self._warming, self._vocab_size = warming, target.ours.vocab_size
        self._mask_ids = useful_masks(target)
        super().__init__(name, target, TrieDrafter)

    def forget(self) -> None:
        """Reset the memory to the answers of the ``warming`` jobs, or to empty without any."""
        memory = Memory(vocab_size=self._vocab_size)
        self._policy = DraftingPolicy(None, memory, None, self._vocab_size, mask_ids=self._mask_ids)
        self._policy.warm_up()
        for job in self._warming:
            memory.of("").remember(job.prompt_ids, job.answer_ids)

    @contextmanager
    def _session(self, verifier: Verifier, request: Request) -> Iterator[Session]:
        session, learned = self._policy.open(verifier, request)
        try:
            yield session
        finally:
            self._policy.remember(session, learned)

    def _ended(self, run: Run, seconds: float) -> Run:
        return replace(
            run,
            decode_seconds=run.decode_seconds + seconds,
            stages=run.stages | {"remember": seconds},
        )


DEFAULT = ("ours", "ours_paper", "ours_plain", "generate", "generate_lookup")
PLAIN, BASELINE, COPYING, STATIC = "ours_plain", "generate", "ours", "generate_static"
LOOKUP = "generate_lookup"
WARM, SPACE = "ours_warm", "ours_space"


def make_decoder(name: str, target: Target, warming: Sequence[Job] = ()) -> Decoder:
    """Make a decoder by name.

    - ``ours`` copies one span, with our default settings.
    - ``ours_tree`` drafts the likeliest tree from the same texts and learns its calibration from
      earlier requests.
    - ``ours_full`` is what ``LLM`` does by default: it also remembers earlier requests.
    - ``ours_warm`` is ``ours_full`` with the answers of ``warming`` known from the start.
    - ``ours_paper`` copies with LLMA's settings (n = 1, k = 20, fixed width).
    - ``ours_plain`` is our loop without drafts.
    - ``ours_exact`` and ``ours_exact_plain`` are ``ours_tree`` and ``ours_plain`` in exact mode.
    - ``ours_space`` is ``ours_full`` with the SPACE adapter of the model's own folder. It gives the
      model's own answers, never recorded ones.
    - ``generate`` is transformers' greedy search, ``generate_lookup`` its prompt lookup with 10
      draft tokens, ``generate_static`` its compiled greedy search over a static cache.
    """
    if name == WARM:
        if not warming:
            raise ValueError(
                f"{WARM} remembers recorded answers of rows that are not measured: take a task "
                "that has more of them than --limit"
            )
        return Remembering(name, target, warming)
    if name not in _MAKERS:
        raise ValueError(f"no decoder {name!r}: take some of {', '.join([*_MAKERS, WARM])}")
    return _MAKERS[name](name, target)


def _paper(name: str, target: Target) -> Decoder:
    make = partial(CopyDrafter.paper, n=1, k=PAPER_K)
    return Ours(name, target, make, token_budget=PAPER_K - 1, apart=True)


def _plain(name: str, target: Target, **modes: Any) -> Decoder:
    return Ours(name, target, NoDrafter, token_budget=0, **modes)


def _tree(name: str, target: Target, **modes: Any) -> Decoder:
    return Ours(name, target, TrieDrafter, **modes)


def _space(name: str, target: Target) -> Decoder:
    return Remembering(name, with_adapter(target, chosen_adapter(target, None)))


_MAKERS: dict[str, Callable[[str, Target], Decoder]] = {
    "ours": lambda name, target: Ours(name, target, CopyDrafter),
    "ours_paper": _paper,
    "ours_plain": _plain,
    "ours_tree": _tree,
    "ours_full": Remembering,
    SPACE: _space,
    "ours_exact": partial(_tree, exact=True),
    "ours_exact_plain": partial(_plain, exact=True),
    "generate": Generate,
    "generate_lookup": partial(Generate, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS),
    "generate_static": GenerateStatic,
}


def capture_passes(
    model: HuggingFaceModel,
    jobs: Sequence[Job],
    *,
    compile: bool,  # noqa: A002
) -> None:
    """Capture CUDA graphs of all widths for every attended length of the jobs, if graphs are used.

    A size is captured at its first use, which takes as long as many passes. A long-lived process
    does that once; without this function a short measurement would time it often.
    """
    if model.graphs is None:
        return
    if compile:
        model.compile()
    engine = Engine(model, kept_prefixes=0)
    longest = max(len(job.prompt_ids) + job.max_new_tokens for job in jobs)
    warm_up_passes(engine, context=longest)
    with_graphs(model)
