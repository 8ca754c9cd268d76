"""Prompt: a question and its passages as token ids, packed to the context, with references."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ragaccel.checks import shown, text
from ragaccel.decoding.request import Reference
from ragaccel.errors import CapacityError, ConfigurationError
from ragaccel.passage import Passage
from ragaccel.references import (
    TURN_WEIGHT,
    EncodedText,
    check_passage,
    encode_text,
    listed_references,
    rank_weights,
    refer,
)
from ragaccel.sentences import split_sentences

if TYPE_CHECKING:
    from ragaccel.models.tokenizer import Tokenizer

Message = Mapping[str, Any]
Template = str | Callable[[str, Sequence[Passage], Sequence[Message]], str | Sequence[Message]]

DEFAULT_TEMPLATE = """\
Answer the question from the numbered passages. Quote their words wherever they answer it, and \
name the passage after each quotation, like [1]. If they do not answer it, write only: The \
passages do not tell.

{passages}

Question: {question}"""

MAX_SENTENCES = 64  # that a chat template with documents can number
MAX_TITLE = 60  # characters: titles were cut to 16 tokens where the bundled reader learned
_GLUE_TOKENS = 2  # that such a template writes round a passage: markers, its citation
_FIELDS = frozenset({"question", "passages"})


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready to be completed.

    ``passages[n - 1]`` is the one the text numbers ``[n]``; ``dropped`` did not fit, and so did
    not the first ``dropped_turns`` messages of the chat. ``references`` are cut from the prompt's
    own ``token_ids`` where it holds them.
    """

    token_ids: tuple[int, ...]
    references: tuple[Reference, ...] = ()
    passages: tuple[Passage, ...] = ()
    dropped: tuple[Passage, ...] = ()
    text: str = ""
    dropped_turns: int = 0


def build_prompt(
    tokenizer: Tokenizer,
    question: str,
    passages: Sequence[Passage],
    *,
    history: Sequence[Message] = (),
    template: Template | None = None,
    max_tokens: int | None = None,
) -> Prompt:
    """Write the prompt that asks a question about passages, best passage first.

    ``template`` is a format string with the fields ``{question}`` and ``{passages}`` (numbered,
    title and text), which becomes the user's message where the model has a chat template and is
    completed as it is where not; or a callable ``(question, passages, history)`` that returns
    messages or a plain text. Without one, a model whose chat template takes documents gets them
    that way, any other ``DEFAULT_TEMPLATE``. ``history`` holds the chat so far, as messages.

    Whole passages are packed in the order given until ``max_tokens`` are full; the others are
    reported in ``dropped``. The oldest turns of the chat give way first, beyond half the room;
    every turn is a reference all the same.

    Raises:
        ConfigurationError: an empty question, or a template with other fields.
        CapacityError: the question alone, or not one passage, fits.
    """
    if not text("the question", question).strip():
        raise ConfigurationError("the question is empty")
    check_history(history)
    passages = listed_references(passages, "passages")
    for passage in passages:
        check_passage(passage)
    _check_template(template)
    layout = _Layout(tokenizer, question.strip(), template)
    kept_turns = _fitting_turns(layout, history, max_tokens)
    kept = layout.fitting(passages, kept_turns, max_tokens)
    encoded = layout.encode(kept, kept_turns)
    references = [*layout.references(encoded, kept), *_turn_references(history, tokenizer, encoded)]
    return Prompt(
        token_ids=encoded.token_ids,
        references=tuple(references),
        passages=tuple(kept),
        dropped=tuple(passage for passage in passages if not any(passage is k for k in kept)),
        text=encoded.text,
        dropped_turns=len(history) - len(kept_turns),
    )


def number_passages(passages: Sequence[Passage]) -> str:
    """Passages as a prompt shows them: ``[1] title``, the text under it, a blank line between."""
    return "\n\n".join(
        f"[{number}] {passage.title}\n{passage.text}"
        if passage.title
        else f"[{number}] {passage.text}"
        for number, passage in enumerate(passages, start=1)
    )


