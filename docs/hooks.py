"""Links of the pages that lead out of the documentation, into the repository.

The pages are read in the repository as well, where such a link opens the file. On the site it opens
the file at the repository's address, and is plain text while there is none.
"""

import re
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).parents[1]
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
_OUTSIDE = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Rewrite a page's links to files outside the documentation."""
    return _OUTSIDE.sub(_rewritten, markdown)


def _rewritten(link: re.Match[str]) -> str:
    text, target = link.groups()
    address = ADDRESS["Repository"].rstrip("/")
    return text if address.endswith(".invalid") else f"[{text}]({address}/blob/main/{target})"
