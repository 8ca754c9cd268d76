"""SPACE's experiments (arXiv 2402.11809), with published figures next to ours."""

from __future__ import annotations

import json
import random
import zlib
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from eval import cli
from eval.data import Job, in_data
from eval.decoders import PLAIN, Ours, capture_passes
from eval.experiments.generation import compare, rows_of
from eval.experiments.speed import run_rounds, summarize
from eval.models import (
    Target,
    chosen_adapter,
    default_dtype,
    describe_adapter,
    load_target,
    masks_of,
    useful_masks,
    with_adapter,
)
from eval.papers.bench import published
from eval.report.tables import show
from eval.runner import (
    CACHE,
    current_commit,
    note,
    open_results_log,
    result,
    settings_of,
)
from ragaccel.decoding import Drafter, NoDrafter, Reference, Request, Sampling, Session, Verifier
from ragaccel.drafting import Mixture, PaperSpaceDrafter, SpaceDrafter, TrieDrafter
from ragaccel.models import Tokenizer
from ragaccel.retrieval import load_embedder
from recipes.reader.corpus import HELD_OUT, load_corpus
from recipes.reader.examples import Example, ExampleMaker
from recipes.reader.folder import Folder
from recipes.reader.vocabulary import NONE, PASSAGE

Row = dict[str, Any]

NUM_DRAFT_TOKENS = 24
TEMPERATURE = 0.8
PAPER, TREE, COPY, BOTH = "space_paper", "space_tree", "copy", "copy_space"
SAMPLED = "sampled "
_WARMING = 10  # one question in ten warms the calibrations and does not count


class SpaceDecoder(Ours):
    """Our loop with a drafter, with default pruning or a fixed number of draft tokens.

    With ``num_draft_tokens`` all passes count as equally expensive: verification then depends on
    probabilities alone, and tokens per pass do not depend on the machine's speed. ``sampled``
    decoding samples tokens, with a seed from the question's name.
    """

    def __init__(
        self,
        name: str,
        target: Target,
        make_drafter: Callable[[], Drafter],
        *,
        num_draft_tokens: int | None = None,
        sampled: bool = False,
        **modes: Any,
    ) -> None:
        label = SAMPLED + name if sampled else name
        super().__init__(label, target, make_drafter, token_budget=num_draft_tokens, **modes)
        self._ignores_costs, self._is_sampled = num_draft_tokens is not None, sampled

    def _request(self, job: Job) -> Request:
        request = super()._request(job)
        if not self._is_sampled:
            return request
        seed = zlib.crc32(job.job_id.encode())
        return replace(request, sampling=Sampling(temperature=TEMPERATURE, seed=seed))

    @contextmanager
    def _session(self, verifier: Verifier, request: Request) -> Iterator[Session]:
        if self._ignores_costs:
            verifier.step_costs = lambda: lambda rows: 1.0  # type: ignore[method-assign] # noqa: ARG005
            verifier.mask_seconds = lambda: 0.0  # type: ignore[method-assign]
        with super()._session(verifier, request) as session:
            yield session


def make_decoders(target: Target, adapted: Target) -> list[SpaceDecoder]:
    """Return all decoders: SPACE's over ``adapted``, others over ``target``, without an adapter.

    Decoders with the paper's layout draft with the first k mask tokens, one decoder for every k;
    the first mask tokens do not depend on later ones. Ours use as many as the adapter says repay
    their rows. Copying drafts from the request's own texts, without earlier requests.
    """
    masks, useful = masks_of(adapted), useful_masks(adapted)
    drafters: dict[str, Callable[[], Drafter]] = {
        TREE: partial(SpaceDrafter, useful),
        COPY: TrieDrafter,
        BOTH: lambda: Mixture(TrieDrafter(), SpaceDrafter(useful)),
    }

    def plain(**how: bool) -> SpaceDecoder:
        return SpaceDecoder(PLAIN, target, NoDrafter, num_draft_tokens=0, **how)

    def paper(own: Sequence[int], **how: bool) -> SpaceDecoder:
        """Draft k candidates, and read k mask tokens after each of them and after the root."""
        k, make = len(own), partial(PaperSpaceDrafter, own)
        rows = (k + 1) ** 2
        name = f"{PAPER}_{k}"
        return SpaceDecoder(name, adapted, make, num_draft_tokens=k, max_rows=rows, **how)

    def ours(name: str, width: int | None = None, **how: bool) -> SpaceDecoder:
        whose = target if name == COPY else adapted
        label = f"{name}_{width}" if width else name
        return SpaceDecoder(label, whose, drafters[name], num_draft_tokens=width, **how)

    return [
        plain(),
        *(paper(masks[:k]) for k in range(1, len(masks) + 1)),
        *(ours(name) for name in drafters),
        *(ours(name, NUM_DRAFT_TOKENS) for name in drafters),
        plain(sampled=True),
        paper(useful, sampled=True),
        *(ours(name, NUM_DRAFT_TOKENS, sampled=True) for name in drafters),
    ]


