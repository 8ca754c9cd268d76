"""Homes: where history, settings and measured costs are kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def data_home() -> Path:
    """The folder of this user's data: RAGACCEL_HOME, else where the platform keeps such things."""
    if chosen := os.environ.get("RAGACCEL_HOME"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "ragaccel"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "ragaccel"
    shared = os.environ.get("XDG_DATA_HOME")
    return (Path(shared) if shared else Path.home() / ".local" / "share") / "ragaccel"


def user_settings_file() -> Path:
    """The settings file that holds wherever the command is run."""
    return data_home() / "ragaccel.toml"


def project_settings_file() -> Path:
    """The settings file of the current folder; it goes before the user's."""
    return Path("ragaccel.toml")


def cost_file(key: str) -> Path | None:
    """Where it is kept what passes of a model cost here; None for a user without a home."""
    try:
        return data_home() / "costs" / f"{key}.json"
    except RuntimeError:
        return None
