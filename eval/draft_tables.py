"""Draft tables: results about drafters alone, without a model, in Markdown."""

from __future__ import annotations

from typing import Any

from eval.markdown import table

ABLATED = {
    "full": "all",
    "longest_only": "only the longest matches",
    "no_beyond": "no agreement beyond a change",
    "one_branch": "one branch",
    "parallel_branches": "branches parting at the root only",
    "no_calibration": "no calibration",
    "no_support": "no count of equally long matches",
    "no_frequent": "no frequent tokens",
    "no_reference": "not from references",
    "no_prompt": "not from the rest of the prompt",
    "no_output": "not from the answer so far",
    "no_past_prompt": "not from past prompts",
    "no_past_answer": "not from past answers",
    "no_successors": "no successors in past requests",
    "no_past": "no past requests at all",
}
REPLAYED = {
    "ours_64_history": "tree, 64 guesses, past rows known",
    "ours_64": "tree, 64 guesses",
    "ours_16": "tree, 16 guesses",
    "copy": "one copied span",
    "llma": "LLMA as published",
    "lookup": "prompt lookup",
    "suffix": "suffix decoding, past rows known",
}


def replay_table(document: dict[str, Any]) -> str:
    """Lay out tokens a verify pass: one row a set, one column a drafter."""
    sets = document["sets"]
    names = list(next(iter(sets.values())))
    rows = [[title, *(f"{row[name]:.2f}" for name in names)] for title, row in sets.items()]
    return table(["set", *(REPLAYED.get(name, name) for name in names)], rows)


def ablation_table(document: dict[str, Any]) -> str:
    """Lay out tokens a pass and differences to the full drafter: one row a variant."""
    parts = []
    for label, variants in document["drafters"].items():
        names = list(next(iter(variants.values())))
        rows = []
        for variant, row in variants.items():
            cells = [f"{row[name]['tokens_per_pass']:.2f}" for name in names]
            if variant != "full":
                changes = [row[name]["difference"] for name in names]
                cells = [f"{c} ({d:+.2f})" for c, d in zip(cells, changes, strict=True)]
            rows.append([ABLATED.get(variant, variant), *cells])
        parts.append(table([REPLAYED.get(f"ours_{label}", label), *names], rows))
    return "\n\n".join(parts)


def drafting_table(document: dict[str, Any]) -> str:
    """Lay out the time of a step that drafts a tree."""
    titles = ["guesses", "past requests", "a step, median", "95 % below", "first step of a request"]
    made = []
    pasts = {"no_past": "none", "past": f"{document['settings']['past_tokens']:,} tokens"}
    for budget, rows in document["budgets"].items():
        for label, figures in rows.items():
            cells = [
                budget,
                pasts[label],
                f"{figures['median_us']:.0f} µs",
                f"{figures['p95_us']:.0f} µs",
                f"{figures['first_step_ms']:.1f} ms",
            ]
            made.append(cells)
    first = document["first_draft"]
    told = (
        f"The first draft of a process takes {first['compiling_seconds']:.1f} s while it is "
        f"compiled, once, and {first['compiled_seconds']:.1f} s later; to remember a request takes "
        f"{document['add_ms']:.1f} ms where so much is remembered."
    )
    return f"{table(titles, made)}\n\n{told}"


def reliability_table(document: dict[str, Any]) -> str:
    """Lay out how far estimated chances were right: one row a source."""
    rows = [
        [
            source,
            f"{figures['guesses']:,}",
            f"{100 * figures['accepted']:.1f} %",
            f"{figures['calibration_error']:.4f}",
            f"{100 * figures['below_constant']:.0f} %",
        ]
        for source, figures in document["sources"].items()
    ]
    return table(
        ["guessed from", "guesses", "accepted", "calibration error", "log-loss below a constant's"],
        rows,
    )
