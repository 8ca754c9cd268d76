"""Tables: each kind of result in Markdown."""

from __future__ import annotations

from typing import Any

NAMES = {
    "ours": "ours, copying",
    "ours_tree": "ours, trees",
    "ours_recycling": "ours, trees and recycling",
    "ours_paper": "ours, LLMA's settings",
    "ours_plain": "ours, plain",
    "ours_near_ties": "ours, near ties asked again",
    "ours_exact": "ours, exact",
    "ours_exact_plain": "ours, exact and plain",
    "generate": "`model.generate`",
    "generate_lookup": "`model.generate`, prompt lookup",
}

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


def speed_table(document: dict[str, Any]) -> str:
    """Lay out a speed result: one row a contender, decoding first, then prefill included."""
    lines = [
        "| decoder | tokens/s | x plain | x `generate` | x copying | acceptance length "
        "| efficiency | with prefill: tokens/s | x plain | x `generate` | same tokens |",
        "|---" * 11 + "|",
    ]
    for name, figures in document["contenders"].items():
        whole = figures["end_to_end"]
        same = figures["identical_to_generate"]
        cells = [
            NAMES.get(name, name),
            f"{figures['tokens_per_second']:.1f}",
            _ratio(figures, "ratio"),
            _ratio(figures, "ratio_generate"),
            _ratio(figures, "ratio_copying"),
            f"{figures['acceptance_length']:.2f}",
            _ratio(figures, "efficiency"),
            f"{whole['tokens_per_second']:.1f}",
            _ratio(whole, "ratio"),
            _ratio(whole, "ratio_generate"),
            "" if same is None else f"{100 * same:.0f} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", seconds_table(document)])


