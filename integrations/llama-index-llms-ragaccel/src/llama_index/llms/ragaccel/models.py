"""Models: which ragaccel.LLM a name means, loaded when first used and shared by all who name it."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ragaccel import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

    from ragaccel import LLM, ModelOutline

READER_NAME = "ragaccel-reader"
"""What the bundled reader is called where a name is wanted."""


class Model:
    """A model by its name, and the LLM that it becomes when it is first used.

    Args:
        name: a folder or a name on the hub; None is the bundled reader.
        options: those of ``LLM.load``.
        llm: a ready one, in place of both.
    """

    def __init__(self, name: str | None, options: Mapping[str, Any], llm: LLM | None = None):
        self.name, self.options = name, dict(options)
        self._is_ready, self._llm = llm is not None, llm
        self._lock = Lock()

    def load(self) -> LLM:
        """Return the LLM, loading it now if nobody has; errors are those of ``LLM.load``."""
        with self._lock:
            if self._llm is None:
                from ragaccel import LLM

                # Made anew for every request, it must not be loaded anew; two fill the memory.
                _LATEST[:] = [self]
                self._llm = LLM.load(self.name, **self.options)
            return self._llm

    @property
    def ready(self) -> LLM | None:
        """The LLM that this was made with."""
        return self._llm if self._is_ready else None

    @property
    def label(self) -> str:
        """What to call it."""
        if self.ready is None:
            return self.name or READER_NAME
        config = getattr(getattr(getattr(self.ready, "model", None), "model", None), "config", None)
        return str(getattr(config, "_name_or_path", "") or "ragaccel")

    @property
    def context_length(self) -> int | None:
        """Most tokens of a prompt with its answer, without loading weights; None if unlimited."""
        if self._llm is not None:
            return self._llm.context_length
        length: int | None = self.options.get("capacity")
        return self._outline.context_length if length is None else length

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer, without loading weights."""
        return self._outline.tokenizer if self._llm is None else self._llm.tokenizer

    @property
    def is_chat_model(self) -> bool:
        """Whether it has a chat template."""
        return bool(self.tokenizer.has_chat_template)

    @cached_property
    def reads_apart(self) -> bool:
        """Whether it reads documents and a question, and nothing else that was said."""
        from ragaccel import reads_apart

        return reads_apart(self.tokenizer)

    @cached_property
    def _outline(self) -> ModelOutline:
        from ragaccel import outline_model

        return outline_model(self.name, **self.options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the same one: what is shared stays shared."""
        return self

    def __reduce__(self) -> tuple[Callable[..., Model], tuple[Any, ...]]:
        """Pickle the name: every process loads its own."""
        if self._is_ready:
            raise TypeError(
                "a Ragaccel made with a ready model cannot be pickled: name the model instead, "
                "and each process loads its own"
            )
        return shared_model, (self.name, self.options)


_SHARED: WeakSet[Model] = WeakSet()
_LATEST: list[Model] = []
_SHARING = Lock()


def shared_model(name: str | None, options: Mapping[str, Any]) -> Model:
    """The model of a name and its options: the same one as long as anyone holds it.

    The one loaded last stays, so that objects made for one call each do not load it each.
    """
    with _SHARING:
        for known in _SHARED:
            if (known.name, known.options) == (name, dict(options)):
                return known
        made = Model(name, options)
        _SHARED.add(made)
        return made


def model_of(model: Any, tokenizer: Any, llm: Any, options: Mapping[str, Any]) -> Model:
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
        return Model(None, {}, llm)
    if is_named and tokenizer is not None:
        raise ConfigurationError(
            "a named model brings its tokenizer: give tokenizer= with a loaded model only"
        )
    if is_named:
        return shared_model(None if model is None else str(model), options)
    if tokenizer is None:
        raise ConfigurationError("a loaded model needs its tokenizer: model=..., tokenizer=...")
    from ragaccel import LLM

    return Model(None, {}, LLM(model, tokenizer, **options))
