"""Decoders, ours and transformers': each runs a job and returns its tokens and seconds."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import numpy as np
import torch
from transformers import CompileConfig, StaticCache

from eval.measure import FORCED_LOGIT, ForcingCost, count_passes, synchronize, teacher_forced
from eval.models import chosen_adapter, useful_masks, with_adapter
from ragaccel.decoding import NoDrafter, Origin, Request, Session
from ragaccel.drafting import (
    BOUNDARY,
    CONTEXT,
    MIN_PROB,
    ROW_BYTES,
    WIDTH,
    BigramTable,
    Calibration,
    CopyDrafter,
    DraftingPolicy,
    Ids,
    Limits,
    MatchWeights,
    Memory,
    Mixture,
    Table,
    TrieDrafter,
    build_tree,
    compiled,
    count_bigram,
    default_match_weights,
    empty_bigrams,
    empty_suffix_array,
    new_candidates,
    new_scores,
    tree_of,
    with_rows,
)
from ragaccel.engine import Engine, measure_passes, num_splits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from eval.data import Job
    from eval.models import Target
    from ragaccel.decoding import Context, Drafter, DraftTree, Verifier
    from ragaccel.models import HuggingFaceModel


_FADE = 0.5  # of what was seen of a token, when it is seen again


class Adjacency:
    """The tokens that the target model ranked highest after each token, in a bounded table.

    A row is the last few rankings after one token, the latest counting most. When all rows are
    taken, tokens without one are not learned.
    """

    def __init__(self, max_bytes: int = 16 << 20) -> None:
        self._max_rows = max_bytes // ROW_BYTES
        self.table: BigramTable = empty_bigrams()

    def learn(self, token_ids: Ids, ranked: Ids) -> None:
        """See what was ranked highest [N, K] after each of some tokens [N], the best first.

        Places below 0 are empty.
        """
        tokens = np.unique(token_ids[token_ids >= 0])
        table = with_rows(self.table, tokens, self._max_rows)
        weights = np.array([0.5**rank for rank in range(ranked.shape[1])])
        recycle(table, token_ids, ranked, weights)
        self.table = table


@compiled
def recycle(table: BigramTable, token_ids: Ids, ranked: Ids, weights: Table) -> None:
    """Write rankings into a table, in place."""
    for i in range(len(token_ids)):
        if not 0 <= token_ids[i] < len(table.row_of) or table.row_of[token_ids[i]] < 0:
            continue
        row = table.row_of[token_ids[i]]
        table.counts[row] *= _FADE
        table.totals[row] *= _FADE
        table.distinct[row] *= _FADE
        for rank in range(ranked.shape[1]):
            if ranked[i, rank] >= 0:
                count_bigram(table, row, ranked[i, rank], weights[rank])


@dataclass(frozen=True, slots=True, eq=False)
class RecyclingDrafter:
    """Drafts from what the target model ranked highest after each token before.

    Every verified row yields the model's next likeliest tokens, and these are drafted the next
    time. The tree is not of a fixed shape: it grows by the chance of acceptance, a token's share of
    its row, which ``calibration`` corrects by depth.
    """

    adjacency: Adjacency = field(default_factory=Adjacency)
    calibration: Calibration = field(default_factory=Calibration)
    decoding_length: int = 64
    branch_length: int = 12
    match_weights: MatchWeights = field(default_factory=default_match_weights)

    mask_ids: ClassVar[tuple[int, ...]] = ()
    num_alternatives: ClassVar[int] = 7

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Learn from the last verify pass, then draft at most ``budget`` tokens."""
        grown: _Grown = context.shared(self._open)
        self._learn(context, grown)
        budget = max(0, min(budget, self.decoding_length))
        limits = Limits(budget, self.branch_length, WIDTH, WIDTH, MIN_PROB, prior=1.0)
        text = np.array([BOUNDARY] * (CONTEXT - 1) + context.token_ids[-1:], np.int32)
        candidates, empty, grown.num_tokens = grown.candidates, grown.empty, len(context.token_ids)
        candidates.token_ids[0] = context.token_ids[-1]
        nodes = grown.nodes = build_tree(
            empty._replace(token_ids=text), empty, self.adjacency.table, text, self.match_weights,
            self.calibration.odds, grown.none, grown.no_shares, limits, grown.scores, candidates,
        )  # fmt: skip
        origins = ((), *[(Origin("recycled", 1),)] * (len(nodes) - 1))
        return tree_of(candidates, nodes, origins)

    def _open(self, context: Context) -> _Grown:  # noqa: ARG002
        return _Grown(self.decoding_length)

    def _learn(self, context: Context, grown: _Grown) -> None:
        last = context.last
        if last is None or last is grown.learned:
            return
        grown.learned = last
        came = context.token_ids[grown.num_tokens :]
        if len(grown.nodes) and came:
            self.calibration.learn(grown.candidates, grown.nodes, np.array(came, np.int32))
        if not last.sampled.alternatives:
            return
        num = last.tree.num_drafts + 1
        ranked = np.full((num, 1 + self.num_alternatives), -1, np.int32)
        ranked[:, 0] = last.sampled.next_ids[:num]
        for node, others in enumerate(last.sampled.alternatives[:num]):
            ranked[node, 1 : 1 + len(others)] = others[: self.num_alternatives]
        self.adjacency.learn(np.array(last.tree.token_ids[:num], np.int32), ranked)


