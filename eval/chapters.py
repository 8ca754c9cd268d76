"""Chapters: the results and pictures of a folder in the order in which a report tells them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from eval.pictures import Picture

# The kinds of results in each; what is of no kind named here comes last.
CHAPTERS = {
    "Sets against decoders": ("matrix",),
    "The papers' experiments": (
        *("llma_count", "llma_tables", "llma_sweep", "llma_dialogue"),
        *("lookahead_sweep", "lookahead_branches", "lookahead_memory"),
    ),
    "SPACE: a model that guesses ahead": ("space_reader", "space_curves", "space_scratch"),
    "Real generation, and the same answers": ("generation", "lossless", "exactness"),
    "Retrieval and answers": ("quality", "quality_sweep"),
    "End to end and in a framework": ("rag_speedup", "frameworks", "registry", "indexing"),
    "Speed, one result at a time": ("speed", "batch", "never_slower", "memory", "peak_memory"),
    "What a pass costs": ("roofline",),
    "Drafters, replayed": ("replay", "ablation", "reliability", "drafting"),
}
OTHER = "More results"


@dataclass(frozen=True, slots=True)
class Section:
    """Tables under a title, in Markdown, with a caption that tells where they were measured."""

    stem: str
    kind: str
    title: str
    tables: str
    caption: str

    def __str__(self) -> str:
        """Lay it out in Markdown."""
        return f"### {self.title}\n\n{self.tables}\n\n{self.caption}\n"


@dataclass(frozen=True, slots=True)
class Chapter:
    """Results that belong together, each followed by the pictures that show it."""

    title: str
    parts: list[Section | Picture]

    @property
    def anchor(self) -> str:
        """What a link to it ends in, as GitHub makes it of the title."""
        kept = "".join(c for c in self.title.lower() if c.isalnum() or c in " -_")
        return kept.replace(" ", "-")


def chapters_of(sections: Sequence[Section], pictures: Sequence[Picture]) -> list[Chapter]:
    """Sort what there is into chapters, in the order of their kinds; empty ones are left out."""
    known = {kind for kinds in CHAPTERS.values() for kind in kinds}
    others = dict.fromkeys(one.kind for one in sections if one.kind not in known)
    found = [
        Chapter(title, [part for kind in kinds for part in _parts(kind, sections, pictures)])
        for title, kinds in {**CHAPTERS, OTHER: tuple(others)}.items()
    ]
    return [chapter for chapter in found if chapter.parts]


def _parts(
    kind: str, sections: Sequence[Section], pictures: Sequence[Picture]
) -> Iterator[Section | Picture]:
    sections = [one for one in sections if one.kind == kind]
    pictures = [one for one in pictures if one.kind == kind]
    stems = {one.stem for one in sections}
    yield from (one for one in pictures if one.shows not in stems)
    for section in sections:
        yield section
        yield from (one for one in pictures if one.shows == section.stem)


def in_markdown(parts: Iterable[Section | Picture], pictures: str) -> str:
    """Lay out parts one below the other, with pictures in the folder of that name."""
    return "\n".join(
        str(part) if isinstance(part, Section) else _picture(part, pictures) for part in parts
    )


def _picture(picture: Picture, folder: str) -> str:
    alt = picture.alt.replace("[", "(").replace("]", ")")
    return f"**{picture.title}**\n\n![{alt}]({folder}/{picture.file})\n\n{picture.caption}\n"
