"""Prompt parsing: a framework's stuffed prompt to documents and a question.

The bundled reader is one: its chat template writes the documents it is given and the last message,
and leaves out whatever else was said. Frameworks put both into one text; here the passages that a
registry finds in that text become the documents again, and what asks becomes the question.
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
_RULES = re.compile(r"^[ \t]*[-=_*#]{3,}[ \t]*$", re.M)  # frame what was retrieved
# A rule, or the label of a passage that was cut out.
_LABEL_ONLY = re.compile(r"^[\W_]*(?:\w[\w ]{0,24}:[\W_]*)?$")
_LEADING_MARKS = re.compile(r"^[\W_]+")  # sentence: part of a text may begin with its mark
_SENTENCE_ENDS = ("?", "？", "؟", ".", "!", "。")


def is_documents_only(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template takes documents and a question, and writes nothing else."""
    if not tokenizer.has_chat_template or not renders_documents(tokenizer):
        return False
    messages = [
        {"role": "user", "content": _EARLIER},
        {"role": "assistant", "content": "An answer."},
        {"role": "user", "content": "?"},
    ]
    try:
        return _EARLIER not in tokenizer.chat_text(messages, documents=[])
    except ConfigurationError:  # it takes no such conversation, so it does not forget one either
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
    """Write the prompt of a reader: the passages found in a text or a chat, and its question.

    Passages are those of ``given`` and of the registry that stand in it; what is ``given`` and
    does not stand there is not read. One that both know is the given one.

    The question is what stands behind the last "Question:" or "Query:" of the last user's message,
    else the paragraph of it that asks, passages cut out. Where no such passage is found, the other
    paragraphs of that message, and of what the system and tools say, are the passages.

    Raises:
        ConfigurationError: nothing in it can be the question.
        CapacityError: the question, or every single passage, is too long.
    """
    texts = [prompt] if isinstance(prompt, str) else [_text_of(message) for message in prompt]
    last_user = _last_user_message(prompt)
    known = [one for one in (_registry_of(given, namespace), registry) if one is not None]
    found = [_matches(text, known, namespace) for text in texts]
    found[last_user], question = _split_question(texts[last_user], found[last_user])
    if not question:
        raise ConfigurationError(
            "no question is found in this prompt: this model reads passages and one question; "
            "write the question behind 'Question:'"
        )
    matched = dict.fromkeys(
        _matched_passage(text, match)
        for text, matches in zip(texts, found, strict=True)
        for match in matches
    )
    candidates = list(matched) or _other_paragraphs(question, prompt, texts, last_user)
    return build_prompt(tokenizer, question, candidates, max_tokens=max_tokens)


def _registry_of(given: Sequence[str | Passage | Reference], namespace: str) -> Lookup | None:
    texts = as_passages(given)
    if not texts:
        return None
    from ragaccel.frameworks.registry import ReferenceRegistry  # numpy with it: not for an import

    registry = ReferenceRegistry()
    registry.register(texts, namespace)
    return registry


def _matches(text: str, known: Sequence[Lookup], namespace: str) -> list[Match]:
    """What stands in a text, in order; where two registries find something, the first one's."""
    kept: list[Match] = []
    for registry in known:
        found = registry.match(text, namespace) if text else []
        kept += [m for m in found if all(m.end <= k.start or k.end <= m.start for k in kept)]
    return sorted(kept, key=lambda match: match.start)


def _matched_passage(text: str, match: Match) -> Passage:
    """Return a passage; or as much of it as stands in a text: the rest is nothing that was said here."""
    if match.whole:
        return match.passage
    part = _LEADING_MARKS.sub("", text[match.start : match.end])
    before = max(0, match.passage.text.find(part))
    return replace(match.passage.cut(before, before + len(part)), text=part)


def _split_question(text: str, found: Sequence[Match]) -> tuple[list[Match], str]:
    """Return the question of a text, and its passages: a question may be a registered text itself."""
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
    """Find what a text asks: what is labelled as the question, else its paragraph that asks."""
    labels = list(_LABEL.finditer(text))
    if labels and (labelled := _sentence_at_start(text[labels[-1].end() :])):
        return labelled
    paragraphs = [part for part in _paragraphs(text) if not _LABEL_ONLY.match(part)]
    return " ".join((_question_paragraphs(text) or paragraphs or [""])[-1].split())


def _question_paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a text that end as questions do."""
    return [part for part in _paragraphs(text) if part.endswith(_SENTENCE_ENDS[:3])]


def _paragraphs(text: str) -> list[str]:
    return [part.strip() for part in _PARAGRAPHS.split(text)]


def _sentence_at_start(text: str) -> str:
    """What a text begins with, up to a sentence's end of a line, a blank line or a label."""
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
    question: str, prompt: str | Sequence[Message], texts: Sequence[str], last_user: int
) -> list[Passage]:
    """What a text or a chat tells besides its question, a passage a paragraph."""
    candidates = [
        text
        for number, text in enumerate(texts)
        if number == last_user or (_role(prompt, number) in ("system", "tool"))
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


def _role(prompt: str | Sequence[Message], number: int) -> str:
    return "user" if isinstance(prompt, str) else str(prompt[number].get("role"))


def _last_user_message(prompt: str | Sequence[Message]) -> int:
    if isinstance(prompt, str):
        return 0
    asked = [number for number, message in enumerate(prompt) if message.get("role") == "user"]
    return asked[-1] if asked else len(prompt) - 1


def _text_of(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))


def _cut_spans(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """Return a text without some stretches of it, a blank line in place of each."""
    kept, at = [], 0
    for start, end in sorted(spans):
        if end > at:
            kept.append(text[at : max(at, start)])
            at = end
    return "\n\n".join([*kept, text[at:]])