def seconds_table(document: dict[str, Any]) -> str:
    """Lay out where the time went, in seconds over all runs."""
    stages = ("prefill", "draft", "verify", "model", "other", "forcing")
    lines = [f"| seconds | {' | '.join(stages)} |", "|---" * (len(stages) + 1) + "|"]
    for name, figures in document["contenders"].items():
        seconds = figures["seconds"]
        cells = [f"{seconds[stage]:.2f}" if stage in seconds else "" for stage in stages]
        lines.append(f"| {NAMES.get(name, name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def lossless_table(document: dict[str, Any]) -> str:
    """Lay out a lossless result: one row a dtype."""
    lines = [
        "| dtype | answers | identical | largest top-2 gap at a first difference |",
        "|---|---|---|---|",
    ]
    for dtype, figures in document["dtypes"].items():
        gap = _largest_gap(figures)
        lines.append(f"| {dtype} | {figures['answers']} | {figures['identical']} | {gap} |")
    return "\n".join(lines)


def exactness_table(document: dict[str, Any]) -> str:
    """Lay out which decoders gave the same answers, and what their modes cost."""
    lines = [
        "| decoder | compared with | answers | identical | largest top-2 gap at a difference |",
        "|---" * 5 + "|",
    ]
    for pair in document["pairs"]:
        cells = [
            NAMES[pair["found"]],
            NAMES[pair["wanted"]],
            str(pair["answers"]),
            str(pair["identical"]),
            _largest_gap(pair),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| costs | against | decoding | prefill | passes |", "|---" * 5 + "|"]
    for cost in document["costs"]:
        cells = [
            NAMES[cost["decoder"]],
            NAMES[cost["against"]],
            _ratio(cost, "decode_seconds"),
            _ratio(cost, "prefill_seconds"),
            f"{cost['passes']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    told = "Costs are times those of the other: seconds and passes a token, seconds of a prompt."
    return "\n".join([*lines, "", told])


def indexing_table(document: dict[str, Any]) -> str:
    """Lay out what indexing a folder took, and a query on it."""
    figures = document["figures"]
    cells = {
        "files": f"{figures['files']:,}",
        "passages": f"{figures['passages']:,}",
        "from nothing": f"{figures['first_seconds']:.0f} s",
        "of it embedding": f"{100 * figures['embed_share']:.0f} %",
        "peak memory": f"{figures['peak_mb']:.0f} MB",
        "unchanged": f"{figures['unchanged_seconds']:.1f} s",
        "one edit": f"{figures['edit_seconds']:.1f} s",
        "a query, loaded": f"{figures['query_ms_median']:.0f} ms",
    }
    return "\n".join(
        [f"| {' | '.join(cells)} |", "|---" * len(cells) + "|", f"| {' | '.join(cells.values())} |"]
    )


def replay_table(document: dict[str, dict[str, float]]) -> str:
    """Lay out tokens a verify pass: one row a set, one column a drafter."""
    names = list(next(iter(document.values())))
    lines = [
        "### tokens a verify pass, recorded answers replayed without a model\n",
        f"| set | {' | '.join(REPLAYED.get(name, name) for name in names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    for title, row in document.items():
        lines.append(f"| {title} | {' | '.join(f'{row[name]:.2f}' for name in names)} |")
    command = "`python -m eval.replay --json eval/results/replay.json`"
    return "\n".join([*lines, f"\nLlama-2 tokens, the first 150 rows of each file: {command}\n"])


def never_slower_table(document: dict[str, Any]) -> str:
    """Lay out what drafting costs where nothing is copied: one row a set."""
    lines = [
        "| set | requests | x plain | slowest | modelled time / plain | highest | "
        "acceptance length | rows a pass | drafting a pass |",
        "|---" * 9 + "|",
    ]
    for title, figures in document["sets"].items():
        cells = [
            title,
            str(figures["requests"]),
            _ratio(figures, "ratio", 3),
            f"{figures['ratio_worst']:.2f}",
            f"{figures['modelled']:.3f}",
            f"{figures['modelled_worst']:.3f}",
            f"{figures['acceptance_length']:.2f}",
            f"{figures['rows_per_pass']:.1f}",
            f"{figures['draft_us_per_pass']:.0f} µs",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    asked = document["asked"]
    wanted = (
        f"Asked: a median of {asked['ratio']} or more, its lower bound {asked['ratio_low']} or "
        f"more, a modelled time of {asked['modelled']} or less."
    )
    return "\n".join([*lines, "", wanted])


def ablation_table(document: dict[str, Any]) -> str:
    """Lay out tokens a pass and differences to the full drafter: one row a variant."""
    parts = []
    for label, variants in document["drafters"].items():
        names = list(next(iter(variants.values())))
        lines = [
            f"| {REPLAYED.get(f'ours_{label}', label)} | {' | '.join(names)} |",
            "|---" * (len(names) + 1) + "|",
        ]
        for variant, row in variants.items():
            cells = [f"{row[name]['tokens_per_pass']:.2f}" for name in names]
            if variant != "full":
                changes = [row[name]["difference"] for name in names]
                cells = [f"{c} ({d:+.2f})" for c, d in zip(cells, changes, strict=True)]
            lines.append(f"| {ABLATED.get(variant, variant)} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def drafting_table(document: dict[str, Any]) -> str:
    """Lay out the time of a step that drafts a tree."""
    lines = [
        "| guesses | past requests | a step, median | 95 % below | first step of a request |",
        "|---" * 5 + "|",
    ]
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
            lines.append(f"| {' | '.join(cells)} |")
    first = document["first_draft"]
    told = (
        f"The first draft of a process takes {first['compiling_seconds']:.1f} s while it is "
        f"compiled, once, and {first['compiled_seconds']:.1f} s later; to remember a request takes "
        f"{document['add_ms']:.1f} ms where so much is remembered."
    )
    return "\n".join([*lines, "", told])


def reliability_table(document: dict[str, Any]) -> str:
    """Lay out how far estimated chances were right: one row a source."""
    lines = [
        "| guessed from | guesses | accepted | calibration error | log-loss below a constant's |",
        "|---" * 5 + "|",
    ]
    for source, figures in document["sources"].items():
        cells = [
            source,
            f"{figures['guesses']:,}",
            f"{100 * figures['accepted']:.1f} %",
            f"{figures['calibration_error']:.4f}",
            f"{100 * figures['below_constant']:.0f} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def memory_table(document: dict[str, Any]) -> str:
    """Lay out how a process grows between two of its requests: one row a setting."""
    first, last = (
        f"{next(iter(document['processes'].values()))['readings'][at]['requests']:,} requests"
        for at in (0, -1)
    )
    lines = [
        f"| setting | resident after {first} | after {last} | growth | "
        "of it remembered | of it kept prefixes |",
        "|---" * 6 + "|",
    ]
    for name, figures in document["processes"].items():
        readings = figures["readings"]
        sizes = [
            readings[0]["resident_bytes"],
            readings[-1]["resident_bytes"],
            figures["growth_bytes"],
            figures["remembered_growth_bytes"],
            figures["kept_growth_bytes"],
        ]
        lines.append(f"| {name} | {' | '.join(f'{size / 1e6:.1f} MB' for size in sizes)} |")
    return "\n".join(lines)


def _largest_gap(figures: dict[str, Any]) -> str:
    gaps = [difference["gap"] for difference in figures["differences"]]
    return f"{max(gaps):.2g}" if gaps and None not in gaps else "not a tie" if gaps else ""


def _ratio(figures: dict[str, Any], label: str, digits: int = 2) -> str:
    if label not in figures:
        return ""
    low, high = (f"{bound:.{digits}f}" for bound in figures[f"{label}_interval"])
    return f"{figures[label]:.{digits}f} ({low} to {high})"
