"""Homes: where history, settings and measured costs are kept."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def data_home() -> Path:
    """The folder of this user's data: RAGACCEL_HOME, else where the platform keeps such things.

    Raises:
        RuntimeError: A user without a home.
    """
    if chosen := os.environ.get("RAGACCEL_HOME"):
        return Path(chosen).expanduser()
    from platformdirs import user_data_dir

    return Path(user_data_dir("ragaccel", appauthor=False)).expanduser()


def make_data_home() -> Path:
    """Return the data folder, made if it is missing; only this user may read a new one.

    Whatever is put there first makes it by this function: what was asked is kept there too.

    Raises:
        OSError: it cannot be made.
    """
    home = data_home()
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    return home


def make_folder_of(path: Path) -> None:
    """Make the folder that a file is to be in; a new data folder on the way is this user's alone.

    Raises:
        OSError: it cannot be made.
    """
    with suppress(RuntimeError):  # a user without a home
        if data_home() in path.parents:
            make_data_home()
    path.parent.mkdir(parents=True, exist_ok=True)


def user_settings_file() -> Path:
    """The settings file that holds wherever the command is run."""
    return data_home() / "ragaccel.toml"


def project_settings_file() -> Path:
    """The settings file of the current folder: before the user's, for what loads nothing."""
    return Path("ragaccel.toml")


def cost_file(key: str) -> Path | None:
    """Where it is kept what passes of a model cost here; None for a user without a home."""
    try:
        return data_home() / "costs" / f"{key}.json"
    except RuntimeError:
        return None
