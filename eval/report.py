"""The report: tables in Markdown from the results on disk, written into ``eval/README.md``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- results: python -m eval.report -->", "<!-- end of results -->"
NAMES = {
    "ours": "ours, copying",
    "ours_tree": "ours, trees",
    "ours_paper": "ours, LLMA's settings",
    "ours_plain": "ours, plain",
    "generate": "`model.generate`",
    "generate_lookup": "`model.generate`, prompt lookup",
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


def main() -> None:
    """Write all results into the README between its two marks."""
    before, begin, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        sys.exit(f"eval.report: {README.name} lacks the marks {BEGIN} and {END}")
    text = all_results(RESULTS)
    README.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")
    print(text)


def all_results(folder: Path) -> str:
    """Lay out every result of a folder, each with its machine and command."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if path.stem == "replay":
            parts.append(replay_table(document))
            continue
        table = TABLES.get(document.get("kind", ""))
        if table is not None:
            parts.append(f"{_title(document)}\n\n{table(document)}\n\n{_caption(document)}\n")
    return "\n".join(parts)


def speed_table(document: dict[str, Any]) -> str:
    """Lay out a speed result: one row a contender, decoding first, then prefill included."""
    lines = [
        "| decoder | tokens/s | x plain | x `generate` | acceptance length | "
        "with prefill: tokens/s | x plain | x `generate` | same tokens |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, figures in document["contenders"].items():
        whole = figures["end_to_end"]
        same = figures["identical_to_generate"]
        cells = [
            NAMES.get(name, name),
            f"{figures['tokens_per_second']:.1f}",
            _ratio(figures, "ratio"),
            _ratio(figures, "ratio_generate"),
            f"{figures['acceptance_length']:.2f}",
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
        gaps = [difference["gap"] for difference in figures["differences"]]
        gap = f"{max(gaps):.2g}" if gaps and None not in gaps else "not a tie" if gaps else ""
        lines.append(f"| {dtype} | {figures['answers']} | {figures['identical']} | {gap} |")
    return "\n".join(lines)


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


TABLES = {"speed": speed_table, "lossless": lossless_table, "indexing": indexing_table}


def _ratio(figures: dict[str, Any], label: str) -> str:
    if label not in figures:
        return ""
    low, high = figures[f"{label}_interval"]
    return f"{figures[label]:.2f} ({low:.2f} to {high:.2f})"


def _title(document: dict[str, Any]) -> str:
    if document["kind"] == "indexing":
        return f"### indexing: {document['figures']['folder']}"
    settings = document["settings"]
    kind = "" if document["kind"] == "speed" else "identical answers: "
    how = "recorded answers" if settings.get("forced") else "its own answers"
    return f"### {kind}{settings['model']}, task {settings['task']}, {how}"


def _caption(document: dict[str, Any]) -> str:
    settings, machine, run = document.get("settings", {}), document["machine"], document["run"]
    place = machine["gpu"] or f"{machine['processor']}, {machine['threads']} threads"
    kind = f"{settings['dtype']}, " if "dtype" in settings else ""
    asked = f"{settings['examples']} examples x {settings.get('repeats', 1)}; " if settings else ""
    return (
        f"{place}, {kind}torch {machine['torch']}, transformers {machine['transformers']}; {asked}"
        f"commit {run['commit']}, {run['date']}: `{run['command']}`"
    )


if __name__ == "__main__":
    main()
