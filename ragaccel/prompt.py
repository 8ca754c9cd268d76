"""Prompts: turn passages, messages and questions into token ids and references."""

from __future__ import annotations

import contextlib
import operator
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ragaccel.decoding.request import Reference
from ragaccel.errors import CapacityError, ConfigurationError, brief, text
from ragaccel.passage import Passage, check_passage, split_sentences

if TYPE_CHECKING:
    from ragaccel.models.tokenizer import Tokenizer


# Tokens that the spaced variant of a reference keeps after the point where both variants agree.
_TAIL_TOKENS = 16
HISTORY_WEIGHT = 0.5
_LEAD_TOKENS = 16  # of the prompt before a predicted answer: longer matches rank no higher


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A text with its token ids and the characters [start, end) that each token stands for.

    ``offsets`` is empty if the tokenizer cannot give them.
    """

    text: str
    token_ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]

    def cut(self, start: int, end: int, margin: int = 0) -> tuple[int, ...]:
        """Return the ids of the tokens that overlap the characters [start, end).

        Include ``margin`` more tokens on each side.
        """
        inside = [i for i, (a, b) in enumerate(self.offsets) if a < end and b > start and a < b]
        if not inside:
            return ()
        return self.token_ids[max(0, inside[0] - margin) : inside[-1] + 1 + margin]


def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> EncodedText:
    """Tokenize a text with character offsets, or without if the tokenizer cannot give them.

    Escaped special tokens (``Tokenizer.escaper``) are tokenized as text and returned unescaped.
    """
    try:
        ids, offsets = tokenizer.encode_with_offsets(text, add_special_tokens=add_special_tokens)
    except ConfigurationError:
        ids, offsets = tokenizer.encode(text, add_special_tokens=add_special_tokens), []
    return EncodedText(tokenizer.escaper.unescape(text), tuple(ids), tuple(offsets))


def rank_weights(passages: Sequence[Passage]) -> list[float]:
    """Return each passage's weight in (0, 1], by retrieval score, or by rank without scores."""
    best = max((passage.score for passage in passages), default=0.0)
    if best <= 0.0:
        return [1.0 / rank for rank in range(1, len(passages) + 1)]
    return [max(passage.score / best, 0.01) for passage in passages]


def as_passages(references: Iterable[str | Passage | Reference]) -> list[Passage]:
    """Return the strings and passages as passages; a string gets the id ``reference-N``."""
    passages: list[Passage] = []
    for number, reference in enumerate(references, start=1):
        if isinstance(reference, str):
            passages.append(Passage(f"reference-{number}", reference, end=len(reference)))
        elif isinstance(reference, Passage):
            passages.append(reference)
    return passages


def check_references(references: Sequence[str | Passage | Reference]) -> None:
    """Check that every reference is a str, Passage or Reference.

    Raises:
        ConfigurationError: a reference is something else, or ``references`` is not a list.
    """
    for reference in as_reference_list(references):
        if isinstance(reference, Passage):
            check_passage(reference)
        elif not isinstance(reference, str | Reference):
            raise ConfigurationError(
                f"a reference must be a str, Passage or Reference, not {type(reference).__name__}"
            )


def as_reference_list(references: Any, name: str = "references") -> Sequence[Any]:
    """Return a list or tuple as it is, and any other iterable as a tuple, to be read repeatedly.

    Raises:
        ConfigurationError: the value is not a list.
    """
    if isinstance(references, str | Passage | Reference):
        raise ConfigurationError(f"{name} must be a list: put this one between brackets")
    if isinstance(references, bytes | Mapping) or not isinstance(references, Iterable):
        raise ConfigurationError(f"{name} must be a list, not {brief(references)}")
    try:
        return references if isinstance(references, list | tuple) else tuple(references)
    except Exception as error:  # the caller's iterable raises
        raise ConfigurationError(f"{name} cannot be read as a list: {error}") from error


