"""The text of a model that is trained from nothing: what it learns, and what is held out."""

from __future__ import annotations

import random
import tarfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recipes.reader.corpus import load_articles

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ragaccel.models.tokenizer import Tokenizer

MANUALS = "tech_docs"
_SUFFIXES = (".md", ".mdx", ".txt")
_HELD_OUT = 25  # one manual of so many

Documents = list[list[int]]


@dataclass(frozen=True, slots=True)
class Text:
    """Documents in token ids, each with an end token; ``kinds`` says of what."""

    held_in: Documents
    held_out: Documents
    kinds: str

    @property
    def num_tokens(self) -> int:
        """Tokens that may be learned."""
        return sum(map(len, self.held_in))


def read_text(
    data: Path, tokenizer: Tokenizer, *, manuals_alone: bool = False, most: int | None = None
) -> Text:
    """Read the text archives; books and articles as prose, manuals with their code.

    Held out are the articles, books and manuals whose names say so, always the same.

    Args:
        data: the data folder.
        tokenizer: whose ids.
        manuals_alone: leave out all others, which take half a minute.
        most: characters that are taken of what may be learned, and of what is held out; all of
            them without it.

    Raises:
        ConfigurationError: the folder holds no text archives.
        ValueError: nothing is left on one of the sides.
    """
    parts: dict[bool, list[str]] = {False: [], True: []}
    for read in (_manuals,) if manuals_alone else (_manuals, _articles):
        for text, is_held_out in read(data):
            parts[is_held_out].append(text)
    held_in, held_out = (encoded(tokenizer, taken(parts[side], most)) for side in (False, True))
    if not held_in or not held_out:
        raise ValueError(
            f"the text archives hold {len(parts[False])} documents to learn and "
            f"{len(parts[True])} held-out ones: both are needed"
        )
    kinds = "manuals" if manuals_alone else "books, a factbook, encyclopedia articles and manuals"
    return Text(held_in, held_out, kinds)


def _articles(data: Path) -> Iterator[tuple[str, bool]]:
    for article in load_articles(data):
        if article.source != MANUALS:
            yield f"{article.title}\n\n{' '.join(article.sentences)}", article.held_out


def _manuals(data: Path) -> Iterator[tuple[str, bool]]:
    archive = data / "text" / f"{MANUALS}.tar.xz"
    if not archive.exists():
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None and member.name.endswith(_SUFFIXES):
                text = file.read().decode("utf-8", errors="replace")
                yield text, zlib.crc32(member.name.encode()) % _HELD_OUT == 0


def taken(texts: Sequence[str], most: int | None) -> list[str]:
    """Shuffle texts, always alike, and take them up to a number of characters."""
    order = list(texts)
    random.Random(0).shuffle(order)
    if most is None:
        return order
    found, room = [], most
    for text in order:
        if room <= 0:
            break
        found.append(text[:room])
        room -= len(text)
    return found


def encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> Documents:
    """Put texts into token ids, an end token behind each."""
    if not texts:
        return []
    words: Any = tokenizer.tokenizer
    found = words(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    end = sorted(tokenizer.eos_ids)[:1]
    return [[*ids, *end] for ids in found]


def draw_prompts(
    documents: Documents, count: int, *, shortest: int, longest: int, seed: int
) -> list[tuple[int, ...]]:
    """Draw beginnings to go on from: pieces of documents, none twice.

    Raises:
        ValueError: the documents are too short for as many.
    """
    rng = random.Random(seed)
    long_enough = [ids for ids in documents if len(ids) > longest]
    found: dict[tuple[int, ...], None] = {}
    for _ in range(20 * count):
        if len(found) == count or not long_enough:
            break
        ids, length = rng.choice(long_enough), rng.randint(shortest, longest)
        start = rng.randrange(len(ids) - length)
        found.setdefault(tuple(ids[start : start + length]))
    if len(found) < count:
        raise ValueError(
            f"{len(long_enough)} documents of more than {longest} tokens give no {count} prompts: "
            "take fewer"
        )
    return list(found)
