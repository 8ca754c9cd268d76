"""Encode and decode text, render chat templates, and escape special tokens in others' text."""

from __future__ import annotations

import ctypes
import hashlib
import re
import threading
from collections.abc import Mapping
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property, partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ragaccel.errors import ConfigurationError, UnsupportedModelError, brief, require_unicode
from ragaccel.models.tool_calls import (
    SENTINEL_CALL,
    SENTINEL_KEY,
    SENTINEL_QUESTION,
    SENTINEL_RESULT,
    SENTINEL_TOOL,
    SENTINEL_TOOLS,
    SENTINEL_VALUE,
    normalize_calls,
    normalize_tools,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from transformers import PreTrainedTokenizerBase


T = TypeVar("T")

_RESERVED_OPTIONS = frozenset({"messages", "conversation", "documents", "tools", "tokenize",
    "add_generation_prompt", "continue_final_message", "chat_template", "return_dict",
    "return_tensors", "return_assistant_tokens_mask", "sanitize_control_tokens", "padding",
    "truncation", "max_length", "tokenizer_kwargs"})  # fmt: skip
_TEMPLATE_TIMEOUT = 30.0  # seconds; one second suffices for megabytes
_MAX_SOURCE = 1 << 20  # characters of a template; the longest known have some 30,000
_MAX_TEXT = 1 << 24  # characters of rendered text, if that is much more than the input
_MAX_GROWTH = 20
_SENTINEL_MESSAGES = (SENTINEL_QUESTION, SENTINEL_CALL, SENTINEL_RESULT)


class ChatTemplate:
    """The chat template of a transformers tokenizer, if it has one.

    Templates ignore inputs that they do not support, and the model would answer without them. So
    sentinel messages are rendered first, to find out whether a template writes tools, calls and
    results.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._is_untested = True  # until the template has rendered something
        self.source: str | None = self._read()

    @property
    def takes_documents(self) -> bool:
        """Whether the template's source mentions ``documents``."""
        return self.source is not None and re.search(r"\bdocuments\b", self.source) is not None

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template writes the tools that the model may call."""
        text = self._try_render([SENTINEL_QUESTION], tools=SENTINEL_TOOLS)
        return text is not None and SENTINEL_TOOL in text

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        **inputs: Any,
    ) -> str:
        """Render messages; ``inputs`` are ``documents`` and ``add_generation_prompt``.

        Raises:
            ConfigurationError: there is no template, it rejects the messages, or it does not
                support tools, calls or results among them.
        """
        if self.source is None:
            raise ConfigurationError(
                "this model has no chat template: pass the prompt as text, or load a chat model"
            )
        inputs["tools"] = tools = normalize_tools(tools) if tools else None
        self._check(messages, tools, options or {})
        arguments_as_text = _has_calls(messages) and self._sentinel_chat[1]
        rendered = _rendered_fields(messages, arguments_as_text=arguments_as_text)
        try:
            return self._render(rendered, **inputs, **(options or {}))
        except UnsupportedModelError:  # it takes too long
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
        unsupported = self._find_unsupported(messages, tools)
        if unsupported is not None:
            raise ConfigurationError(
                f"this model's chat template does not support {unsupported}: load a model that was "
                "trained to call tools, or write them into a message's text"
            )
        taken = sorted(_RESERVED_OPTIONS & options.keys())
        if taken:
            raise ConfigurationError(
                f"{taken[0]!r} cannot be a template option: it is an argument of the call itself"
            )

    def _find_unsupported(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str | None:
        """Return what the template would leave out; None if it supports all or cannot be tested."""
        if tools and not self.takes_tools:
            return "tools"
        if _has_calls(messages) and not self._renders(SENTINEL_VALUE):
            return "tool calls"
        has_results = any(message.get("role") == "tool" for message in messages)
        if has_results and not self._renders(str(SENTINEL_RESULT["content"])):
            return "tool results"
        return None

    def _renders(self, word: str) -> bool:
        text, _ = self._sentinel_chat
        return text is None or word in text

    @cached_property
    def _sentinel_chat(self) -> tuple[str | None, bool]:
        """Return the rendered sentinel messages, and whether arguments of calls must be text.

        The messages are None if the template rejects them. The second value is True if the
        template writes arguments correctly only as JSON text.
        """
        text = self._try_render(_rendered_fields(_SENTINEL_MESSAGES), tools=SENTINEL_TOOLS)
        if text is not None and str({SENTINEL_KEY: SENTINEL_VALUE}) not in text:
            return text, False
        with_texts = _rendered_fields(_SENTINEL_MESSAGES, arguments_as_text=True)
        text_of_texts = self._try_render(with_texts, tools=SENTINEL_TOOLS)
        return (text, False) if text_of_texts is None else (text_of_texts, True)

    def _try_render(self, messages: Sequence[Mapping[str, Any]], **inputs: Any) -> str | None:
        if self.source is None:
            return None
        try:
            return self._render(messages, add_generation_prompt=True, **inputs)
        except UnsupportedModelError:  # it takes too long
            raise
        except Exception:  # templates raise anything
            return None

    def _render(self, messages: Sequence[Mapping[str, Any]], **inputs: Any) -> str:
        for name in ("documents", "tools"):
            given = inputs.get(name)
            inputs[name] = None if given is None else [dict(one) for one in given]
        render: Callable[[], str] = partial(
            self._tokenizer.apply_chat_template, list(messages), tokenize=False, **inputs
        )
        try:
            text = run_with_timeout(_TEMPLATE_TIMEOUT, render) if self._is_untested else render()
        except TimeoutError as error:
            raise UnsupportedModelError(
                f"its chat template takes more than {_TEMPLATE_TIMEOUT:.0f} seconds to render "
                "messages: it is damaged, or made to hang"
            ) from error
        self._is_untested = False
        if len(text) > _MAX_TEXT and len(text) > _MAX_GROWTH * len(str((messages, inputs))):
            raise ConfigurationError(
                f"it renders them to {len(text):,} characters, which is too many"
            )
        return text

    def _read(self) -> str | None:
        if not getattr(self._tokenizer, "chat_template", None):
            return None
        try:
            source: str = self._tokenizer.get_chat_template()
        except ValueError:  # several templates without a default
            return None
        if len(source) > _MAX_SOURCE:
            raise UnsupportedModelError(
                f"its chat template has {len(source):,} characters, more than {_MAX_SOURCE:,}: it "
                "is damaged, or not a template"
            )
        return source


def _has_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(message.get("tool_calls") for message in messages)


def _rendered_fields(
    messages: Sequence[Mapping[str, Any]], *, arguments_as_text: bool = False
) -> list[dict[str, Any]]:
    """Return messages as chat templates read them: no field is None, and no list of calls empty."""
    rendered = []
    for message in messages:
        fields = {name: value for name, value in message.items() if value is not None}
        if fields.get("tool_calls"):
            calls = fields["tool_calls"]
            fields["tool_calls"] = normalize_calls(calls, arguments_as_text=arguments_as_text)
        else:
            fields.pop("tool_calls", None)  # templates only test whether the key exists
        rendered.append(fields)
    return rendered


def run_with_timeout(seconds: float, call: Callable[[], T], name: str = "ragaccel-template") -> T:
    """Run a call in a thread; return its result, or stop it after a time limit.

    Raises:
        TimeoutError: the call takes longer. It stops at its next Python instruction; a running C
            function is not interrupted.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # raised again in the waiting thread
            done.set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        return done.result(seconds)
    except FutureTimeoutError as error:
        ident = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
        raise TimeoutError(f"it takes more than {seconds} seconds") from error


_FIRST_ESCAPE = 0x10F800  # a private-use character
_GUARD = chr(0x10FFF0)

Offsets = list[tuple[int, int]]


class SpecialTokenEscaper:
    """An escaper of special tokens, so that a prompt contains text from others as plain text.

    ``escape`` replaces the first character of every special token in a text by a private-use
    character of the same length. ``unescape`` restores it, also after a chat template has copied
    the text. A private-use character counts as an escape only if the rest of a special token
    follows.
    """

    def __init__(self, special_tokens: Iterable[str]) -> None:
        tokens = sorted(filter(None, set(special_tokens)), key=len, reverse=True)
        firsts = sorted({token[0] for token in tokens})
        self._escape_of = {first: chr(_FIRST_ESCAPE + i) for i, first in enumerate(firsts)}
        self._first_of = {mark: first for first, mark in self._escape_of.items()}
        # Matches are tried at every character, because tokens may overlap; (?!) never matches.
        heads = [re.escape(token[0]) + f"(?={re.escape(token[1:])})" for token in tokens]
        marks = [
            self._escape_of[token[0]] + f"(?={self._possibly_escaped(token[1:])})"
            for token in tokens
        ]
        self._special_tokens_pattern = re.compile("|".join(heads) or "(?!)")
        self._escaped_tokens = re.compile("|".join(marks) or "(?!)")

    def escape(self, text: str) -> str:
        """Escape every special token in a text; the length stays."""
        return self._special_tokens_pattern.sub(lambda found: self._escape_of[found.group()], text)

    def escape_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Escape all text of a message at any depth, except its role."""
        return {
            key: value if key == "role" else self.escape_value(value)
            for key, value in message.items()
        }

    def escape_value(self, value: Any) -> Any:
        """Escape all text in a value at any depth, including keys of mappings.

        Keys such as argument names also come from others.
        """
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, Mapping):
            return {self.escape_value(key): self.escape_value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape_value(item) for item in value]
        return value

    def unescape(self, text: str) -> str:
        """Return the text with all escapes restored."""
        return self._escaped_tokens.sub(lambda found: self._first_of[found.group()], text)

    def is_escaped(self, text: str) -> bool:
        """Return whether a text contains escapes."""
        return self._escaped_tokens.search(text) is not None

    def _possibly_escaped(self, rest: str) -> str:
        """Return a pattern of a token's rest, which may hold escapes of overlapping tokens."""
        return "".join(
            f"[{re.escape(char)}{self._escape_of[char]}]" if char in self._escape_of
            else re.escape(char)
            for char in rest
        )  # fmt: skip


class PlainTextEncoder:
    """A fast tokenizer that reads special tokens as plain text, for escaped stretches.

    Args:
        backend: a tokenizer of the ``tokenizers`` library, which is copied.
        special_ids: tokens that plain text must not produce.
    """

    def __init__(self, backend: Any, special_ids: frozenset[int]) -> None:
        self._special_ids = special_ids
        self._backend = deepcopy(backend)
        # An added token that is not special is still split off. Text after it is tokenized like
        # text after a special token, without the space that some tokenizers prepend to a text.
        self._backend.add_tokens([_GUARD])
        self._backend.encode_special_tokens = True

    def replace(
        self, escaped_text: str, escaper: SpecialTokenEscaper, ids: list[int], spans: Offsets
    ) -> tuple[list[int], Offsets]:
        """Tokenize the escaped stretches between special tokens again, as unescaped plain text.

        Args:
            escaped_text: the escaped text.
            escaper: restores the stretches.
            ids: token ids of the escaped text.
            spans: character spans of those tokens.

        Returns:
            The new ids and spans. A stretch stays escaped if the vocabulary itself would turn its
            plain text into special tokens.
        """
        new_ids: list[int] = []
        new_spans: Offsets = []
        at = start = 0
        for i in range(len(ids) + 1):
            if i < len(ids) and ids[i] not in self._special_ids:
                continue
            end = spans[i][0] if i < len(ids) else len(escaped_text)
            stretch, between = escaped_text[at:end], slice(start, i)
            again = (
                self._encode(escaper.unescape(stretch), at) if escaper.is_escaped(stretch) else None
            )
            own_ids, own_spans = again or (ids[between], spans[between])
            new_ids += own_ids
            new_spans += own_spans
            if i < len(ids):
                new_ids.append(ids[i])
                new_spans.append(spans[i])
                at, start = max(at, spans[i][1]), i + 1
        return new_ids, new_spans

    def _encode(self, text: str, at: int) -> tuple[list[int], Offsets] | None:
        guard = _GUARD if at else ""
        encoding = self._backend.encode(guard + text, add_special_tokens=False)
        first = len(guard)
        ids = list(encoding.ids[first:])
        if not self._special_ids.isdisjoint(ids):
            return None
        shift = at - first
        return ids, [(start + shift, end + shift) for start, end in encoding.offsets[first:]]


_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """A wrapper of a transformers tokenizer, without state that calls change.

    Args:
        tokenizer: any transformers tokenizer; a fast one gives exact offsets.
        eos_ids: tokens that end an answer; the default is the tokenizer's own end token.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, eos_ids: Iterable[int] | None = None
    ) -> None:
        if not callable(getattr(tokenizer, "get_vocab", None)):
            raise ConfigurationError(
                f"tokenizer must be a tokenizer of transformers, not {brief(tokenizer)}: make one "
                "with AutoTokenizer.from_pretrained(name), or load both by LLM.load(name)"
            )
        self.tokenizer: Any = cast("Any", tokenizer)
        own = getattr(tokenizer, "eos_token_id", None)
        if eos_ids is None:
            eos_ids = () if own is None else (own,)
        self.eos_ids: frozenset[int] = frozenset(eos_ids)
        vocabulary = self.tokenizer.get_vocab()
        self.byte_ids: frozenset[int] = frozenset(
            index for token, index in vocabulary.items() if _BYTE_TOKEN.fullmatch(token)
        )
        self.special_tokens: tuple[str, ...] = _special_tokens(self.tokenizer, self.eos_ids)
        self.escaper = SpecialTokenEscaper(self.special_tokens)
        # Transformers cleans up spaces of word pieces only; with BPE that would corrupt the text.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        is_bpe = type(getattr(backend, "model", None)).__name__ == "BPE"
        self.cleans_spaces: bool = not is_bpe and bool(
            getattr(tokenizer, "clean_up_tokenization_spaces", False)
        )
        self._template = ChatTemplate(self.tokenizer)
        # The first call drops a saved truncation. Later calls change nothing, so that threads may
        # share the tokenizer.
        self.encode("")

    @property
    def eos_tokens(self) -> tuple[str, ...]:
        """The tokens that end an answer, as text."""
        return tuple(self.tokenizer.convert_ids_to_tokens(sorted(self.eos_ids)))

    def __len__(self) -> int:
        """Return the size of the vocabulary, including added tokens."""
        return len(self.tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the vocabulary; tokenizers with equal hashes have equal ids and tokens."""
        digest = hashlib.sha256()
        for token, index in sorted(self.tokenizer.get_vocab().items(), key=itemgetter(1)):
            digest.update(f"{index} {token}\n".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()[:32]

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._template.source is not None

    @property
    def takes_documents(self) -> bool:
        """Whether the chat template reads retrieved documents."""
        return self._template.takes_documents

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template writes the tools that the model may call."""
        return self._template.takes_tools

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode text as token ids; do not add a begin token if the text starts with it.

        Escaped special tokens (see ``escaper``) are encoded as plain text.

        Raises:
            ConfigurationError: the text holds a lone surrogate.
        """
        if self._is_fast and self.escaper.is_escaped(text):
            return self.encode_with_offsets(text, add_special_tokens)[0]
        with _explain_surrogates(text):
            ids: list[int] = self.tokenizer.encode(
                text, add_special_tokens=add_special_tokens, verbose=False
            )
        return ids[1:] if self._has_doubled_bos(ids) else ids

    def encode_with_offsets(
        self, text: str, add_special_tokens: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode text as token ids; return them and each token's characters (start, end).

        Tokens that the tokenizer adds have the span (0, 0).

        Raises:
            ConfigurationError: the text holds a lone surrogate, or the tokenizer is not a fast one
                and does not preserve the text.
        """
        if not self._is_fast:
            return self._encode_by_decoding(text, add_special_tokens)
        with _explain_surrogates(text):
            encoding = self.tokenizer(
                text,
                add_special_tokens=add_special_tokens,
                return_offsets_mapping=True,
                return_attention_mask=False,
                verbose=False,
            )
        ids: list[int] = list(encoding["input_ids"])
        spans = [(start, end) for start, end in encoding["offset_mapping"]]
        if self.escaper.is_escaped(text):
            ids, spans = self._plain_encoder.replace(text, self.escaper, ids, spans)
        return (ids[1:], spans[1:]) if self._has_doubled_bos(ids) else (ids, spans)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids to text, by default without special tokens."""
        text: str = self.tokenizer.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=self.cleans_spaces,
        )
        return text

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> str:
        """Render messages with the chat template, as text.

        Escape text from others with ``escaper`` first: encoding the result reads all special
        tokens in it.

        Args:
            messages: the chat, in the format of OpenAI's API. ``tool_calls`` hold calls, with
                arguments as a dict or as JSON; messages of the role ``tool`` hold results.
            documents: retrieved documents, for templates that read them.
            add_generation_prompt: end with the opening of an answer.
            tools: the tools that the model may call, in the format of OpenAI's API.
            template_options: other variables of the template, such as ``enable_thinking``.

        Raises:
            ConfigurationError: there is no template, it rejects the messages, or it does not
                support tools, calls or results among them.
        """
        return self._template.text(
            messages,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            options=template_options,
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Render messages with the chat template, as token ids; arguments as in ``chat_text``.

        The template writes special tokens itself, so none are added. Special tokens in messages,
        documents and tools are encoded as plain text; ``template_options`` are not escaped.
        """
        escape_message, escape_value = self.escaper.escape_message, self.escaper.escape_value
        text = self.chat_text(
            [escape_message(message) for message in messages],
            None if documents is None else escape_value(documents),
            add_generation_prompt,
            tools=None if tools is None else escape_value(tools),
            template_options=template_options,
        )
        return self.encode(text)

    @property
    def _is_fast(self) -> bool:
        return bool(getattr(self.tokenizer, "is_fast", False))

    @cached_property
    def _plain_encoder(self) -> PlainTextEncoder:
        ids = frozenset(self.tokenizer.convert_tokens_to_ids(list(self.special_tokens)))
        unknown = self.tokenizer.unk_token_id  # any text may produce it, unless it is an end token
        if unknown not in {*self.eos_ids, self.tokenizer.bos_token_id}:
            ids -= {unknown}
        return PlainTextEncoder(self.tokenizer.backend_tokenizer, ids - self.byte_ids)

    def _has_doubled_bos(self, ids: Sequence[int]) -> bool:
        begin = getattr(self.tokenizer, "bos_token_id", None)
        return begin is not None and len(ids) > 1 and ids[0] == ids[1] == begin

    def _encode_by_decoding(
        self, text: str, add_special_tokens: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode with a slow tokenizer; find spans by decoding ever longer prefixes."""
        ids = self.encode(text, add_special_tokens)
        ends = [len(self.decode(ids[:end])) for end in range(1, len(ids) + 1)]
        if self.decode(ids) != text:
            raise ConfigurationError(
                f"{type(self.tokenizer).__name__} does not tell which characters a token covers: "
                "install its fast version (pip install tokenizers sentencepiece)"
            )
        return ids, [(min(start, end), end) for start, end in zip([0, *ends], ends, strict=False)]


@contextmanager
def _explain_surrogates(text: str) -> Iterator[None]:
    """Raise ConfigurationError for a lone surrogate, which tokenizers report as a TypeError."""
    try:
        yield
    except TypeError:
        require_unicode("the text", text)
        raise


def _special_tokens(tokenizer: Any, eos_ids: Iterable[int]) -> tuple[str, ...]:
    """Return the texts of special and end tokens, without other added tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    named = [str(token) for token in added.values() if token.special]
    ends = [str(added[index]) for index in eos_ids if index in added]
    return tuple(sorted({*named, *tokenizer.all_special_tokens, *ends}))
