"""The tokenizer: texts and chats to token ids, special tokens escaped."""

from __future__ import annotations

import ctypes
import hashlib
import re
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property, partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

from ragaccel.errors import ConfigurationError, UnsupportedModelError, brief
from ragaccel.models.tool_calls import (
    SENTINEL_CALL,
    SENTINEL_KEY,
    SENTINEL_QUESTION,
    SENTINEL_RESULT,
    SENTINEL_TOOL,
    SENTINEL_TOOLS,
    SENTINEL_VALUE,
    has_tool_calls,
    has_tool_results,
    normalize_messages,
    normalize_tools,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from transformers import PreTrainedTokenizerBase


_RESERVED_OPTIONS = frozenset({"messages", "conversation", "documents", "tools", "tokenize",
    "add_generation_prompt", "continue_final_message", "chat_template", "return_dict",
    "return_tensors", "return_assistant_tokens_mask", "sanitize_control_tokens", "padding",
    "truncation", "max_length", "tokenizer_kwargs"})  # fmt: skip
_TEMPLATE_TIMEOUT = 30.0  # seconds that messages may take; templates lay out megabytes in one
_MAX_SOURCE = 1 << 20  # characters of a template; the longest known have some 30,000
_MAX_TEXT = 1 << 24  # characters of a text laid out, if that is much more than went in
_MAX_GROWTH = 20
_SENTINEL_MESSAGES = (SENTINEL_QUESTION, SENTINEL_CALL, SENTINEL_RESULT)


class ChatTemplate:
    """The chat template of a tokenizer of transformers, if it has one.

    What a template has a place for is found by laying out a probe: templates ignore what they do
    not know, and a tool's result left out would be answered without.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._is_untested = True  # until it has laid something out
        self.source: str | None = self._read()

    @property
    def takes_documents(self) -> bool:
        """Whether it reads a list of documents; it may just name them."""
        return self.source is not None and re.search(r"\bdocuments\b", self.source) is not None

    @cached_property
    def takes_tools(self) -> bool:
        """Whether it writes out the tools that the model may call."""
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
        """Lay messages out; ``inputs`` are ``documents`` and ``add_generation_prompt``.

        Raises:
            ConfigurationError: there is no template, it rejects the messages, or it has no place
                for something among them.
        """
        if self.source is None:
            raise ConfigurationError(
                "this model has no chat template: give the prompt as text, or load a chat model"
            )
        inputs["tools"] = tools = normalize_tools(tools)
        self._check(messages, tools, options or {})
        arguments_as_text = has_tool_calls(messages) and self._sentinel_chat[1]
        rendered = normalize_messages(messages, arguments_as_text=arguments_as_text)
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
                f"this model's chat template has no place for {unsupported}: load a model that was "
                "trained to call tools, or write them into a message's text"
            )
        taken = sorted(_RESERVED_OPTIONS & options.keys())
        if taken:
            raise ConfigurationError(f"{taken[0]!r} is an argument of its own, no template option")

    def _find_unsupported(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str | None:
        """What among these the template would leave out; None also where only trying can tell."""
        if tools and not self.takes_tools:
            return "tools"
        if has_tool_calls(messages) and not self._renders(SENTINEL_VALUE):
            return "tool calls"
        if has_tool_results(messages) and not self._renders(str(SENTINEL_RESULT["content"])):
            return "tool results"
        return None

    def _renders(self, word: str) -> bool:
        text, _ = self._sentinel_chat
        return text is None or word in text

    @cached_property
    def _sentinel_chat(self) -> tuple[str | None, bool]:
        """A probe conversation laid out, None if rejected; whether arguments go in as JSON text."""
        text = self._try_render(normalize_messages(_SENTINEL_MESSAGES), tools=SENTINEL_TOOLS)
        if text is not None and str({SENTINEL_KEY: SENTINEL_VALUE}) not in text:
            return text, False
        with_texts = normalize_messages(_SENTINEL_MESSAGES, arguments_as_text=True)
        text_of_texts = self._try_render(with_texts, tools=SENTINEL_TOOLS)
        return (text, False) if text_of_texts is None else (text_of_texts, True)

    def _try_render(self, messages: Sequence[Mapping[str, Any]], **inputs: Any) -> str | None:
        if self.source is None:
            return None
        try:
            return self._render(messages, add_generation_prompt=True, **inputs)
        except UnsupportedModelError:  # it takes too long
            raise
        except Exception:  # whatever a template raises, it does not take these
            return None

    def _render(self, messages: Sequence[Mapping[str, Any]], **inputs: Any) -> str:
        for name in ("documents", "tools"):
            given = inputs.get(name)
            inputs[name] = None if given is None else [dict(one) for one in given]
        render = partial(
            self._tokenizer.apply_chat_template, list(messages), tokenize=False, **inputs
        )
        try:
            text = run_with_timeout(_TEMPLATE_TIMEOUT, render) if self._is_untested else render()
        except TimeoutError as error:
            raise UnsupportedModelError(
                f"its chat template lays out messages for more than "
                f"{_TEMPLATE_TIMEOUT:.0f} seconds: it is damaged, or made to hang"
            ) from error
        self._is_untested = False
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
            raise UnsupportedModelError(
                f"its chat template has {len(source):,} characters, more than {_MAX_SOURCE:,}: it "
                "is damaged, or no template"
            )
        return source


def run_with_timeout(seconds: float, call: Callable[[], str]) -> str:
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


_FIRST_ESCAPE = 0x10F800  # private use, and no text's own
_GUARD = chr(0x10FFF0)

Offsets = list[tuple[int, int]]


class SpecialTokenEscaper:
    """Marks special tokens in text that others wrote, so that a prompt can hold it as text.

    ``hide`` puts a mark in place of the first character of every special token a text spells;
    what a chat template makes of it has the same length and is turned back by ``reveal``. A mark
    counts only where the rest of a special token follows it.
    """

    def __init__(self, special_tokens: Iterable[str]) -> None:
        tokens = sorted(filter(None, set(special_tokens)), key=len, reverse=True)
        firsts = sorted({token[0] for token in tokens})
        self._escape_of = {first: chr(_FIRST_ESCAPE + i) for i, first in enumerate(firsts)}
        self._first_of = {mark: first for first, mark in self._escape_of.items()}
        # Looked at from every character, since occurrences may overlap; nothing matches (?!).
        heads = [re.escape(token[0]) + f"(?={re.escape(token[1:])})" for token in tokens]
        marks = [
            self._escape_of[token[0]] + f"(?={self._possibly_escaped(token[1:])})"
            for token in tokens
        ]
        self._special_tokens_pattern = re.compile("|".join(heads) or "(?!)")
        self._escaped_tokens = re.compile("|".join(marks) or "(?!)")

    def escape(self, text: str) -> str:
        """Mark every special token that a text spells; the length stays."""
        return self._special_tokens_pattern.sub(lambda found: self._escape_of[found.group()], text)

    def escape_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Mark all text of a message, at whatever depth; its role stays."""
        return {
            key: value if key == "role" else self.escape_value(value)
            for key, value in message.items()
        }

    def escape_value(self, value: Any) -> Any:
        """Mark all text in a value, at whatever depth: in the keys of its mappings as well.

        Names of arguments are written by others as much as what they stand for.
        """
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, Mapping):
            return {self.escape_value(key): self.escape_value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape_value(item) for item in value]
        return value

    def unescape(self, text: str) -> str:
        """Turn a marked text back."""
        return self._escaped_tokens.sub(lambda found: self._first_of[found.group()], text)

    def is_escaped(self, text: str) -> bool:
        """Whether a text holds marks."""
        return self._escaped_tokens.search(text) is not None

    def _possibly_escaped(self, rest: str) -> str:
        """The rest of a token, where an overlapping one may have been marked in its midst."""
        return "".join(
            f"[{re.escape(char)}{self._escape_of[char]}]" if char in self._escape_of
            else re.escape(char)
            for char in rest
        )  # fmt: skip


