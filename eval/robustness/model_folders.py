"""Damaged model folders: loaded and asked."""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path

from eval.robustness.fuzz import Case, Kind, Make, changed_bytes
from eval.robustness.stand_ins import save_tiny_model
from ragaccel import LLM
from ragaccel.errors import RagaccelError

_NUMBERS = (b"0", b"-1", b"1", b"3", b"0.5", b"1e999", b"null", b'"x"', b"[]", b"99999999999")
_TEMPLATES = (
    "{% if %}",
    "{{ messages[0].x.y.z }}",
    "{{ raise_exception('no') }}",
    "{{ ''.__class__.__mro__ }}",
    "{% include '/etc/passwd' %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 200000000 }}",
    "{{ '\\\\ud800' }}",
    "{{ tools }}{{ '(' * 20000 }}{{ messages }}",
    "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "{{ documents }}{{ messages }}" + " " * (1 << 21),
)

Damage = tuple[str, bytes | None]
"""A file's name and its new contents, or None for a deleted one."""


def open_model_folders(folder: Path) -> Make:
    """Save a tiny model; return the function that damages one file of a copy of it."""
    whole = save_tiny_model(folder / "whole")
    files = {path.name: path.read_bytes() for path in sorted(whole.iterdir())}

    def make(number: int, rng: random.Random) -> Case:
        file, data = damage(files, rng)
        return file, f"{file}, damage {number}", lambda: use(whole, folder / "damaged", file, data)

    return make


def use(whole: Path, folder: Path, file: str, data: bytes | None) -> None:
    """Load a copy of the folder with one file damaged, and ask the model twice."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    if data is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(data)
    llm = LLM.load(str(folder), save_measurements=False)
    llm.generate("abc", max_new_tokens=2, remember=False)
    said = [{"role": "user", "content": "x"}]
    try:
        llm.generate(said, max_new_tokens=2, remember=False)
    except RagaccelError:  # the damaged chat template refuses messages
        assert llm.tokenizer.takes_tools in (True, False)


def damage(files: dict[str, bytes], rng: random.Random) -> Damage:
    """Draw a file and its damaged contents from ``rng``."""
    file = rng.choice(sorted(files))
    data = files[file]
    if rng.random() < 0.06:
        return file, None
    if file.endswith(".jinja") and rng.random() < 0.6:
        return file, rng.choice(_TEMPLATES).encode()
    if file.endswith(".safetensors") and rng.random() < 0.7:
        head = 8 + struct.unpack("<Q", data[:8])[0]
        return file, changed_bytes(data[:head], rng) + data[head:]
    if file.endswith(".json") and rng.random() < 0.5:
        return file, _renumbered(data, rng)
    return file, changed_bytes(data, rng)


def _renumbered(data: bytes, rng: random.Random) -> bytes:
    """Replace the value on one line of JSON by one of another type or a wild number."""
    lines = data.split(b"\n")
    holding = [n for n, line in enumerate(lines) if b":" in line]
    if not holding:
        return changed_bytes(data, rng)
    at = rng.choice(holding)
    name, _, value = lines[at].partition(b":")
    tail = b"," if value.rstrip().endswith(b",") else b""
    lines[at] = name + b": " + rng.choice(_NUMBERS) + tail
    return b"\n".join(lines)


KIND = Kind(open_model_folders, count=250, seconds=120, megabytes=4000, batch=25)
