"""An experiment on reading files in encodings from before Unicode."""

from __future__ import annotations

import random
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from eval import cli
from eval.runner import note, result
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


@cli.experiment(
    cli.integer("--count", 100, "files in each encoding"),
    cli.SEED,
    cli.option("--sentences", type=Path, default=SENTENCES, help="other sentences"),
    broken=lambda document: not document["promise_kept"],
)
def run_encodings(options: Namespace) -> dict[str, Any]:
    """Encodings: how many files in encodings from before Unicode are read correctly?

        python -m eval encodings --out eval/results

    The run makes files of 200 bytes to 20 kB from the sentences of ``sentences.txt``, some mixed
    with English lines as real files are, a hundred in each of eight encodings, and reads them as
    indexing does. For comparison it also reads further encodings, Unicode and Western text, which
    must not change, and all files by charset-normalizer alone. A file is wrong if any of its
    characters is wrong. A wrong file whose encoding was not reported as unsure is a silent error.
    The run exits with 1 if fewer than 98 % are right, or if Western or Unicode text changes.
    """
    sentences = read_sentences(options.sentences)
    chance = random.Random(options.seed)
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, rows in (("legacy", LEGACY), ("further", FURTHER), ("kept", KEPT)):
        groups[name] = []
        for encoding, languages in rows:
            note(f"{name}: {encoding}")
            groups[name].append(_measured(encoding, languages, sentences, options.count, chance))
    shares = {name: _share(rows) for name, rows in groups.items()}
    return result(
        "encodings",
        {"count": options.count, "seed": options.seed},
        **groups,
        right={name: round(share, 4) for name, share in shares.items()},
        silent_errors=sum(row["silent"] for row in groups["legacy"]),
        promise_kept=shares["legacy"] >= MIN_SHARE and shares["kept"] == 1.0,
    )


def read_sentences(path: Path) -> dict[str, list[str]]:
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


def _measured(
    encoding: str,
    languages: str,
    sentences: dict[str, list[str]],
    count: int,
    chance: random.Random,
) -> dict[str, Any]:
    counts = dict.fromkeys(("right", "named", "silent", "charset_normalizer_right"), 0)
    seconds, wrong = 0.0, []
    for number in range(count):
        language = languages.split()[number % len(languages.split())]
        data = make_text(sentences[language], encoding, chance).encode(encoding, "ignore")
        text = data.decode(encoding)
        began = time.perf_counter()
        read, told = decode_text(data)
        seconds += time.perf_counter() - began
        doubt = encoding_warning(data)
        counts["right"] += read == text
        counts["named"] += bool(doubt)
        counts["silent"] += read != text and not doubt
        counts["charset_normalizer_right"] += _by_charset_normalizer(data) == text
        if read != text:
            wrong.append({"language": language, "bytes": len(data), "read_as": told})
    each = round(1000 * seconds / max(1, count), 1)
    return {"encoding": encoding, "files": count, **counts, "ms_a_file": each, "wrong": wrong[:5]}


def _by_charset_normalizer(data: bytes) -> str:
    from charset_normalizer import from_bytes

    best = from_bytes(data).best()
    return "" if best is None else data.decode(best.encoding, "replace")


def _share(rows: list[dict[str, Any]]) -> float:
    return sum(row["right"] for row in rows) / max(1, sum(row["files"] for row in rows))
