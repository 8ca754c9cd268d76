"""The files of a SPACE adapter: where they are, and what the description among them says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ragaccel.errors import ConfigurationError
from ragaccel.models.locate import Kind, find_folder

CONFIG_FILE, WEIGHTS_FILE = "space_config.json", "space.safetensors"
FOLDER = "space"
"""Where a model's folder holds its own adapter."""
FORMAT = 1
ADAPTER = Kind(
    "SPACE adapter",
    (CONFIG_FILE, WEIGHTS_FILE),
    (CONFIG_FILE,),
    "train one with `ragaccel train space`",
)


def fetched(name_or_path: str | Path, hub: dict[str, Any]) -> Path:
    """Find the folder of an adapter; the hub is asked only where the cache has it not.

    Raises:
        ModelNotFoundError: neither a folder nor, in the cache or on the hub, a repository.
    """
    folder = Path(os.path.expanduser(name_or_path))
    if os.path.isdir(folder) or isinstance(name_or_path, Path):
        return folder / (hub.get("subfolder") or "")
    return find_folder(name_or_path, ADAPTER, hub)


def read_config(folder: Path) -> dict[str, Any]:
    """Read what an adapter's folder says of it.

    Raises:
        ConfigurationError: nothing, or nothing that can be read.
    """
    path = folder / CONFIG_FILE
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if config["format"] > FORMAT:
            raise ConfigurationError(
                f"{path} is of a later format ({config['format']}): update ragaccel"
            )
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigurationError(
            f"{folder} holds no {CONFIG_FILE}: name a folder that `ragaccel train space` wrote"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{path} is no description of a SPACE adapter: {error}") from error
    return config
