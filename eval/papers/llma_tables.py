"""LLMA's Tables 1 and 2: answers copied from ten passages, and from cached answers.

    python -m eval.papers.llma_tables --data DATA
    python -m eval.papers.llma_tables --data DATA --model random:llama-135m --limit 20 --out FILE

Table 1 is the paper's own set, as recorded and as unified: ten passages are the references. Table 2
stands for cache-assisted generation: the paper's outputs are unpublished, so that the references
are what others answered to the same task, the answer itself left out. There the answers
alone are tried (no passages in the prompt either), the passages alone, and both. Decoding steps are
replayed; with ``--model`` a model follows the answers and is timed. Without a data folder both
tables are of what ships.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from eval.papers.decoders import NO_DRAFTS, TREES, llma, open_bench
from eval.papers.llma_layout import llma_tables_table
from eval.papers.published import published
from eval.papers.recorded_sets import (
    ORIGINAL,
    SHIPPED_ANSWERS,
    UNIFIED,
    add_paper_options,
    answered_rows,
    chosen_models,
    describe_paper_run,
    laid_out,
    set_paths,
)
from eval.recordings import encode_apart, lay_out
from eval.script import measured, new_parser, result
from ragaccel.decoding.request import Reference

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from eval.papers.decoders import Bench
    from eval.papers.recorded_sets import Row
    from eval.recordings import Recorded

CACHED = "mtrag_human_answers"
KINDS = ("answers", "passages", "both")
DECODERS = (NO_DRAFTS, llma(), TREES)


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("papers.llma_tables", measure, parse(arguments))
    print(llma_tables_table(document))
    print(json.dumps(document["grid"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("papers.llma_tables", __doc__)
    add_paper_options(parser, (ORIGINAL, UNIFIED))
    parser.add_argument("--cached", default=CACHED, help="file of rag/ with answers to one task")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run both tables."""
    target, tokenizer = chosen_models(options)
    settings = describe_paper_run(options) | {"cached": options.cached}
    bench = open_bench(options, target, settings)
    grid = []
    for name, path in set_paths(options, options.sets).items():
        recordings = laid_out(answered_rows(path, options.limit), tokenizer)
        grid += _points(bench, recordings, table=1, set=name, references="passages")
    same = {}
    for name, path in set_paths(options, options.cached, SHIPPED_ANSWERS).items():
        asked = with_others(answered_rows(path, None), tokenizer)[: options.limit]
        if not asked:
            raise ValueError(f"{name} holds no two answers to a question: choose another --cached")
        same[name] = sum(row["answer"].strip() in others for row, others in asked)
        for kind in KINDS:
            recordings = [cached(row, others, tokenizer, kind) for row, others in asked]
            grid += _points(bench, recordings, table=2, set=name, references=kind)
    return result(
        "llma_tables",
        settings,
        device=options.device,
        module="papers.llma_tables",
        same_answers=same,
        grid=grid,
        published=published("llma"),
    )


def _points(bench: Bench, recordings: Sequence[Recorded], **where: Any) -> list[dict[str, Any]]:
    points = bench.points("/".join(map(str, where.values())), recordings, DECODERS)
    return [where | {"answers": len(recordings)} | point for point in points]


def with_others(rows: Sequence[Row], tokenizer: Any) -> list[tuple[Row, list[str]]]:
    """Each row with what others answered to the same question after the same turns.

    Rows that nobody else answered are left out, and those whose prompts are too long.
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
    """Lay out a row with cached answers, passages or both as references.

    Where passages are no reference the prompt is without them too. Cached answers stand first,
    since LLMA copies from the first place that matches.
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


if __name__ == "__main__":
    main()
