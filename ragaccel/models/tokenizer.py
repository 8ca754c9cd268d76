"""Tokenizers: text to ids with offsets, chat templates, and back to text."""

from __future__ import annotations

import hashlib
import re
from contextlib import contextmanager
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

from ragaccel.checks import shown
from ragaccel.errors import ConfigurationError
from ragaccel.models.chat_template import ChatTemplate
from ragaccel.models.shielding import PlainEncoder, Shield

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

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
                f"a tokenizer is one of transformers, not {shown(tokenizer)}: AutoTokenizer"
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
        self.shield = Shield(self.special_tokens)
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
    def special_ends(self) -> tuple[str, ...]:
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
        if self._is_fast and self.shield.is_marked(text):
            return self.encode_with_offsets(text, add_special_tokens)[0]
        with _telling_of_halves(text):
            ids: list[int] = self.tokenizer.encode(
                text, add_special_tokens=add_special_tokens, verbose=False
            )
        return ids[1:] if self._starts_twice(ids) else ids

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
            return self._encode_slowly(text, add_special_tokens)
        with _telling_of_halves(text):
            encoding = self.tokenizer(
                text,
                add_special_tokens=add_special_tokens,
                return_offsets_mapping=True,
                return_attention_mask=False,
                verbose=False,
            )
        ids: list[int] = list(encoding["input_ids"])
        spans = [(start, end) for start, end in encoding["offset_mapping"]]
        if self.shield.is_marked(text):
            ids, spans = self._plain_encoder.replace(text, self.shield, ids, spans)
        return (ids[1:], spans[1:]) if self._starts_twice(ids) else (ids, spans)

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
        hide_in, hide_below = self.shield.hide_in, self.shield.hide_below
        text = self.chat_text(
            [hide_in(message) for message in messages],
            None if documents is None else hide_below(documents),
            add_generation_prompt,
            tools=None if tools is None else hide_below(tools),
            template_options=template_options,
        )
        return self.encode(text)

    @property
    def _is_fast(self) -> bool:
        return bool(getattr(self.tokenizer, "is_fast", False))

    @cached_property
    def _plain_encoder(self) -> PlainEncoder:
        ids = frozenset(self.tokenizer.convert_tokens_to_ids(list(self.special_tokens)))
        unknown = self.tokenizer.unk_token_id  # comes out of any text, where it is no end as well
        if unknown not in {*self.eos_ids, self.tokenizer.bos_token_id}:
            ids -= {unknown}
        return PlainEncoder(self.tokenizer.backend_tokenizer, ids - self.byte_ids)

    def _starts_twice(self, ids: Sequence[int]) -> bool:
        begin = getattr(self.tokenizer, "bos_token_id", None)
        return begin is not None and len(ids) > 1 and ids[0] == ids[1] == begin

    def _encode_slowly(
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
def _telling_of_halves(text: str) -> Iterator[None]:
    """Say what is wrong with a text where tokenizers say that it is no text."""
    try:
        yield
    except TypeError as error:
        half = _LONE_SURROGATE.search(text)
        if half is None:
            raise
        raise ConfigurationError(
            f"the text holds {half[0]!r}, half a character, as broken PDFs do: replace it, e.g. by "
            "text.encode(errors='replace').decode()"
        ) from error


def _special_tokens(tokenizer: Any, eos_ids: Iterable[int]) -> tuple[str, ...]:
    """List the tokens that text may not spell; what transformers merely adds as words is text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    named = [str(token) for token in added.values() if token.special]
    ends = [str(added[index]) for index in eos_ids if index in added]
    return tuple(sorted({*named, *tokenizer.all_special_tokens, *ends}))
