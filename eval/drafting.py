"""What drafting costs: indexing references and one draft, without any model.

    python -m eval.drafting
    python -m eval.drafting --tree --data DATA --out eval/results/drafting.json

Trees are measured in ``eval.tree_drafting``; the rest is on copying one span, on made-up text, and
prints one JSON line. The text is a seeded mixture as documents are:
Zipf-distributed tokens in which a third of the sentences come back. The answer copies runs of
it and says something of its own in between. The prompt holds the references, so that the index
holds every token twice; ``build_tokens_per_second`` counts the reference tokens once, per second
of processor time, so that what else the machine does is left out; steps are wall-clock.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, process_time
from typing import TYPE_CHECKING

import numpy as np

from eval.draft_tables import drafting_table
from eval.script import measured, new_parser
from eval.tree_drafting import measure_trees
from ragaccel.decoding.request import Reference
from ragaccel.decoding.session import Context
from ragaccel.drafting.ngram import CopyDrafter, NgramIndex

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZES = (1_000, 8_000, 32_000, 128_000)


def sentences(rng: random.Random, num_tokens: int, vocab_size: int = 32_000) -> list[list[int]]:
    """Make sentences of 8-30 tokens, ``num_tokens`` in all; a third repeat an earlier one."""
    zipf = np.random.default_rng(rng.randrange(2**32)).zipf(1.3, num_tokens + 64) % vocab_size
    made: list[list[int]] = []
    used = 0
    while used < num_tokens:
        size = rng.randrange(8, 31)
        fresh = zipf[used : used + size].tolist()
        made.append(rng.choice(made) if made and rng.random() < 0.33 else fresh)
        used += len(made[-1])
    return made


def make_case(num_tokens: int, seed: int) -> tuple[Context, list[int]]:
    """Make a context with ten references and an answer of 600 tokens that quotes them."""
    rng = random.Random(seed)
    references, prompt, answer = [], [], []
    for i in range(10):
        text = [t for sentence in sentences(rng, num_tokens // 10) for t in sentence]
        references.append(Reference(tuple(text), 1.0 - i / 20, f"p{i}"))
        prompt += text
    question = [t for sentence in sentences(rng, 40) for t in sentence]
    while len(answer) < 600:
        text = rng.choice(references).token_ids
        start = rng.randrange(max(1, len(text) - 30))
        answer += [*text[start : start + rng.randrange(4, 30)], *question[: rng.randrange(6)]]
    return Context([*prompt, *question], references), answer[:600]


def measure(num_tokens: int, repeats: int) -> dict[str, float]:
    """Time index builds and every draft of answers decoded three tokens a step."""
    builds, drafts = [], []
    drafter = CopyDrafter()
    for seed in range(repeats):
        context, answer = make_case(num_tokens, seed)
        started = process_time()
        context.shared(NgramIndex)
        builds.append(process_time() - started)
        for i in range(0, len(answer), 3):
            started = perf_counter()
            drafter.draft(context, 31)
            drafts.append(perf_counter() - started)
            context.token_ids += answer[i : i + 3]
    reference_tokens = sum(len(reference.token_ids) for reference in context.references)
    return {
        "build_tokens_per_second": round(reference_tokens / median(builds)),
        "step_median_microseconds": round(median(drafts) * 1e6, 1),
        "step_p95_microseconds": round(quantiles(drafts, n=20)[-1] * 1e6, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if not options.tree:
        copying(options.repeats)
        return
    document = measured("drafting", measure_trees, options)
    print(drafting_table(document))
    print(json.dumps(document["budgets"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("drafting", __doc__)
    add = parser.add_argument
    add("--repeats", type=int, default=5, help="texts of each size (default: %(default)s)")
    add("--tree", action="store_true", help="trees over recorded answers, not copied spans")
    add("--data", type=Path, help="data folder, for --tree; also the variable RAGACCEL_DATA")
    add("--tokenizer", default="llama2", help="of the data folder, or a folder")
    add("--context", type=int, default=8_000, help="tokens of a prompt (default: %(default)s)")
    add("--past-tokens", type=int, default=1_000_000, help="of the history (default: %(default)s)")
    add("--requests", type=int, default=40, help="answers followed (default: %(default)s)")
    add("--out", type=Path, help="result file of --tree")
    return parser.parse_args(arguments)


def copying(repeats: int) -> None:
    """Measure the drafter of one copied span and print one JSON line."""
    measure(SIZES[0], 2)  # warm-up
    figures = {str(size): measure(size, repeats) for size in SIZES}
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    print(json.dumps({"reference_tokens": figures, "machine": platform.machine(), **versions}))


if __name__ == "__main__":
    main()
