"""The files of a SPACE adapter: where they are, and what the description among them says."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.errors import LocalEntryNotFoundError

from ragaccel.errors import ConfigurationError, ModelNotFoundError

CONFIG_FILE, WEIGHTS_FILE = "space_config.json", "space.safetensors"
FOLDER = "space"
"""Where a model's folder holds its own adapter."""
FORMAT = 1


def fetched(name_or_path: str | Path, hub: dict[str, Any]) -> Path:
    """Find the folder of an adapter; the hub is asked only where the cache has it not.

    Raises:
        ModelNotFoundError: neither a folder nor, in the cache or on the hub, a repository.
    """
    folder = Path(name_or_path).expanduser()
    if os.path.isdir(folder) or isinstance(name_or_path, Path):
        return folder
    from huggingface_hub import snapshot_download

    within: str = hub.pop("subfolder", "")
    files = [f"{within}/{name}" if within else name for name in (CONFIG_FILE, WEIGHTS_FILE)]
    fetch = partial(snapshot_download, str(name_or_path), allow_patterns=files, **hub)
    try:
        with suppress(LocalEntryNotFoundError):
            found = Path(str(fetch(local_files_only=True)))
            if (found / files[0]).is_file():
                return found / within
        return Path(str(fetch())) / within
    except Exception as error:
        raise ModelNotFoundError(
            f"no SPACE adapter {name_or_path!r} in a folder, in the cache or on the hub "
            f"({type(error).__name__}): check the name, or train one with `ragaccel train space`"
        ) from error


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
