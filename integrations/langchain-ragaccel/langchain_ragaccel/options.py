"""Options: what both model classes are made with, and which LLM that means."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from langchain_core.language_models.base import BaseLanguageModel
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, field_validator, model_validator
from ragaccel import SharedModel, check_arguments, shared_model

from langchain_ragaccel.calls import (
    ANSWERING,
    INSTEAD,
    OTHER_NAMES,
    QUIET,
    Call,
    as_stops,
    canonical,
    check_names,
    make_call,
)
from langchain_ragaccel.checking import check_options
from langchain_ragaccel.generating import in_thread
from langchain_ragaccel.metadata import PROVIDER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from langchain_core.language_models.base import LangSmithParams
    from ragaccel import LLM
    from typing_extensions import Self

LOADING = (
    "dtype", "device", "device_map", "capacity", "token_budget", "max_batch", "exact",
    "memory", "space",
)  # fmt: skip
"""Options of ``LLM.load``; ``model_kwargs`` go there as well."""

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens",
    "repetition_penalty", "no_repeat_ngram_size", "n",
)  # fmt: skip
"""Options that choose the answer; a call may set them anew."""


_INSTEAD = {
    **INSTEAD,
    **dict.fromkeys(
        ("documents", "references", "prediction", "drafter", "logits_processors", "tools",
         "stopping_criteria", "tool_choice", "parallel_tool_calls"),
        "it is for calls: invoke(..., name=value), or bind(name=value)",
    ),
}  # fmt: skip
_SETTINGS = dict.fromkeys(
    (*SAMPLING, *(other for other, name in OTHER_NAMES.items() if name in SAMPLING)),
    "it is an argument of its own, not an option of loading",
)


class ModelOptions(BaseLanguageModel[Any]):
    """What ``ChatRagaccel`` and ``RagaccelLLM`` have in common.

    A model is loaded at the first answer, once a process: all objects that name it with the same
    loading options share it, until the last of them goes. An ``llm`` that is ready is used.
    """

    model: str | None = None
    """A name on the hub or a folder; the bundled reader by default. Beside ``llm``: its name."""
    llm: Any = Field(default=None, exclude=True, repr=False)
    """A ready ``ragaccel.LLM``, instead of one to be loaded."""

    dtype: str | None = None
    device: str | None = None
    device_map: Any = None
    capacity: int | None = Field(default=None, ge=1)
    """Most tokens of a prompt with its answer; the model's own limit by default."""
    token_budget: int | None = None
    max_batch: int | None = Field(default=None, ge=1)
    exact: bool | None = None
    memory: str | None = None
    """A file in which what earlier requests taught is kept."""
    space: str | bool | None = None
    """A SPACE adapter, by its folder or name; True for the model's own. Answers stay the same."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of transformers' ``from_pretrained``."""

    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """0 (the default) takes the likeliest token."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of an answer; 256 by default."""
    min_tokens: int | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = None
    repetition_penalty: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    no_repeat_ngram_size: int | None = Field(default=None, ge=0)
    n: int | None = Field(default=None, ge=1)
    """How many answers, sampled with seeds one above the other; 1 by default."""
    stop: list[str] | str | None = None
    timeout: float | None = Field(default=None, gt=0)
    """Most seconds for an answer, after which ``TimeoutError`` is raised."""

    namespace: str = ""
    """Keeps references and what is remembered of one tenant apart."""
    remember: bool = True
    registry: Any = Field(default=None, exclude=True, repr=False)
    """Where references are looked up; the process's own ``ragaccel.default_registry()`` if None."""
    auto_references: bool = True
    """Copy from registered texts that occur in the prompt."""
    neighbours: bool = True
    """Copy from what stands beside those in the same document as well."""
    max_reference_tokens: int = Field(default=8192, ge=0)
    track: Literal["run-tree"] | None = None
    """Copy also from what was retrieved for this prompt, though only a summary stands in it."""

    streaming: bool | None = None
    """Tokens to callbacks from answers asked for whole; by itself where any takes them, if None."""
    stream_usage: bool | None = None
    """Token counts at the end of streams; on by default."""
    max_retries: int | None = None
    """Does nothing: there is no network to fail."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """Does nothing: nobody is asked."""

    settable: ClassVar[frozenset[str]] = ANSWERING | QUIET | {"stop", "model"}
    """What a call may set, and ``bind``."""

    _held: SharedModel | None = PrivateAttr(default=None)

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    @field_validator("model", "memory", "dtype", "device", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> str | None:
        """Paths and torch's objects become what they are written as, in files and in keys."""
        return None if value is None else str(value).removeprefix("torch.")

    @model_validator(mode="before")
    @classmethod
    def _take_other_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = canonical(values, cls.__name__)
        check_arguments(cls.__name__, values, cls.model_fields, _INSTEAD)
        check_arguments("model_kwargs", _settings_in(values.get("model_kwargs")), (), _SETTINGS)
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_options(self)
        return self

    @model_validator(mode="after")
    def _follow_runs_if_asked(self) -> Self:
        if self.track is not None:
            from langchain_ragaccel.run_tree import install

            install()
        return self

    @model_validator(mode="after")
    def _hold_its_model(self) -> Self:
        _ = self.shared
        return self

    @model_validator(mode="after")
    def _set_ragaccel_version(self) -> Self:
        if hasattr(self, "_add_version"):  # langchain-core has it since 1.4
            from langchain_ragaccel import __version__

            self._add_version("langchain-ragaccel", __version__)
        return self

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Say that objects made from a model's name can be made again from plain values."""
        return True

    def to_json(self) -> Any:
        """Serialize what the constructor took, unless that was a ready object."""
        if self.llm is not None or self.registry is not None:
            return self.to_json_not_implemented()
        return super().to_json()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copy the options; a ready LLM and a registry are shared."""
        memo = {} if memo is None else memo
        memo.update({id(shared): shared for shared in (self.llm, self.registry)})
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        """Refuse to pickle a ready object."""
        if self.llm is not None or self.registry is not None:
            raise TypeError(
                f"a {type(self).__name__} made with llm= or registry= cannot be pickled: "
                "name the model instead, and each process loads its own"
            )
        return super().__getstate__()

    @property
    def shared(self) -> SharedModel:
        """The model that answers, loaded or not: one for all that name it with the same options."""
        if self.llm is None:
            meant = shared_model(self.model, **self._loading())
        else:
            meant = SharedModel(self.model, ready=self.llm)
        if self._held is None or self._held != meant:
            self._held = meant
        return self._held

    @property
    def model_name(self) -> str:
        """The model's name, as it stands in every answer's metadata."""
        return self.shared.label

    @property
    def ready_llm(self) -> LLM:
        """The LLM that answers; loaded now if it is not yet."""
        return self.shared.load()

    @property
    def identifying(self) -> dict[str, Any]:
        """What an answer depends on, and nothing else: speculation never changes one."""
        names = ("dtype", "device", "device_map", "capacity", "exact", *SAMPLING)
        known = {name: getattr(self, name) for name in names} | {"stop": as_stops(self.stop)}
        if self.model_kwargs:
            known["model_kwargs"] = {name: repr(one) for name, one in self.model_kwargs.items()}
        if self.llm is not None and self.model is None:
            known["llm"] = self.shared.identity
        plain = (bool, int, float, str, list, dict)
        return {
            "model": self.model_name,
            **{
                name: value if isinstance(value, plain) else str(value)
                for name, value in known.items()
                if value is not None
            },
        }

    def call(self, stop: Sequence[str] | str | None, given: Mapping[str, Any]) -> Call:
        """What one call asks for: its own settings before this object's.

        Raises:
            TypeError: something that no call can set.
            ConfigurationError: something that cannot be.
        """
        check_names(given, type(self).__name__, self.settable)
        return make_call(self, stop, given)

    async def acall(self, stop: Sequence[str] | str | None, given: Mapping[str, Any]) -> Call:
        """:meth:`call`, with the model loaded, and the event loop not held up.

        Who waits for a model takes none of the threads that prepare the prompts of others.
        """
        call = await in_thread(lambda: self.call(stop, given))
        await self.shared.aload()
        return call

    def with_settings(self, given: dict[str, Any]) -> Self:
        """This object with what a call sets as its own; what is taken over leaves ``given``."""
        set_here = canonical(given, type(self).__name__).items()
        own = {k: v for k, v in set_here if k in SAMPLING and v is not None}
        for name in [name for name in given if OTHER_NAMES.get(name, name) in SAMPLING]:
            del given[name]
        if given.keys() & {"logits_processors", "stopping_criteria"}:
            own["cache"] = False  # nothing says what these do
        return self.model_copy(update=own) if own else self

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text by the model's own tokenizer, without special ones."""
        counted = self.custom_get_token_ids
        return list(self.shared.tokenizer.encode(text)) if counted is None else counted(text)

    def bind(self, **kwargs: Any) -> Any:
        """Set what every call sets; TypeError for what no call can."""
        check_names(kwargs, type(self).__name__, self.settable)
        return super().bind(**kwargs)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        """What traces call it; both of LangChain's classes have this, and their base has not."""
        params: LangSmithParams = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = PROVIDER
        params["ls_model_name"] = kwargs.get("model") or self.model_name
        return params

    def _loading(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in LOADING}
        return {**copy.copy(self.model_kwargs), **{k: v for k, v in given.items() if v is not None}}


def _settings_in(model_kwargs: Any) -> list[str]:
    """Settings of answers among what goes to ``from_pretrained``, which would not know them."""
    return [name for name in model_kwargs or () if name in _SETTINGS]
