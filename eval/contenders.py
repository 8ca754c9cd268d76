"""Contenders: the decoders that are compared, each from a job to its tokens and seconds."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from eval.forced import following
from eval.passes import synchronize, watching
from eval.runs import Run, model_stage
from eval.stock import Generate, GenerateStatic
from ragaccel.decode.interfaces import NoDrafter
from ragaccel.decode.request import Request
from ragaccel.decode.session import Session
from ragaccel.draft.copying import CopyDrafter
from ragaccel.draft.mixture import Mixture
from ragaccel.draft.recycling import RecyclingDrafter
from ragaccel.draft.trie import TrieDrafter
from ragaccel.engine.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from eval.forced import Forcing
    from eval.jobs import Job
    from eval.targets import Target
    from ragaccel.decode.interfaces import Drafter

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

    ``modes`` are the engine's: ``exact``, ``near_ties``.
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
        self._networks, self._device = target.networks, target.ours.device
        self._graphs = target.ours.graphs

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Do nothing: passes are captured by ``eval.warm``, for all contenders of ours."""

    def forget(self) -> None:
        """Take a new drafter, which has learned nothing."""
        self._drafter = self._make_drafter()

    def following(self, job: Job) -> AbstractContextManager[Forcing]:
        """Make the model follow the job's recorded answer while the context is open."""
        return following(self._networks, job.prompt_ids, job.answer_ids, self._graphs)

    def held_bytes(self, allocated: int) -> int:
        """All of it: what little the others hold is counted against ours."""
        return allocated

    def know_costs(self, seconds: dict[int, float]) -> None:
        """Begin with what greedy passes cost by their rows, as a run before would have kept it."""
        self._engine.costs.replace("greedy", seconds)

    def run(self, job: Job) -> Run:
        """Generate greedily, timed."""
        request = Request(
            prompt_ids=job.prompt_ids,
            references=job.apart if self._apart else job.references,
            max_new_tokens=job.max_new_tokens,
            eos_ids=job.eos_ids,
        )
        verifier = self._engine.open(request)
        try:
            return self._timed(
                Session(verifier, self._drafter, request, token_budget=self._token_budget)
            )
        finally:
            verifier.close()

    def _timed(self, session: Session) -> Run:
        device = self._device
        synchronize(device)
        start = perf_counter()
        session.prefill()
        synchronize(device)
        prefilled = perf_counter()
        with watching(self._networks, self._graphs) as passes:
            for _ in session:
                pass
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
        )


DEFAULT = ("ours", "ours_paper", "ours_plain", "generate", "generate_lookup")
PLAIN, BASELINE, COPYING, STATIC = "ours_plain", "generate", "ours", "generate_static"


def make_contender(name: str, target: Target) -> Contender:
    """Make a contender by name.

    ``ours`` copies with our default settings, ``ours_tree`` drafts the likeliest tree from the same
    texts and learns its calibration from the requests before, ``ours_recycling`` mixes in what the
    model ranked highest before, ``ours_paper`` copies with LLMA's
    settings (n = 1, k = 20, fixed width), ``ours_plain`` is our loop without drafts;
    ``ours_near_ties`` is ``ours_tree`` with near ties asked again, ``ours_exact`` and
    ``ours_exact_plain`` are ``ours_tree`` and ``ours_plain`` in exact mode; ``generate``
    is transformers' greedy search, ``generate_lookup`` its prompt lookup with 10 guesses,
    ``generate_static`` its greedy search over a static cache, compiled on a GPU.

    Raises:
        ValueError: names the contenders there are.
    """
    if name not in _MAKERS:
        raise ValueError(f"no contender {name!r}: take some of {', '.join(_MAKERS)}")
    return _MAKERS[name](name, target)


def _paper(name: str, target: Target) -> Contender:
    make = partial(CopyDrafter.paper, n=1, k=PAPER_K)
    return Ours(name, target, make, token_budget=PAPER_K - 1, apart=True)


def _plain(name: str, target: Target, **modes: Any) -> Contender:
    return Ours(name, target, NoDrafter, token_budget=0, **modes)


def _tree(name: str, target: Target, **modes: Any) -> Contender:
    return Ours(name, target, TrieDrafter, **modes)


_MAKERS: dict[str, Callable[[str, Target], Contender]] = {
    "ours": lambda name, target: Ours(name, target, CopyDrafter),
    "ours_paper": _paper,
    "ours_plain": _plain,
    "ours_tree": _tree,
    "ours_recycling": lambda name, target: Ours(
        name, target, lambda: Mixture(TrieDrafter(), RecyclingDrafter())
    ),
    "ours_near_ties": partial(_tree, near_ties=True),
    "ours_exact": partial(_tree, exact=True),
    "ours_exact_plain": partial(_plain, exact=True),
    "generate": Generate,
    "generate_lookup": partial(Generate, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS),
    "generate_static": GenerateStatic,
}
