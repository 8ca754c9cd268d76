"""Contenders: the decoders that are compared, each from a job to its tokens and seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from eval.passes import synchronize, watching
from ragaccel.decode.interfaces import NoDrafter
from ragaccel.decode.request import Request
from ragaccel.decode.session import Session
from ragaccel.draft.copying import CopyDrafter
from ragaccel.draft.mixture import Mixture
from ragaccel.draft.recycling import RecyclingDrafter
from ragaccel.draft.trie import TrieDrafter
from ragaccel.engine.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from eval.jobs import Job
    from eval.targets import Target
    from ragaccel.decode.interfaces import Drafter

PAPER_K = 20
PROMPT_LOOKUP_TOKENS = 10  # transformers' own example


@dataclass(frozen=True, slots=True)
class Run:
    """One generation: its new tokens and where the time went.

    ``decode_seconds`` is all after prefill. Prefill is the prompt's pass: with ``generate`` it
    yields the first token as well, with ours the first verify pass does. ``stages`` splits the
    decoding: ``draft``, ``verify`` and ``model`` (inside the model's passes), as far as seen.
    ``rows_of_each`` has the rows of every pass after prefill.
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


class Contender(Protocol):
    """A way to decode."""

    name: str

    def run(self, job: Job) -> Run:
        """Generate greedily, timed."""
        ...


class Ours:
    """Our loop with a drafter. The engine and its cost table last, as in an application.

    ``modes`` are the engine's: ``exact``, ``near_ties``.
    """

    def __init__(
        self,
        name: str,
        target: Target,
        drafter: Drafter,
        *,
        token_budget: int | None = None,
        apart: bool = False,
        **modes: Any,
    ) -> None:
        self.name, self._drafter, self._token_budget, self._apart = (
            name,
            drafter,
            token_budget,
            apart,
        )
        # No prompt is known from a run before: what a contender reads it reads each time.
        self._engine = Engine(target.ours, kept_prefixes=0, **modes)
        self._networks, self._device = target.networks, target.ours.device

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
        with watching(self._networks) as passes:
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
            stages=stages | _model_stage(device, passes.seconds),
            rows_of_each=tuple(passes.rows_of_each),
        )


class Generate:
    """transformers' ``model.generate``, greedy, over its default cache."""

    def __init__(self, name: str, target: Target, **settings: Any) -> None:
        self.name, self._settings, self._model = (
            name,
            settings,
            cast("Any", target.model),
        )
        self._networks = target.networks

    def run(self, job: Job) -> Run:
        """Generate greedily, timed."""
        model, device = self._model, self._model.device
        ids = torch.tensor([job.prompt_ids], device=device)
        synchronize(device)
        start = perf_counter()
        with watching(self._networks) as passes:
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=job.max_new_tokens,
                eos_token_id=sorted(job.eos_ids) or None,
                pad_token_id=min(job.eos_ids, default=0),
                **_GREEDY,
                **self._settings,
            )
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
            stages=_model_stage(device, passes.seconds - passes.first_seconds),
            rows_of_each=(1, *passes.rows_of_each[1:]),
        )


# Spelled out, so that a checkpoint's own sampling settings and penalties do not apply.
_GREEDY = {
    "do_sample": False,
    "temperature": None,
    "top_k": None,
    "top_p": None,
    "repetition_penalty": 1.0,
}

DEFAULT = ("ours", "ours_paper", "ours_plain", "generate", "generate_lookup")
PLAIN, BASELINE, COPYING = "ours_plain", "generate", "ours"


def make_contender(name: str, target: Target) -> Contender:
    """Make a contender by name.

    ``ours`` copies with our default settings, ``ours_tree`` drafts the likeliest tree from the same
    texts and learns its calibration from the requests before, ``ours_recycling`` mixes in what the
    model ranked highest before, ``ours_paper`` copies with LLMA's
    settings (n = 1, k = 20, fixed width), ``ours_plain`` is our loop without drafts;
    ``ours_near_ties`` is ``ours_tree`` with near ties asked again, ``ours_exact`` and
    ``ours_exact_plain`` are ``ours_tree`` and ``ours_plain`` in exact mode; ``generate``
    is transformers' greedy search, ``generate_lookup`` its prompt lookup with 10 guesses.

    Raises:
        ValueError: names the contenders there are.
    """
    if name not in _MAKERS:
        raise ValueError(f"no contender {name!r}: take some of {', '.join(_MAKERS)}")
    return _MAKERS[name](name, target)


def _paper(name: str, target: Target) -> Contender:
    drafter = CopyDrafter.paper(n=1, k=PAPER_K)
    return Ours(name, target, drafter, token_budget=PAPER_K - 1, apart=True)


def _plain(name: str, target: Target, **modes: Any) -> Contender:
    return Ours(name, target, NoDrafter(), token_budget=0, **modes)


def _tree(name: str, target: Target, **modes: Any) -> Contender:
    return Ours(name, target, TrieDrafter(), **modes)


_MAKERS: dict[str, Callable[[str, Target], Contender]] = {
    "ours": lambda name, target: Ours(name, target, CopyDrafter()),
    "ours_paper": _paper,
    "ours_plain": _plain,
    "ours_tree": _tree,
    "ours_recycling": lambda name, target: Ours(
        name, target, Mixture(TrieDrafter(), RecyclingDrafter())
    ),
    "ours_near_ties": partial(_tree, near_ties=True),
    "ours_exact": partial(_tree, exact=True),
    "ours_exact_plain": partial(_plain, exact=True),
    "generate": Generate,
    "generate_lookup": partial(Generate, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS),
}


def _model_stage(device: torch.device, seconds: float) -> dict[str, float]:
    return {"model": seconds} if device.type == "cpu" else {}
