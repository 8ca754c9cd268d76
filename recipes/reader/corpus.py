"""The reader's training text: articles from archives, and people's questions on passages."""

from __future__ import annotations

import hashlib
import json
import random
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ragaccel.errors import ConfigurationError
from ragaccel.passage import split_sentences

HELD_OUT_SHARE = 0.04
NUM_HELD_OUT_XQUAD = 16
BOOK_CHARACTERS = 8_000_000


@dataclass(frozen=True, slots=True)
class Article:
    """A document with its title and sentences; all of it is for training, or all is held out."""

    title: str
    sentences: tuple[str, ...]
    source: str
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class HumanQuestion:
    """A question written by a person, with its passage and the sentence that answers it."""

    question: str
    title: str
    sentences: tuple[str, ...]
    gold: int  # index into sentences
    source: str
    held_out: bool = False
    answer: str = ""  # the short answer, if known


def load_articles(data: Path) -> list[Article]:
    """Read every text archive under ``data/text``."""
    folder = data / "text"
    if not folder.is_dir():
        raise ConfigurationError(
            f"there are no text archives in {folder}: pass --data FOLDER or set RAGACCEL_DATA"
        )
    articles: list[Article] = []
    for title, text, source in _texts(folder):
        sentences = tuple(s for s in map(_one_line, split_sentences(text)) if _is_prose(s))
        if sentences:
            articles.append(Article(title.strip(), sentences, source, _is_held_out(source + title)))
    return articles


def limit_books(articles: list[Article], seed: int) -> list[Article]:
    """Shuffle articles and keep 8 million characters of books, which are most of the text."""
    random.Random(seed).shuffle(articles)
    kept, characters = [], 0
    for article in articles:
        if article.source.startswith("books"):
            characters += sum(map(len, article.sentences))
            if characters > BOOK_CHARACTERS:
                continue
        kept.append(article)
    return kept


def load_questions(data: Path) -> list[HumanQuestion]:
    """Read people's questions: the sets for training, and XQuAD, with some articles held out."""
    squad = rows_of(data / "rag" / "squad_like.jsonl")
    trained = {row["passages"][0]["title"] for row in squad[:2910]}
    only_xquad = sorted(
        {row["passages"][0]["title"] for row in squad[2910:]} - trained, key=_digest
    )
    held_out = frozenset(only_xquad[:NUM_HELD_OUT_XQUAD])
    questions: dict[tuple[str, str], HumanQuestion] = {}
    for source, rows in (("squad", squad), ("nq", rows_of(data / "rag" / "nq_open_oracle.jsonl"))):
        for row in rows:
            found = _human_question(row, source, held_out)
            if found is not None:
                questions.setdefault((found.question, found.sentences[0]), found)
    return list(questions.values())


def _human_question(row: dict, source: str, held_out: frozenset[str]) -> HumanQuestion | None:  # type: ignore[type-arg]
    passage = row["passages"][0]
    text = detokenized(passage["text"]) if source == "nq" else passage["text"]
    sentences = tuple(map(_one_line, split_sentences(text)))
    holding = [i for i, s in enumerate(sentences) if row["answer"].lower() in s.lower()]
    if not holding:
        return None
    asked = set(re.findall(r"\w+", row["question"].lower()))
    overlap = [len(asked & set(re.findall(r"\w+", sentences[i].lower()))) for i in holding]
    best = max(overlap)
    if overlap.count(best) > 1:  # ambiguous: two sentences match equally well
        return None
    title = passage["title"].replace("_", " ")
    gold = holding[overlap.index(best)]
    is_held_out = (
        passage["title"] in held_out if source == "squad" else _is_held_out(source + title)
    )
    return HumanQuestion(
        row["question"].strip(), title, sentences, gold, source, is_held_out, row["answer"]
    )


def _texts(folder: Path) -> Iterator[tuple[str, str, str]]:
    for name, raw in _members(folder / "hipporag_2wiki.tar.xz", ".json"):
        for row in json.loads(raw):
            yield row["title"], row["text"], name.split("/", 1)[0]
    for _, raw in _members(folder / "wikitext2.tar.xz", ".txt"):
        yield from _wikitext(raw)
    for name, raw in _members(folder / "factbook.tar.xz", ".json"):
        yield from _factbook(name, raw)
    for name, raw in _members(folder / "tech_docs.tar.xz", (".md", ".txt", ".mdx")):
        yield _first_heading(raw) or Path(name).stem, _prose_of_markdown(raw), "tech_docs"
    for name, raw in _members(folder / "classic_books.tar.xz", ".md"):
        yield from _chapters(name, raw)


