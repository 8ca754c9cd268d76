"""LLMA's experiments (arXiv 2304.04487), with published figures next to ours."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from eval import cli
from eval.data import Recorded, encode_apart, lay_out
from eval.papers.bench import (
    NO_DRAFTS,
    REPLAYED,
    SHIPPED_ANSWERS,
    TREES,
    Bench,
    Entry,
    Row,
    answered_sets,
    counts_of,
    laid_out,
    llma_point,
    open_bench,
    paper_options,
    replay_rows,
)
from eval.report.tables import show
from ragaccel.decoding import Reference

ORIGINAL, UNIFIED, CACHED = "llma_rag_original", "llma_msmarco_davinci003", "mtrag_human_answers"
TABLE_KINDS = ("answers", "passages", "both")
TABLE_POINTS = (NO_DRAFTS, llma_point(), TREES)


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
    bench = open_bench(options, cached=options.cached)
    grid = []
    for name, rows in answered_sets(options, options.sets, options.limit).items():
        where = {"table": 1, "set": name, "references": "passages"}
        grid += bench.sweep(laid_out(rows, bench.tokenizer), TABLE_POINTS, **where)
    same = {}
    shipped = (SHIPPED_ANSWERS,)
    for name, rows in answered_sets(options, options.cached, None, shipped).items():
        asked = with_others(rows, bench.tokenizer)[: options.limit]
        if not asked:
            raise ValueError(f"{name} holds no two answers to a question: choose another --cached")
        same[name] = sum(row["answer"].strip() in others for row, others in asked)
        for kind in TABLE_KINDS:
            recordings = [cached(row, others, bench.tokenizer, kind) for row, others in asked]
            where = {"table": 2, "set": name, "references": kind}
            grid += bench.sweep(recordings, TABLE_POINTS, **where)
    return bench.result("llma_tables", same_answers=same, grid=grid)


def with_others(rows: Sequence[Row], tokenizer: Any) -> list[tuple[Row, list[str]]]:
    """Return each row with the other answers to the same question after the same turns.

    Rows without other answers are left out, and rows whose prompts are too long.
    """

    def task(row: Row) -> tuple[str, ...]:
        return (*(turn["text"] for turn in row.get("history", ())), row["question"])

    asked: defaultdict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        asked[task(row)].append(row)
    return [
        (row, [other["answer"].strip() for other in asked[task(row)] if other is not row])
        for row in rows
        if len(asked[task(row)]) > 1 and lay_out(row, tokenizer) is not None
    ]


def cached(row: Row, others: Sequence[str], tokenizer: Any, kind: str) -> Recorded:
    """Convert a row to a request with cached answers, passages or both as references.

    If passages are not references, the prompt has none either. Cached answers come first, since
    LLMA copies after the first match.
    """
    recorded = lay_out(row | {"passages": []} if kind == "answers" else row, tokenizer)
    assert recorded is not None, "rows with long prompts were left out before"
    known = _references(others if kind != "passages" else (), tokenizer)
    return replace(
        recorded, references=(*known, *recorded.references), apart=(*known, *recorded.apart)
    )


def _references(texts: Sequence[str], tokenizer: Any) -> tuple[Reference, ...]:
    return tuple(
        Reference(encode_apart(text, tokenizer), passage_id=f"more/{number}")
        for number, text in enumerate(texts)
    )


LENGTHS, COPIES = (1, 2, 3, 4, 5), (2, 5, 10, 15, 20, 25, 30)


@cli.experiment(
    *paper_options((ORIGINAL,)),
    cli.option("--n", type=cli.numbers_of, default=LENGTHS, help="tokens that must match"),
    cli.option("--k", type=cli.numbers_of, default=COPIES, help="tokens fed at once"),
    table=show, shown=("grid",), **REPLAYED,
)  # fmt: skip
def run_llma_sweep(options: Namespace) -> dict[str, Any]:
    """LLMA's Figures 4 and 5: the length n that must match and the tokens k fed at once, swept.

        python -m eval llma_sweep --data DATA
        python -m eval llma_sweep --data DATA --model random:llama-135m --limit 10 --out FILE

    Each point has the number of decoding steps, the share of steps with a match, and the accepted
    tokens per match, by replay; with ``--model`` also the speed, with all points in turn on every
    answer. These check the paper's claim that speed-up follows the reduction of decoding steps.
    """
    bench = open_bench(options, n=list(options.n), k=list(options.k))
    points = [llma_point(n, k, is_swept=True) for n in options.n for k in options.k]
    plain, grid = {}, []
    for name, rows in answered_sets(options, options.sets, options.limit).items():
        recordings = laid_out(rows, bench.tokenizer)
        plain[name], *swept = bench.sweep(recordings, [NO_DRAFTS, *points], set=name)
        grid += swept
    return bench.result("llma_sweep", plain=plain, grid=grid)


DIALOGUE_SETS = ("mtrag_un", CACHED)
DIALOGUE_KINDS = ("passages", "answers", "earlier passages")
DIALOGUE_POINTS = (llma_point(), TREES)
LAST_TURN = 7  # later turns are few and share a label


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
    bench = open_bench(options)
    grid: list[Entry] = []
    for name, rows in answered_sets(options, options.sets, options.limit).items():
        has_earlier = any(earlier_passages(row, rows) for row in rows)
        for kind in DIALOGUE_KINDS if has_earlier else DIALOGUE_KINDS[:-1]:
            turns = [
                (turn_of(row), with_earlier(row, rows, recorded, bench.tokenizer, kind))
                for row in rows
                if (recorded := lay_out(row, bench.tokenizer)) is not None
            ]
            grid += dialogue_entries(bench, turns, set=name, references=kind)
    return bench.result("llma_dialogue", grid=grid)


def dialogue_entries(
    bench: Bench, turns: Sequence[tuple[int, Recorded]], **where: str
) -> Iterator[Entry]:
    """Yield an entry for each decoder and turn, and a timed one for all turns."""
    recordings = [recorded for _, recorded in turns]
    times = bench.times("/".join(where.values()), recordings, [NO_DRAFTS, *DIALOGUE_POINTS])
    numbers = [number if number < LAST_TURN else LAST_TURN for number, _ in turns]
    for point, tallies in zip(
        DIALOGUE_POINTS, replay_rows(recordings, DIALOGUE_POINTS), strict=True
    ):
        for turn in sorted(set(numbers)):
            own = [one for one, number in zip(tallies, numbers, strict=True) if number == turn]
            label = str(turn) if turn < LAST_TURN else f"{LAST_TURN} and later"
            at = {"turn": label, "answers": len(own)}
            yield {**where, **point.parameters, **at, **counts_of(own)}
        whole = {"turn": "all", "answers": len(turns), **counts_of(tallies)}
        yield {**where, **point.parameters, **whole, **times.get(point.name, {})}


def with_earlier(
    row: Row, rows: Sequence[Row], recorded: Recorded, tokenizer: Any, kind: str
) -> Recorded:
    """Return a row's request with the references of ``kind`` after this turn's passages.

    Earlier passages that are also in this turn are not repeated.
    """
    texts: list[str] = []
    if kind != "passages":
        texts += [t["text"].strip() for t in row.get("history", ()) if t["role"] != "user"]
    if kind == "earlier passages":
        texts += earlier_passages(row, rows)
    known = _references(texts, tokenizer)
    return replace(
        recorded, references=(*recorded.references, *known), apart=(*recorded.apart, *known)
    )


def turn_of(row: Row) -> int:
    """Return the number of a row's turn in its conversation, from 1."""
    return 1 + sum(turn["role"] == "user" for turn in row.get("history", ()))


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
