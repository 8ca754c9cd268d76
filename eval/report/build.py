"""Build the report: tables and pictures of all results on disk, in Markdown."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eval import cli
from eval.report.tables import NAMES, TABLES, matrices, show
from eval.runner import caption_of, caption_of_many, note

Document = dict[str, Any]

RESULTS = Path(__file__).resolve().parents[1] / "results"
README, RESULTS_PAGE = RESULTS.parent / "README.md", RESULTS.parent / "RESULTS.md"
PICTURES = "plots"
LEAD = """\
Every table says where it was measured, from which commit and by which command. Speeds are tokens
a second of decoding unless a column says otherwise; ratios are medians of pairs, one pair an
example, with their 95 % bootstrap interval. HF is Hugging Face transformers. Sets that we do not
win stand among the others and are marked."""
BEGIN, END = "<!-- results: python -m eval report -->", "<!-- end of results -->"
DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What reading a result raises that does not hold what its kind should."""

SECTIONS = {
    "Sets against decoders": {
        "matrix": "{model}, {dtype}: sets against decoders",
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
        "roofline": "passes against the memory's bandwidth: {model}, {device}",
    },
    "Drafters, replayed": {
        "replay": "tokens a verify pass, recorded answers replayed without a model",
        "peers": "tokens a step beside other engines' drafting rules, recorded answers replayed",
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
FIRST = "matrix"
"""The kind whose tables and first picture stand in the README."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A plot as SVG: its file's stem, its title and its alternative text."""

    stem: str
    title: str
    alt: str
    svg: str

    @property
    def file(self) -> str:
        """Return the file's name, which is valid on every system and in links without escapes."""
        return re.sub(r"[^\w.]+", "-", self.stem).strip("-") + ".svg"

    def shown(self, folder: str) -> str:
        """Return the picture in Markdown; ``folder`` is that of the pictures' files."""
        alt = self.alt.replace("[", "(").replace("]", ")")
        return f"**{self.title}**\n\n![{alt}]({folder}/{self.file})"


@dataclass(frozen=True, slots=True)
class Part:
    """A result in the report: its tables in Markdown and its pictures."""

    kind: str
    title: str
    tables: str
    caption: str
    pictures: tuple[Picture, ...]

    def shown(self, folder: str) -> str:
        """Return the part in Markdown."""
        pictures = (picture.shown(folder) for picture in self.pictures)
        parts = (f"### {self.title}", self.tables, *pictures, self.caption)
        return "\n\n".join(filter(None, parts)) + "\n"

    def shown_first(self, folder: str) -> str:
        """Return what the README shows of the part: only the first picture."""
        return replace(self, pictures=self.pictures[:1]).shown(folder)


@cli.command(
    cli.option("--results", type=Path, default=RESULTS, help="folder (default: those committed)"),
    cli.option("--out", type=Path, help="folder to write to (default: that of the results)"),
)
def run_report(options: Namespace) -> None:
    """Report: tables and pictures of all results in a folder.

        python -m eval report                              # the committed: README.md, RESULTS.md
        python -m eval report --results .cache/eval/quick  # your own: all files beside them

    Pictures need matplotlib (``pip install ragaccel[eval]``); without it the tables are written
    alone.
    """
    documents = read_results(options.results)
    if not documents:
        sys.exit(f"eval report: no results in {options.results}: measure some first (--results)")
    if find_spec("matplotlib") is None:
        note("tables only: plots need `pip install ragaccel[eval]`")
    parts = list(parts_of(documents))
    own = options.results.resolve() == RESULTS and options.out is None
    out = options.out or options.results
    (out / PICTURES).mkdir(parents=True, exist_ok=True)
    pictures = [picture for part in parts for picture in part.pictures]
    for picture in pictures:
        (out / PICTURES / picture.file).write_text(picture.svg, encoding="utf-8")
    folder = f"{RESULTS.name}/{PICTURES}" if own else PICTURES
    page = RESULTS_PAGE if own else out / RESULTS_PAGE.name
    page.write_text(all_results(parts, folder), encoding="utf-8")
    if own:
        write_readme(parts, folder)
    print(json.dumps({"tables": str(page), "pictures": len(pictures)}))


def read_results(folder: Path) -> dict[str, Document]:
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


def parts_of(documents: dict[str, Document]) -> Iterator[Part]:
    """Yield the parts of the report; a result that lacks figures is left out with a note."""
    whole = {stem: one for stem, one in documents.items() if _is_whole(stem, one)}
    for stem, one in {**matrices(whole), **whole}.items():
        sets = one["sets"].values() if one["kind"] == "matrix" else ()
        caption = caption_of_many([*sets]) if sets else caption_of(one)
        yield Part(one["kind"], title_of(one), show(one), caption, tuple(drawn(stem, one)))


def _is_whole(stem: str, document: Document) -> bool:
    try:
        for one in (document, *matrices({stem: document}).values()):
            show(one)
            title_of(one)
        caption_of(document)
    except KeyError as error:
        note(f"{stem}.json is left out: it lacks {error}, so another version made it")
        return False
    except DAMAGED as error:
        note(f"{stem}.json is left out: it does not hold what its kind should ({error})")
        return False
    return True


def drawn(stem: str, document: Document) -> Iterator[Picture]:
    """Yield a result's pictures, if matplotlib is there, until one lacks its figures."""
    if find_spec("matplotlib") is None:
        return
    from eval.report.plots import pictures_of

    try:
        for name, title, alt, svg in pictures_of(document):
            yield Picture(f"{stem}-{name}", title, alt, svg)
    except DAMAGED as error:
        note(f"a picture is left out: {stem} does not hold what it shows ({error!r})")


def title_of(document: Document) -> str:
    """Return a result's title: what was measured."""
    settings, figures = document.get("settings", {}), document.get("figures")
    decoder = settings.get("decoder", "")
    names = {
        "how": "recorded answers" if settings.get("forced") else "its own answers",
        "drafter": NAMES.get(decoder, decoder),
        **(figures if isinstance(figures, dict) else {}),
        **settings,
    }
    return TITLES[document["kind"]].format_map(names)


def all_results(parts: Iterable[Part], folder: str) -> str:
    """Return all parts by section, after a table of contents."""
    by_kind: dict[str, list[str]] = {kind: [] for kind in TITLES}
    for part in parts:
        by_kind[part.kind].append(part.shown(folder))
    sections = {
        title: [one for kind in kinds for one in by_kind[kind]] for title, kinds in SECTIONS.items()
    }
    told = {title: "\n".join(own) for title, own in sections.items() if own}
    listed = "\n".join(f"- [{title}](#{_anchor(title)})" for title in told)
    text = "\n".join(f"## {title}\n\n{own}" for title, own in told.items())
    return f"# All results\n\n{LEAD}\n\n{listed}\n\n{text}"


def _anchor(title: str) -> str:
    """Return the anchor that GitHub derives from a title."""
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


def write_readme(parts: Iterable[Part], folder: str) -> None:
    """Write the tables of sets against decoders into the README, with their pictures.

    The text before and after the README's two marks does not change.
    """
    before, begin, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        sys.exit(f"eval report: {README.name} lacks the marks {BEGIN} and {END}")
    text = "\n".join(part.shown_first(folder) for part in parts if part.kind == FIRST)
    README.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")