def _members(archive: Path, suffix: str | tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if not archive.exists():
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None and member.name.endswith(suffix) and "LICENSE" not in member.name:
                yield member.name, file.read().decode("utf-8", errors="replace")


def _wikitext(raw: str) -> Iterator[tuple[str, str, str]]:
    title = ""
    lines: list[str] = []
    for line in raw.split("\n"):
        heading = re.fullmatch(r" = ([^=].*[^=]) = ", line)
        if heading:
            if lines:
                yield title, "\n\n".join(lines), "wikitext2"
            title, lines = heading.group(1), []
        elif line.strip() and not line.startswith(" ="):
            lines.append(detokenized(line))
    if lines:
        yield title, "\n\n".join(lines), "wikitext2"


def _factbook(name: str, raw: str) -> Iterator[tuple[str, str, str]]:
    country: dict[str, dict[str, object]] = json.loads(raw)
    if "/meta/" in name:
        return
    names = country.get("Government", {}).get("Country name", {})
    short = names.get("conventional short form", {}) if isinstance(names, dict) else {}
    title = short.get("text", "") if isinstance(short, dict) else ""
    title = title or Path(name).stem
    lines = [line for section in country.values() for line in _fields("", section)]
    yield title, "\n\n".join(lines), "factbook"


def _fields(label: str, value: object) -> Iterator[str]:
    if not isinstance(value, dict):
        return
    text = value.get("text")
    if isinstance(text, str):
        plain = re.sub(r"<[^>]+>|&\w+;", " ", text)
        if len(plain) < 500:
            yield f"{label.strip()}: {plain.strip()}" if label and "." not in plain[:60] else plain
        else:
            yield plain
        return
    for key, inner in value.items():
        yield from _fields(f"{label}, {key.strip()}" if label and len(label) < 30 else key, inner)


def _chapters(name: str, raw: str) -> Iterator[tuple[str, str, str]]:
    body = raw.split("-------", 1)[-1]
    title = Path(name).stem
    for part in re.split(r"\n#{2,4} ", body):
        if len(part) > 800:
            yield title, part.split("\n", 1)[-1], f"books/{title}"


def _prose_of_markdown(raw: str) -> str:
    text = re.sub(r"```.*?```|<!--.*?-->|\[\[.*?\]\]", "\n\n", raw, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"<[^>\n]+>|^#+ .*$|[*_]{2}", "", text, flags=re.MULTILINE)


def _first_heading(raw: str) -> str:
    found = re.search(r"^#+ (.+)$", raw, flags=re.MULTILINE)
    return re.sub(r"[`*_\[\]]", "", found.group(1)) if found else ""


def detokenized(text: str) -> str:
    """Return text without the spaces that tokenized corpora have around punctuation."""
    text = re.sub(r" @([-,.])@ ", r"\1", text)
    text = text.replace("`` ", '"').replace(" ''", '"').replace("( ", "(").replace(" )", ")")
    text = re.sub(r'(^| )" ([^"]*) "', r'\1"\2"', text)
    return re.sub(r" ([.,;:?!%]|'s|n't)(?=\W|$)", r"\1", text)


def _one_line(sentence: str) -> str:
    return re.sub(r"\s+", " ", sentence).strip()


def _is_prose(sentence: str) -> bool:
    letters = sum(c.isalpha() or c == " " for c in sentence)
    return 20 <= len(sentence) <= 320 and letters > 0.7 * len(sentence) and "<unk>" not in sentence


def rows_of(path: Path) -> list[dict]:  # type: ignore[type-arg]
    """Read the rows of a JSON-lines file; return an empty list if the file does not exist."""
    lines: Iterable[str] = path.read_text(encoding="utf-8").split("\n") if path.exists() else ()
    return [json.loads(line) for line in lines if line]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _is_held_out(key: str) -> bool:
    """Return whether an article is held out, by its name; chapters of a book share the name."""
    return int(_digest(key)[:8], 16) / 2**32 < HELD_OUT_SHARE
