"""Build the report: tables, pictures and one page from all results on disk."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eval import cli
from eval.papers import llma, lookahead, space
from eval.report import tables
from eval.report.matrices import matrices, matrix_tables
from eval.report.page import (
    Picture,
    ReportSection,
    ResultTables,
    group_by_section,
    in_markdown,
    page,
)
from eval.report.tables import NAMES
from eval.runner import caption_of, caption_of_many, note

Document = dict[str, Any]

RESULTS = Path(__file__).resolve().parents[1] / "results"
README, RESULTS_PAGE = RESULTS.parent / "README.md", RESULTS.parent / "RESULTS.md"
PICTURES = "plots"
TITLE = "ragaccel: is it faster, and is it the same?"
LEAD = """\
Every table says where it was measured, from which commit and by which command. Speeds are tokens
a second of decoding unless a column says otherwise; ratios are medians of pairs, one pair an
example, with their 95 % bootstrap interval. HF is Hugging Face transformers. Sets that we do not
win stand among the others and are marked."""
BEGIN, END = "<!-- results: python -m eval report -->", "<!-- end of results -->"

SECTIONS = {
    "Sets against decoders": {
        "matrix": "",
    },
    "The papers' experiments": {
        "llma_tables": "LLMA, Tables 1 and 2: {timed}",
        "llma_sweep": "LLMA, Figures 4 and 5, n and k: {timed}",
        "llma_dialogue": "LLMA over several turns: {timed}",
        "lookahead_sweep": "Lookahead, lengths of drafts and of their branches: {timed}",
        "lookahead_branches": "Lookahead, one branch, several apart, or a merged tree",
        "lookahead_memory": "Lookahead's trie, cold and warm",
    },
    "SPACE: a model that drafts ahead": {
        "space_reader": "SPACE: the bundled reader drafts ahead, alone and beside copying",
        "space_curves": "SPACE: held-out tokens a pass while an adapter is trained",
    },
    "Real generation, and the same answers": {
        "generation": "{model} in its own words, by kind of prompt",
        "lossless": "identical answers: {model}, by task and type of numbers",
        "exactness": "identical answers: {model}, task {task}, {how}",
    },
    "Retrieval and answers": {
        "quality": "what is found: dense, full-text and fused search",
    },
    "End to end and in a framework": {
        "rag_speedup": "from a question to its answer: {model}, task {task}, {how}",
        "frameworks": "in a framework: {model}, task {task}, {how}",
        "registry": "the reference registry: texts found again in prompts",
        "indexing": "indexing: {folder}",
    },
    "Speed, one result at a time": {
        "speed": "{model}, task {task}, {how}",
        "batch": "several at a time: {model}, task {task}, {how}",
        "never_slower": "{model}, {drafter}, knowing nothing yet, where nothing is copied",
        "memory": "a process that goes on answering: {model}",
        "peak_memory": "the most that lies in memory: {model}, the longest prompt of {task}",
    },
    "What a pass costs": {
        "roofline": "passes against the memory's bandwidth: {model}",
    },
    "Drafters, replayed": {
        "replay": "tokens a verify pass, recorded answers replayed without a model",
        "ablation": "tokens a verify pass without one idea or source, recorded answers replayed",
        "reliability": "estimated chances against what was accepted, recorded answers replayed",
        "drafting": "a draft tree's time, from {context:,} tokens of context to the cut tree",
    },
}
"""{section: {kind of result: title}}.

