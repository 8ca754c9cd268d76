"""Result tables and pictures in sections, as Markdown and as one HTML page."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

OTHER = "More results"


@dataclass(frozen=True, slots=True)
class ResultTables:
    """Tables of a result in Markdown, with a title and a caption on the measurement."""

    stem: str
    kind: str
    title: str
    tables: str
    caption: str

    def __str__(self) -> str:
        """Return title, tables and caption as Markdown."""
        return f"### {self.title}\n\n{self.tables}\n\n{self.caption}\n"


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A section of the report: result tables, each followed by its pictures."""

    title: str
    parts: list[ResultTables | Picture]

    @property
    def anchor(self) -> str:
        """Return the anchor that GitHub derives from the title."""
        kept = "".join(c for c in self.title.lower() if c.isalnum() or c in " -_")
        return kept.replace(" ", "-")


def group_by_section(
    sections: Sequence[ResultTables],
    pictures: Sequence[Picture],
    kinds_of: Mapping[str, Iterable[str]],
) -> list[ReportSection]:
    """Return tables and pictures by section, in the order of the kinds, without empty sections."""
    known = {kind for kinds in kinds_of.values() for kind in kinds}
    others = dict.fromkeys(one.kind for one in sections if one.kind not in known)
    found = [
        ReportSection(title, [part for kind in kinds for part in _parts(kind, sections, pictures)])
        for title, kinds in {**kinds_of, OTHER: tuple(others)}.items()
    ]
    return [section for section in found if section.parts]


def _parts(
    kind: str, sections: Sequence[ResultTables], pictures: Sequence[Picture]
) -> Iterator[ResultTables | Picture]:
    sections = [one for one in sections if one.kind == kind]
    pictures = [one for one in pictures if one.kind == kind]
    stems = {one.stem for one in sections}
    yield from (one for one in pictures if one.shows not in stems)
    for section in sections:
        yield section
        yield from (one for one in pictures if one.shows == section.stem)


def in_markdown(parts: Iterable[ResultTables | Picture], pictures: str) -> str:
    """Return parts in order as Markdown; ``pictures`` is the folder of the pictures' files."""
    return "\n".join(
        str(part) if isinstance(part, ResultTables) else _picture(part, pictures) for part in parts
    )


def _picture(picture: Picture, folder: str) -> str:
    alt = picture.alt.replace("[", "(").replace("]", ")")
    return f"**{picture.title}**\n\n![{alt}]({folder}/{picture.file})\n\n{picture.caption}\n"


@dataclass(frozen=True, slots=True)
class Picture:
    """A plot: its file's stem, the kind and stem of its result, and the drawing as SVG.

    ``alt`` is its alternative text; ``caption`` has hardware, commit and command in Markdown.
    """

    stem: str
    kind: str
    shows: str
    title: str
    alt: str
    caption: str
    svg: str

    @property
    def file(self) -> str:
        """Return the file's name, which is valid on every system and in links without escapes."""
        return re.sub(r"[^\w.]+", "-", self.stem).strip("-") + ".svg"


STYLE = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
TOLD = 20  # cells of so many characters may wrap
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")


def page(title: str, lead: str, report_sections: Sequence[ReportSection]) -> str:
    """Return the report as an HTML page; ``lead`` is an introduction in Markdown."""
    listed = "".join(
        f'<li><a href="#{section.anchor}">{escape(section.title)}</a></li>'
        for section in report_sections
    )
    body = "\n".join(_section_html(section) for section in report_sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(title)}</h1>\n{html_of(lead, title)}</header>\n"
        f'<nav aria-label="Contents"><ul>{listed}</ul></nav>\n'
        f"<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _section_html(section: ReportSection) -> str:
    head = f'<section id="{section.anchor}">\n<h2>{escape(section.title)}</h2>'
    parts = [
        _section(one) if isinstance(one, ResultTables) else _figure(one) for one in section.parts
    ]
    return "\n".join([head, *parts, "</section>"])


def _section(section: ResultTables) -> str:
    caption = _MARKDOWN.renderInline(section.caption)
    return (
        f'<h3 id="{escape(section.stem)}">{_MARKDOWN.renderInline(section.title)}</h3>\n'
        f"<figure>\n{html_of(section.tables, section.title)}"
        f"<figcaption>{caption}</figcaption>\n</figure>"
    )


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.svg.encode()).decode()
    title, caption = map(_MARKDOWN.renderInline, (picture.title, picture.caption))
    return (
        f'<figure id="picture-{escape(picture.stem)}">\n<p><strong>{title}</strong></p>\n'
        f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(picture.alt)}">\n'
        f"<figcaption>{caption}</figcaption>\n</figure>"
    )


def html_of(markdown: str, title: str) -> str:
    """Render Markdown as HTML, with raw HTML escaped; tables scroll and have the caption ``title``.

    The first cell of each row is a row header.
    """
    tokens = list(_with_heads(_MARKDOWN.parse(markdown)))
    html = _MARKDOWN.renderer.render(tokens, _MARKDOWN.options, {})
    named = escape(title)
    opened = (
        f'<div class="table" role="region" tabindex="0" aria-label="{named}">\n'
        f"<table>\n<caption>{named}</caption>"
    )
    html = html.replace("<table>", opened).replace("</table>", "</table>\n</div>")
    return html.replace("&lt;br&gt;", "<br>")  # the only tag in our cells


def _with_heads(tokens: Sequence[Token]) -> Iterator[Token]:
    at, in_head = 0, False
    for number, token in enumerate(tokens):
        if token.type == "thead_open" or token.type == "thead_close":
            in_head = token.type == "thead_open"
        if token.type == "tr_open":
            at = 0
        if token.type in ("th_open", "td_open"):
            token.attrs = _attributes(in_head, at, tokens[number + 1].content)
        if token.type in ("td_open", "td_close") and at == 0:
            token.tag = "th"
        if token.type in ("th_close", "td_close"):
            at += 1
        yield token


def _attributes(in_head: bool, at: int, text: str) -> dict[str, str | int | float]:
    if in_head or at == 0:
        return {"scope": "col" if in_head else "row"}
    return {"class": "told"} if len(text) > TOLD and not text[:1].isdigit() else {}
