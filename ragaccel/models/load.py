"""Load a model and its tokenizer by name or folder."""

from __future__ import annotations

import contextlib
import logging as stdlib_logging
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from transformers.utils.hub import extract_commit_hash
from transformers.utils.import_utils import is_accelerate_available

from ragaccel.engine import bfloat16
from ragaccel.errors import (
    ConfigurationError,
    MissingExtraError,
    ModelNotFoundError,
    UnsupportedModelError,
    brief,
)
from ragaccel.models.fused_decoder import has_compiled_form, packed_groups
from ragaccel.models.hf_model import HuggingFaceModel
from ragaccel.models.hub import LANGUAGE_MODEL, find_folder
from ragaccel.models.packing import multiplies_bfloat16, pack_linears
from ragaccel.models.self_check import describe_files
from ragaccel.models.support import (
    describe_quantization,
    read_max_positions,
    refuse_by_config,
    refuse_recurrent,
)
from ragaccel.models.tokenizer import Tokenizer
from ragaccel.paths import claim_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


logger = stdlib_logging.getLogger("ragaccel")
_SHARE_LEFT = 0.1  # of the weights, that may stay in 16 bits without a warning
_HUB_ARGUMENTS = ("revision", "token", "cache_dir", "subfolder", "local_files_only")
_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a model that are known before its weights are loaded.

    ``context_length`` is the limit for the prompt and its answer together, in tokens; None for no
    limit.
    """

    context_length: int | None
    tokenizer: Tokenizer


def read_model_info(name_or_path: str | Path | None = None, **model_kwargs: Any) -> ModelInfo:
    """Read a model's config and tokenizer without loading its weights.

    Args:
        name_or_path: a folder, or a name on the hub; the default is the bundled reader.
        **model_kwargs: arguments of ``load_model``; those about weights are ignored.

    Raises:
        ModelNotFoundError: no folder, cache entry or repository on the hub has this name.
        UnsupportedModelError: the model needs its own code, or its config rules out exact
            decoding.
    """
    name = bundled_reader_path() if name_or_path is None else name_or_path
    source, arguments = _resolve(name, model_kwargs)
    config = _read_config(name, source, arguments)
    refuse_by_config(config, model_kwargs)
    tokenizer = _read_tokenizer(name, source, arguments)
    length = read_max_positions(config.get_text_config(decoder=True))
    return ModelInfo(length, Tokenizer(tokenizer))


def check_config(folder: Path, name: str | Path) -> Any:
    """Return a model's config, unless it rules the model out; no weights are needed.

    Raises:
        UnsupportedModelError: the model is no causal language model, needs its own code, or cannot
            be decoded exactly.
    """
    with _translate_errors(name, "config.json"):
        config: Any = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    refuse_by_config(config, {}, brief(str(name)))
    with _translate_errors(name, "config.json"):
        kinds: Any = AutoModelForCausalLM._model_mapping.get(type(config), ())
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    made_by = getattr(config, "architectures", None) or [kind.__name__ for kind in kinds]
    kind = next((kind for kind in kinds if kind.__name__ in made_by), None)
    if kind is None:
        raise UnsupportedModelError(
            f"{brief(str(name))} is not a causal language model, but {', '.join(made_by)}"
        )
    refuse_recurrent(kind, config, brief(str(name)))
    return config


@torch.inference_mode(mode=False)  # torch does not count writes to inference tensors
def load_model(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: Any = None,
    self_check: bool = True,
    owned: bool = True,
    check_folder: Path | None = None,
    **model_kwargs: Any,
) -> tuple[HuggingFaceModel, Tokenizer]:
    """Load a causal language model and its tokenizer.

    Args:
        name_or_path: a folder, or a name on the hub; a name in the local cache needs no network.
        dtype: type of the weights; "auto" takes the checkpoint's, except that on a CPU float16
            becomes float32, and so does bfloat16 if the processor multiplies it slowly. "int8"
            rounds the weights of linear layers to 8 bits, one scale an output, and computes in
            bfloat16: another model, of half the size, where ``engine.bfloat16_products`` run.
        device: where to put the model; a GPU if there is one. Not together with ``device_map``.
        device_map: how to spread the model over devices, as transformers defines it.
        self_check: verify a small tree against transformers' own passes first.
        owned: replace the loaded weights by packed ones on a CPU, which takes half the memory of
            keeping both; ``generate`` then uses the packed weights as well.
        check_folder: folder for findings of the self-check; ``None`` keeps them in memory.
        **model_kwargs: for ``AutoModelForCausalLM.from_pretrained``: quantization_config,
            attn_implementation, revision, token …

    Raises:
        ModelNotFoundError: no folder, cache entry or repository on the hub has this name.
        UnsupportedModelError: the model cannot be decoded exactly, or needs its own code.
        MissingExtraError: ``device_map`` is set, and accelerate is not installed.
        ConfigurationError: ``device`` and ``device_map`` are both set, or an argument is invalid.
    """
    claim_torch()
    target_device = _resolve_device(device, device_map)
    is_int8 = dtype in ("int8", torch.int8)
    if is_int8:
        is_quantized = model_kwargs.get("quantization_config") is not None
        _check_int8(target_device, owned=owned, is_quantized=is_quantized)
        dtype = torch.bfloat16
    model, words, files = _load(
        name_or_path, dtype, target_device, device_map=device_map, **model_kwargs
    )
    if target_device is not None and getattr(model, "hf_quantizer", None) is None:
        model = model.to(target_device)
    if is_int8:
        round_to_int8(model)
    target = HuggingFaceModel(
        model, self_check=self_check, owned=owned, check_folder=check_folder, files=files
    )
    return target, words


def round_to_int8(model: Any) -> None:
    """Replace the linear layers of a bfloat16 model by ones over weights of 8 bits.

    Layers stay as they are if they are small, of another class or of outputs that are no multiple
    of 32; a warning tells if these are more than a few.

    Raises:
        UnsupportedModelError: there are none that can be replaced.
    """
    if describe_quantization(model) or model.dtype != torch.bfloat16:
        raise UnsupportedModelError("only weights in bfloat16 can be rounded to 8 bits")
    packed = pack_linears([model], keep=False, groups=packed_groups(model), is_int8=True)
    if not any(layer.group.is_int8 for layer in packed):
        raise UnsupportedModelError(
            "no weights of this model can be kept in 8 bits: load it with dtype='bfloat16'"
        )
    sizes = {True: 0, False: 0}  # weights in 8 bits, and others but for the embedding
    for layer in packed:
        sizes[layer.group.is_int8] += layer.in_features * layer.out_features
    embedding = model.get_input_embeddings().weight
    others = (one for one in model.parameters() if one is not embedding and one.dim() > 1)
    sizes[False] += sum(one.numel() for one in others)
    left, whole = sizes[False], sum(sizes.values())
    if left > _SHARE_LEFT * whole:
        logger.warning("%.0f %% of this model's weights stay in 16 bits", 100 * left / whole)


def _check_int8(device: torch.device | None, *, owned: bool, is_quantized: bool) -> None:
    if is_quantized or not owned:
        raise ConfigurationError(
            "dtype='int8' rounds the weights of the model itself: give it without "
            "quantization_config and owned=False"
        )
    if device is None or device.type != "cpu":
        where = "device_map" if device is None else str(device)
        raise ConfigurationError(f"dtype='int8' is for a CPU, not for {where}: give device='cpu'")
    if bfloat16.kernels("products") is None:
        why = "needs Linux, numba, and an x86 CPU with AVX2 (whose AMX, if any, may be used)"
        if bfloat16.is_supported():
            why = "cannot run here, as its products did not compile (see the warning before)"
        raise ConfigurationError(f"dtype='int8' {why}: give bfloat16, float32 or auto")


def load_for_training(
    name_or_path: str | Path | None = None, *, dtype: str | torch.dtype = "auto"
) -> tuple[Any, Tokenizer]:
    """Load an unpacked transformers model on the CPU, and its tokenizer.

    Arguments and errors are those of ``load_model``; the default is the bundled reader.
    """
    name = bundled_reader_path() if name_or_path is None else name_or_path
    model, words, _ = _load(name, dtype, _resolve_device(None, None), shown=False, is_packed=False)
    return model, words


def _load(
    name: str | Path,
    dtype: str | torch.dtype,
    device: torch.device | None,
    *,
    shown: bool = True,
    is_packed: bool = True,
    **model_kwargs: Any,
) -> tuple[Any, Tokenizer, str]:
    """Load a model of transformers on the CPU, in the dtype for a device, and its tokenizer.

    The third result describes the files that the model is made of; empty if more may be involved.
    """
    source, arguments = _resolve(name, model_kwargs)
    known = {*_HUB_ARGUMENTS, "trust_remote_code"}
    model_kwargs = {key: value for key, value in model_kwargs.items() if key not in known}
    config = _read_config(name, source, arguments)
    refuse_by_config(config, model_kwargs)
    others = {key for key, value in model_kwargs.items() if value is not None}
    has_code = arguments["trust_remote_code"]
    is_whole = not others - {"attn_implementation"} and not has_code
    files = describe_files(Path(source)) if is_whole else ""
    is_packed = is_packed and not model_kwargs.get("quantization_config")
    given = model_kwargs.get("attn_implementation")

    def is_compiled() -> bool:
        return (
            is_packed
            and _is_compiled(config, has_code=has_code, attention=given)
            and bfloat16.kernels("products") is not None
        )

    resolved = _resolve_dtype(dtype, config, device, is_compiled)
    wanted = {"dtype": resolved, **arguments, **model_kwargs}
    with (
        _translate_errors(name, "weights", model_kwargs),
        _progress_bar(shown=shown and not is_bundled(name)),
    ):
        model: Any = AutoModelForCausalLM.from_pretrained(source, config=config, **wanted)
    _set_hub_name(model, name, source)
    tokenizer = _read_tokenizer(name, source, arguments)
    return model, Tokenizer(tokenizer, eos_ids=find_eos_ids(model, tokenizer)), files


def make_target(model: Any, check_folder: Path | None = None) -> HuggingFaceModel:
    """Wrap a transformers model as a target model; return a ``HuggingFaceModel`` unchanged.

    Args:
        model: a transformers model or a ``HuggingFaceModel``.
        check_folder: folder for findings of the self-check; ``None`` keeps them in memory.

    Raises:
        UnsupportedModelError: the model cannot be decoded exactly.
        ConfigurationError: the argument is not a transformers model.
    """
    claim_torch()
    if isinstance(model, HuggingFaceModel):
        return model
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise ConfigurationError(
            f"model must be a causal language model of transformers, not {brief(model)}: to load "
            "one by its name or folder, call LLM.load(name)"
        )
    return HuggingFaceModel(cast("Any", model), check_folder=check_folder)


def find_eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer, looked up as in ``generate``.

    Raises:
        UnsupportedModelError: they are not token ids.
    """
    generation_config = getattr(model, "generation_config", None)
    for holder in (generation_config, model.config, tokenizer):
        found = getattr(holder, "eos_token_id", None)
        if found is not None:
            try:
                ids = [found] if isinstance(found, int) else [int(eos) for eos in found]
            except (TypeError, ValueError) as error:
                raise UnsupportedModelError(
                    f"eos_token_id must be a token id or a list of them, not {brief(found)}: "
                    "correct the model's generation_config.json or config.json"
                ) from error
            return frozenset(eos for eos in ids if eos >= 0)  # -1 means no end token
    return frozenset()


