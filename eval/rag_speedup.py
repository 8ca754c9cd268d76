"""RAG: is the whole way faster, from a question to the last word of its answer?

    python -m eval.rag_speedup --model reader --data DATA
    python -m eval.rag_speedup --model random:llama-135m --data DATA --limit 20

The passages of all of a task's questions are one index: a file, an embedder, FAISS. Each question
goes from there to its ten best passages, a prompt and an answer: through ``ragaccel.RAG``, through
a chain of LangChain and through a query engine of LlamaIndex, where those are installed, each as
it comes and with plain decoding; and through ``model.generate`` on the same passages. All stream.
They take turns on each question; every LLM begins a round knowing nothing, neither answers nor
prompts. *Asked again* is the one way that has had the question before. A real model gives its own
answers; a random one follows the recorded ones whatever was retrieved. Without the data folder the
documents under ``demos/`` are asked about. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from eval.chains import PACKAGES, STREAMING, is_installed
from eval.ledger import kept_beside
from eval.machine import current_commit
from eval.rag_collection import ABOUT_DOCUMENTS, load_questions, open_collection, share_found
from eval.rag_table import STAGES, rag_speedup_table
from eval.rag_ways import Generate, Ours
from eval.ratios import paired_ratio
from eval.script import measured, new_parser, note, result
from eval.speed import in_turn
from eval.targets import (
    add_dtype_option,
    add_target_options,
    chosen_target,
    describe_target,
)
from ragaccel import load_embedder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eval.examples import Example
    from eval.ledger import Ledger
    from eval.rag_clock import Asked, TimedSource
    from eval.rag_ways import Way
    from eval.targets import Target
    from ragaccel.models.tokenizer import Tokenizer

    Row = dict[str, Any]
    Speeds = dict[tuple[str, int], float]

GENERATE, PLAIN, AGAIN = "generate", "_plain", "_again"


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("rag_speedup", measure, parse(arguments))
    print(rag_speedup_table(document))
    print(json.dumps(document["contenders"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("rag_speedup", __doc__)
    add_target_options(parser)
    add_dtype_option(parser)
    add = parser.add_argument
    add("--task", help="a file of eval/tasks, or a .jsonl file of your own (default: llma)")
    add("--ways", default=",".join(STREAMING), help="comma-separated (default: %(default)s)")
    add("--embedder", help="a folder or name (default: all-MiniLM-L6-v2)")
    add("--k", type=int, default=10, help="passages of a prompt (default: %(default)s)")
    add("--limit", type=int, help="questions to ask (default: all); the index holds all passages")
    add("--repeats", type=int, default=1, help="rounds over all questions")
    add("--max-new-tokens", type=int, default=256)
    add("--out", type=Path, help="result file; rows stand beside it, and a second run goes on")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure whatever the ledger lacks and compare."""
    ways, left_out = chosen_ways(options.ways)
    task, examples = load_questions(options.task, options.data)
    note(f"loading {options.model}")
    target = chosen_target(options, options.dtype)
    asked = questions_of(examples, options.limit, answered=target.is_random)
    if not asked:
        raise ValueError(f"task {task} has no questions with recorded answers to follow")
    settings = {
        **describe_target(options),
        "task": Path(task).name,
        "forced": target.is_random,
        "ways": ",".join(ways),
        **({"left_out": left_out} if left_out else {}),
        **({"embedder": Path(options.embedder).name} if options.embedder else {}),
        "k": options.k,
        "examples": len(asked),
        "repeats": options.repeats,
        "max_new_tokens": options.max_new_tokens,
        "commit": current_commit(),
    }
    ledger = kept_beside(options.out, settings)
    with open_collection(task, examples, load_embedder(options.embedder)) as collection:
        index: dict[str, Any] = {"passages": collection.num_passages}
        if task not in ABOUT_DOCUMENTS:
            index["own_found"] = share_found(collection, asked, options.k)
        contenders = make_ways(ways, target, collection.source, options)
        recorded = recorded_answers(asked, target, options.max_new_tokens)
        run_rounds(contenders, asked, recorded, ledger, options.repeats)
    resumed = [row["resumed"] for row in ledger.rows if "resumed" in row]
    return result(
        "rag_speedup",
        settings,
        device=options.device,
        index=index,
        **({"resumed": resumed} if resumed else {}),
        contenders=compare(ledger.measurements),
    )


def questions_of(
    examples: Sequence[Example], limit: int | None, *, answered: bool
) -> list[Example]:
    """The first questions that stand alone; where they are to be followed, with an answer."""
    alone = (one for one in examples if one.question and not one.history)
    return list(islice((one for one in alone if one.answer or not answered), limit))


def chosen_ways(names: str) -> tuple[list[str], list[str]]:
    """The ways that are asked for and installed, and those that are not.

    Raises:
        ValueError: a way that there is not.
    """
    chosen = names.split(",")
    if unknown := set(chosen) - STREAMING.keys():
        raise ValueError(f"no way {sorted(unknown)[0]!r}: take some of {', '.join(STREAMING)}")
    left_out = [name for name in chosen if name in PACKAGES and not is_installed(name)]
    for name in left_out:
        note(f"{name} is left out: {PACKAGES[name]} is not installed")
    return [name for name in chosen if name not in left_out], left_out


def make_ways(
    ways: Sequence[str], target: Target, source: TimedSource, options: argparse.Namespace
) -> list[Way]:
    """Make each way accelerated and plain, the first also asked again; and without us."""
    settings = {"k": options.k, "max_new_tokens": options.max_new_tokens}
    made: list[Way] = [Generate(GENERATE, target, source, **settings)]
    for way in ways:
        made.append(Ours(way + PLAIN, target, source, way=way, accelerated=False, **settings))
        made.append(Ours(way, target, source, way=way, **settings))
    again = f"{ways[0]}{AGAIN}"
    made.append(Ours(again, target, source, way=ways[0], again=True, **settings))
    return made


