"""Texts in encodings from before Unicode: how many are read without an error."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from eval.robustness.fuzz import Case, Counts, Kind, Make, OutcomeError
from ragaccel.retrieval.loaders import decode_text, encoding_warning

SENTENCES = Path(__file__).with_name("sentences.txt")
LEGACY = (
    ("shift_jis", "ja"),
    ("euc_jp", "ja"),
    ("big5", "zh-Hant"),
    ("gbk", "zh-Hans"),
    ("euc_kr", "ko"),
    ("koi8_r", "ru"),
    ("cp1251", "ru uk bg"),
    ("cp1250", "pl cs hu"),
)
FURTHER = (
    ("gb18030", "zh-Hans"),
    ("iso2022_jp", "ja"),
    ("cp866", "ru"),
    ("iso8859_5", "ru bg"),
    ("koi8_u", "uk"),
    ("cp1253", "el"),
    ("cp1254", "tr"),
    ("iso8859_2", "pl cs hu"),
)
WESTERN = "de fr es pt it sv da"
KEPT = (
    ("cp1252", WESTERN),
    ("latin_1", WESTERN),
    ("utf-8", "ja zh-Hans zh-Hant ko ru el de fr"),
    ("utf-8-sig", "ja ru fr"),
    ("utf-16", "ja zh-Hans ko ru de"),
)
MIN_SHARE = 0.98
_SHORTEST, _LONGEST = 200, 20_000
_ENGLISH = (
    "The key hangs behind the tank.",
    "See section 4.2 of the manual.",
    "TODO: check version 1.10.3 before the release",
    "https://example.org/docs/page?id=7",
    "name, year, amount: 12,500.00",
)


def read_sentences(path: Path = SENTENCES) -> dict[str, list[str]]:
    """Read sentences by language from a file with one sentence per line under ``[language]``."""
    found: dict[str, list[str]] = {}
    language = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            language = line[1:-1]
        elif line and not line.startswith("#"):
            found.setdefault(language, []).append(line)
    return found


def make_text(sentences: list[str], encoding: str, chance: random.Random) -> str:
    """Draw a text from sentences; its length in bytes is uniform between two limits."""
    size = _SHORTEST * (_LONGEST / _SHORTEST) ** chance.random()
    english = chance.choice((0.0, 0.0, 0.2, 0.5))
    text = ""
    while len(text.encode(encoding, "ignore")) < size:
        others = _ENGLISH if chance.random() < english else sentences
        text += chance.choice(others) + chance.choice((" ", "\n", "\n\n"))
    return text


def open_encodings(_folder: Path) -> Make:
    """Return the function that makes texts, in all encodings in turn."""
    sentences = read_sentences()
    groups = {"legacy": LEGACY, "further": FURTHER, "kept": KEPT}
    turns = [(name, *row) for name, rows in groups.items() for row in rows]

    def make(number: int, rng: random.Random) -> Case:
        group, encoding, languages = turns[number % len(turns)]
        language = rng.choice(languages.split())
        data = make_text(sentences[language], encoding, rng).encode(encoding, "ignore")
        label = f"{encoding}, {language}, {len(data)} bytes"
        return f"{group} {encoding}", label, lambda: read(data, encoding, group)

    return make


def read(data: bytes, encoding: str, group: str) -> None:
    """Read a text; it is wrong if any character is, and silently so without a warning."""
    read_as, told = decode_text(data)
    if read_as == data.decode(encoding):
        return
    how = "changed" if group == "kept" else "wrong" if encoding_warning(data) else "silent"
    raise OutcomeError(how if how != "changed" else f"changed: read as {told}")


def judge(counts: Counts) -> list[str]:
    """Return whether too few texts in the common encodings are right."""
    total = sum((own for group, own in counts.items() if group.startswith("legacy")), Counter())
    share = total["ok"] / max(1, total.total())
    return [f"only {share:.1%} are right"] if share < MIN_SHARE else []


KIND = Kind(open_encodings, count=2_100, seconds=10, allowed=("ok", "wrong", "silent"), judge=judge)
