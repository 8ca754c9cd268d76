"""Models: which ragaccel.LLM a constructor's arguments mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragaccel import ConfigurationError, SharedModel, shared_model

if TYPE_CHECKING:
    from collections.abc import Mapping


def model_of(model: Any, tokenizer: Any, llm: Any, options: Mapping[str, Any]) -> SharedModel:
    """The model that a constructor's arguments mean.

    Args:
        model: a name or a folder, None, or a model of transformers that is loaded.
        tokenizer: its tokenizer, beside a loaded model.
        llm: a ready ``ragaccel.LLM``.
        options: those of ``LLM.load``, or of ``LLM`` for a loaded model.

    Raises:
        ConfigurationError: arguments that exclude or miss each other.
    """
    if isinstance(llm, str):
        raise ConfigurationError(
            "this was saved with a ready model, which a file cannot hold: give it again, "
            "Ragaccel.from_dict(data, llm=...)"
        )
    is_named = model is None or isinstance(model, str | Path)
    if llm is not None:
        if model is not None or tokenizer is not None or options:
            raise ConfigurationError("llm= is ready: neither a model nor options go with it")
        if not hasattr(llm, "astream"):
            raise ConfigurationError(f"llm is a ready ragaccel.LLM, not {type(llm).__name__}")
        return SharedModel(ready=llm)
    if is_named and tokenizer is not None:
        raise ConfigurationError(
            "a named model brings its tokenizer: give tokenizer= with a loaded model only"
        )
    if is_named:
        return shared_model(model, **options)
    if tokenizer is None:
        raise ConfigurationError("a loaded model needs its tokenizer: model=..., tokenizer=...")
    from ragaccel import LLM

    return SharedModel(ready=LLM(model, tokenizer, **options))