def recorded_answers(
    examples: Sequence[Example], target: Target, max_new_tokens: int
) -> dict[str, tuple[int, ...]]:
    """The answers that a random model is to follow, in tokens; none for a real one."""
    if not target.is_random:
        return {}
    return {
        example.example_id: recorded_ids(example.answer, target.tokenizer)[:max_new_tokens]
        for example in examples
    }


def recorded_ids(answer: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """An answer in tokens, with its end: the same whatever prompt a chain puts before it."""
    return (*tokenizer.encode(answer), *sorted(tokenizer.eos_ids)[:1])


def run_rounds(
    ways: Sequence[Way],
    examples: Sequence[Example],
    recorded: Mapping[str, tuple[int, ...]],
    ledger: Ledger,
    repeats: int,
) -> None:
    """Ask every way every question, another one first each time, but for what the ledger holds.

    All is forgotten before every round. A run that goes on within one notes the place: what was
    remembered of the questions before is lost.
    """
    done = {(row["round"], row["example"]) for row in ledger.measurements}
    groups = [(turn, at, one) for turn in range(repeats) for at, one in enumerate(examples)]
    left = [group for group in groups if (group[0], group[2].example_id) not in done]
    if left and left[0][1] > 0:
        turn, _, example = left[0]
        ledger.add({"resumed": {"round": turn, "example": example.example_id}})
    if left:
        note("warming up")
        answer = recorded.get(examples[-1].example_id, ())
        for way in ways:
            way.ask(examples[-1].question, answer)
    last_turn = None
    for number, (turn, at, example) in enumerate(left, start=1):
        if turn != last_turn:
            for way in ways:
                way.forget()
        last_turn = turn
        answer = recorded.get(example.example_id, ())
        rows = {
            way.name: as_row(way.name, example, turn, way.ask(example.question, answer))
            for way in in_turn(ways, at + turn)
        }
        ledger.add(*(rows[way.name] for way in ways))
        seconds = ", ".join(f"{name} {row['total_seconds']:.2f}" for name, row in rows.items())
        note(f"{number}/{len(left)} round {turn + 1} {example.example_id}: seconds {seconds}")


def as_row(name: str, example: Example, turn: int, asked: Asked) -> Row:
    """Put one answer into a row of the ledger."""
    return {
        "example": example.example_id,
        "round": turn,
        "contender": name,
        "prompt_tokens": asked.prompt_tokens,
        "tokens": len(asked.token_ids),
        "passes": asked.passes,
        "text_hash": hashlib.sha256(asked.text.strip().encode()).hexdigest()[:12],
        "first_token_seconds": asked.first_token_seconds,
        "total_seconds": asked.total_seconds,
        "stages": asked.stages,
    }


def compare(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Figures of each way, in order of first appearance.

    ``first_token_seconds`` and ``total_seconds`` are medians of answers, ``stages`` means, so that
    they sum to ``total_seconds_mean``. ``ratio`` and ``ratio_first_token`` are medians of paired
    speeds over the same way with plain decoding, ``ratio_generate`` and
    ``ratio_first_token_generate`` over ``model.generate``. ``same_text`` counts the answers that
    say what plain decoding said, of so many ``answers``.
    """
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row["contender"], []).append(row)
    return {name: _figures(name, by_name) for name in by_name}


def _figures(name: str, by_name: Mapping[str, list[Row]]) -> dict[str, Any]:
    own, plain = by_name[name], by_name.get(plain_of(name), [])
    first_plain = next(rows for other, rows in by_name.items() if other.endswith(PLAIN))
    said = {_key(row): row["text_hash"] for row in plain or first_plain}
    return {
        "first_token_seconds": median(row["first_token_seconds"] for row in own),
        "total_seconds": median(row["total_seconds"] for row in own),
        "total_seconds_mean": fmean(row["total_seconds"] for row in own),
        **_ratios(own, plain, ""),
        **_ratios(own, by_name[GENERATE], "_generate"),
        "stages": {
            stage: fmean(row["stages"][stage] for row in own)
            for stage in STAGES
            if stage in own[0]["stages"]
        },
        "examples": len({row["example"] for row in own}),
        "answers": len(own),
        "prompt_tokens": fmean(row["prompt_tokens"] for row in own),
        "tokens": sum(row["tokens"] for row in own),
        "passes": sum(row["passes"] for row in own),
        "acceptance_length": sum(r["tokens"] for r in own) / sum(r["passes"] for r in own),
        "same_text": sum(row["text_hash"] == said.get(_key(row)) for row in own),
    }


def plain_of(name: str) -> str:
    """The name of the same way with plain decoding."""
    return name.removesuffix(AGAIN).removesuffix(PLAIN) + PLAIN


def _ratios(own: Sequence[Row], other: Sequence[Row], label: str) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for quantity, kind in (("total_seconds", ""), ("first_token_seconds", "_first_token")):
        if other:
            ratio = paired_ratio(_speeds(own, quantity), _speeds(other, quantity))
            key = f"ratio{kind}{label}"
            figures[key], figures[f"{key}_worst"] = ratio.value, ratio.worst
            figures[f"{key}_interval"] = [ratio.low, ratio.high]
    return figures


def _speeds(rows: Sequence[Row], quantity: str) -> Speeds:
    return {_key(row): 1 / row[quantity] for row in rows}


def _key(row: Row) -> tuple[str, int]:
    return row["example"], row["round"]


if __name__ == "__main__":
    main()
