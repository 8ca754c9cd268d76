"""Packing choices: for which layers packing was measured to pay, kept on disk from run to run."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
from typing import TYPE_CHECKING

import torch

from ragaccel.homes import cost_file
from ragaccel.replacing import replacing

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

_FORMAT = "ragaccel packing 1"

logger = logging.getLogger("ragaccel")


class PackingChoices:
    """Whether layers of a shape and type are packed; the next run chooses alike, without measuring.

    What was measured twice may come out differently, and packed sums round differently. A file
    that is no such file, or cannot be written, does no harm: choices are measured anew.

    Args:
        path: the file, of one processor, number of threads and version of torch; without it
            nothing is kept.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._pays = _read(path)
        self._is_saved = True

    def of(self, weight: Tensor) -> bool | None:
        """What is known of weights like these."""
        return self._pays.get(_name(weight))

    def add(self, weight: Tensor, pays: bool) -> None:
        """Take what was measured on these weights."""
        self._pays[_name(weight)] = pays
        self._is_saved = False

    def save(self) -> None:
        """Write what is new; what other programs have written meanwhile stays."""
        if self._path is None or self._is_saved:
            return
        document = {"format": _FORMAT, "pays": {**self._pays, **_read(self._path)}}
        try:
            with replacing(self._path) as file:
                file.write(json.dumps(document, indent=1).encode())
        except OSError as error:
            logger.debug("packing choices are not kept: %s", error)
        self._is_saved = True


def packing_file(*, keep: bool = True) -> Path | None:
    """Where choices are kept for this processor, its threads and this torch; None if they are not.

    Beside what passes cost.
    """
    if not keep:
        return None
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} threads"
    kernels = torch.backends.cpu.get_cpu_capability()
    place = f"packing {platform.machine()} {kernels} {threads} torch {torch.__version__}"
    return cost_file(re.sub(r"[^0-9A-Za-z.]+", "-", place).lower())


def forget_packing() -> None:
    """Have choices measured anew that are kept for this processor and its threads."""
    path = packing_file()
    try:
        if path is not None:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.debug("packing choices are not forgotten: %s", error)


def _name(weight: Tensor) -> str:
    outputs, inputs = weight.shape
    return f"{outputs} x {inputs} {str(weight.dtype).removeprefix('torch.')}"


def _read(path: Path | None) -> dict[str, bool]:
    if path is None:
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] == _FORMAT:
            kept = document["pays"].items()
            return {name: pays for name, pays in kept if isinstance(pays, bool)}
    except Exception as error:  # measured anew: what it holds is no one's work
        logger.debug("packing choices are not read: %s", error)
    return {}