def bundled_reader_path() -> Path:
    """Return the folder of the reader that ships with the package.

    Raises:
        ModelNotFoundError: this installation has no bundled reader.
    """
    folder = Path(__file__).parent / "reader"
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            "this installation has no bundled reader: install the package again, or name a model"
        )
    return folder


def _resolve(
    name_or_path: str | Path, model_kwargs: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return a model's local folder, and the arguments for reading each part of it.

    Read parts from the folder, because huggingface_hub may ask the network even for a cached name.
    """
    hub = {key: model_kwargs[key] for key in _HUB_ARGUMENTS if key in model_kwargs}
    runs_code = model_kwargs.get("trust_remote_code", False)
    extra_patterns = ("*.py",) if runs_code else ()
    folder = find_folder(name_or_path, LANGUAGE_MODEL, hub, extra_patterns)
    elsewhere = (
        "token",
        "cache_dir",
        "local_files_only",
    )  # needed if the model's code lies in another repository
    arguments = {key: hub[key] for key in elsewhere if key in hub}
    return str(folder), {**arguments, "trust_remote_code": runs_code}


def _set_hub_name(model: Any, name: str | Path, source: str) -> None:
    """Set the name and commit of a model from the hub in place of its folder in the cache."""
    if not os.path.isdir(os.path.expanduser(name)):
        model.name_or_path = model.config.name_or_path = str(name)
        model.config._commit_hash = extract_commit_hash(os.path.join(source, "config.json"), None)


def _resolve_device(device: str | torch.device | None, device_map: Any) -> torch.device | None:
    if device_map is not None:
        if device is not None:
            raise ConfigurationError("give device or device_map, not both")
        if not is_accelerate_available():
            raise MissingExtraError("accelerate", "multi-gpu")
        return None
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"device is {brief(device)}: {_first_line(error)}: give cpu, cuda or cuda:1"
        ) from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"device is {brief(device)}, and torch finds {torch.cuda.device_count()} CUDA devices: "
            "give cpu, or install torch for CUDA and its driver"
        )
    return found


def expansion_on_cpu(config: Any) -> float:
    """Return how many bytes a byte of a model's saved weights takes on this processor."""
    is_compiled = partial(_is_compiled, config)
    found = _resolve_dtype("auto", config, torch.device("cpu"), is_compiled)
    return 2.0 if found == torch.float32 else 1.0


def _is_compiled(config: Any, *, has_code: bool = False, attention: str | None = None) -> bool:
    """Return whether compiled functions compute a bfloat16 model that is packed."""
    attention = attention or getattr(config, "_attn_implementation", None)
    has_own_code = has_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    return attention in (None, "sdpa") and not has_own_code and has_compiled_form(config)


def _resolve_dtype(
    dtype: str | torch.dtype,
    config: Any,
    target_device: torch.device | None,
    is_compiled: Callable[[], bool],
) -> str | torch.dtype:
    """Return the dtype to load in; ``is_compiled`` may compile: it is asked only if it counts."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ConfigurationError(
                f"dtype must be auto, {', '.join(_DTYPES)} or int8, not {brief(dtype)}"
            )
        return _DTYPES[dtype]
    saved = getattr(config, "dtype", None)
    on_cpu = target_device is not None and target_device.type == "cpu"
    if not on_cpu or getattr(config, "quantization_config", None) is not None:
        return "auto"
    if saved == torch.bfloat16:
        return "auto" if multiplies_bfloat16() or is_compiled() else torch.float32
    return torch.float32 if saved == torch.float16 else "auto"


def is_bundled(name: str | Path) -> bool:
    """Return whether a path is the folder of the reader that ships with the package."""
    if not name or not os.path.isdir(name):
        return False
    return Path(name).samefile(Path(__file__).parent / "reader")


@contextlib.contextmanager
def _progress_bar(*, shown: bool) -> Iterator[None]:
    """Hide transformers' progress bar unless ``shown``."""
    was_enabled = logging.is_progress_bar_enabled()
    if not shown:
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _read_config(name: str | Path, source: str, arguments: Mapping[str, Any]) -> Any:
    with _translate_errors(name, "config.json"):
        return AutoConfig.from_pretrained(source, **arguments)


def _read_tokenizer(name: str | Path, source: str, arguments: Mapping[str, Any]) -> Any:
    with _translate_errors(name, "tokenizer"):
        tokenizer: Any = AutoTokenizer.from_pretrained(source, **arguments)
        # Some damaged files fail only when the tokenizer is used.
        tokenizer.decode(tokenizer.encode("A text of the house's own: 1, 2.", verbose=False))
        return tokenizer


@contextlib.contextmanager
def _translate_errors(
    name: str | Path, part: str, model_kwargs: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Convert transformers' errors about a part of a checkpoint to ragaccel's errors.

    The block must contain calls of transformers only: other errors in it would be reported as
    faults of the checkpoint.
    """
    try:
        yield
    except OSError as error:
        raise ModelNotFoundError(f"cannot load {str(name)!r}: {_first_line(error)}") from error
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise UnsupportedModelError(
                f"{str(name)!r} needs Python code from its repository: read that code, then load "
                "with trust_remote_code=True"
            ) from error
        if model_kwargs and isinstance(error, TypeError) and "unexpected keyword" in str(error):
            raise  # the caller gave an unknown argument
        raise _unreadable(name, part, error) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # raised by tokenizers
            raise
        raise _unreadable(name, part, error) from error


def _unreadable(name: str | Path, part: str, error: BaseException) -> UnsupportedModelError:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return UnsupportedModelError(
        f"cannot load {str(name)!r}: its {part} cannot be read ({kind}{_first_line(error)})"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
