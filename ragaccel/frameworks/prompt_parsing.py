"""Parse a framework's stuffed prompt into documents and a question.

Some models have a documents-only chat template, which renders the documents and the last message
and ignores all other messages; the bundled reader is one. Frameworks put passages and question
into one text: the passages that a registry finds in it become documents, and the question is looked
for in the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ragaccel.errors import ConfigurationError
from ragaccel.passage import Passage
from ragaccel.prompt import Message, Prompt, as_passages, build_prompt, renders_documents

if TYPE_CHECKING:
    from ragaccel.decoding.request import Reference
    from ragaccel.frameworks.registry import Lookup, Match
    from ragaccel.models.tokenizer import Tokenizer


_EARLIER = "An earlier turn."
_LABEL = re.compile(r"\b(?:question|query)\b(?:\s+is(?:\s+as\s+follows)?)?[ \t*]*:[\s*]*", re.I)
_NEXT_LABEL = re.compile(r"^[ \t#*]*\w[\w ]{0,48}:")
_MIN_PARAGRAPH = 24  # characters: shorter ones are headings
_PARAGRAPHS = re.compile(r"\n[ \t]*\n")
_RULES = re.compile(r"^[ \t]*[-=_*#]{3,}[ \t]*$", re.M)  # lines that templates put around passages
# A rule, or the label of a passage that was cut out.
_LABEL_ONLY = re.compile(r"^[\W_]*(?:\w[\w ]{0,24}:[\W_]*)?$")
_LEADING_MARKS = re.compile(r"^[\W_]+")  # a part may begin with the previous sentence's full stop
_SENTENCE_ENDS = ("?", "？", "؟", ".", "!", "。")


def is_documents_only(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template renders only documents and the last message."""
    if not tokenizer.has_chat_template or not renders_documents(tokenizer):
        return False
    messages = [
        {"role": "user", "content": _EARLIER},
        {"role": "assistant", "content": "An answer."},
        {"role": "user", "content": "?"},
    ]
    try:
        return _EARLIER not in tokenizer.chat_text(messages, documents=[])
    except ConfigurationError:  # the template rejects such a chat, so it does not ignore messages
        return False


def parse_prompt(
    prompt: str | Sequence[Message],
    tokenizer: Tokenizer,
    registry: Lookup | None,
    *,
    given: Sequence[str | Passage | Reference] = (),
    namespace: str = "",
    max_tokens: int | None = None,
) -> Prompt:
    """Build the prompt of a documents-only model from a stuffed text or chat.

    The passages are those of ``given`` and of the registry that occur in the text; a given one
    takes precedence over a registered one. Given passages that do not occur are ignored.

    The question is the text after the last "Question:" or "Query:" of the last user message, else
    the last paragraph of that message that ends with a question mark, without the passages. If no
    passage is found, the other paragraphs of that message and of system and tool messages serve as
    passages.

    Raises:
        ConfigurationError: no question is found.
        CapacityError: the question, or each passage by itself, is too long for ``max_tokens``.
    """
    from ragaccel.frameworks.registry import first_matches  # imports numpy: only when needed

    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    texts = [_text_of(message) for message in messages]
    last_user = _last_user_message(messages)
    known = [one for one in (_registry_of(given, namespace), registry) if one is not None]
    found = [
        first_matches(one.match(text, namespace) for one in known) if text else [] for text in texts
    ]
    found[last_user], question = _split_question(texts[last_user], found[last_user])
    if not question:
        raise ConfigurationError(
            "no question was found in this prompt, and this model reads only passages and one "
            "question: write it after 'Question:'"
        )
    matched = dict.fromkeys(
        _matched_passage(text, match)
        for text, matches in zip(texts, found, strict=True)
        for match in matches
    )
    candidates = list(matched) or _other_paragraphs(question, messages, texts, last_user)
    return build_prompt(tokenizer, question, candidates, max_tokens=max_tokens)


def _registry_of(given: Sequence[str | Passage | Reference], namespace: str) -> Lookup | None:
    texts = as_passages(given)
    if not texts:
        return None
    from ragaccel.frameworks.registry import ReferenceRegistry

    registry = ReferenceRegistry()
    registry.register(texts, namespace)
    return registry


def _matched_passage(text: str, match: Match) -> Passage:
    """Return the passage of a match, or only the part that occurs in the text."""
    if match.whole:
        return match.passage
    part = _LEADING_MARKS.sub("", text[match.start : match.end])
    before = max(0, match.passage.text.find(part))
    return replace(match.passage.cut(before, before + len(part)), text=part)


def _split_question(text: str, found: Sequence[Match]) -> tuple[list[Match], str]:
    """Return the passages and the question of a text; the question may itself be registered."""
    spans = [(match.start, match.end) for match in found]
    labels = [label.end() for label in _LABEL.finditer(text)]
    asked = {end for end in labels if not any(start < end < stop for start, stop in spans)}
    passages = [match for match in found if match.start not in asked]
    rest = _cut_spans(text, [(match.start, match.end) for match in passages])
    if not asked and not _question_paragraphs(rest):
        for match in reversed(passages):
            if _question_paragraphs(text[match.start : match.end]):
                passages.remove(match)
                return passages, " ".join(text[match.start : match.end].split())
    return passages, find_question(rest)


def find_question(text: str) -> str:
    """Return the labelled question of a text, else its last paragraph with a question mark.

    If no paragraph ends with a question mark, return the last paragraph.
    """
    labels = list(_LABEL.finditer(text))
    if labels and (labelled := _sentence_at_start(text[labels[-1].end() :])):
        return labelled
    paragraphs = [part for part in _paragraphs(text) if not _LABEL_ONLY.match(part)]
    return " ".join((_question_paragraphs(text) or paragraphs or [""])[-1].split())


def _question_paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a text that end with a question mark."""
    return [part for part in _paragraphs(text) if part.endswith(_SENTENCE_ENDS[:3])]


def _paragraphs(text: str) -> list[str]:
    return [part.strip() for part in _PARAGRAPHS.split(text)]


def _sentence_at_start(text: str) -> str:
    """Return a text's start up to a line that ends a sentence, a blank line or a label."""
    lines: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped or (lines and _NEXT_LABEL.match(line)):
            break
        lines.append(stripped)
        if stripped.endswith(_SENTENCE_ENDS):
            break
    return " ".join(" ".join(lines).split())


def _other_paragraphs(
    question: str, messages: Sequence[Message], texts: Sequence[str], last_user: int
) -> list[Passage]:
    """Return the paragraphs of a chat besides the question, as passages."""
    candidates = [
        text
        for number, text in enumerate(texts)
        if number == last_user or messages[number].get("role") in ("system", "tool")
    ]
    paragraphs = [part for text in candidates for part in _paragraphs(_RULES.sub("\n", text))]
    kept = [
        part
        for part in paragraphs
        if len(part) >= _MIN_PARAGRAPH
        and not part.endswith(":")
        and question not in " ".join(part.split())
    ]
    return [Passage(f"paragraph-{n}", part, end=len(part)) for n, part in enumerate(kept, start=1)]


def _last_user_message(messages: Sequence[Message]) -> int:
    asked = [number for number, message in enumerate(messages) if message.get("role") == "user"]
    return asked[-1] if asked else len(messages) - 1


def _text_of(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))


def _cut_spans(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """Return a text with each span replaced by a blank line."""
    kept, at = [], 0
    for start, end in sorted(spans):
        if end > at:
            kept.append(text[at : max(at, start)])
            at = end
    return "\n\n".join([*kept, text[at:]])