def make_references(
    references: Sequence[str | Passage | Reference],
    tokenizer: Tokenizer,
    prompt: EncodedText | None,
) -> list[Reference]:
    """Return references in token ids; if the prompt contains their text, its ids are used.

    Tokenized alone, a passage may have other tokens at its ends, and matches would break there.

    Raises:
        ConfigurationError: a reference is not a str, Passage or Reference.
    """
    check_references(references)
    made = [reference for reference in references if isinstance(reference, Reference)]
    retrieved = [reference for reference in references if isinstance(reference, Passage)]
    weight_of = dict(zip(map(id, retrieved), rank_weights(retrieved), strict=True))
    for passage in as_passages(references):
        weight = weight_of.get(id(passage), 1.0)
        made += references_from_text(
            passage.text, tokenizer, prompt, weight=weight, passage_id=passage.passage_id
        )
    return made


def references_from_text(
    text: str,
    tokenizer: Tokenizer,
    prompt: EncodedText | None = None,
    *,
    weight: float = 1.0,
    passage_id: str = "",
) -> list[Reference]:
    """Return references for a text: cut from the prompt that contains it, else tokenized alone.

    Tokenized alone, the text is encoded with and without a leading space, since the model may write
    its first word either way. Lone surrogates, which broken PDFs contain, are replaced.
    """
    text = text.strip()
    if not text:
        return []
    at = prompt.text.find(text) if prompt is not None else -1
    own = prompt.cut(at, at + len(text)) if prompt is not None and at >= 0 else ()
    if own:
        return [Reference(own, weight, passage_id)]
    text = tokenizer.escaper.escape(text.encode(errors="replace").decode())
    plain = tuple(tokenizer.encode(text, add_special_tokens=False))
    spaced = tuple(tokenizer.encode(" " + text, add_special_tokens=False))
    variants = [plain, _head_of_variant(spaced, plain)]
    return [Reference(ids, weight, passage_id) for ids in variants if ids]


def prediction_references(
    texts: Sequence[str], tokenizer: Tokenizer, prompt_ids: Sequence[int]
) -> list[Reference]:
    """Return predicted answers as references that begin with the prompt's last tokens.

    The end of the prompt then matches them, so that the first token of the answer is drafted too.
    """
    lead = tuple(prompt_ids[-_LEAD_TOKENS:])
    return [
        Reference((*lead, *reference.token_ids), passage_id="prediction")
        for text in texts
        for reference in references_from_text(text, tokenizer)
    ]