class _Grown:
    """The last tree of one request, and the arrays that it is built in."""

    def __init__(self, budget: int) -> None:
        self.empty = empty_suffix_array()
        self.none, self.no_shares = np.zeros(0, np.int32), np.zeros(0)
        self.scores, self.candidates = new_scores(), new_candidates(budget, 0)
        self.nodes: Ids = np.zeros(0, np.int32)
        self.learned: object = None
        self.num_tokens = 0  # of the context, when it was grown


@dataclass(frozen=True, slots=True)
class Run:
    """One generation: its new tokens and where the time went.

    ``decode_seconds`` is all after prefill. Prefill is the prompt's pass: with ``generate`` it
    yields the first token as well, with ours the first verify pass does. ``stages`` splits the
    decoding: ``draft``, ``verify`` and ``model`` (inside the model's passes), as far as seen.
    ``rows_of_each`` has the rows of every pass after prefill; ``tokens_of_each`` has what each pass
    emitted, the prompt's included where it yields a token; empty where that was not seen.
    ``first_token_seconds`` is from the start to the first token.
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

    def teacher_forced(self, job: Job) -> AbstractContextManager[ForcingCost]:
        """Make the model follow the job's recorded answer while the context is open."""
        return teacher_forced(self._model, job.prompt_ids, job.answer_ids)

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
        with count_passes(self._model) as passes:
            output = greedy(model, ids, job, **self._settings)
            synchronize(device)
            end = perf_counter()
        new = output[0, len(job.prompt_ids) :].tolist()
        first_rows = passes.rows_of_each[0] - len(job.prompt_ids) + 1  # prompt lookup drafts there
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
    def teacher_forced(self, job: Job) -> Iterator[ForcingCost]:
        """Make the model follow the job's recorded answer while the context is open."""
        self._answer = job.answer_ids
        try:
            yield ForcingCost()
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
    """The settings with which ``generate`` compiles its passes: on a GPU it does so by itself.

    Raises:
        ValueError: on a CPU, where no C++ compiler is found.
    """
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
    """Call ``generate`` as all its decoders do: greedily, to the job's end tokens or length."""
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


PAPER_K = 20
PROMPT_LOOKUP_TOKENS = 10  # transformers' own example


class Decoder(Protocol):
    """A way to decode."""

    name: str

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Do what is done once, before anything is timed."""
        ...

    def teacher_forced(self, job: Job) -> AbstractContextManager[ForcingCost]:
        """Make the model follow the job's recorded answer while the context is open."""
        ...

    def forget(self) -> None:
        """Forget the earlier jobs, but not the latency profile."""
        ...

    def run(self, job: Job) -> Run:
        """Generate greedily, timed."""
        ...

    def held_bytes(self, allocated: int) -> int:
        """Return how many of the bytes allocated between runs this decoder needs."""
        ...


