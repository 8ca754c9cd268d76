"""Check that the bundled reader's answer quotes a passage and is relevant to the question.

The reader copies a sentence of the passages even if none of them answers the question. A question
counts as not answered if

- the model says so (``NOT_TOLD``; any model);
- the most similar sentence found is less similar to the question than ``FLOOR`` (``NOT_NEAR``);
- the question, or every passage, is in a script that the reader was not trained on
  (``FOREIGN_SCRIPT``);
- the reader's text occurs in no passage, is a heading, or adds no word to the question
  (``NO_QUOTE``).

The second and third are known before generation: one token is generated then, and not shown.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from ragaccel.answer import TOKEN_PATTERN
from ragaccel.errors import MissingExtraError, ModelNotFoundError
from ragaccel.passage import is_heading, sentence_spans
from ragaccel.retrieval.compression import nearest_sentences

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.answer import Answer
    from ragaccel.passage import NearestSentence, Passage
    from ragaccel.prompt import Message
    from ragaccel.retrieval.embedder import Embedder

REFUSAL = "The passages do not tell."
NOT_TOLD, NOT_NEAR = "not told", "not near"
FOREIGN_SCRIPT, NO_QUOTE = "foreign script", "no quote"

FLOOR = 0.40
"""Least cosine of a question and the sentence nearest to it, with the default embedder.

Fitted on development questions by ``python -m eval floor``.
"""

_NUM_NEAREST = 3
_CITATION = re.compile(r"\s*\[\d{1,3}\]\s*\.?$")
_FOREIGN_SHARE = 0.5  # of the letters


def refuse(
    question: str, history: Sequence[Message], passages: Sequence[Passage], source: object
) -> str:
    """Return the reason why the bundled reader must not answer, or "" if it may.

    Args:
        question: The question.
        history: The chat so far, as messages.
        passages: The passages found for the question.
        source: The retriever; its ``embedder`` is used if it is the default one.
    """
    readable = [passage for passage in passages if not is_foreign(passage.text)]
    if is_foreign(question) or not readable:
        return FOREIGN_SCRIPT
    embedder = _default_embedder(source)
    if embedder is None:
        return ""
    queries = [question, *filter(None, [with_previous_question(question, history)])]
    near = (nearest_sentences(embedder, query, readable) for query in queries)
    best = max((found[0].score for found in near if found), default=0.0)
    return NOT_NEAR if best < FLOOR else ""


def judge(
    answer: Answer,
    question: str,
    history: Sequence[Message],
    source: object,
    *,
    quotes: bool,
    refusal: str = "",
) -> Answer:
    """Return the answer with ``refusal`` set, and the nearest sentences if it is refused.

    Args:
        answer: The model's answer.
        question: The question.
        history: The chat so far, as messages.
        source: The retriever. The nearest sentences are those of its ``nearest(query)`` if it has
            that method, else those of the answer's passages by its ``embedder``.
        quotes: Whether the model is the bundled reader, which must quote.
        refusal: The reason found before generation (see ``refuse``).
    """
    readable = tuple(passage for passage in answer.passages if not is_foreign(passage.text))
    if is_refusal(answer.text):
        refusal = refusal or NOT_TOLD
    elif (
        quotes
        and not refusal
        and not (is_quote(answer.text, readable) and adds_words(answer.text, question))
    ):
        refusal = NO_QUOTE
    if not refusal:
        return answer
    query = with_previous_question(question, history) or question
    nearest = _nearest(answer, query, source, quotes=quotes)
    if quotes and refusal != FOREIGN_SCRIPT:
        nearest = [one for one in nearest if not is_foreign(one.passage.text)]
        nearest = nearest or _nearest(
            replace(answer, passages=readable), query, None, quotes=quotes
        )
    if refusal != NOT_TOLD:
        answer = replace(answer, text=REFUSAL, copied_spans=())
    return replace(answer, refusal=refusal, nearest=tuple(nearest[:_NUM_NEAREST]))


def is_refusal(text: str) -> bool:
    """Return whether a model says that the passages hold no answer."""
    return text.strip().rstrip(".") == REFUSAL.rstrip(".")


def with_previous_question(question: str, history: Sequence[Message]) -> str:
    """Return the previous question and this one ("And who built it?"), or "" without a previous."""
    asked = [message["content"] for message in history if message.get("role") == "user"]
    return f"{asked[-1]} {question}" if asked else ""


def is_quote(text: str, passages: Sequence[Passage]) -> bool:
    """Return whether a text, without its citation, occurs in a passage and is not a heading."""
    said = _normalized(_CITATION.sub("", text))
    return bool(said) and any(
        said in _normalized(passage.text) and not _is_heading_of(said, passage.text)
        for passage in passages
    )


def adds_words(text: str, question: str) -> bool:
    """Return whether a quote has two words, a letter, and a word that the question lacks."""
    words, asked = _words(_CITATION.sub("", text)), _words(question)
    return (
        len(words) > 1
        and any(character.isalpha() for word in words for character in word)
        and not words <= asked
    )


def is_foreign(text: str) -> bool:
    """Return whether most letters of a text are not Latin, the script that the reader reads."""
    letters = [character for character in text if character.isalpha()]
    return sum(not _is_latin(letter) for letter in letters) > _FOREIGN_SHARE * len(letters)


@cache
def _is_latin(letter: str) -> bool:
    return letter.isascii() or unicodedata.name(letter, "").startswith(("LATIN", "FULLWIDTH LATIN"))


def _is_heading_of(said: str, text: str) -> bool:
    return any(
        is_heading(text, start, end)
        for start, end in sentence_spans(text)
        if _normalized(text[start:end]) == said
    )


def _words(text: str) -> set[str]:
    return {word.casefold() for word in TOKEN_PATTERN.findall(text) if any(map(str.isalnum, word))}


def _normalized(text: str) -> str:
    return " ".join(text.split())


def _nearest(
    answer: Answer, query: str, source: object, *, quotes: bool
) -> Sequence[NearestSentence]:
    search = getattr(source, "nearest", None)
    if search is not None:
        found: Sequence[NearestSentence] = search(query)
        return found
    embedder = _default_embedder(source) if quotes else getattr(source, "embedder", None)
    return [] if embedder is None else nearest_sentences(embedder, query, answer.passages)


def _default_embedder(source: object) -> Embedder | None:
    """Return the default embedder, the retriever's own if it is the same; None if not installed."""
    own: Embedder | None = getattr(source, "embedder", None)
    try:
        default = _default()
    except (ModelNotFoundError, MissingExtraError):
        return None
    return own if own is not None and own.fingerprint == default.fingerprint else default


@cache
def _default() -> Embedder:
    from ragaccel.retrieval.embedder import load_embedder

    return load_embedder()
