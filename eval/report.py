"""The report: tables in Markdown from the results on disk, written into ``eval/README.md``."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.draft_tables import ablation_table, drafting_table, reliability_table, replay_table
from eval.memory_tables import memory_table, peak_memory_table
from eval.papers.llma_layout import (
    llma_count_table,
    llma_dialogue_table,
    llma_sweep_table,
    llma_tables_table,
)
from eval.tables import (
    NAMES,
    batch_table,
    exactness_table,
    frameworks_table,
    indexing_table,
    lossless_table,
    never_slower_table,
    registry_table,
    roofline_table,
    speed_table,
)

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- results: python -m eval.report -->", "<!-- end of results -->"

TABLES = {
    "speed": speed_table,
    "batch": batch_table,
    "roofline": roofline_table,
    "lossless": lossless_table,
    "exactness": exactness_table,
    "frameworks": frameworks_table,
    "memory": memory_table,
    "peak_memory": peak_memory_table,
    "indexing": indexing_table,
    "registry": registry_table,
    "never_slower": never_slower_table,
    "ablation": ablation_table,
    "drafting": drafting_table,
    "reliability": reliability_table,
    "replay": replay_table,
    "llma_count": llma_count_table,
    "llma_tables": llma_tables_table,
    "llma_sweep": llma_sweep_table,
    "llma_dialogue": llma_dialogue_table,
}
# Of settings and, where there are, figures; {how} is whose answers, {drafter} a contender's name.
TITLES = {
    "speed": "{model}, task {task}, {how}",
    "batch": "several at a time: {model}, task {task}, {how}",
    "roofline": "passes against the memory's bandwidth: {model}",
    "lossless": "identical answers: {model}, task {task}, {how}",
    "exactness": "identical answers: {model}, task {task}, {how}",
    "frameworks": "in a framework: {model}, task {task}, {how}",
    "memory": "a process that goes on answering: {model}",
    "peak_memory": "the most that lies in memory: {model}, the longest prompt of {task}",
    "indexing": "indexing: {folder}",
    "registry": "the reference registry: texts found again in prompts",
    "never_slower": "{model}, {drafter}, knowing nothing yet, where nothing is copied",
    "ablation": "tokens a verify pass without one idea or source, recorded answers replayed",
    "drafting": "a draft tree's time, from {context:,} tokens of context to the cut tree",
    "reliability": "estimated chances against what was accepted, recorded answers replayed",
    "replay": "tokens a verify pass, recorded answers replayed without a model",
    "llma_count": "LLMA: its published rules counted, and our drafter of them",
    "llma_tables": "LLMA, Tables 1 and 2: {timed}",
    "llma_sweep": "LLMA, Figures 4 and 5, n and k: {timed}",
    "llma_dialogue": "LLMA over several turns: {timed}",
}


@dataclass(frozen=True, slots=True)
class Section:
    """A result as it is shown: its file's stem, and a title, tables and a caption in Markdown."""

    stem: str
    kind: str
    title: str
    tables: str
    caption: str

    def __str__(self) -> str:
        """Lay it out in Markdown."""
        return f"### {self.title}\n\n{self.tables}\n\n{self.caption}\n"


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
    return "\n".join(str(section_of(*one)) for one in read_results(folder).items())


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the results of a folder that there are tables for, by the stems of their files."""
    documents = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.json"))
    }
    if "replay" in documents:  # counts alone, the same on every machine
        documents["replay"] = {"kind": "replay", "sets": documents["replay"]}
    return {stem: one for stem, one in documents.items() if one.get("kind") in TABLES}


def section_of(stem: str, document: dict[str, Any]) -> Section:
    """Lay out one result."""
    kind = document["kind"]
    tables = TABLES[kind](document)
    return Section(stem, kind, title_of(document), tables, caption_of(document))


def title_of(document: dict[str, Any]) -> str:
    """Say what was measured."""
    kind, settings = document["kind"], document.get("settings", {})
    figures = document.get("figures")
    contender = settings.get("contender", "")
    names = {
        "how": "recorded answers" if settings.get("forced") else "its own answers",
        "drafter": NAMES.get(contender, contender),
        **(figures if isinstance(figures, dict) else {}),
        **settings,
    }
    return TITLES.get(kind, kind).format_map(names)


def caption_of(document: dict[str, Any]) -> str:
    """Say where a result was measured, and by which command."""
    if "run" not in document:
        command = "python -m eval.replay --json eval/results/replay.json"
        return f"Llama-2 tokens, the first 150 rows of each file: `{command}`"
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
