"""SPACE's decoders: the paper's layout, our trees, copying, and both, on the same questions."""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from eval.adapters import masks_of, useful_masks
from eval.contenders import PLAIN, Ours
from eval.ledger import kept_beside
from eval.lossless import compare, rows_of
from eval.speed import run_rounds
from eval.summary import summarize
from eval.warm import capture_passes
from ragaccel.decoding.request import Sampling
from ragaccel.decoding.session import NoDrafter
from ragaccel.drafting.policy import Mixture
from ragaccel.drafting.space import PaperSpaceDrafter, SpaceDrafter
from ragaccel.drafting.trie import TrieDrafter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from eval.jobs import Job
    from eval.targets import Target
    from ragaccel.decoding.request import Request
    from ragaccel.decoding.session import Drafter, Session, Verifier

    Row = dict[str, Any]

GUESSES = 24
TEMPERATURE = 0.8
PAPER, TREE, COPY, BOTH = "space_paper", "space_tree", "copy", "copy_space"
SAMPLED = "sampled "
_WARMING = 10  # one of so many questions warms the calibrations and is not counted


class SpaceDecoder(Ours):
    """Our loop with a drafter, as users have it, or with a number of guesses whatever they cost.

    With ``guesses`` every pass counts as equally dear: what is verified then depends on chances
    alone, and so the tokens a pass on no machine's speed. A ``sampled`` one draws its tokens, with
    a seed that the question's name gives.
    """

    def __init__(
        self,
        name: str,
        target: Target,
        make_drafter: Callable[[], Drafter],
        *,
        guesses: int | None = None,
        sampled: bool = False,
        **modes: Any,
    ) -> None:
        super().__init__(name, target, make_drafter, token_budget=guesses, **modes)
        self._ignores_costs, self._is_sampled = guesses is not None, sampled

    def _request(self, job: Job) -> Request:
        request = super()._request(job)
        if not self._is_sampled:
            return request
        seed = zlib.crc32(job.job_id.encode())
        return replace(request, sampling=Sampling(temperature=TEMPERATURE, seed=seed))

    @contextmanager
    def _session(self, verifier: Verifier, request: Request) -> Iterator[Session]:
        if self._ignores_costs:
            verifier = cast("Verifier", EvenCosts(verifier))
        with super()._session(verifier, request) as session:
            yield session


class EvenCosts:
    """A verifier that says that all of its passes cost the same."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    def __getattr__(self, name: str) -> Any:
        """Do all else as it does."""
        return getattr(self._verifier, name)

    def cost_seconds(self, rows: int) -> float:  # noqa: ARG002
        """Count every pass as one second."""
        return 1.0


def make_decoders(target: Target, worn: Target) -> list[SpaceDecoder]:
    """Make all decoders: SPACE's over ``worn``, which has an adapter, the others over ``target``.

    The paper's layout guesses with the first k mask tokens, for every k: the first ones do not
    depend on the later. Ours take as many as the adapter says are worth their rows. Copying
    guesses from the request's own texts and knows no earlier ones.
    """
    masks, useful = masks_of(worn), useful_masks(worn)
    drafters: dict[str, Callable[[], Drafter]] = {
        TREE: partial(SpaceDrafter, useful),
        COPY: TrieDrafter,
        BOTH: lambda: Mixture(TrieDrafter(), SpaceDrafter(useful)),
    }
    return [
        SpaceDecoder(PLAIN, target, NoDrafter, guesses=0),
        *(_paper(f"{PAPER}_{k}", worn, masks[:k]) for k in range(1, len(masks) + 1)),
        *(SpaceDecoder(name, _whose(name, target, worn), make) for name, make in drafters.items()),
        *(
            SpaceDecoder(f"{name}_{GUESSES}", _whose(name, target, worn), make, guesses=GUESSES)
            for name, make in drafters.items()
        ),
        SpaceDecoder(SAMPLED + PLAIN, target, NoDrafter, guesses=0, sampled=True),
        _paper(f"{SAMPLED}{PAPER}_{len(useful)}", worn, useful, sampled=True),
        *(
            SpaceDecoder(
                f"{SAMPLED}{name}_{GUESSES}",
                _whose(name, target, worn),
                make,
                guesses=GUESSES,
                sampled=True,
            )
            for name, make in drafters.items()
        ),
    ]


def _whose(name: str, target: Target, worn: Target) -> Target:
    return target if name == COPY else worn


def _paper(name: str, worn: Target, masks: Sequence[int], *, sampled: bool = False) -> SpaceDecoder:
    """The paper's decoder: k candidates, and k mask tokens behind each of them and the root."""
    return SpaceDecoder(
        name,
        worn,
        partial(PaperSpaceDrafter, masks),
        guesses=len(masks),
        sampled=sampled,
        max_rows=(len(masks) + 1) ** 2,
    )


def answered(
    out: Path | None, settings: dict[str, Any], target: Target, worn: Target, jobs: Sequence[Job]
) -> list[Row]:
    """Have every decoder answer every question, by turns: the rows, those of earlier runs too."""
    ledger = kept_beside(out, settings)
    for ours in (target.ours, worn.ours):
        capture_passes(ours, jobs, compile=False)
    decoders = make_decoders(target, worn)
    run_rounds(target, jobs, decoders, ledger, repeats=1, forced=False, keep_answers=True)
    return ledger.measurements


def counted(jobs: Sequence[Job]) -> Sequence[Job]:
    """All but the first tenth, which warms what decoders learn."""
    return jobs[len(jobs) // _WARMING :]


def figures_of(target: Target, jobs: Sequence[Job], rows: Sequence[Row]) -> dict[str, Any]:
    """Tell what each decoder gave on the jobs that count, greedy and sampled ones apart.

    Of a greedy one also its first differences from plain decoding, with the gap of the two logits.
    """
    jobs = counted(jobs)
    ids = {job.job_id for job in jobs}
    own = [row for row in rows if row["example"] in ids]
    greedy = [row for row in own if not row["contender"].startswith(SAMPLED)]
    sampled = [
        row | {"contender": row["contender"].removeprefix(SAMPLED)}
        for row in own
        if row["contender"].startswith(SAMPLED)
    ]
    found = _figures(greedy)
    by_name = {name: rows_of(name, greedy) for name in found}
    for name, figures in found.items():
        held = compare(target, jobs, by_name, name, PLAIN)
        figures["differences"] = held["differences"]
    return {"answers": len(jobs), "greedy": found, "sampled": _figures(sampled)}


def _figures(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    answers = {key: row["token_ids"] for key, row in rows_of(PLAIN, rows).items()}
    return {
        name: {
            **{key: figures[key] for key in ("tokens", "passes", "tokens_per_second")},
            "ratio": figures["ratio"],
            "ratio_interval": figures["ratio_interval"],
            "end_to_end": {key: figures["end_to_end"][key] for key in ("ratio", "ratio_interval")},
            "tokens_per_pass": round(figures["acceptance_length"], 4),
            "guesses_per_pass": round(figures["draft_tokens"] / figures["passes"], 2),
            "masks_per_pass": round(
                figures["rows_per_pass"] - 1 - figures["draft_tokens"] / figures["passes"], 2
            ),
            "identical": sum(
                list(row["token_ids"]) == list(answers[key])
                for key, row in rows_of(name, rows).items()
            ),
        }
        for name, figures in summarize(rows).items()
    }