def _head_of_variant(variant: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Return a variant's tokens up to the ending it shares with the other one, and a few more.

    Return () if both are equal.
    """
    if variant == other:
        return ()
    same = 0
    for a, b in zip(reversed(variant), reversed(other), strict=False):
        if a != b:
            break
        same += 1
    return variant[: len(variant) - same + _TAIL_TOKENS]


Message = Mapping[str, Any]
History = Sequence[Message] | Sequence[tuple[str, Any]] | Sequence[str] | None
Template = str | Callable[[str, Sequence[Passage], Sequence[Message]], str | Sequence[Message]]

DEFAULT_TEMPLATE = """\
Answer the question from the numbered passages. Quote their words wherever they answer it, and \
name the passage after each quotation, like [1]. If they do not answer it, write only: The \
passages do not tell.

{passages}

Question: {question}"""

MAX_SENTENCES = 64  # the most that a chat template with documents can number
MAX_TITLE = 60  # characters: the bundled reader was trained on titles of at most 16 tokens
_MARGIN_TOKENS = 2  # markers and citation that a template with documents writes around a passage
_FIELDS = frozenset({"question", "passages"})


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready to be completed.

    ``passages[n - 1]`` is the one the text numbers ``[n]``. ``dropped`` holds the passages that do
    not fit, ``dropped_messages`` the number of messages left out at the start of the chat.
    ``references`` are cut from the prompt's own ``token_ids`` if it contains their text.
    ``question`` is what it asks.
    """

    token_ids: tuple[int, ...]
    references: tuple[Reference, ...] = ()
    passages: tuple[Passage, ...] = ()
    dropped: tuple[Passage, ...] = ()
    text: str = ""
    dropped_messages: int = 0
    question: str = ""


def build_prompt(
    tokenizer: Tokenizer,
    question: str,
    passages: Sequence[Passage],
    *,
    history: History = (),
    template: Template | None = None,
    max_tokens: int | None = None,
) -> Prompt:
    """Build the prompt that asks a question about passages, best passage first.

    ``template`` is a format string with the fields ``{question}`` and ``{passages}`` (numbered,
    with title and text): it becomes the user's message if the model has a chat template, and is
    completed as it is otherwise. Or it is a callable ``(question, passages, history)`` that returns
    messages or a plain text. By default a chat template that takes documents gets the passages as
    documents, and any other model ``DEFAULT_TEMPLATE``. ``history`` is the chat so far (see
    ``as_messages``).

    Whole passages are packed in the given order until ``max_tokens`` are used; ``dropped`` holds
    the others. If the chat takes more than half of the tokens, its oldest messages are dropped.
    Dropped messages are still references.

    Raises:
        ConfigurationError: the question is empty, or the template has other fields.
        CapacityError: the question alone is too long, or no passage fits.
    """
    if not text("the question", question).strip():
        raise ConfigurationError("the question is empty")
    history = as_messages(history)
    passages = as_reference_list(passages, "passages")
    for passage in passages:
        check_passage(passage)
    check_template(template)
    renderer = _PromptRenderer(tokenizer, question.strip(), template)
    kept_history = _fitting_history(renderer, history, max_tokens)
    kept = renderer.fit_passages(passages, kept_history, max_tokens)
    encoded = renderer.encode(kept, kept_history)
    references = [
        *renderer.references(encoded, kept),
        *_history_references(history, tokenizer, encoded),
    ]
    return Prompt(
        token_ids=encoded.token_ids,
        references=tuple(references),
        passages=tuple(kept),
        dropped=tuple(passage for passage in passages if not any(passage is k for k in kept)),
        text=encoded.text,
        dropped_messages=len(history) - len(kept_history),
        question=question.strip(),
    )


def number_passages(passages: Sequence[Passage]) -> str:
    """Return numbered passages as text: ``[1] title``, the text below, separated by blank lines."""
    return "\n\n".join(
        f"[{number}] {passage.title}\n{passage.text}"
        if passage.title
        else f"[{number}] {passage.text}"
        for number, passage in enumerate(passages, start=1)
    )


class _PromptRenderer:
    """A renderer of the prompt of one question for one model, with any passages and messages."""

    def __init__(self, tokenizer: Tokenizer, question: str, template: Template | None) -> None:
        self.tokenizer, self.question, self.template = tokenizer, question, template
        self.uses_documents = template is None and renders_documents(tokenizer)

    def encode(self, passages: Sequence[Passage], history: Sequence[Message]) -> EncodedText:
        """Return the tokenized prompt with the character offsets of its tokens."""
        text, is_plain = self._render_text(passages, history)
        return encode_text(self.tokenizer, text, add_special_tokens=is_plain)

    def size(self, passages: Sequence[Passage], history: Sequence[Message]) -> int:
        """Return the number of tokens of the prompt."""
        text, is_plain = self._render_text(passages, history)
        return len(self.tokenizer.encode(text, add_special_tokens=is_plain))

    def fit_passages(
        self, passages: Sequence[Passage], history: Sequence[Message], max_tokens: int | None
    ) -> list[Passage]:
        """Return the passages that fit, in the given order."""
        wanted = self._limit_sentences(passages)
        if max_tokens is None or not wanted:
            return wanted
        around = self.size([], history)
        sizes = [self.size([passage], history) - around for passage in wanted]
        budget = max_tokens - around
        while kept := _pack(wanted, sizes, budget):
            excess = self.size(kept, history) - max_tokens
            if excess <= 0:
                return kept
            budget -= excess
        raise CapacityError(
            f"none of {len(passages)} passages fits: the smallest takes {min(sizes):,} tokens, and "
            f"the question leaves {max(0, max_tokens - around):,} of {max_tokens:,}: lower "
            "max_new_tokens, index smaller passages, or load a model with a longer context"
        )

    def references(self, encoded: EncodedText, passages: Sequence[Passage]) -> list[Reference]:
        """Return the passages as references, in the prompt's own token ids if they occur in it."""
        made: list[Reference] = []
        at = 0
        margin = _MARGIN_TOKENS if self.uses_documents else 0
        for passage, weight in zip(passages, rank_weights(passages), strict=True):
            pieces = _sentences(passage) if self.uses_documents else [passage.text]
            found = _find_in_order(encoded.text, [piece.strip() for piece in pieces], at)
            own = encoded.cut(*found, margin) if found is not None else ()
            if found is not None and own:
                at = found[1]
                made.append(Reference(own, weight, passage.passage_id))
            else:
                name = passage.passage_id
                made += references_from_text(
                    passage.text, self.tokenizer, weight=weight, passage_id=name
                )
        return made

    def _render_text(
        self, passages: Sequence[Passage], history: Sequence[Message]
    ) -> tuple[str, bool]:
        """Return the prompt's text, and whether it is plain, not from a chat template."""
        # Passages and messages may spell special tokens; only templates may write them.
        escaper = self.tokenizer.escaper
        escape = escaper.escape
        escaped = [replace(p, text=escape(p.text), title=escape(p.title)) for p in passages]
        written = self._render(escaped, [escaper.escape_message(message) for message in history])
        if isinstance(written, str):
            return written, True
        documents = [_as_document(p, escape) for p in passages] if self.uses_documents else None
        return self.tokenizer.chat_text(written, documents=documents), False

    def _render(
        self, passages: Sequence[Passage], history: Sequence[Message]
    ) -> str | Sequence[Message]:
        question = self.tokenizer.escaper.escape(self.question)
        if callable(self.template):
            return self.template(question, passages, history)
        if self.uses_documents:
            return [*history, {"role": "user", "content": question}]
        form = self.template or DEFAULT_TEMPLATE
        content = form.format(question=question, passages=number_passages(passages))
        if self.tokenizer.has_chat_template:
            return [*history, {"role": "user", "content": content}]
        said = "".join(f"{message['role']}: {message['content']}\n\n" for message in history)
        return said + content + ("" if self.template else "\n\nAnswer:")

    def _limit_sentences(self, passages: Sequence[Passage]) -> list[Passage]:
        """Return the passages without those whose sentences the chat template cannot number."""
        if not self.uses_documents:
            return list(passages)
        return _pack(passages, [len(_sentences(passage)) for passage in passages], MAX_SENTENCES)


def as_messages(history: Any) -> list[Message]:
    """Return a chat in any common form as messages.

    Args:
        history: messages (``{"role": ..., "content": ...}``, or objects with these attributes),
            pairs of a question and its answer, or questions and answers in turns; None is no chat.
            The answer of a pair may be an ``Answer``, and a content a list of texts, as OpenAI
            has it.

    Raises:
        ConfigurationError: the value is something else; the message shows it.
    """
    if history is None:
        return []
    if isinstance(history, str | bytes | Mapping) or not isinstance(history, Iterable):
        raise ConfigurationError(f"history must be {_HISTORY_FORMS}, not {brief(history)}")
    turns = list(history)
    if turns and all(isinstance(turn, str) for turn in turns):
        if len(turns) % 2:
            raise ConfigurationError(
                "history must hold a question and an answer in turns, and its last question "
                f"{brief(turns[-1])} has no answer: ask that one, or leave it out"
            )
        turns = list(zip(turns[::2], turns[1::2], strict=True))
    return [message for turn in turns for message in _as_turn(turn)]


def _as_turn(turn: Any) -> list[Message]:
    """Return one item of a history, a message or a pair, as messages."""
    if isinstance(turn, tuple | list) and len(turn) == 2:
        first, second = turn[0], _said(turn[1])
        if isinstance(first, str) and second is not None:
            if role := _ROLES.get(first):
                return [{"role": role, "content": second}]
            return [{"role": "user", "content": first}, {"role": "assistant", "content": second}]
    fields = dict(turn) if isinstance(turn, Mapping) else {}
    role = fields.get("role") or getattr(turn, "role", None) or getattr(turn, "type", None)
    role = getattr(role, "value", role)  # LlamaIndex has an enumeration, LangChain other names
    content = _said(fields.get("content", getattr(turn, "content", None)))
    if isinstance(role, str) and (content is not None or fields.get("tool_calls")):
        return [{**fields, "role": _ROLES.get(role, role), "content": content}]
    raise ConfigurationError(f"history must be {_HISTORY_FORMS}; one item is {brief(turn)}")


def _said(content: Any) -> str | None:
    """Return the text of a message's content or of an answer, or None if it is not only text."""
    if isinstance(content, list):
        parts: list[Any] = [p.get("text") if isinstance(p, Mapping) else p for p in content]
        return "\n".join(parts) if all(isinstance(part, str) for part in parts) else None
    said = content if isinstance(content, str) else getattr(content, "text", None)
    return said if isinstance(said, str) else None


_ROLES = {name: name for name in ("user", "assistant", "system", "tool")}
_ROLES |= {"human": "user", "ai": "assistant"}
_HISTORY_FORMS = (
    "a list of messages with a role and a content, of (question, answer) pairs, or of strings"
)


def renders_system(tokenizer: Tokenizer) -> bool:
    """Return whether a system message reaches the model: some chat templates refuse or drop it."""
    if not tokenizer.has_chat_template:
        return True
    probe = "a probe of the system message"
    messages = [{"role": "system", "content": probe}, {"role": "user", "content": "?"}]
    try:
        return probe in tokenizer.chat_text(messages)
    except ConfigurationError:
        return False


def check_template(template: Template | None) -> None:
    """Raise ConfigurationError if a template is neither a function nor a right format string."""
    if template is None or callable(template):
        return
    if not isinstance(template, str):
        raise ConfigurationError(
            f"a prompt template must be a format string or a function, not {brief(template)}"
        )
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ConfigurationError(f"the prompt template is not a format string: {error}") from None
    if fields != _FIELDS:
        raise ConfigurationError(
            "a prompt template must have the fields {question} and {passages}, not "
            f"{sorted(fields) or 'none'}: write {{{{ and }}}} for plain braces"
        )


def renders_documents(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template renders the text of documents, which not all do."""
    if not tokenizer.takes_documents:
        return False
    sample = Passage("", "Probe.", title="Probe")
    asked = [{"role": "user", "content": "?"}]
    try:
        return sample.text in tokenizer.chat_text(asked, documents=[_as_document(sample, str)])
    except ConfigurationError:  # the template expects another form of documents
        return False


def _as_document(passage: Passage, escape: Callable[[str], str]) -> dict[str, Any]:
    return {
        "title": escape(shorten_title(passage.title)),
        "text": escape(passage.text),
        "sentences": [escape(sentence) for sentence in _sentences(passage)],
    }


def shorten_title(title: str) -> str:
    """Return a title on one line, cut between words to ``MAX_TITLE`` characters."""
    line = " ".join(title.split())
    if len(line) <= MAX_TITLE:
        return line
    whole_words, space, _ = line[: MAX_TITLE + 1].rpartition(" ")
    return whole_words if space else line[:MAX_TITLE]


def _sentences(passage: Passage) -> list[str]:
    """Return a passage's sentences, each on one line; the ``MAX_SENTENCES``-th holds the rest."""
    lines = [" ".join(sentence.split()) for sentence in split_sentences(passage.text)]
    return [*lines[: MAX_SENTENCES - 1], " ".join(lines[MAX_SENTENCES - 1 :])][: len(lines)]


def _pack(passages: Sequence[Passage], sizes: Sequence[int], budget: int) -> list[Passage]:
    """Return the passages that fit in the budget, in order, skipping those that are too large."""
    kept: list[Passage] = []
    for passage, size in zip(passages, sizes, strict=True):
        if size <= budget:
            kept.append(passage)
            budget -= size
    return kept


def _fitting_history(
    renderer: _PromptRenderer, history: Sequence[Message], max_tokens: int | None
) -> Sequence[Message]:
    """Drop the oldest messages until half of the tokens are left to passages; return the others.

    Keep a system message; the message after it is not an assistant's.
    """
    if max_tokens is None:
        return history
    alone = renderer.size([], [])
    if alone > max_tokens:
        raise CapacityError(
            f"the question and its instructions take {alone:,} tokens, and only "
            f"{max(0, max_tokens):,} fit before the answer: shorten the question or lower "
            "max_new_tokens (max_tokens)"
        )
    budget = alone + (max_tokens - alone) // 2
    messages = list(history)
    first = int(bool(messages) and messages[0].get("role") == "system")
    while len(messages) > first and (
        messages[first].get("role") == "assistant" or renderer.size([], messages) > budget
    ):
        messages.pop(first)
    return messages


def _history_references(
    history: Sequence[Message], tokenizer: Tokenizer, encoded: EncodedText
) -> list[Reference]:
    return [
        reference
        for message in history
        for reference in references_from_text(
            str(message["content"]), tokenizer, encoded, weight=HISTORY_WEIGHT
        )
    ]


def _find_in_order(text: str, pieces: Sequence[str], at: int) -> tuple[int, int] | None:
    """Return [start, end) of pieces found in order in ``text[at:]``; None if one is missing."""
    start: int | None = None
    for piece in pieces:
        found = text.find(piece, at)
        if found < 0:
            return None
        start = found if start is None else start
        at = found + len(piece)
    return None if start is None else (start, at)


OnePrompt = str | Prompt | Sequence[int] | Sequence[Message]
Batch = (
    list[str] | list[Prompt] | list[list[int]] | list[list[Message]] | list[list[dict[str, Any]]]
)
AnyReference = str | Passage | Reference

_KINDS = "a str, a list of messages, a list of token ids, a Prompt, or a list of those"


def split_batch(prompt: Any) -> Sequence[Any] | None:
    """Return the prompts of a batch, or None if this is one prompt.

    Raises:
        ConfigurationError: a prompt is empty, mixes kinds, or is not a prompt.
    """
    if not _is_batch(prompt):
        return None
    if any(_is_batch(one) for one in prompt):
        raise ConfigurationError("a batch cannot hold lists of prompts: pass them in one list")
    prompts: Sequence[Any] = prompt
    return prompts


def _is_batch(prompt: Any) -> bool:
    """Return whether a prompt is a list of prompts.

    Raises:
        ConfigurationError: the prompt is empty, mixes kinds, or is not a prompt.
    """
    if isinstance(prompt, str | Prompt):
        return False
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        hint = ": pass token ids as a list, ids.tolist()" if hasattr(prompt, "tolist") else ""
        raise ConfigurationError(f"a prompt must be {_KINDS}, not {type(prompt).__name__}{hint}")
    if not prompt:
        raise ConfigurationError("the prompt is an empty list")
    kinds = {_kind_of_item(item) for item in prompt}
    if kinds & {"bool"} or (len(kinds) > 1 and kinds != {"prompt", "list"}):
        raise ConfigurationError(
            f"a prompt must be {_KINDS}, not a list of {' and '.join(sorted(kinds))} items"
        )
    return not kinds <= {"int", "message"}


def read_prompt(
    prompt: OnePrompt,
    references: Sequence[AnyReference],
    tokenizer: Tokenizer,
    vocab_size: int,
) -> Prompt:
    """Return one prompt of any kind, checked by ``split_batch``, and its references, tokenized.

    Raises:
        ConfigurationError: the prompt is empty, has ids outside the vocabulary, or messages for
            a model without a chat template.
    """
    if isinstance(prompt, Prompt):
        _check_ids(prompt.token_ids, vocab_size)
        encoded = _encoded_ids(prompt.token_ids, references, tokenizer)
        more = make_references(references, tokenizer, encoded)
        return replace(
            prompt,
            references=(*prompt.references, *more),
            passages=(*prompt.passages, *as_passages(references)),
        )
    ids, encoded = _encode(prompt, references, tokenizer)
    _check_ids(ids, vocab_size)
    made = make_references(references, tokenizer, encoded)
    text = encoded.text if encoded is not None else ""
    return Prompt(ids, tuple(made), tuple(as_passages(references)), text=text)


def references_per_prompt(references: Any, num_prompts: int) -> list[Sequence[Any]]:
    """Return the references of each prompt of a batch, given as a list for each or one for all."""
    if isinstance(references, str | Mapping) or not isinstance(references, Sequence):
        raise ConfigurationError("references must be a list of texts, passages or References")
    nested = [isinstance(one, Sequence) and not isinstance(one, str) for one in references]
    if not any(nested):
        return [references] * num_prompts
    if not all(nested) or len(references) != num_prompts:
        raise ConfigurationError(
            f"references of a batch must be one list for all {num_prompts} prompts, or "
            f"{num_prompts} lists"
        )
    return list(references)


def _encode(
    prompt: Any, references: Sequence[Any], tokenizer: Tokenizer
) -> tuple[tuple[int, ...], EncodedText | None]:
    """Return a prompt's ids, and its text and token offsets if references may occur in it."""
    if not isinstance(prompt, str) and not isinstance(prompt[0], Mapping):
        ids = tuple(int(i) for i in prompt)
        return ids, _encoded_ids(ids, references, tokenizer)
    is_plain = isinstance(prompt, str)
    text = prompt if is_plain else _chat_text(prompt, tokenizer)
    if not text:
        raise ConfigurationError("the prompt is empty")
    if not references:
        return tuple(tokenizer.encode(text, add_special_tokens=is_plain)), None
    encoded = encode_text(tokenizer, text, add_special_tokens=is_plain)
    return encoded.token_ids, encoded


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    if not ids:
        raise ConfigurationError("the prompt is empty")
    wrong = [i for i in ids if not 0 <= i < vocab_size]
    if wrong:
        raise ConfigurationError(
            f"token id {wrong[0]} is outside the model's vocabulary of {vocab_size:,}"
        )


def _chat_text(messages: Sequence[Message], tokenizer: Tokenizer) -> str:
    """Return messages rendered with the chat template, with special tokens in them escaped."""
    return tokenizer.chat_text([tokenizer.escaper.escape_message(message) for message in messages])


def _encoded_ids(
    ids: tuple[int, ...], references: Sequence[Any], tokenizer: Tokenizer
) -> EncodedText | None:
    """Return ids with their text, or None if the text is not tokenized to the same ids again."""
    if not references:
        return None
    text: str = tokenizer.tokenizer.decode(list(ids), skip_special_tokens=False)
    encoded = encode_text(tokenizer, text, add_special_tokens=False)
    return encoded if encoded.token_ids == ids else None


def _is_integer(item: Any) -> bool:
    """Return whether an item is an integer; a tensor has ``__index__`` whatever it holds."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        operator.index(item)
        return True
    return False


def _kind_of_item(item: Any) -> str:
    if isinstance(item, bool):
        return "bool"
    if _is_integer(item):
        return "int"
    if isinstance(item, Mapping):
        if "role" not in item or "content" not in item:
            raise ConfigurationError("a message must have a role and a content")
        return "message"
    if isinstance(item, str | Prompt):
        return "prompt"
    if isinstance(item, Sequence) and not isinstance(item, bytes):
        return "list"
    raise ConfigurationError(f"a prompt must be {_KINDS}, not a list of {type(item).__name__}")


MessageDict = dict[str, Any]


def adapt_messages(
    messages: list[MessageDict], render: Callable[[list[MessageDict]], Any]
) -> list[MessageDict]:
    """Return messages that the chat template accepts, merged if its roles must alternate.

    If ``render`` raises an error, adjacent messages of one role are merged; if it still does, the
    system message is also merged into the user's. Tool calls, tool results and messages whose
    content is not a string are never merged.

    Args:
        messages: the messages, ``{"role": ..., "content": ...}``.
        render: renders messages with the chat template, such as ``llm.tokenizer.chat_text``.

    Raises:
        ConfigurationError: the template rejects all variants; this is its first error.
    """
    first: ConfigurationError | None = None
    for changed in (messages, _merged(messages), _merged(_system_as_user(messages))):
        error = _render_error(render, changed)
        if error is None:
            return changed
        first = first or error
    assert first is not None
    raise first


def _render_error(
    render: Callable[[list[MessageDict]], Any], messages: list[MessageDict]
) -> ConfigurationError | None:
    try:
        render(messages)
    except ConfigurationError as error:
        return error
    return None


def _merged(messages: Sequence[MessageDict]) -> list[MessageDict]:
    """Return the messages with adjacent ones of the same role merged."""
    made: list[MessageDict] = []
    for message in messages:
        if (
            made
            and _is_plain(message)
            and _is_plain(made[-1])
            and made[-1]["role"] == message["role"]
        ):
            texts = (made[-1]["content"], message["content"])
            made[-1] = {**made[-1], "content": "\n\n".join(filter(None, texts))}
        else:
            made.append(message)
    return made


def _system_as_user(messages: Sequence[MessageDict]) -> list[MessageDict]:
    return [
        {**message, "role": "user"} if message["role"] == "system" else message
        for message in messages
    ]


def _is_plain(message: Mapping[str, Any]) -> bool:
    said = message.get("content")
    return message["role"] != "tool" and not message.get("tool_calls") and isinstance(said, str)