class _Layout:
    """How one question is written for one model, whatever passages and turns go with it."""

    def __init__(self, tokenizer: Tokenizer, question: str, template: Template | None) -> None:
        self.tokenizer, self.question, self.template = tokenizer, question, template
        self.by_documents = template is None and shows_documents(tokenizer)

    def encode(self, passages: Sequence[Passage], history: Sequence[Message]) -> EncodedText:
        """The whole prompt, with the characters of every token."""
        text, is_plain = self._text(passages, history)
        return encode_text(self.tokenizer, text, add_special_tokens=is_plain)

    def size(self, passages: Sequence[Passage], history: Sequence[Message]) -> int:
        """How many tokens the whole prompt takes."""
        text, is_plain = self._text(passages, history)
        return len(self.tokenizer.encode(text, add_special_tokens=is_plain))

    def fitting(
        self, passages: Sequence[Passage], history: Sequence[Message], max_tokens: int | None
    ) -> list[Passage]:
        """The passages that fit, in their order."""
        wanted = self._numberable(passages)
        if max_tokens is None or not wanted:
            return wanted
        around = self.size([], history)
        sizes = [self.size([passage], history) - around for passage in wanted]
        room = max_tokens - around
        while kept := _packed(wanted, sizes, room):
            excess = self.size(kept, history) - max_tokens
            if excess <= 0:
                return kept
            room -= excess
        raise CapacityError(
            f"none of {len(passages)} passages fits: the smallest takes {min(sizes):,} tokens, the "
            f"question leaves {max(0, max_tokens - around):,} of {max_tokens:,}: lower "
            "max_new_tokens, index in smaller passages, or load a model with a longer context"
        )

    def references(self, encoded: EncodedText, passages: Sequence[Passage]) -> list[Reference]:
        """The passages as references, cut from the prompt one after the other."""
        made: list[Reference] = []
        at = 0
        margin = _GLUE_TOKENS if self.by_documents else 0
        for passage, weight in zip(passages, rank_weights(passages), strict=True):
            pieces = _sentences(passage) if self.by_documents else [passage.text]
            found = _find_in_order(encoded.text, [piece.strip() for piece in pieces], at)
            own = encoded.cut(*found, margin) if found is not None else ()
            if found is not None and own:
                at = found[1]
                made.append(Reference(own, weight, passage.passage_id))
            else:
                name = passage.passage_id
                made += refer(passage.text, self.tokenizer, weight=weight, passage_id=name)
        return made

    def _text(self, passages: Sequence[Passage], history: Sequence[Message]) -> tuple[str, bool]:
        """The prompt's text, and whether it is plain: no chat template wrote special tokens."""
        # What others wrote may spell special tokens; only templates may write them.
        shield = self.tokenizer.shield
        hide = shield.hide
        shown = [replace(p, text=hide(p.text), title=hide(p.title)) for p in passages]
        written = self._write(shown, [shield.hide_in(turn) for turn in history])
        if isinstance(written, str):
            return written, True
        documents = [_as_document(p, hide) for p in passages] if self.by_documents else None
        return self.tokenizer.chat_text(written, documents=documents), False

    def _write(
        self, passages: Sequence[Passage], history: Sequence[Message]
    ) -> str | Sequence[Message]:
        question = self.tokenizer.shield.hide(self.question)
        if callable(self.template):
            return self.template(question, passages, history)
        if self.by_documents:
            return [*history, {"role": "user", "content": question}]
        form = self.template or DEFAULT_TEMPLATE
        content = form.format(question=question, passages=number_passages(passages))
        if self.tokenizer.has_chat_template:
            return [*history, {"role": "user", "content": content}]
        said = "".join(f"{turn['role']}: {turn['content']}\n\n" for turn in history)
        return said + content + ("" if self.template else "\n\nAnswer:")

    def _numberable(self, passages: Sequence[Passage]) -> list[Passage]:
        """All passages, or those whose sentences a template with documents can number together."""
        if not self.by_documents:
            return list(passages)
        return _packed(passages, [len(_sentences(passage)) for passage in passages], MAX_SENTENCES)


