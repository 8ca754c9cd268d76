"""Contenders: the decoders that are compared, each from a job to its tokens and seconds."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from eval.adapters import chosen_adapter, useful_masks, wearing
from eval.forced import following
from eval.passes import synchronize, watching
from eval.recycling import RecyclingDrafter
from eval.runs import Run, model_stage
from eval.stock import Generate, GenerateStatic
from ragaccel.decoding.request import Request
from ragaccel.decoding.session import NoDrafter, Session
from ragaccel.drafting.memory import Memory
from ragaccel.drafting.ngram import CopyDrafter
from ragaccel.drafting.policy import DraftingPolicy, Mixture
from ragaccel.drafting.trie import TrieDrafter
from ragaccel.engine.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from eval.forced import Forcing
    from eval.jobs import Job
    from eval.targets import Target
    from ragaccel.decoding.session import Drafter, Verifier

PAPER_K = 20
PROMPT_LOOKUP_TOKENS = 10  # transformers' own example


class Contender(Protocol):
    """A way to decode."""

    name: str

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Do what is done once, before anything is timed."""
        ...

    def following(self, job: Job) -> AbstractContextManager[Forcing]:
        """Make the model follow the job's recorded answer while the context is open."""
        ...

    def forget(self) -> None:
        """Know nothing of the jobs before; what passes cost aside."""
        ...

    def run(self, job: Job) -> Run:
        """Generate greedily, timed."""
        ...

    def held_bytes(self, allocated: int) -> int:
        """How much of what is allocated on the device between runs it needs itself."""
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
        # No prompt is known from a run before: what a contender reads it reads each time.
        self._engine = Engine(target.ours, kept_prefixes=0, **modes)
        self._network, self._device = target.ours.network, target.ours.device
        self._graphs = target.ours.graphs

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Do nothing: passes are captured by ``eval.warm``, for all contenders of ours."""

    def forget(self) -> None:
        """Take a new drafter, which has learned nothing."""
        self._drafter = self._make_drafter()

    def following(self, job: Job) -> AbstractContextManager[Forcing]:
        """Make the model follow the job's recorded answer while the context is open."""
        return following(self._network, job.prompt_ids, job.answer_ids, self._graphs)

    def held_bytes(self, allocated: int) -> int:
        """All of it: what little the others hold is counted against ours."""
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
        """Take into account what a session's end took: nothing where nothing is remembered."""
        return run

    def _timed(self, session: Session, start: float) -> Run:
        device = self._device
        session.prefill()
        synchronize(device)
        prefilled = perf_counter()
        tokens_of_each: list[int] = []
        first = prefilled
        with watching(self._network, self._graphs) as passes:
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

    Where the target wears a SPACE adapter it guesses at mask tokens too.

    Its memory begins with the answers of ``warming``, which are jobs that are not measured, and
    with nothing where there are none. To remember an answer counts as decoding.
    """

    def __init__(self, name: str, target: Target, warming: Sequence[Job] = ()) -> None:
        self._warming, self._vocab_size = warming, target.ours.vocab_size
        self._mask_ids = useful_masks(target)
        super().__init__(name, target, TrieDrafter)

    def forget(self) -> None:
        """Know what the memory began with, and no more."""
        memory = Memory(vocab_size=self._vocab_size)
        self._guessing = DraftingPolicy(
            None, memory, None, self._vocab_size, mask_ids=self._mask_ids
        )
        self._guessing.warm_up()
        for job in self._warming:
            memory.of("").remember(job.prompt_ids, job.answer_ids)

    @contextmanager
    def _session(self, verifier: Verifier, request: Request) -> Iterator[Session]:
        with self._guessing.session(verifier, request) as session:
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


def make_contender(name: str, target: Target, warming: Sequence[Job] = ()) -> Contender:
    """Make a contender by name.

    ``ours`` copies with our default settings, ``ours_tree`` drafts the likeliest tree from the same
    texts and learns its calibration from the requests before, ``ours_full`` is what ``LLM`` does by
    default, the requests before remembered, ``ours_warm`` the same with the answers of ``warming``
    known from the start, ``ours_recycling`` mixes in what the
    model ranked highest before, ``ours_paper`` copies with LLMA's
    settings (n = 1, k = 20, fixed width), ``ours_plain`` is our loop without drafts;
    ``ours_exact`` and
    ``ours_exact_plain`` are ``ours_tree`` and ``ours_plain`` in exact mode; ``generate``
    is transformers' greedy search, ``generate_lookup`` its prompt lookup with 10 guesses,
    ``generate_static`` its greedy search over a static cache, compiled. ``ours_space`` is
    ``ours_full`` with the SPACE adapter that lies in the model's own folder; it gives the model's
    own answers, never recorded ones.

    Raises:
        ValueError: names the contenders there are; or nothing to be warm with, or no adapter.
    """
    if name == WARM:
        if not warming:
            raise ValueError(
                f"{WARM} remembers recorded answers of rows that are not measured: take a task "
                "that has more of them than --limit"
            )
        return Remembering(name, target, warming)
    if name not in _MAKERS:
        raise ValueError(f"no contender {name!r}: take some of {', '.join([*_MAKERS, WARM])}")
    return _MAKERS[name](name, target)


def _paper(name: str, target: Target) -> Contender:
    make = partial(CopyDrafter.paper, n=1, k=PAPER_K)
    return Ours(name, target, make, token_budget=PAPER_K - 1, apart=True)


def _plain(name: str, target: Target, **modes: Any) -> Contender:
    return Ours(name, target, NoDrafter, token_budget=0, **modes)


def _tree(name: str, target: Target, **modes: Any) -> Contender:
    return Ours(name, target, TrieDrafter, **modes)


def _space(name: str, target: Target) -> Contender:
    return Remembering(name, wearing(target, chosen_adapter(target, None)))


_MAKERS: dict[str, Callable[[str, Target], Contender]] = {
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
