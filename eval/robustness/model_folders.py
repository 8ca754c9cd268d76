"""A fuzzer of model loading: damaged model folders."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import struct
import tempfile
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from eval.robustness.fuzzer import fuzzer, in_child, patience
from eval.robustness.stand_ins import save_tiny_model
from eval.runner import note, result
from ragaccel import LLM
from ragaccel.errors import RagaccelError

_BATCH = 25  # folders that one process loads
_MAX_BYTES = 12 << 30  # of address space
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

Damage = tuple[str, bytes | None]  # a file's name and its new contents; None: deleted


@fuzzer(250, patience(60), seed=0)
def run_fuzz_model_folders(options: Namespace) -> dict[str, Any]:
    """Damaged model folders: ``python -m eval fuzz_model_folders --count 250``.

    One file of a tiny model's folder is damaged at a time: bytes and numbers of config, tokenizer,
    weights and template are changed, cut, doubled or deleted. The model must load and answer, or
    one of ragaccel's errors must say why it cannot. Any other error, a process that dies and a
    folder that takes more than ``--patience`` seconds of CPU break the promise, and the run exits
    with 1. Child processes load the folders, with limits on memory and time.
    """
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    broken: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as name:
        base = save_tiny_model(Path(name) / "base")
        rng = random.Random(options.seed)
        files = {path.name: path.read_bytes() for path in sorted(base.iterdir())}
        damages = [damage(files, rng) for _ in range(options.count)]
        done = 0
        while done < len(damages):
            outcomes = _in_a_child(base, damages[done : done + _BATCH], options.patience)
            for (file, _), outcome in zip(damages[done:], outcomes, strict=False):
                kind = outcome.split(":")[0]
                counts[kind] += 1
                if kind not in ("answered", "refused"):
                    broken.append({"file": file, "case": str(done), "outcome": outcome})
                done += 1
            note(f"{done} of {len(damages)}: {dict(counts)}")
    settings = {"count": options.count, "seed": options.seed}
    return result("fuzz_model_folders", settings, counts=dict(counts), broken=broken)


def _in_a_child(base: Path, damages: Sequence[Damage], patience: int) -> list[str]:
    """Return the outcomes of loading damaged folders in one child; the last says if it died."""

    def load_all(tell: Callable[[Any], object]) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL)  # the timer ends the process
        for each in damages:
            signal.setitimer(signal.ITIMER_VIRTUAL, patience)
            tell(_outcome(base, each))

    outcomes, ended = in_child(load_all)
    if len(outcomes) < len(damages):
        outcomes.append("hang" if ended == "SIGVTALRM" else f"died: {ended}")
    return outcomes


def _outcome(base: Path, damaged: Damage) -> str:
    file, data = damaged
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        shutil.copytree(base, folder)
        if data is None:
            (folder / file).unlink()
        else:
            (folder / file).write_bytes(data)
        try:
            _use(folder)
        except RagaccelError as error:
            return f"refused: {type(error).__name__}: {_line(error)}"
        except BaseException as error:
            ours = [
                f for f in traceback.extract_tb(error.__traceback__) if "ragaccel" in f.filename
            ]
            place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
            return f"raw {type(error).__name__}: {_line(error)} at {place}"
    return "answered"


def _use(folder: Path) -> None:
    llm = LLM.load(str(folder), save_measurements=False)
    llm.generate("abc", max_new_tokens=2, remember=False)
    said = [{"role": "user", "content": "x"}]
    try:
        llm.generate(said, max_new_tokens=2, remember=False)
    except RagaccelError:  # the damaged chat template refuses messages
        assert llm.tokenizer.takes_tools in (True, False)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]


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
        return file, _changed(data[:head], rng) + data[head:]
    if file.endswith(".json") and rng.random() < 0.5:
        return file, _renumbered(data, rng)
    return file, _changed(data, rng)


def _renumbered(data: bytes, rng: random.Random) -> bytes:
    """Replace the value on one line of JSON by one of another type or a wild number."""
    lines = data.split(b"\n")
    holding = [n for n, line in enumerate(lines) if b":" in line]
    if not holding:
        return _changed(data, rng)
    at = rng.choice(holding)
    name, _, value = lines[at].partition(b":")
    tail = b"," if value.rstrip().endswith(b",") else b""
    lines[at] = name + b": " + rng.choice(_NUMBERS) + tail
    return b"\n".join(lines)


def _changed(data: bytes, rng: random.Random) -> bytes:
    """Return a copy with bytes flipped, cut, doubled, overwritten or removed, up to a few times."""
    for _ in range(rng.choice((1, 1, 1, 3, 20))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 4, 64, 1000)))
        kind = rng.randrange(6)
        if kind == 0 and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at]
        elif kind == 2:
            data = data[:end] + data[at:]
        elif kind == 3:
            data = data[:at] + rng.randbytes(end - at) + data[end:]
        elif kind == 4:
            data = data[:at] + data[end:]
        else:
            data = data[:at] + rng.choice(_NUMBERS) + data[at:]
    return data
