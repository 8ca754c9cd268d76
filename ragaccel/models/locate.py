"""Where a model is: a folder, the local cache or the hub, in that order and without waiting."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError

from ragaccel.checks import shown
from ragaccel.errors import ModelNotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping

_PART = r"\w(?:[\w.-]*\w)?"
_LONGEST_NAME = 96  # that the hub gives
_TIMEOUT_SECONDS = 5.0
_WEIGHTS = ("*.safetensors", "*.bin")


def locate_model(name_or_path: str | Path, hub: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Find a model; return what ``from_pretrained`` is to be given.

    A name in the cache is loaded from there and never asks the network. Otherwise the hub is
    asked once, for a few seconds at most: transformers alone would try again for half a minute.

    Args:
        name_or_path: a folder or a name on the hub.
        hub: revision, token, cache_dir and subfolder, where given.

    Raises:
        ModelNotFoundError: saying where it was looked for.
    """
    name = str(name_or_path)
    folder = Path(name).expanduser()
    if os.path.isdir(folder):
        if not (folder / hub.get("subfolder", "") / "config.json").is_file():
            raise ModelNotFoundError(f"{name!r} is a folder without a config.json: not a model")
        return str(folder), dict(hub)
    if os.path.isfile(folder):
        raise ModelNotFoundError(f"{name!r} is a file: give the folder that holds config.json")
    if isinstance(name_or_path, Path) or not _can_be_on_hub(name):
        raise ModelNotFoundError(
            f"no folder {shown(name)}, and no model on the hub has such a name"
        )
    if cached_folder(name, hub) is not None:
        return name, {**hub, "local_files_only": True}
    if constants.HF_HUB_OFFLINE:
        raise ModelNotFoundError(
            f"no model {name!r} in a folder or in the cache ({constants.HF_HUB_CACHE}), and "
            "HF_HUB_OFFLINE forbids asking the hub: download it first, or unset HF_HUB_OFFLINE"
        )
    _ask_hub(name, hub)
    return name, dict(hub)


def cached_folder(name: str, hub: Mapping[str, Any]) -> Path | None:
    """Return where the cache holds a name's files, if its weights are among them."""
    if not _can_be_on_hub(name):
        return None
    subfolder = hub.get("subfolder", "")
    config = try_to_load_from_cache(
        name,
        f"{subfolder}/config.json" if subfolder else "config.json",
        cache_dir=hub.get("cache_dir"),
        revision=hub.get("revision"),
    )
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return folder if any(next(folder.glob(pattern), None) for pattern in _WEIGHTS) else None


def _can_be_on_hub(name: str) -> bool:
    # One optional owner, then letters, digits and single dashes, dots or underscores.
    if (
        re.fullmatch(rf"(?:{_PART}/)?{_PART}", name, re.ASCII) is None
        or ".." in name
        or "--" in name
        or len(name) > _LONGEST_NAME
    ):
        return False
    return not name.startswith((".", "~", os.sep))


def _ask_hub(name: str, hub: dict[str, Any]) -> None:
    try:
        HfApi(token=hub.get("token")).model_info(
            name, revision=hub.get("revision"), timeout=_TIMEOUT_SECONDS
        )
    except HfHubHTTPError as error:
        raise ModelNotFoundError(
            f"no model {name!r}: not a folder, not in the cache, and the hub answers: "
            f"{str(error).strip().splitlines()[-1]} Private and gated models need a token."
        ) from error
    except Exception as error:
        raise ModelNotFoundError(
            f"no model {name!r} in a folder or in the cache ({constants.HF_HUB_CACHE}), and the "
            f"hub cannot be reached ({type(error).__name__}): check the name, or the network"
        ) from error
