"""The report: tables in Markdown from the results on disk, written into ``eval/README.md``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from eval.draft_tables import ablation_table, drafting_table, reliability_table, replay_table
from eval.tables import (
    NAMES,
    batch_table,
    exactness_table,
    frameworks_table,
    indexing_table,
    lossless_table,
    memory_table,
    never_slower_table,
    registry_table,
    roofline_table,
    speed_table,
)

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- results: python -m eval.report -->", "<!-- end of results -->"


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


REPLAY_TITLES = {
    "ablation": "tokens a verify pass without one idea or source, recorded answers replayed",
    "reliability": "estimated chances against what was accepted, recorded answers replayed",
}
TABLES = {
    "speed": speed_table,
    "batch": batch_table,
    "roofline": roofline_table,
    "lossless": lossless_table,
    "exactness": exactness_table,
    "frameworks": frameworks_table,
    "memory": memory_table,
    "indexing": indexing_table,
    "registry": registry_table,
    "never_slower": never_slower_table,
    "ablation": ablation_table,
    "drafting": drafting_table,
    "reliability": reliability_table,
}


def _title(document: dict[str, Any]) -> str:
    kind, settings = document["kind"], document.get("settings", {})
    if kind == "indexing":
        return f"### indexing: {document['figures']['folder']}"
    if kind == "never_slower":
        drafter = NAMES.get(settings["contender"], settings["contender"])
        return f"### {settings['model']}, {drafter}, knowing nothing yet, where nothing is copied"
    if kind == "drafting":
        context = f"{settings['context']:,} tokens of context"
        return f"### a draft tree's time, from {context} to the cut tree"
    if kind == "memory":
        return f"### a process that goes on answering: {settings['model']}"
    if kind == "registry":
        return "### the reference registry: texts found again in prompts"
    if kind == "roofline":
        return f"### passes against the memory's bandwidth: {settings['model']}"
    if kind in REPLAY_TITLES:
        return f"### {REPLAY_TITLES[kind]}"
    before = {"speed": "", "batch": "several at a time: ", "frameworks": "in a framework: "}
    same = before.get(kind, "identical answers: ")
    how = "recorded answers" if settings.get("forced") else "its own answers"
    return f"### {same}{settings['model']}, task {settings['task']}, {how}"


def _caption(document: dict[str, Any]) -> str:
    settings, machine, run = document.get("settings", {}), document["machine"], document["run"]
    place = machine["gpu"] or f"{machine['processor']}, {machine['threads']} threads"
    kind = f"{settings['dtype']}, " if "dtype" in settings else ""
    asked = ""
    if "examples" in settings:
        asked = f"{settings['examples']} examples x {settings.get('repeats', 1)}; "
    return (
        f"{place}, {kind}torch {machine['torch']}, transformers {machine['transformers']}; {asked}"
        f"commit {run['commit']}, {run['date']}: `{run['command']}`"
    )


if __name__ == "__main__":
    main()
