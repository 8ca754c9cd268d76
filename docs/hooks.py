"""Pages made from other files of the repository, and links that leave the documentation.

The pages are read in the repository as well, where a link to a file outside of ``docs`` opens it.
On the site it leads to the page made from the file, or to the file at the repository's address, or
is plain text while there is no address. Pictures from elsewhere are copied.
"""

import json
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from posixpath import basename, dirname, join, normpath, relpath
from typing import Any

import griffe
import tomllib
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"][
    "Repository"
]
PAGES = {  # {file of the repository: the page made from it}
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "vulnerabilities.md",
    "eval/README.md": "measuring.md",
    "eval/RESULTS.md": "results.md",
    "ragaccel/models/reader/README.md": "reader.md",
    "ragaccel/models/sentence_ranker/README.md": "sentence_ranker.md",
    "integrations/langchain-ragaccel/README.md": "langchain-options.md",
    "integrations/llama-index-llms-ragaccel/README.md": "llamaindex-options.md",
}
_FILES = {page: file for file, page in PAGES.items()}
CHART_MODEL = "qwen2.5-0.5b"  # the largest that all sets were measured with
SETS = {
    "llma": "Search questions over web pages (llma)",
    "clapnq": "Questions over an encyclopedia (clapnq)",
    "mtrag": "Conversations over documents (mtrag)",
    "pubmedqa": "Questions over medical abstracts (pubmedqa)",
    "scitldr": "One-sentence summaries of papers (scitldr)",
    "gsm8k": "Arithmetic, without documents (gsm8k)",
    "humaneval": "Python functions, without documents (humaneval)",
}
OPPONENTS = {
    "generate": "model.generate",
    "generate_static": "model.generate, compiled",
    "generate_lookup": "model.generate with prompt lookup",
}
_TABLES = re.compile(
    "<!-- results: python -m eval report -->(.*)<!-- end of results -->", re.DOTALL
)
_DOCTEST = re.compile(r"^>>> .*\n(?:.+\n)*", re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from files elsewhere."""
    for file, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / file)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Fill in what is generated, and rewrite the links to files outside of the documentation."""
    uri = page.file.src_uri
    linked = partial(_linked, uri=uri, config=config, files=files)
    if uri in ("results.md", "changelog.md"):
        page.meta["search"] = {"exclude": True}  # else they are found for every word
    if uri == PAGES["eval/README.md"]:
        markdown = _TABLES.sub("", markdown)  # they are on the evaluation's page
    markdown = linked(markdown, _FILES.get(uri, f"docs/{uri}"))
    if "<!-- commands -->" in markdown:
        markdown = markdown.replace("<!-- commands -->", "\n".join(_commands()))
    if "<!-- chart -->" in markdown:
        markdown = markdown.replace("<!-- chart -->", _chart())
    if "<!-- tables -->" in markdown:
        tables = linked("\n".join(_folded_tables()), "eval/README.md")
        markdown = markdown.replace("<!-- tables -->", tables)
    return markdown


def _linked(markdown: str, source: str, uri: str, config: Any, files: Files) -> str:
    """Rewrite the links of a text of the file ``source``, which is shown on the page ``uri``."""

    def rewritten(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        path, _, anchor = target.partition("#")
        file = normpath(join(dirname(source), path))
        if not path or not (ROOT / file).exists():  # an address, or no link at all
            return link.group()
        if file in PAGES or file.startswith("docs/"):
            to = PAGES.get(file) or file.removeprefix("docs/")
        elif mark:
            to = f"assets/{basename(file)}"
            if files.get_file_from_path(to) is None:
                files.append(File.generated(config, to, abs_src_path=str(ROOT / file)))
        elif ADDRESS.endswith(".invalid"):
            return text
        else:
            return f"[{text}]({ADDRESS}/blob/main/{file})"
        return f"{mark}[{text}]({relpath(to, dirname(uri) or '.')}{'#' * bool(anchor)}{anchor})"

    return _LINK.sub(rewritten, markdown)


class Doctests(griffe.Extension):
    """Shows the doctests of a docstring as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the doctests."""
        if obj.docstring:
            obj.docstring.value = _DOCTEST.sub(r"```pycon\n\g<0>```\n", obj.docstring.value + "\n")


def _chart() -> str:
    """Return bars of tokens a second: the fastest opponent of each set, and ours."""
    paths = sorted((ROOT / "eval" / "results").glob(f"matrix-{CHART_MODEL}-*.json"))
    results = [json.loads(path.read_text("utf-8")) for path in paths]
    rows = []
    for result in results:
        speeds = {name: one["tokens_per_second"] for name, one in result["decoders"].items()}
        opponents = {name: speed for name, speed in speeds.items() if not name.startswith("ours")}
        best = max(opponents, key=opponents.__getitem__)
        rows.append((result["settings"]["task"], best, speeds[best], speeds["ours_full"]))
    widest = max(ours for *_, ours in rows)
    bars = [
        f"<b>{SETS[task]}</b>{_bar('', theirs / widest, f'{theirs:.0f} {OPPONENTS[best]}')}"
        + _bar(" ours", ours / widest, f"{ours:.0f} ragaccel, {ours / theirs:.1f} times as fast")
        for task, best, theirs, ours in sorted(rows, key=lambda row: row[2] / row[3])
    ]
    return '<div class="chart">' + "".join(bars) + "</div>"


def _bar(kind: str, share: float, text: str) -> str:
    return f'<div class="bar{kind}"><i style="width:{45 * share:.1f}%"></i>{text}</div>'


def _folded_tables() -> Iterator[str]:
    """Yield the first tables of the evaluation's report, each folded under its title."""
    report = (ROOT / "eval" / "README.md").read_text("utf-8")
    for table in _TABLES.search(report)[1].split("\n### ")[1:]:
        title, _, text = table.partition("\n")
        yield f'??? note "{title}"\n'
        yield from (f"    {line}" for line in text.splitlines())
        yield ""


def _commands() -> Iterator[str]:
    """Yield a section for every command, then the options common to all."""
    sys.path.insert(0, str(ROOT))  # this checkout's, whatever is installed
    import typer

    from ragaccel.cli.main import app

    root = typer.main.get_command(app)
    shown = {name: (one, _records(one)) for name, one in _runnable(root, "ragaccel")}
    common = set.intersection(*(set(records) for _, records in shown.values()))
    for name, (command, records) in shown.items():
        yield f"## {name}\n\n{command.help}\n"
        usage = _context(command, name).get_usage().removeprefix("Usage: ")
        yield f"```text\n{usage}\n```\n"
        yield from _table([record for record in records if record not in common])
    yield "## Options of every command\n"
    yield from _table([record for record in records if record in common])
    yield root.epilog or ""


def _runnable(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    if getattr(command, "invoke_without_command", True):  # a group may be a command, too
        yield name, command
    for word, one in getattr(command, "commands", {}).items():
        yield from _runnable(one, f"{name} {word}")


def _context(command: Any, name: str) -> Any:
    return command.make_context(name, [], resilient_parsing=True)


def _records(command: Any) -> list[tuple[str, str]]:
    """Return (name, help) of every argument and option, as ``--help`` prints them."""
    context = _context(command, command.name)
    records = (one.get_help_record(context) for one in command.get_params(context))
    return [record for record in records if record]


def _table(records: list[tuple[str, str]]) -> Iterator[str]:
    if records:
        yield "| argument or option | what it is |\n|---|---|"
        for name, text in records:
            text = re.sub(r"\s+", " ", text).replace("|", "\\|")
            yield f"| `{name.strip()}` | {text} |"
        yield ""