def check_history(history: Any) -> None:
    """Refuse a history that is no list of messages.

    Raises:
        ConfigurationError: with what it holds instead.
    """
    if isinstance(history, str | bytes | Mapping) or not isinstance(history, Sequence):
        raise ConfigurationError(f"history is a list of messages, not {shown(history)}")
    for turn in history:
        if not isinstance(turn, Mapping) or not {"role", "content"} <= turn.keys():
            raise ConfigurationError(
                f"a message of the history has a role and a content, unlike {shown(turn)}"
            )


def _check_template(template: Template | None) -> None:
    if template is None or callable(template):
        return
    if not isinstance(template, str):
        raise ConfigurationError(
            f"a prompt template is a format string or a function, not {shown(template)}"
        )
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ConfigurationError(f"the prompt template is no format string: {error}") from None
    if fields != _FIELDS:
        raise ConfigurationError(
            "a prompt template has the fields {question} and {passages}, not "
            f"{sorted(fields) or 'none'}; write {{{{ and }}}} for plain braces"
        )


def shows_documents(tokenizer: Tokenizer) -> bool:
    """Whether the chat template writes out the documents it is given; it may just name them."""
    if not tokenizer.takes_documents:
        return False
    probe = Passage("", "Probe.", title="Probe")
    asked = [{"role": "user", "content": "?"}]
    try:
        return probe.text in tokenizer.chat_text(asked, documents=[_as_document(probe, str)])
    except ConfigurationError:  # documents of another shape
        return False


def _as_document(passage: Passage, hide: Callable[[str], str]) -> dict[str, Any]:
    return {
        "title": hide(shorten_title(passage.title)),
        "text": hide(passage.text),
        "sentences": [hide(sentence) for sentence in _sentences(passage)],
    }


def shorten_title(title: str) -> str:
    """A title on one line, cut between words to what a reader of documents expects of one."""
    line = " ".join(title.split())
    if len(line) <= MAX_TITLE:
        return line
    whole_words, space, _ = line[: MAX_TITLE + 1].rpartition(" ")
    return whole_words if space else line[:MAX_TITLE]


def _sentences(passage: Passage) -> list[str]:
    """A passage's sentences on one line each; the last takes in what is too many to be numbered."""
    lines = [" ".join(sentence.split()) for sentence in split_sentences(passage.text)]
    return [*lines[: MAX_SENTENCES - 1], " ".join(lines[MAX_SENTENCES - 1 :])][: len(lines)]


def _packed(passages: Sequence[Passage], sizes: Sequence[int], room: int) -> list[Passage]:
    """The passages that fit in the room, best first; a smaller one may take what a larger left."""
    kept: list[Passage] = []
    for passage, size in zip(passages, sizes, strict=True):
        if size <= room:
            kept.append(passage)
            room -= size
    return kept


def _fitting_turns(
    layout: _Layout, history: Sequence[Message], max_tokens: int | None
) -> Sequence[Message]:
    """The newest turns that leave half of the room to the passages, from one of the user's on."""
    if max_tokens is None:
        return history
    alone = layout.size([], [])
    if alone > max_tokens:
        raise CapacityError(
            f"the question and its instructions take {alone:,} tokens, and there is room for "
            f"{max_tokens:,} before the answer: shorten the question or lower max_new_tokens"
        )
    room = alone + (max_tokens - alone) // 2
    turns = list(history)
    first = int(bool(turns) and turns[0].get("role") == "system")
    while len(turns) > first and (
        turns[first].get("role") == "assistant" or layout.size([], turns) > room
    ):
        turns.pop(first)
    return turns


def _turn_references(
    history: Sequence[Message], tokenizer: Tokenizer, encoded: EncodedText
) -> list[Reference]:
    return [
        reference
        for turn in history
        for reference in refer(str(turn["content"]), tokenizer, encoded, weight=TURN_WEIGHT)
    ]


def _find_in_order(text: str, pieces: Sequence[str], at: int) -> tuple[int, int] | None:
    """Where pieces stand one after the other in a text: the first's start and the last's end."""
    start: int | None = None
    for piece in pieces:
        found = text.find(piece, at)
        if found < 0:
            return None
        start = found if start is None else start
        at = found + len(piece)
    return None if start is None else (start, at)
