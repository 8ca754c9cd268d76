"""LLMA's experiments (arXiv 2304.04487), with published figures next to ours."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import StatisticsError, correlation, linear_regression
from typing import Any

from eval import cli
from eval.data import Recorded, encode_apart, lay_out
from eval.decoders import PLAIN
from eval.experiments.replay import Tally
from eval.papers.bench import (
    NO_DRAFTS,
    ORIGINAL,
    REPLAYED,
    SHIPPED_ANSWERS,
    TREES,
    UNIFIED,
    Bench,
    PaperDecoder,
    Row,
    answered_rows,
    chosen_models,
    describe_paper_run,
    laid_out,
    llma_decoder,
    open_bench,
    paper_options,
    set_paths,
)
from eval.papers.published import published
from eval.report.tables import show
from eval.runner import note, result
from ragaccel.decoding import Reference

Document = dict[str, Any]
Point = dict[str, Any]


CACHED = "mtrag_human_answers"
TABLE_KINDS = ("answers", "passages", "both")
TABLE_DECODERS = (NO_DRAFTS, llma_decoder(), TREES)


@cli.experiment(
    *paper_options((ORIGINAL, UNIFIED)),
    cli.option("--cached", default=CACHED, help="file of rag/ with answers to one task"),
    table=show, shown=("grid",), **REPLAYED,
)  # fmt: skip
def run_llma_tables(options: Namespace) -> dict[str, Any]:
    """LLMA's Tables 1 and 2: answers copied from ten passages, and from cached answers.

        python -m eval llma_tables --data DATA
        python -m eval llma_tables --data DATA --model random:llama-135m --limit 20 --out FILE

    Table 1 has the paper's own set, as recorded and in the unified schema: ten passages are the
    references. Table 2 has cache-assisted generation. The paper's outputs are unpublished, so the
    references are the other recorded answers to the same task. The references are these answers
    alone (then the prompt has no passages), the passages alone, or both. Decoding steps are
    replayed; with ``--model`` a model follows the answers and is timed. Without a data folder both
    tables use the shipped sets.
    """
    target, tokenizer = chosen_models(options)
    settings = describe_paper_run(options) | {"cached": options.cached}
    bench = open_bench(options, target, settings)
    grid = []
    for name, path in set_paths(options, options.sets).items():
        recordings = laid_out(answered_rows(path, options.limit), tokenizer)
        grid += _table_points(bench, recordings, table=1, set=name, references="passages")
    same = {}
    for name, path in set_paths(options, options.cached, SHIPPED_ANSWERS).items():
        asked = with_others(answered_rows(path, None), tokenizer)[: options.limit]
        if not asked:
            raise ValueError(f"{name} holds no two answers to a question: choose another --cached")
        same[name] = sum(row["answer"].strip() in others for row, others in asked)
        for kind in TABLE_KINDS:
            recordings = [cached(row, others, tokenizer, kind) for row, others in asked]
            grid += _table_points(bench, recordings, table=2, set=name, references=kind)
    return result(
        "llma_tables",
        settings,
        device=options.device,
        same_answers=same,
        grid=grid,
        published=published("llma"),
    )


def _table_points(
    bench: Bench, recordings: Sequence[Recorded], **where: Any
) -> list[dict[str, Any]]:
    points = bench.points("/".join(map(str, where.values())), recordings, TABLE_DECODERS)
    return [where | {"answers": len(recordings)} | point for point in points]


def with_others(rows: Sequence[Row], tokenizer: Any) -> list[tuple[Row, list[str]]]:
    """Return each row with the other answers to the same question after the same turns.

    Rows without other answers are left out, and rows whose prompts are too long.
    """
    asked: defaultdict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        asked[_task(row)].append(row)
    return [
        (row, [other["answer"].strip() for other in asked[_task(row)] if other is not row])
        for row in rows
        if len(asked[_task(row)]) > 1 and lay_out(row, tokenizer) is not None
    ]


def _task(row: Row) -> tuple[str, ...]:
    return (*(turn["text"] for turn in row.get("history", ())), row["question"])


def cached(row: Row, others: Sequence[str], tokenizer: Any, kind: str) -> Recorded:
    """Convert a row to a request with cached answers, passages or both as references.

    If passages are not references, the prompt has none either. Cached answers come first, since
    LLMA copies after the first match.
    """
    recorded = lay_out(row | {"passages": []} if kind == "answers" else row, tokenizer)
    assert recorded is not None, "rows with long prompts were left out before"
    known = tuple(_references(others, tokenizer)) if kind != "passages" else ()
    return replace(
        recorded,
        references=(*known, *recorded.references),
        apart=(*known, *recorded.apart),
    )


def _references(texts: Sequence[str], tokenizer: Any) -> Iterator[Reference]:
    for number, text in enumerate(texts):
        yield Reference(encode_apart(text, tokenizer), passage_id=f"cached/{number}")


LENGTHS, COPIES = (1, 2, 3, 4, 5), (2, 5, 10, 15, 20, 25, 30)


@cli.experiment(
    *paper_options((ORIGINAL,)),
    cli.option("--n", type=cli.numbers_of, default=LENGTHS, help="tokens that must match"),
    cli.option("--k", type=cli.numbers_of, default=COPIES, help="tokens fed at once"),
    table=show, shown=("grid", "follows"), **REPLAYED,
)  # fmt: skip
def run_llma_sweep(options: Namespace) -> dict[str, Any]:
    """LLMA's Figures 4 and 5: the length n that must match and the tokens k fed at once, swept.

        python -m eval llma_sweep --data DATA
        python -m eval llma_sweep --data DATA --model random:llama-135m --limit 10 --out FILE

    Each point has the number of decoding steps, the share of steps with a match, and the accepted
    tokens per match, by replay; with ``--model`` also the speed, with all points in turn on every
    answer. These check the paper's claim that speed-up follows the reduction of decoding steps, by
    the correlation of both and a fitted line, over points and over answers.
    """
    target, tokenizer = chosen_models(options)
    settings = describe_paper_run(options) | {"n": list(options.n), "k": list(options.k)}
    bench = open_bench(options, target, settings)
    grid, plain = [], {}
    for name, path in set_paths(options, options.sets).items():
        recordings = laid_out(answered_rows(path, options.limit), tokenizer)
        points = swept(bench, name, recordings, [(n, k) for n in options.n for k in options.k])
        plain[name] = points.pop(0)
        grid += points
    return result(
        "llma_sweep",
        settings,
        device=options.device,
        plain=plain,
        grid=grid,
        follows=follows(grid, bench.results_log.measurements) if target else None,
        published=published("llma"),
    )


def swept(
    bench: Bench, name: str, recordings: Sequence[Recorded], grid: Sequence[tuple[int, int]]
) -> list[Point]:
    """Run plain decoding and every (n, k) of the grid on a set; return the points in this order."""
    named = {f"n{n}_k{k}": (n, k) for n, k in grid}
    decoders = [NO_DRAFTS, *(llma_decoder(n, k, label) for label, (n, k) in named.items())]
    points = []
    for point in bench.points(name, recordings, decoders):
        label = point.pop("decoder")
        place = dict(zip(("n", "k"), named.get(label, ()), strict=False))
        points.append({"set": name, "answers": len(recordings), **place, **point})
    return points


def follows(grid: Sequence[Point], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Fit speed-up over plain decoding to the reduction of decoding steps.

    The fits are over the points of the grid; over the points of one k, whose passes cost the same;
    and over single answers at every point. On a line through (1, 1) with slope 1 the speed-up would
    equal the reduction; the difference is the cost of wider passes and of drafting.
    """
    pairs = [(point["timed_tokens_per_pass"], point["ratio"]) for point in grid]
    copies = sorted({point["k"] for point in grid})
    return {
        "points": fitted(pairs),
        "by_k": {
            str(k): fitted([pair for pair, p in zip(pairs, grid, strict=True) if p["k"] == k])
            for k in copies
        },
        "answers": fitted(answer_pairs(rows)),
    }


