"""Chat template: what a tokenizer lays messages out by, and what it has a place for."""

from __future__ import annotations

import ctypes
import re
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ragaccel.errors import ConfigurationError, ModelRefusedError
from ragaccel.models.tool_messages import (
    PROBE_CALLING,
    PROBE_KEY,
    PROBE_QUESTION,
    PROBE_RESULT,
    PROBE_TOOL,
    PROBE_TOOLS,
    PROBE_VALUE,
    as_messages,
    as_tools,
    calls_tools,
    holds_results,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_OWN_ARGUMENTS = frozenset({"messages", "conversation", "documents", "tools", "tokenize",
    "add_generation_prompt", "continue_final_message", "chat_template", "return_dict",
    "return_tensors", "return_assistant_tokens_mask", "sanitize_control_tokens", "padding",
    "truncation", "max_length", "tokenizer_kwargs"})  # fmt: skip
_PATIENCE = 30.0  # seconds that messages may take; templates lay out megabytes in one
_MAX_SOURCE = 1 << 20  # characters of a template; the longest known have some 30,000
_MAX_TEXT = 1 << 24  # characters of a text laid out, if that is much more than went in
_MAX_GROWTH = 20
_CONVERSATION = (PROBE_QUESTION, PROBE_CALLING, PROBE_RESULT)


class ChatTemplate:
    """The chat template of a tokenizer of transformers, if it has one.

    What a template has a place for is found by laying out a probe: templates ignore what they do
    not know, and a tool's result left out would be answered without.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._is_timed = True  # until it has laid something out
        self.source: str | None = self._read()

    @property
    def takes_documents(self) -> bool:
        """Whether it reads a list of documents; it may just name them."""
        return self.source is not None and re.search(r"\bdocuments\b", self.source) is not None

    @cached_property
    def takes_tools(self) -> bool:
        """Whether it writes out the tools that the model may call."""
        text = self._try([PROBE_QUESTION], tools=PROBE_TOOLS)
        return text is not None and PROBE_TOOL in text

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        **inputs: Any,
    ) -> str:
        """Lay messages out; ``inputs`` are ``documents`` and ``add_generation_prompt``.

        Raises:
            ConfigurationError: there is no template, it rejects the messages, or it has no place
                for something among them.
        """
        if self.source is None:
            raise ConfigurationError(
                "this model has no chat template: give the prompt as text, or load a chat model"
            )
        inputs["tools"] = tools = as_tools(tools)
        self._check(messages, tools, options or {})
        as_text = calls_tools(messages) and self._probe[1]
        laid_out = as_messages(messages, arguments_as_text=as_text)
        try:
            return self._render(laid_out, **inputs, **(options or {}))
        except ModelRefusedError:  # it takes too long
            raise
        except Exception as error:
            raise ConfigurationError(
                f"the chat template rejects these messages: {error}"
            ) from error

    def _check(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> None:
        lacking = self._lacking(messages, tools)
        if lacking is not None:
            raise ConfigurationError(
                f"this model's chat template has no place for {lacking}: load a model that was "
                "trained to call tools, or write them into a message's text"
            )
        taken = sorted(_OWN_ARGUMENTS & options.keys())
        if taken:
            raise ConfigurationError(f"{taken[0]!r} is an argument of its own, no template option")

    def _lacking(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str | None:
        """What among these the template would leave out; None also where only trying can tell."""
        if tools and not self.takes_tools:
            return "tools"
        if calls_tools(messages) and not self._shows(PROBE_VALUE):
            return "tool calls"
        if holds_results(messages) and not self._shows(str(PROBE_RESULT["content"])):
            return "tool results"
        return None

    def _shows(self, word: str) -> bool:
        text, _ = self._probe
        return text is None or word in text

    @cached_property
    def _probe(self) -> tuple[str | None, bool]:
        """A probe conversation laid out, None if rejected; whether arguments go in as JSON text."""
        text = self._try(as_messages(_CONVERSATION), tools=PROBE_TOOLS)
        if text is not None and str({PROBE_KEY: PROBE_VALUE}) not in text:
            return text, False
        with_texts = as_messages(_CONVERSATION, arguments_as_text=True)
        text_of_texts = self._try(with_texts, tools=PROBE_TOOLS)
        return (text, False) if text_of_texts is None else (text_of_texts, True)

    def _try(self, messages: Sequence[Mapping[str, Any]], **inputs: Any) -> str | None:
        if self.source is None:
            return None
        try:
            return self._render(messages, add_generation_prompt=True, **inputs)
        except ModelRefusedError:  # it takes too long
            raise
        except Exception:  # whatever a template raises, it does not take these
            return None

    def _render(self, messages: Sequence[Mapping[str, Any]], **inputs: Any) -> str:
        for name in ("documents", "tools"):
            given = inputs.get(name)
            inputs[name] = None if given is None else [dict(one) for one in given]
        lay_out = partial(
            self._tokenizer.apply_chat_template, list(messages), tokenize=False, **inputs
        )
        try:
            text = within(_PATIENCE, lay_out) if self._is_timed else lay_out()
        except TimeoutError as error:
            raise ModelRefusedError(
                f"its chat template lays out messages for more than {_PATIENCE:.0f} seconds: it is "
                "damaged, or made to hang"
            ) from error
        self._is_timed = False
        if len(text) > _MAX_TEXT and len(text) > _MAX_GROWTH * len(str((messages, inputs))):
            raise ConfigurationError(f"it makes {len(text):,} characters of them")
        return text

    def _read(self) -> str | None:
        if not getattr(self._tokenizer, "chat_template", None):
            return None
        try:
            source: str = self._tokenizer.get_chat_template()
        except ValueError:  # several templates and none of them the default
            return None
        if len(source) > _MAX_SOURCE:
            raise ModelRefusedError(
                f"its chat template has {len(source):,} characters, more than {_MAX_SOURCE:,}: it "
                "is damaged, or no template"
            )
        return source


def within(seconds: float, call: Callable[[], str]) -> str:
    """Return what a call returns; one that takes too long is ended where it is in Python code.

    Raises:
        TimeoutError: it takes longer; a single operation of C is not broken off.
    """
    done: Future[str] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # it belongs to whoever waits
            done.set_exception(error)

    thread = threading.Thread(target=run, name="ragaccel-template", daemon=True)
    thread.start()
    try:
        return done.result(seconds)
    except FutureTimeoutError as error:
        ident = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
        raise TimeoutError(f"it takes more than {seconds} seconds") from error