class Ours:
    """Our loop with a drafter. The engine and its cost table last, as in an application.

    What the drafter learns lasts until it is to ``forget``.

    ``modes`` are the engine's: ``exact``.
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
        # No prompt is known from a run before: what a decoder reads it reads each time.
        self._engine = Engine(target.ours, kept_prefixes=0, **modes)
        self._network, self._device = target.ours.network, target.ours.device
        self._graphs = target.ours.graphs

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Do nothing: passes are captured by ``capture_passes``, for all decoders of ours."""

    def forget(self) -> None:
        """Make a new drafter."""
        self._drafter = self._make_drafter()

    def teacher_forced(self, job: Job) -> AbstractContextManager[ForcingCost]:
        """Make the model follow the job's recorded answer while the context is open."""
        return teacher_forced(self._network, job.prompt_ids, job.answer_ids, self._graphs)

    def held_bytes(self, allocated: int) -> int:
        """Return all of it: the little that others hold counts against ours."""
        return allocated

    def know_costs(self, seconds: dict[int, float]) -> None:
        """Begin with what greedy passes cost by their rows, as a run before would have kept it."""
        self._engine.latency_profile.replace("greedy", seconds)

    def run(self, job: Job) -> Run:
        """Generate greedily, timed."""
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
        """Add the time of a session's end; nothing if it remembers nothing."""
        return run

    def _timed(self, session: Session, start: float) -> Run:
        device = self._device
        session.prefill()
        synchronize(device)
        prefilled = perf_counter()
        tokens_of_each: list[int] = []
        first = prefilled
        with count_passes(self._network, self._graphs) as passes:
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
    """Our loop as ``LLM`` runs it: trees over all that the requests before said and answered.

    With a SPACE adapter attached to the target, mask tokens draft too.

    Its memory begins with the answers of ``warming``, which are jobs that are not measured, and
    or empty. To remember an answer counts as decoding.
    """

    def __init__(self, name: str, target: Target, warming: Sequence[Job] = ()) -> None:
        self._warming, self._vocab_size = warming, target.ours.vocab_size
        self._mask_ids = useful_masks(target)
        super().__init__(name, target, TrieDrafter)

    def forget(self) -> None:
        """Reset the memory to its first state."""
        memory = Memory(vocab_size=self._vocab_size)
        self._policy = DraftingPolicy(None, memory, None, self._vocab_size, mask_ids=self._mask_ids)
        self._policy.warm_up()
        for job in self._warming:
            memory.of("").remember(job.prompt_ids, job.answer_ids)

    @contextmanager
    def _session(self, verifier: Verifier, request: Request) -> Iterator[Session]:
        with self._policy.session(verifier, request) as session:
            yield session

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

    ``ours`` copies with our default settings, ``ours_tree`` drafts the likeliest tree from the same
    texts and learns its calibration from the requests before, ``ours_full`` is what ``LLM`` does by
    default, the requests before remembered, ``ours_warm`` the same with the answers of ``warming``
    known from the start, ``ours_recycling`` mixes in what the
    model ranked highest before, ``ours_paper`` copies with LLMA's
    settings (n = 1, k = 20, fixed width), ``ours_plain`` is our loop without drafts;
    ``ours_exact`` and
    ``ours_exact_plain`` are ``ours_tree`` and ``ours_plain`` in exact mode; ``generate``
    is transformers' greedy search, ``generate_lookup`` its prompt lookup with 10 draft tokens,
    ``generate_static`` its greedy search over a static cache, compiled. ``ours_space`` is
    ``ours_full`` with the SPACE adapter that lies in the model's own folder; it gives the model's
    own answers, never recorded ones.

    Raises:
        ValueError: names the decoders there are; or nothing to be warm with, or no adapter.
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
    "ours_recycling": lambda name, target: Ours(
        name, target, lambda: Mixture(TrieDrafter(), RecyclingDrafter())
    ),
    "ours_full": Remembering,
    SPACE: _space,
    "ours_exact": partial(_tree, exact=True),
    "ours_exact_plain": partial(_plain, exact=True),
    "generate": Generate,
    "generate_lookup": partial(Generate, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS),
    "generate_static": GenerateStatic,
}


_STEP = 64  # tokens between two lengths that are looked at


def capture_passes(
    model: HuggingFaceModel,
    jobs: Sequence[Job],
    *,
    compile: bool,  # noqa: A002
) -> None:
    """Capture passes of all widths over every attended length the jobs come to, if any is captured.

    A size is captured where it is first met, which takes as long as many passes: in a process that
    goes on answering once, in a short measurement often.
    """
    if model.graphs is None:
        return
    if compile:
        model.compile()
    engine = Engine(model, kept_prefixes=0)
    for length in contexts(jobs, engine.max_rows):
        room = length if model.max_positions is None else min(length, model.max_positions - 2)
        measure_passes(engine, context=room, repeats=1)


def contexts(jobs: Sequence[Job], max_rows: int) -> list[int]:
    """Return one length of each bucket of attended tokens, in ascending order."""
    first = min(len(job.prompt_ids) for job in jobs)
    last = max(len(job.prompt_ids) + job.max_new_tokens for job in jobs)
    found: dict[int, int] = {}
    for length in range(first, last + _STEP, _STEP):
        found.setdefault((num_splits(length + max_rows) - 1).bit_length(), length)
    return list(found.values())
