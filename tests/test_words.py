"""Names, docstrings, messages and documents keep to the field's words."""

import re
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("ragaccel", "integrations", "eval", "recipes", "demos", "docs", "tests", ".ci")
KINDS = {".py", ".pyi", ".md", ".toml", ".txt", ".yml", ".yaml", ".sh", ".html", ".css", ".jinja"}
QUOTED = ("demos/documents/", "eval/results/", "eval/tasks/", "tests/test_words.py")

WORDS = (
    r"guess",
    r"rehears",
    r"fore(see|saw)",
    r"(?<![a-z])(wears?|wearing|worn)(?![a-z])",
    r"(?<![a-z])twins?(?![a-z])",
    r"chooser",
    r"runner[\s_-]?up",
    r"why_apart",
    r"joins_sequences",
    r"disguis",
    r"(?<![a-z])homes(?![a-z])",
    r"where\s+there\s+is\s+none",
    r"half\s+a\s+character",
)


@cache
def pages():
    listed = subprocess.run(
        ["git", "ls-files", "*"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split("\n")
    found = [ROOT / name for name in listed if name] or [
        path for folder in FOLDERS for path in (ROOT / folder).rglob("*")
    ]
    names = {
        str(path.relative_to(ROOT)): path
        for path in found
        if path.is_file() and (path.suffix in KINDS or path.name in ("Makefile", "run"))
    }
    return {
        name: f"{name}\n{path.read_text(encoding='utf-8')}"
        for name, path in names.items()
        if not name.startswith(QUOTED) and "/data/" not in name
    }


def places_of(pattern):
    return [
        f"{name}:{text.count(chr(10), 0, match.start())}: {match.group()}"
        for name, text in pages().items()
        for match in pattern.finditer(text)
    ]


def test_no_private_word_is_left_and_limits_are_called_min_and_max():
    assert not places_of(re.compile("|".join(WORDS), re.IGNORECASE))
    assert not places_of(re.compile(r"(?<![A-Z])(LEAST|MOST|FEW|ENOUGH)_[A-Z]"))


def test_all_that_people_read_is_looked_at():
    folders = {name.split("/")[0] for name in pages()}
    assert folders >= {*FOLDERS[:-1], "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile"}