def fitted(pairs: Sequence[tuple[float, float]]) -> dict[str, Any] | None:
    """Fit a line and compute the correlation; return None if the pairs do not differ."""
    reduction, speedup = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    try:
        line, together = linear_regression(reduction, speedup), correlation(reduction, speedup)
    except StatisticsError:
        return None
    return {
        "pairs": len(pairs),
        "correlation": round(together, 4),
        "slope": round(line.slope, 4),
        "intercept": round(line.intercept, 4),
    }


def answer_pairs(rows: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return (reduction of steps, speed-up) of each answer at each point, paired by round."""
    plain = {
        (row["example"], row["round"]): row["decode_seconds"]
        for row in rows
        if row["decoder"] == PLAIN
    }
    return [
        (row["tokens"] / row["passes"], plain[row["example"], row["round"]] / row["decode_seconds"])
        for row in rows
        if row["decoder"] != PLAIN
    ]


DIALOGUE_SETS = ("mtrag_un", "mtrag_human_answers")
DIALOGUE_KINDS = ("passages", "answers", "earlier passages")
LAST_TURN = 7  # later turns are few and share a label
DIALOGUE_DECODERS = (llma_decoder(), TREES)


@dataclass(frozen=True, slots=True)
class Turn:
    """A row as a request with its references, and its turn number in the conversation."""

    number: int
    recorded: Recorded

    @property
    def label(self) -> str:
        """The turn's label; late turns share one."""
        return str(self.number) if self.number < LAST_TURN else f"{LAST_TURN} and later"


@cli.experiment(
    *paper_options(DIALOGUE_SETS),
    table=show, shown=("grid",), **REPLAYED,
)  # fmt: skip
def run_llma_dialogue(options: Namespace) -> dict[str, Any]:
    """LLMA over several turns: are earlier answers, and earlier passages, worth copying from?

        python -m eval llma_dialogue --data DATA
        python -m eval llma_dialogue --data DATA --model random:llama-135m --limit 20 --out FILE

    Three kinds of references are compared: this turn's passages; with earlier answers of the
    conversation; and with the passages of its earlier turns too, if the file has them
    (mtrag_human_answers does; mtrag_un has one turn of each conversation). Steps are reported by
    turn. The prompt always contains the earlier turns: our drafter copies from the prompt by
    default, LLMA never does.
    """
    target, tokenizer = chosen_models(options)
    settings = describe_paper_run(options)
    bench = open_bench(options, target, settings)
    grid: list[dict[str, Any]] = []
    for name, path in set_paths(options, options.sets).items():
        rows = answered_rows(path, options.limit)
        for kind in kinds_of(rows):
            turns = list(laid_out_turns(rows, tokenizer, kind))
            grid += _dialogue_points(bench, f"{name}/{kind}", turns)
    return result(
        "llma_dialogue",
        settings,
        device=options.device,
        grid=grid,
        published=published("llma"),
    )


def kinds_of(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the kinds of references; without earlier passages if no row has any."""
    return (
        DIALOGUE_KINDS if any(earlier_passages(row, rows) for row in rows) else DIALOGUE_KINDS[:-1]
    )


def _dialogue_points(bench: Bench, name: str, turns: Sequence[Turn]) -> Iterator[dict[str, Any]]:
    """Yield a point for each decoder and turn, and a timed one for all turns."""
    of_set, _, kind = name.partition("/")
    times = bench.times(name, [turn.recorded for turn in turns], [NO_DRAFTS, *DIALOGUE_DECODERS])
    for decoder in DIALOGUE_DECODERS:
        tallies = replayed(turns, decoder)
        for label, (answers, tally) in tallies.items():
            point = {
                **{"set": of_set, "references": kind, "decoder": decoder.name},
                **{"turn": label, "answers": answers, **tally.counts()},
            }
            yield point | (times.get(decoder.name, {}) if label == "all" else {})
        note(f"{name}: {decoder.name} {tallies['all'][1].counts()['tokens_per_pass']} a pass")


def replayed(turns: Sequence[Turn], decoder: PaperDecoder) -> dict[str, tuple[int, Tally]]:
    """Replay turns in order; return (number of answers, tally) by label and for all turns."""
    labels = [*dict.fromkeys(turn.label for turn in sorted(turns, key=attrgetter("number"))), "all"]
    tallies = {label: Tally() for label in labels}
    answers: Counter[str] = Counter()
    replayed = decoder.replayed()
    for turn in turns:
        one = Tally()
        replayed.replay(turn.recorded, one)
        for label in (turn.label, "all"):
            tallies[label].add(one)
            answers[label] += 1
    return {label: (answers[label], tallies[label]) for label in labels}


def laid_out_turns(rows: Sequence[Row], tokenizer: Any, kind: str) -> Iterator[Turn]:
    """Yield rows as requests with the references of ``kind``, this turn's passages first.

    Earlier passages that are also in this turn are not repeated.
    """
    for row in rows:
        recorded = lay_out(row, tokenizer)
        if recorded is None:
            continue
        texts = earlier_answers(row) if kind != "passages" else []
        if kind == "earlier passages":
            texts += earlier_passages(row, rows)
        known = tuple(
            Reference(encode_apart(text, tokenizer), passage_id=f"earlier/{number}")
            for number, text in enumerate(texts)
        )
        yield Turn(
            turn_of(row),
            replace(
                recorded,
                references=(*recorded.references, *known),
                apart=(*recorded.apart, *known),
            ),
        )


def turn_of(row: Row) -> int:
    """Return the number of a row's turn in its conversation, from 1."""
    return 1 + sum(turn["role"] == "user" for turn in row.get("history", ()))


def earlier_answers(row: Row) -> list[str]:
    return [t["text"].strip() for t in row.get("history", ()) if t["role"] != "user"]


def earlier_passages(row: Row, rows: Sequence[Row]) -> list[str]:
    """Return the passages of the conversation's earlier turns that the file has."""
    conversation = str(row["id"]).partition("<::>")[0]
    own = {passage["text"] for passage in row["passages"]}
    found = {
        passage["text"]: None
        for other in rows
        if str(other["id"]).partition("<::>")[0] == conversation and turn_of(other) < turn_of(row)
        for passage in other["passages"]
    }
    return [text for text in found if text not in own]
