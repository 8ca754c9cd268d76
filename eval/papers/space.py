"""SPACE's experiments (arXiv 2402.11809), with published figures next to ours."""

from __future__ import annotations

import json
import zlib
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from eval.experiments.answers import clapnq_questions
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
from eval.papers.published import published
from eval.report.tables import largest_gap, plain_table, ratio_cell
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
from recipes.reader.corpus import load_articles, load_questions
from recipes.reader.evaluate import SHAPES
from recipes.reader.examples import Example, ExampleMaker
from recipes.reader.vocabulary import NONE, PASSAGE

Row = dict[str, Any]
Document = dict[str, Any]
Figures = dict[str, Any]

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
        super().__init__(name, target, make_drafter, token_budget=num_draft_tokens, **modes)
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
            verifier.cost_seconds = lambda rows: 1.0  # type: ignore[method-assign] # noqa: ARG005
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
    return [
        SpaceDecoder(PLAIN, target, NoDrafter, num_draft_tokens=0),
        *(_paper(f"{PAPER}_{k}", adapted, masks[:k]) for k in range(1, len(masks) + 1)),
        *(
            SpaceDecoder(name, _whose(name, target, adapted), make)
            for name, make in drafters.items()
        ),
        *(
            SpaceDecoder(
                f"{name}_{NUM_DRAFT_TOKENS}",
                _whose(name, target, adapted),
                make,
                num_draft_tokens=NUM_DRAFT_TOKENS,
            )
            for name, make in drafters.items()
        ),
        SpaceDecoder(SAMPLED + PLAIN, target, NoDrafter, num_draft_tokens=0, sampled=True),
        _paper(f"{SAMPLED}{PAPER}_{len(useful)}", adapted, useful, sampled=True),
        *(
            SpaceDecoder(
                f"{SAMPLED}{name}_{NUM_DRAFT_TOKENS}",
                _whose(name, target, adapted),
                make,
                num_draft_tokens=NUM_DRAFT_TOKENS,
                sampled=True,
            )
            for name, make in drafters.items()
        ),
    ]


def _whose(name: str, target: Target, adapted: Target) -> Target:
    return target if name == COPY else adapted


def _paper(
    name: str, adapted: Target, masks: Sequence[int], *, sampled: bool = False
) -> SpaceDecoder:
    """Return the paper's decoder: k candidates, and k mask tokens after each and after the root."""
    return SpaceDecoder(
        name,
        adapted,
        partial(PaperSpaceDrafter, masks),
        num_draft_tokens=len(masks),
        sampled=sampled,
        max_rows=(len(masks) + 1) ** 2,
    )


def answered(
    out: Path | None, settings: dict[str, Any], target: Target, adapted: Target, jobs: Sequence[Job]
) -> list[Row]:
    """Answer every question with every decoder in turn; return all rows, with logged ones."""
    results_log = open_results_log(out, settings)
    for ours in (target.ours, adapted.ours):
        capture_passes(ours, jobs, compile=False)
    decoders = make_decoders(target, adapted)
    run_rounds(target, jobs, decoders, results_log, repeats=1, forced=False, keep_answers=True)
    return results_log.measurements