A title is formatted with settings and, if there are any, figures; {how} is whose answers, {drafter}
a decoder's name.
"""
TITLES = {kind: title for kinds in SECTIONS.values() for kind, title in kinds.items()}
TABLES = {
    kind: vars(module)[f"{kind}_table"]
    for module in (tables, llma, lookahead, space)
    for kind in TITLES
    if f"{kind}_table" in vars(module)
}


@cli.command(
    cli.option("--results", type=Path, default=RESULTS, help="folder (default: those committed)"),
    cli.option("--out", type=Path, help="folder to write to (default: that of the results)"),
)
def run_report(options: Namespace) -> None:
    """Report: tables, pictures and one page of all results in a folder.

        python -m eval report                              # the committed: README.md, RESULTS.md
        python -m eval report --results .cache/eval/quick  # your own: all files beside them

    Pictures need matplotlib (``pip install ragaccel[eval]``); without it the tables are written
    alone.
    """
    documents = read_results(options.results)
    if not documents:
        sys.exit(f"eval report: no results in {options.results}: measure some first (--results)")
    sections = result_tables_of(documents)
    documents = {one.stem: documents[one.stem] for one in sections}
    sections = [*matrix_tables_of(documents), *sections]
    pictures = draw(documents)
    report_sections = group_by_section(sections, pictures, SECTIONS)
    own = options.results.resolve() == RESULTS and options.out is None
    out = options.out or options.results
    write_pictures(out / PICTURES, pictures)
    shown, folder = (
        (RESULTS_PAGE, f"{RESULTS.name}/{PICTURES}") if own else (out / RESULTS_PAGE.name, PICTURES)
    )
    shown.write_text(all_tables(report_sections, folder), encoding="utf-8")
    (out / "report.html").write_text(page(TITLE, LEAD, report_sections), encoding="utf-8")
    if own:
        write_readme(report_sections, folder)
    print(
        json.dumps(
            {"tables": str(shown), "page": str(out / "report.html"), "pictures": len(pictures)}
        )
    )


def draw(documents: dict[str, Document]) -> list[Picture]:
    """Return all pictures; without matplotlib print a note and return none."""
    if find_spec("matplotlib") is None:
        note("tables only: plots need `pip install ragaccel[eval]`")
        return []
    from eval.report.plots import pictures_of

    return pictures_of(documents)


def write_pictures(folder: Path, pictures: Sequence[Picture]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        (folder / picture.file).write_text(picture.svg, encoding="utf-8")


def write_readme(report_sections: Sequence[ReportSection], folder: str) -> None:
    """Write the tables of sets against decoders into the README, with their pictures.

    The text before and after the README's two marks does not change.
    """
    before, begin, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        sys.exit(f"eval report: {README.name} lacks the marks {BEGIN} and {END}")
    text = in_markdown(shown_first(report_sections), folder)
    README.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


def shown_first(report_sections: Sequence[ReportSection]) -> list[ResultTables | Picture]:
    """Return the README's parts: the table and chart of each matrix, and the cost of a pass."""
    parts = [part for section in report_sections for part in section.parts]
    return [
        part
        for part in parts
        if (
            part.kind == "matrix"
            and (isinstance(part, ResultTables) or part.stem.endswith("-speed"))
        )
        or part.stem == "pass-cost"
    ]


def all_tables(report_sections: Sequence[ReportSection], folder: str) -> str:
    """Return all sections in Markdown, after a table of contents."""
    listed = "\n".join(f"- [{section.title}](#{section.anchor})" for section in report_sections)
    told = "\n".join(
        f"## {one.title}\n\n{in_markdown(one.parts, folder)}" for one in report_sections
    )
    return f"# All results\n\n{LEAD}\n\n{listed}\n\n{told}"


def matrix_tables_of(documents: dict[str, Document]) -> list[ResultTables]:
    """Return the result tables of each matrix of sets against decoders."""
    return [
        ResultTables(
            one.stem, "matrix", one.title, matrix_tables(one), caption_of_many([*one.sets.values()])
        )
        for one in matrices(documents)
    ]


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the results of a folder that have tables, by the stems of their files."""
    documents = {path.stem: _json_of(path) for path in sorted(folder.glob("*.json"))}
    if documents.get("replay"):  # counts only, equal on every machine
        documents["replay"] = {"kind": "replay", "sets": documents["replay"]}
    kinds = {s: one.get("kind") for s, one in documents.items() if isinstance(one, dict)}
    known = list(TABLES)  # a list, since a damaged kind may not be hashable
    return {stem: documents[stem] for stem, kind in kinds.items() if kind in known}


def _json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        note(f"{path.name} is left out: it holds no JSON, or not all of it")
        return None


def result_tables_of(documents: dict[str, Document]) -> list[ResultTables]:
    """Return the tables of every result; a result that lacks figures is left out with a note."""
    return [one for one in map(_result_tables_if_whole, documents, documents.values()) if one]


def _result_tables_if_whole(stem: str, document: Document) -> ResultTables | None:
    try:
        section = result_tables(stem, document)
        if document["kind"] == "speed":
            all(map(matrix_tables, matrices({stem: document})))
    except KeyError as error:
        note(f"{stem}.json is left out: it lacks {error}, so another version made it")
        return None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        note(f"{stem}.json is left out: it does not hold what its kind should ({error})")
        return None
    return section


def result_tables(stem: str, document: dict[str, Any]) -> ResultTables:
    """Return the tables of one result, with its title and caption."""
    kind = document["kind"]
    shown = TABLES[kind](document)
    return ResultTables(stem, kind, title_of(document), shown, caption_of(document))


def title_of(document: dict[str, Any]) -> str:
    """Return a result's title: what was measured."""
    kind, settings = document["kind"], document.get("settings", {})
    figures = document.get("figures")
    decoder = settings.get("decoder", "")
    names = {
        "how": "recorded answers" if settings.get("forced") else "its own answers",
        "drafter": NAMES.get(decoder, decoder),
        **(figures if isinstance(figures, dict) else {}),
        **settings,
    }
    return TITLES.get(kind, kind).format_map(names)
