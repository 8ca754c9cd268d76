"""Embedder settings: what a sentence-transformers folder says about how it embeds."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ragaccel.errors import ModelNotFoundError, ModelRefusedError, RagaccelError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_ENCODERS = ("bert", "camembert", "electra", "modernbert", "roberta", "xlm-roberta")
_ROBERTAS = ("camembert", "roberta", "xlm-roberta")  # they count positions from the padding's id
_SPECIAL = ("processing_kwargs", "query_length", "document_length", "query_expansion")
_MOST_NESTED = 4
_PLAIN_MODULES = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])


@contextmanager
def explained(folder: Path | str) -> Iterator[None]:
    """Turn whatever is raised over a damaged model folder into an error of ours.

    Raises:
        ModelRefusedError: With the cause.
    """
    try:
        yield
    except (RagaccelError, MemoryError):
        raise
    except Exception as error:  # the libraries that read it raise whatever they like
        cause = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelRefusedError(
            f"the model in {folder} cannot be loaded ({cause}): save or download it anew, or use"
            " another"
        ) from error


class EmbedderSettings:
    """What a model folder says about how it embeds.

    Raises:
        ModelNotFoundError: A file of it cannot be read.
        ModelRefusedError: It says what no model can be.
    """

    def __init__(self, folder: Path) -> None:
        with explained(folder):
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
            and not any(saved.get(name) for name in _SPECIAL)
            and _is_plain_encoder(self.config)
            and (folder / "model.safetensors").is_file()
            and (folder / "tokenizer.json").is_file()
            and not (folder / "adapter_config.json").exists()
        )

    def described(self) -> str:
        """The settings that shape the vectors, written the same for the same model anywhere."""
        kept = (self.modules, self.pooling, self.max_length, self.prompts, self.lower_case)
        return json.dumps(kept, sort_keys=True)


def require_known_modules(folder: Path) -> None:
    """Refuse a model folder that names classes which are not sentence-transformers' or torch's own.

    Versions of sentence-transformers before 6 import such classes from the folder itself, which
    runs whatever Python it brings along.

    Raises:
        ModelRefusedError: It names the file and the class.
    """
    for module in _modules(folder):
        _require_known_module(folder / "modules.json", module.get("type"), module.get("path", ""))


def _modules(folder: Path) -> list[dict[str, Any]]:
    modules = _read_json(folder / "modules.json") or []
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelRefusedError(f"{folder / 'modules.json'} is no list of modules: use another")
    return modules


def _require_known_module(file: Path, name: Any, subfolder: Any, depth: int = 0) -> None:
    """Check one module, named in a file, and those that it is made of."""
    _require_class(file, name, "sentence_transformers.")
    folder, kind = file.parent / str(subfolder), str(name).rsplit(".", 1)[-1]
    if kind == "Dense":
        config = _read_object(folder / "config.json")
        if "activation_function" in config:
            _require_class(folder / "config.json", config["activation_function"], "torch.nn.")
    elif kind == "WordEmbeddings":
        config = _read_object(folder / "wordembedding_config.json")
        name = config.get("tokenizer_class")
        _require_class(folder / "wordembedding_config.json", name, "sentence_transformers.")
    elif kind in ("Router", "Asym") and depth < _MOST_NESTED:
        for routes in (folder / "router_config.json", folder / "config.json"):
            for inner, name in (_read_object(routes).get("types") or {}).items():
                _require_known_module(routes, name, inner, depth + 1)
    elif kind in ("Router", "Asym"):
        raise ModelRefusedError(f"{file} nests modules deeper than any model does: use another")


def _require_class(file: Path, name: Any, home: str) -> None:
    if not isinstance(name, str) or not name.startswith(home):
        raise ModelRefusedError(
            f"{file} names {name!r}, which is not part of {home[:-1]}: loading it would run code"
            " that the model brings along; use another embedding model"
        )


def _is_plain_encoder(config: dict[str, Any]) -> bool:
    """Whether :class:`ragaccel.retrieve.encoder.TextEncoder` takes such a model."""
    return (
        config.get("model_type") in _ENCODERS
        and not config.get("is_decoder", False)
        and "quantization_config" not in config
    )


def _num_positions(config: dict[str, Any]) -> int:
    """How many tokens a model has positions for."""
    positions = int(config.get("max_position_embeddings", 512))
    left_out = config.get("model_type") in _ROBERTAS
    return positions - (int(config.get("pad_token_id", 1)) + 1 if left_out else 0)


def _pooling(config: dict[str, Any]) -> str:
    """``mean``, ``cls``, or the name of another way of pooling."""
    if isinstance(config.get("pooling_mode"), str):
        return str(config["pooling_mode"])
    modes = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    names = [mode.removeprefix("pooling_mode_").removesuffix("_tokens") for mode in modes]
    return {"cls_token": "cls"}.get("+".join(names), "+".join(names))


def _read_object(path: Path) -> dict[str, Any]:
    found = _read_json(path)
    if not isinstance(found, dict):
        raise ModelRefusedError(f"{path} is no JSON object: save or download the model anew")
    return found


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error}") from error
