"""The machine: hardware, versions, command and commit, as every result carries them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
_PACKAGES = ("ragaccel", "torch", "transformers", "numpy")
_LOCAL = (
    "--data",
    "--documents",
    "--other",
    "--out",
    "--picture",
    "--indexes",
    "--adapter",
    "--run",
    "--work",
)  # options whose values name places on one machine only


def describe_machine(device: str) -> dict[str, Any]:
    """Describe hardware and versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": _memory_gb(),
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        "system": platform.system(),
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
    }


def describe_run(module: str) -> dict[str, Any]:
    """Tell when, from which commit and by which command a result was made."""
    return {
        "command": f"python -m {module} {_arguments(sys.argv[1:])}".strip(),
        "commit": current_commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


@cache
def current_commit() -> str:
    """Return the commit of the code, with a plus sign if it was changed since."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    changed = _git(
        "status", "--porcelain", "--", "ragaccel", "eval/*.py", "eval/shapes", "eval/tasks"
    )
    return commit + ("+" if changed else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _arguments(arguments: list[str]) -> str:
    """Join the arguments, with folders of this machine by their last name only."""
    shown = list(arguments)
    for i, argument in enumerate(shown):
        name, equals, value = argument.partition("=")
        if name in _LOCAL and equals:
            shown[i] = f"{name}={_short(value)}"
        elif i and shown[i - 1] in _LOCAL:
            shown[i] = _short(argument)
    return " ".join(shown)


def _short(path: str) -> str:
    full = Path(path).resolve()
    return str(full.relative_to(ROOT)) if full.is_relative_to(ROOT) else full.name


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "from source"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gb() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9)
    except (AttributeError, ValueError, OSError):
        return None