def counted(jobs: Sequence[Job]) -> Sequence[Job]:
    """Return all jobs but the first tenth, which warms up the decoders."""
    return jobs[len(jobs) // _WARMING :]


def figures_of(target: Target, jobs: Sequence[Job], rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of each decoder on the counted jobs, greedy and sampled apart.

    Greedy decoders also have their first differences from plain decoding, with the logits' gaps.
    """
    jobs = counted(jobs)
    ids = {job.job_id for job in jobs}
    ways: dict[bool, list[Row]] = {False: [], True: []}
    for row in rows:
        if row["example"] in ids:
            name = row["decoder"].removeprefix(SAMPLED)
            ways[name != row["decoder"]].append(row | {"decoder": name})
    greedy, sampled = (_figures(ways[is_sampled]) for is_sampled in (False, True))
    by_name = {name: rows_of(name, ways[False]) for name in greedy}
    for name, figures in greedy.items():
        figures["differences"] = compare(target, jobs, by_name, name, PLAIN)["differences"]
    return {"answers": len(jobs), "greedy": greedy, "sampled": sampled}


def _figures(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    answers = {key: row["token_ids"] for key, row in rows_of(PLAIN, rows).items()}
    found = {}
    for name, figures in summarize(rows).items():
        drafted = figures["draft_tokens"] / figures["passes"]
        ratios = ("ratio", "ratio_interval")
        found[name] = {
            **{key: figures[key] for key in ("tokens", "passes", "tokens_per_second", *ratios)},
            "end_to_end": {key: figures["end_to_end"][key] for key in ratios},
            "tokens_per_pass": round(figures["acceptance_length"], 4),
            "draft_tokens_per_pass": round(drafted, 2),
            "masks_per_pass": round(figures["rows_per_pass"] - 1 - drafted, 2),
            "identical": sum(
                list(row["token_ids"]) == list(answers[key])
                for key, row in rows_of(name, rows).items()
            ),
        }
    return found


SEED = 7
VECTORS = CACHE / "vectors"


def held_out_maker(data: Path, tokenizer: Tokenizer) -> ExampleMaker:
    """Return a maker of prompts from the questions not used to train the reader."""
    words: Any = tokenizer.tokenizer
    return ExampleMaker(Folder(load_corpus(data), HELD_OUT, load_embedder(), VECTORS), words)


def draw_jobs(
    maker: ExampleMaker, count: int, *, eos_ids: frozenset[int], max_new_tokens: int
) -> list[Job]:
    """Draw distinct questions, in turn with whole paragraphs and with the nearest sentences."""
    rng = random.Random(SEED)
    jobs: dict[tuple[int, ...], Job] = {}
    for number, whole in zip(maker.folder.order(SEED), cycle((True, False))):
        example = maker.make(number, rng, whole_tokens=300 if whole else 0)
        if example is None:
            continue
        prompt = tuple(example.token_ids[: example.answer_start + 1])
        references = tuple(passages_of(maker, example))
        name = f"{example.question.source}/{len(jobs)}"
        job = Job(name, prompt, references, references, (), max_new_tokens, eos_ids)
        jobs.setdefault(prompt, job)
        if len(jobs) == count:
            break
    return list(jobs.values())


def passages_of(maker: ExampleMaker, example: Example) -> Iterator[Reference]:
    """Yield the passages as slices of a prompt's token ids, as the library does."""
    ids = example.token_ids[: example.answer_start]
    passage, none = maker.id_of[PASSAGE], maker.id_of[NONE]
    starts = [place for place, token in enumerate(ids) if token == passage]
    ends = [*starts[1:], ids.index(none, starts[-1])] if starts else []  # the refusal is last
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        yield Reference(tuple(ids[start + 1 : end]), passage_id=f"passage/{number}")


QUESTIONS, MAX_NEW_TOKENS = 200, 160
READER_ASKED = {
    "space": 1.8,
    "beside_copying": 1.05,
}  # tokens a pass; and times those of copying alone


@cli.experiment(
    cli.DATA,
    cli.option("--adapter", type=Path, help="its folder (default: the reader's own)"),
    cli.integer("--limit", QUESTIONS, "questions"),
    cli.integer("--max-new-tokens", MAX_NEW_TOKENS),
    cli.THREADS, cli.DEVICE, table=show, shown=("sets",),
)  # fmt: skip
def run_space_reader(options: Namespace) -> dict[str, Any]:
    """SPACE on the bundled reader: its own answers to held-out questions, with and without copying.

        python -m eval space_reader --data DATA --out eval/results
        python -m eval space_reader --data DATA --adapter FOLDER --limit 20

    Every question is answered by plain decoding, by the paper's layout with 1 to K mask tokens, by
    our trees of mask predictions, by copying (``TrieDrafter`` without earlier requests) and by
    copying with SPACE. The last three run twice: with the default pruning by the measured cost of a
    pass, and with 24 draft tokens whatever their cost. The decoders take turns on each question and
    keep what they learn; the first tenth of the questions does not count. Then all is repeated with
    sampling and compared to plain sampling with the same seed.
    """
    if options.limit < 1:
        raise ValueError("--limit must be 1 or more")
    data = in_data("qa", options.data).parent
    note("loading the reader, then the questions")
    target = load_target("reader", device=options.device)
    adapter = chosen_adapter(target, options.adapter)
    adapted = with_adapter(target, adapter)
    maker = held_out_maker(data, target.tokenizer)
    jobs = draw_jobs(
        maker,
        options.limit,
        eos_ids=target.tokenizer.eos_ids,
        max_new_tokens=options.max_new_tokens,
    )
    settings = settings_of(
        options, "device", "max_new_tokens", model="reader", dtype=default_dtype(options.device),
        threads=torch.get_num_threads(), examples=len(jobs), warming=len(jobs) - len(counted(jobs)),
        draft_tokens=NUM_DRAFT_TOKENS, temperature=TEMPERATURE,
        num_masks=adapter.num_masks, rank=adapter.rank,
    )  # fmt: skip
    results_log = open_results_log(options.out, settings)
    for ours in (target.ours, adapted.ours):
        capture_passes(ours, jobs, compile=False)
    decoders = make_decoders(target, adapted)
    run_rounds(target, jobs, decoders, results_log, repeats=1, forced=False, keep_answers=True)
    return result(
        "space_reader",
        settings,
        device=options.device,
        parameters=sum(weight.numel() for weight in target.model.parameters()),
        adapter=describe_adapter(adapter),
        asked=READER_ASKED,
        kinds=Counter(job.job_id.partition("/")[0] for job in counted(jobs)),
        sets={"held-out questions": figures_of(target, jobs, results_log.measurements)},
        published=published("space"),
    )


@cli.experiment(
    cli.option("--run", type=Path, required=True, help="the run's folder, which holds its log"),
    table=show, shown=("curve",),
)  # fmt: skip
def run_space_curves(options: Namespace) -> dict[str, Any]:
    """SPACE over training: tokens per pass by number of mask tokens, from a run's log.

        ragaccel train space SAMPLES --out FOLDER --evaluate-every 50 ...
        python -m eval space_curves --run FOLDER-run --out eval/results

    Nothing is trained here: the figures come from the log of a run folder. They count the steps of
    the paper's decoding on held-out answers, without decoding.
    """
    log, run = read_run(options.run)
    curve = curve_of(log)
    if not curve:
        raise ValueError(
            f"{options.run.name} was never evaluated while it trained: train with --evaluate-every "
            "and held-out samples"
        )
    return result(
        "space_curves",
        {"model": run["model"]["model_type"], "commit": current_commit()},
        recipe=run["recipe"],
        samples=run["samples"],
        curve=curve,
        losses=[{"step": row["step"], "loss": row["loss"]} for row in log if "loss" in row],
        published=published("space"),
    )


def read_run(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a run folder's log and its description of the run."""
    try:
        log, run = (
            json.loads((folder / name).read_text(encoding="utf-8"))
            for name in ("log.json", "run.json")
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder.name} holds no whole log.json and run.json: name the folder where a run of "
            "`ragaccel train space` keeps its checkpoints"
        ) from error
    return log, run


def curve_of(log: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the evaluations of a log by step, ascending; for a repeated step the last one."""
    by_step = {
        row["step"]: {"step": row["step"], **row["figures"]} for row in log if "figures" in row
    }
    return [by_step[step] for step in sorted(by_step)]