class PlainTextEncoder:
    """A fast tokenizer that sees no special tokens, for the stretches that hold marks.

    Args:
        backend: the tokenizer of the ``tokenizers`` library; copied, as its settings are changed.
        special_ids: tokens that must not come out of text.
    """

    def __init__(self, backend: Any, special_ids: frozenset[int]) -> None:
        self._special_ids = special_ids
        self._backend = deepcopy(backend)
        # An added token that is not special is still told apart: text behind it is tokenized as
        # text behind a special token is, without the space that some put before a whole text.
        self._backend.add_tokens([_GUARD])
        self._backend.encode_special_tokens = True

    def replace(
        self, escaped_text: str, escaper: SpecialTokenEscaper, ids: list[int], spans: Offsets
    ) -> tuple[list[int], Offsets]:
        """Tokenize the marked stretches between the special tokens of a text again, as text.

        ``ids`` and ``spans`` are those of the marked text. Where the tokenizer's own vocabulary
        would make special tokens of plain text, the mark stays.
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


_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """A tokenizer of transformers, as the rest of the package uses it. Stateless after creation.

    Args:
        tokenizer: any tokenizer of transformers; offsets are best with a fast one.
        eos_ids: tokens that end an answer; the tokenizer's own end token if not given.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, eos_ids: Iterable[int] | None = None
    ) -> None:
        if not callable(getattr(tokenizer, "get_vocab", None)):
            raise ConfigurationError(
                f"a tokenizer is one of transformers, not {brief(tokenizer)}: AutoTokenizer"
                ".from_pretrained(name) makes one, and LLM.load(name) loads it with its model"
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
        # Transformers cleans spaces of word pieces only; with BPE it would corrupt the text.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        is_bpe = type(getattr(backend, "model", None)).__name__ == "BPE"
        self.cleans_spaces: bool = not is_bpe and bool(
            getattr(tokenizer, "clean_up_tokenization_spaces", False)
        )
        self._template = ChatTemplate(self.tokenizer)
        # Drops any truncation saved with the tokenizer now: later calls change nothing, so that
        # threads may share it.
        self.encode("")

    @property
    def eos_tokens(self) -> tuple[str, ...]:
        """The texts of the tokens that end an answer."""
        return tuple(self.tokenizer.convert_ids_to_tokens(sorted(self.eos_ids)))

    def __len__(self) -> int:
        """Count the tokens it knows, added ones included."""
        return len(self.tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """Tells this vocabulary from others: the same ids mean the same tokens."""
        digest = hashlib.sha256()
        for token, index in sorted(self.tokenizer.get_vocab().items(), key=itemgetter(1)):
            digest.update(f"{index} {token}\n".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()[:32]

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be laid out as the model was trained to read them."""
        return self._template.source is not None

    @property
    def takes_documents(self) -> bool:
        """Whether the chat template has a place of its own for retrieved documents."""
        return self._template.takes_documents

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template writes out the tools that the model may call."""
        return self._template.takes_tools

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Turn text into token ids. A begin token that the text spells out is not doubled.

        What ``shield`` has marked in the text is read as text and never as special tokens.

        Raises:
            ConfigurationError: the text holds half a character that the tokenizer cannot read.
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
        """Turn text into token ids and the characters [start, end) each stands for.

        A token that the tokenizer adds stands for no character: (0, 0).

        Raises:
            ConfigurationError: if the tokenizer is not a fast one and does not keep the text, or
                as in ``encode``.
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
        """Turn token ids into text, by default without special tokens."""
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
        """Lay out messages by the chat template, as text.

        ``tools`` are what the model may call, in the shape of OpenAI's interface; so are calls in
        messages (``tool_calls``, their arguments a dict or its JSON). Messages of the role
        ``tool`` hold results. ``template_options`` are other names that the template reads, such
        as ``enable_thinking``.

        Text that others wrote goes through ``shield`` first: a template's text is read with all
        the special tokens it spells.

        Raises:
            ConfigurationError: if there is no template, it rejects the messages, or it has no
                place for tools, their calls or their results.
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
        """Lay out messages by the chat template, as token ids; arguments as for ``chat_text``.

        The template writes its own special tokens, so none are added: no begin token twice. What
        messages, documents and tools spell is text; ``template_options`` are the program's own.
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
        unknown = self.tokenizer.unk_token_id  # comes out of any text, where it is no end as well
        if unknown not in {*self.eos_ids, self.tokenizer.bos_token_id}:
            ids -= {unknown}
        return PlainTextEncoder(self.tokenizer.backend_tokenizer, ids - self.byte_ids)

    def _has_doubled_bos(self, ids: Sequence[int]) -> bool:
        begin = getattr(self.tokenizer, "bos_token_id", None)
        return begin is not None and len(ids) > 1 and ids[0] == ids[1] == begin

    def _encode_by_decoding(
        self, text: str, add_special_tokens: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Find each token's characters by decoding ever longer starts of the text."""
        ids = self.encode(text, add_special_tokens)
        ends = [len(self.decode(ids[:end])) for end in range(1, len(ids) + 1)]
        if self.decode(ids) != text:
            raise ConfigurationError(
                f"{type(self.tokenizer).__name__} gives no offsets: install its fast version "
                "(pip install tokenizers sentencepiece)"
            )
        return ids, [(min(start, end), end) for start, end in zip([0, *ends], ends, strict=False)]


@contextmanager
def _explain_surrogates(text: str) -> Iterator[None]:
    """Say what is wrong with a text where tokenizers say that it is no text."""
    try:
        yield
    except TypeError as error:
        surrogate = _LONE_SURROGATE.search(text)
        if surrogate is None:
            raise
        raise ConfigurationError(
            f"the text holds {surrogate[0]!r}, a lone surrogate, as broken PDFs do: replace it, "
            "e.g. by text.encode(errors='replace').decode()"
        ) from error


def _special_tokens(tokenizer: Any, eos_ids: Iterable[int]) -> tuple[str, ...]:
    """List the tokens that text may not spell; what transformers merely adds as words is text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    named = [str(token) for token in added.values() if token.special]
    ends = [str(added[index]) for index in eos_ids if index in added]
    return tuple(sorted({*named, *tokenizer.all_special_tokens, *ends}))