def counted(jobs: Sequence[Job]) -> Sequence[Job]:
    """Return all jobs but the first tenth, which warms up the decoders."""
    return jobs[len(jobs) // _WARMING :]


def figures_of(target: Target, jobs: Sequence[Job], rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of each decoder on the counted jobs, greedy and sampled apart.

    Greedy decoders also have their first differences from plain decoding, with the logits' gaps.
    """
    jobs = counted(jobs)
    ids = {job.job_id for job in jobs}
    own = [row for row in rows if row["example"] in ids]
    greedy = [row for row in own if not row["decoder"].startswith(SAMPLED)]
    sampled = [
        row | {"decoder": row["decoder"].removeprefix(SAMPLED)}
        for row in own
        if row["decoder"].startswith(SAMPLED)
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
            "draft_tokens_per_pass": round(figures["draft_tokens"] / figures["passes"], 2),
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


THEIR_MASKS = 5  # as in the paper's training script
LABELS = {TREE: "SPACE, trees", COPY: "copying", BOTH: "copying and SPACE"}
COUNTED = (
    "Counted are the rows of verify passes. Our trees have their first draft tokens from mask "
    "tokens that are read with the prompt; as published the first pass has none."
)
THEIRS = (
    "Theirs are models of 6 to 70 billion parameters, which had learned from far more text, with "
    "all weights tuned further (on alpaca_gpt4_en and lima, as their repository's script has it), "
    "and other sets: figures of so different models and texts cannot be compared one by one. What "
    "they call lossless is against the model so tuned. Ours is against the model as it was: its "
    "weights are frozen, and what was trained acts on mask tokens' rows alone."
)


def space_reader_table(document: Document) -> str:
    """Return the tables of SPACE on the bundled reader: decoders, targets, published figures."""
    kinds = ", ".join(f"{number} of {kind}" for kind, number in document["kinds"].items())
    parts = [f"Questions that count: {kinds}. {COUNTED}"]
    for title, figures in document["sets"].items():
        parts += set_parts(title, figures, document["settings"])
    (figures,) = document["sets"].values()
    asked, greedy = document["asked"], figures["greedy"]
    best = max(papers(greedy).values(), key=_length)
    over = (
        greedy[f"{BOTH}_{NUM_DRAFT_TOKENS}"]["tokens_per_pass"]
        / greedy[f"{COPY}_{NUM_DRAFT_TOKENS}"]["tokens_per_pass"]
    )
    parts.append(
        f"Asked: SPACE alone {asked['space']} tokens a pass or more; as published it has "
        f"{_length(best):.2f}, our trees {_length(greedy[f'{TREE}_{NUM_DRAFT_TOKENS}']):.2f}. "
        f"Copying and SPACE {asked['beside_copying']} times copying's tokens a pass or more: "
        f"{over:.3f} with {NUM_DRAFT_TOKENS} draft tokens."
    )
    return "\n\n".join([*parts, *beside(document)])


def set_parts(title: str, figures: Figures, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables of one set: all greedy decoders, then the sampled ones."""
    greedy = figures["greedy"]
    yield f"**{title}**: {figures['answers']} answers, greedy"
    yield decoders_table(greedy, figures["answers"])
    yield gains(greedy)
    yield f"**{title}**, sampled at temperature {settings['temperature']} with plain's seeds"
    yield decoders_table(figures["sampled"], figures["answers"])


def decoders_table(decoders: Mapping[str, Figures], answers: int) -> str:
    rows = [
        [
            label_of(name),
            f"{figures['tokens_per_pass']:.2f}",
            f"{figures['draft_tokens_per_pass']:.1f}",
            f"{figures['masks_per_pass']:.1f}",
            f"{figures['identical']} of {answers}",
            largest_gap(figures) if figures.get("differences") else "",
            f"{figures['tokens_per_second']:.1f}",
            "" if name == PLAIN else ratio_cell(figures, "ratio"),
            "" if name == PLAIN else ratio_cell(figures["end_to_end"], "ratio"),
        ]
        for name, figures in decoders.items()
    ]
    titles = ["decoder", "tokens a pass", "draft tokens a pass", "mask tokens a pass"]
    titles += ["same as plain", "largest gap of logits", "tokens/s", "x plain"]
    return plain_table([*titles, "x plain, the prompt's pass included"], rows)


def label_of(name: str) -> str:
    """Return the name of a decoder in a table."""
    if name == PLAIN:
        return "plain"
    if name.startswith(PAPER):
        return f"SPACE as published, k = {name.rpartition('_')[2]}"
    kind = name.removesuffix(f"_{NUM_DRAFT_TOKENS}")
    return f"{LABELS[kind]}, {'by cost' if kind == name else f'{NUM_DRAFT_TOKENS} draft tokens'}"


def gains(greedy: Mapping[str, Figures]) -> str:
    """Return a sentence on what SPACE adds to copying."""
    told = []
    for suffix, words in (
        (f"_{NUM_DRAFT_TOKENS}", f"with {NUM_DRAFT_TOKENS} draft tokens"),
        ("", "by cost"),
    ):
        both, alone = greedy[BOTH + suffix], greedy[COPY + suffix]
        more = 100 * (both["tokens_per_pass"] / alone["tokens_per_pass"] - 1)
        times = both["ratio"] / alone["ratio"]
        told.append(f"{words} {more:+.1f} % tokens a pass, {times:.2f} times its median speed")
    return f"SPACE beside copying: {'; '.join(told)}."


def papers(decoders: Mapping[str, Figures]) -> dict[int, Figures]:
    """Return the figures of the paper's decoders by their number of mask tokens."""
    return {
        int(name.rpartition("_")[2]): figures
        for name, figures in decoders.items()
        if name.startswith(PAPER)
    }


def _length(figures: Figures) -> float:
    return float(figures["tokens_per_pass"])


def space_curves_table(document: Document) -> str:
    """Return tables of held-out tokens per pass over training, and by mask tokens at the end."""
    curve, held_out = document["curve"], document["curve"][-1]["samples"]
    last = curve[-1]
    ks = range(1, len(last["tokens_per_pass"]) + 1)
    with_prompt = last.get("with_prompt")
    told = "tokens a pass, the first draft tokens read with the prompt"
    rows = [
        ["tokens a pass", *(f"{value:.2f}" for value in last["tokens_per_pass"])],
        *[[told, *(f"{value:.2f}" for value in with_prompt or ())]] * bool(with_prompt),
        ["right draft tokens of the k-th mask token", *(f"{100 * v:.0f} %" for v in last["right"])],
    ]
    return "\n\n".join(
        [
            f"Tokens a pass by the paper's layout, walked over {held_out} held-out answers without "
            f"decoding; {100 * last['own']:.1f} % of their tokens are the model's own choice:",
            steps_table(curve),
            f"After {last['step']:,} steps, by the number of mask tokens:",
            plain_table(["", *(f"k = {k}" for k in ks)], rows),
            recipe_line(document["recipe"], document["samples"]["count"]),
        ]
    )


def steps_table(curve: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of tokens per pass: a row per evaluation, a column per number of masks."""
    ks = range(1, len(curve[-1]["tokens_per_pass"]) + 1)
    rows = [
        [f"{one['step']:,}", *(f"{value:.2f}" for value in one["tokens_per_pass"])] for one in curve
    ]
    return plain_table(["steps", *(f"k = {k}" for k in ks)], rows)


def recipe_line(recipe: Mapping[str, Any], samples: int) -> str:
    """Return a sentence on the recipe of an adapter."""
    learned = "the model's own distribution" if recipe["distill"] else "the recorded tokens"
    return (
        f"Trained: mode {recipe['mode']}, rank {recipe['rank']}, {recipe['num_masks']} mask tokens "
        f"that {'share one embedding' if recipe['shared_mask'] else 'have one embedding each'}, "
        f"{samples:,} samples, up to {recipe['num_cuts']} places of each, learning {learned}, "
        f"rate {recipe['learning_rate']:g}."
    )


def beside(document: Document) -> Iterator[str]:
    """Yield text on the adapter's training, and a table of our figures and published ones."""
    adapter, training = document["adapter"], document["adapter"]["training"]
    told = [
        f"The adapter: {adapter['parameters'] / 1e6:.2f} million numbers beside the model's "
        f"{document['parameters'] / 1e6:.1f} million; our trees take {adapter['num_useful']} of "
        f"its {adapter['num_masks']} mask tokens."
    ]
    if "recipe" in training:
        told.append(recipe_line(training["recipe"], training["samples"]))
        told.append(f"{training['steps']:,} steps over {training['tokens']:,} tokens in all.")
    yield " ".join(told)
    k = min(THEIR_MASKS, adapter["num_masks"])
    yield f"SPACE alone, greedy, ours with {k} mask tokens:"
    titles = ["model", "trained", "sets", "tokens a pass", "speed-up over plain"]
    yield plain_table(titles, [*_our_rows(document, k), *_their_rows(document["published"])])
    yield THEIRS


def _our_rows(document: Document, k: int) -> Iterator[list[str]]:
    size, rank = document["parameters"] / 1e6, document["adapter"]["rank"]
    for title, figures in document["sets"].items():
        found = papers(figures["greedy"])[k]
        yield [
            f"ours: {document['settings']['model']}, {size:.0f} million",
            f"gated changes of rank {rank}, base frozen",
            title,
            f"{found['tokens_per_pass']:.2f}",
            f"{found['ratio']:.2f}",
        ]


def _their_rows(figures: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return one row per model of published figures; a setting ends with a comma and the set."""
    by_model: dict[str, list[Mapping[str, Any]]] = {}
    for figure in figures:
        by_model.setdefault(figure["setting"].rpartition(", ")[0], []).append(figure)
    return [
        [
            f"{model} ({own[0]['source']})",
            "all weights",
            " / ".join(one["setting"].rpartition(", ")[2] for one in own),
            " / ".join(f"{one['tokens_per_pass']:.2f}" for one in own),
            " / ".join(one["speedup"] for one in own),
        ]
        for model, own in by_model.items()
    ]


HUMAN_SHARE = 0.5  # share of people's questions; others are generated
SEED = 7
VECTORS = CACHE / "vectors"


def held_out_maker(data: Path, tokenizer: Tokenizer) -> ExampleMaker:
    """Return an example maker over the articles and questions not used to train the reader."""
    articles = [article for article in load_articles(data) if article.held_out]
    questions = [question for question in load_questions(data) if question.held_out]
    questions += clapnq_questions(data)
    words: Any = tokenizer.tokenizer
    return ExampleMaker(
        articles, questions, words, seed=SEED, embedder=load_embedder(), cache=VECTORS
    )


def draw_jobs(
    maker: ExampleMaker, count: int, *, eos_ids: frozenset[int], max_new_tokens: int
) -> list[Job]:
    """Draw distinct questions, in turn with whole passages and with retrieved sentences."""
    shapes = cycle([replace(shape, human_share=HUMAN_SHARE) for shape in SHAPES.values()])
    jobs: dict[tuple[int, ...], Job] = {}
    while len(jobs) < count:
        example = maker.make(next(shapes))
        prompt = tuple(example.token_ids[: example.answer_start + 1])
        references = tuple(passages_of(maker, example))
        name = f"{example.origin}/{len(jobs)}"
        job = Job(name, prompt, references, references, (), max_new_tokens, eos_ids)
        jobs.setdefault(prompt, job)
    return list(jobs.values())


def passages_of(maker: ExampleMaker, example: Example) -> Iterator[Reference]:
    """Yield the passages as slices of a prompt's token ids, as the library does."""
    ids = example.token_ids[: example.answer_start]
    passage, none = maker.id_of[PASSAGE], maker.id_of[NONE]
    starts = [place for place, token in enumerate(ids) if token == passage]
    for number, (start, end) in enumerate(zip(starts, _ends(ids, starts, none), strict=True)):
        yield Reference(tuple(ids[start + 1 : end]), passage_id=f"passage/{number}")


def _ends(ids: Sequence[int], starts: Sequence[int], none: int) -> list[int]:
    """Return the end of each passage: the next one's start, or the refusal after the last."""
    return [*starts[1:], ids.index(none, starts[-1])] if starts else []


QUESTIONS, MAX_NEW_TOKENS = 200, 160
READER_ASKED = {
    "space": 1.8,
    "beside_copying": 1.05,
}  # tokens a pass; and times those of copying alone
READER_FILE = "space-reader.json"


@cli.experiment(
    cli.DATA,
    cli.option("--adapter", type=Path, help="its folder (default: the reader's own)"),
    cli.integer("--limit", QUESTIONS, "questions"),
    cli.integer("--max-new-tokens", MAX_NEW_TOKENS),
    cli.THREADS, cli.DEVICE, table=space_reader_table, shown=("sets",),
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
    data = in_data("text", options.data).parent
    note("loading the reader, then the articles")
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
    rows = answered(options.out, settings, target, adapted, jobs)
    return result(
        "space_reader",
        settings,
        device=options.device,
        parameters=sum(weight.numel() for weight in target.model.parameters()),
        adapter=describe_adapter(adapter),
        asked=READER_ASKED,
        kinds=Counter(job.job_id.partition("/")[0] for job in counted(jobs)),
        sets={"held-out questions": figures_of(target, jobs, rows)},
        published=published("space"),
    )


@cli.experiment(
    cli.option("--run", type=Path, required=True, help="the run's folder, which holds its log"),
    table=space_curves_table, shown=("curve",),
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
