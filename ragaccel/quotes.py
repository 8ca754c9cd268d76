"""Quotes of the bundled reader: what it may say, and whether its quote is shown.

The reader gets the sentences nearest to the question, and may only say one of them, or where none
may be quoted that they do not tell. Its own chance of each, their similarity to the question, the
words that they share with it and whether they hold what it asks for decide together
(``QuoteConstraint``). A question counts as not answered if

- the retriever finds no passage (``NOT_FOUND``; any model);
- the model says so (``NOT_TOLD``; any model);
- the question, or every passage, is not in English (``NOT_ENGLISH``);
- the most similar sentence found is less similar to the question than ``FLOOR`` (``NOT_NEAR``);
- no sentence may be quoted (``may_be_quoted``), or what is said is no quote (``NO_QUOTE``);
- the signs that the quote is the answer are too weak (``NOT_SURE``, see ``QuoteSigns``).

``NOT_FOUND``, ``NOT_ENGLISH`` and ``NOT_NEAR`` are known before generation: one token is generated
then, and not shown.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from ragaccel.errors import MissingExtraError, ModelNotFoundError
from ragaccel.passage import NearestSentence, is_heading, sentence_spans
from ragaccel.retrieval.compression import nearest_sentences, score_sentences
from ragaccel.retrieval.language import (
    content_words,
    is_english,
    is_foreign,
    share_of_words,
    words_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from torch import Tensor

    from ragaccel.answer import Answer
    from ragaccel.models.tokenizer import Tokenizer
    from ragaccel.passage import Passage
    from ragaccel.prompt import Message, Prompt
    from ragaccel.retrieval.embedder import Embedder


class QuoteConstraint:
    """A logits processor that lets the bundled reader say one sentence of its prompt, whole.

    The prompt is that of the reader's chat template: each sentence, and the refusal, stands between
    two copies of its marker token. The first token of the answer is a marker, and decides it: the
    one with the highest sum of the logarithm of its chance and the sentence's value.

    What it returns depends on ids and scores alone, so drafting stays as it is. Shapes: B rows, L
    tokens of prompt and answer so far, V vocabulary.

    Args:
        prompt_ids: The prompt's token ids.
        tokenizer: The reader's.
        values: Those of the prompt's sentences, in order (see ``values_of``). The refusal is only
            said then if no sentence may be. If they are not as many as the sentences, such as
            none, the reader's chances alone decide.
        is_sure: Tells by the chances and the place of the best sentence whether to say it; nothing
            but that sentence, or else the refusal, may be said then.

    Attributes:
        chances: The reader's probability of each sentence, in order, and last of the refusal; ()
            until the first token is decided.
    """

    takes_batches = True

    def __init__(
        self,
        prompt_ids: Sequence[int],
        tokenizer: Tokenizer,
        values: Sequence[float] = (),
        is_sure: Callable[[Sequence[float], int], bool] | None = None,
    ) -> None:
        special = filter(_MARKER.fullmatch, tokenizer.special_tokens)
        markers = {token for text in special for token in tokenizer.encode(text)}
        self._num_prompt = len(prompt_ids)
        self._quotes = _quotes_of(prompt_ids, markers, sorted(tokenizer.eos_ids)[:1])
        self.chances: tuple[float, ...] = ()
        self._values: list[float] = [0.0] * len(self._quotes)
        self._is_sure = is_sure
        if len(values) == len(self._quotes) - 1:
            self._values = [*values, _BANNED / 2]

    def __call__(self, token_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [B, V] in which only the tokens that a quote has next are possible."""
        answers = token_ids[:, self._num_prompt :].tolist()
        constrained = scores.new_full(scores.shape, float("-inf"))
        for row, answer in enumerate(answers):
            allowed = self._next(answer)
            if allowed is None:
                constrained[row] = scores[row]
            elif answer:  # whatever else was banned, such as an early end
                constrained[row, allowed] = 0.0
            else:
                known = scores[row, allowed].float().nan_to_num(neginf=_BANNED).log_softmax(0)
                self.chances = tuple(known.exp().tolist())
                total = known.to(scores) + scores.new_tensor(self._values)
                if self._is_sure is not None:
                    best, refusal = int(total.argmax()), len(allowed) - 1
                    is_said = best == refusal or self._is_sure(self.chances, best)
                    kept = best if is_said else refusal
                    total[:kept] = total[kept + 1 :] = float("-inf")
                constrained[row, allowed] = total
        return constrained

    def place_of(self, answer: Sequence[int]) -> int | None:
        """Return which sentence of the prompt an answer quotes; None if it quotes none."""
        places = {marker: place for place, marker in enumerate(self._quotes)}
        return places.get(answer[0]) if answer else None

    def _next(self, answer: list[int]) -> list[int] | None:
        """Return what may follow; None, all tokens, follow a draft that is no quote."""
        if not (answer or not self._quotes):
            return list(self._quotes)
        quote = self._quotes.get(answer[0], []) if answer else []
        if len(answer) < len(quote) and quote[: len(answer)] == answer:
            return [quote[len(answer)]]
        return None


def _quotes_of(
    prompt_ids: Sequence[int], markers: Container[int], end: Sequence[int]
) -> dict[int, list[int]]:
    """Return each sentence of a prompt with its markers and an end token, by its marker."""
    quotes: dict[int, list[int]] = {}
    opened = -1
    for at, token in enumerate(prompt_ids):
        if token not in markers:
            continue
        if opened >= 0 and prompt_ids[opened] == token:
            quotes.setdefault(token, [*prompt_ids[opened : at + 1], *end])
            opened = -1
        else:
            opened = at
    return quotes


# The score of a sentence that another processor bans. The refusal has half of it beside sentences:
# it is less likely than any of them, and likelier than a banned one.
_BANNED = -1e4
_MARKER = re.compile(r"<(?:s\d+|none)>")

REFUSAL = "The passages do not tell."
NOT_FOUND = "not found"
NOT_TOLD, NOT_NEAR = "not told", "not near"
NOT_ENGLISH, NO_QUOTE, NOT_SURE = "not English", "no quote", "not sure"

FLOOR = 0.30
"""Lowest cosine of an answered question and its nearest sentence, with the default embedder.

It saves the work for most questions on other things: below it are 1.7 % of the development
questions that are quoted rightly without it, and 17 % of those on other articles (``eval quotes``);
of questions on other articles than those of a small folder, more than half.
"""
CHOICE_WEIGHTS = (10.4, 5.6, 4.5)
"""The weights of a sentence's ``features_of``, beside the logarithm of its chance, by which the
quote is chosen.

Fitted on development questions by ``python -m eval quotes``.
"""

SIGN_WEIGHTS, BIAS, MIN_CHANCE = (4.55, 1.42, 0.36, 0.37), -6.13, 0.12
"""The chance that a quote is the answer is the logistic function of its ``QuoteSigns``, with these
weights, and the bias; the quote is shown if it is ``MIN_CHANCE`` or more.

Fitted on development questions by ``python -m eval quotes``.
"""

_NUM_NEAREST = 6
_STOPS = (".", "!", "?", "…")
_CITATION = re.compile(r"\s*\[\d{1,3}\]\s*\.?$")
_NUMBER = (
    r"\d|\b(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty|thirty"
    r"|forty|fifty|sixty|seventy|eighty|ninety|hundreds?|thousands?|millions?|billions?|dozens?"
    r"|once|twice|half|third|quarters?|none|an? (?:hour|day|week|month|year|mile|metre|meter))\b"
)
_OFTEN = rf"{_NUMBER}|\b(?:daily|weekly|monthly|yearly|annually|every|each|always|never)\b"
_TIME = (
    rf"{_OFTEN}|\b(?:(?:mon|tues|wednes|thurs|fri|satur|sun)days?|january|february|(?-i:March|May)"
    r"|april|june|july|august|september|october|november|december|christmas|easter|noon|midnight"
    r"|dawn|dusk|mornings?|evenings?|nights?|spring|summer|autumn|winter|today|tomorrow|yesterday"
    r"|(?:last|next) (?:week|month|year)|ago|decades?|centur(?:y|ies)|after|before|until|when|while"
    r"|during|as soon as)\b"
)
_START = r"^\W*(?:(?:and|but|so|by|since|until|from|to|with|for|in \d+) )*"
_NEXT = (  # what follows a noun that is asked for, and no part of its name
    r"(?=\W*$| (?:did|do|does|was|were|is|are|has|have|had|will|would|can|could|may|must|should"
    r"|of|in|on|for|the)\b)"
)
_EXPECTED = (
    (
        rf"{_START}when\b|\bwhen\W*$|\b(?:what|which) (?:year|day|date|time|month|decade|century)s?"
        rf"\b{_NEXT}",
        _TIME,
    ),
    (r"\bhow (?:long|often|old|soon)\b", rf"{_OFTEN}|\buntil\b"),
    (
        r"\bhow (?:many|much|far|high|tall|big|large|small|heavy|deep|wide|thick|fast|hot|cold"
        r"|loud)\b|\bwhat (?:percent\w*|number|temperature|fraction|age)\b" + _NEXT
        + r"|^what (?:is|was|are|were) the (?:costs?|price) (?:of|for)\b"
        + r"|\bwhat (?:do|does|did) .* cost\W*$",
        rf"{_NUMBER}|\bfree\b",
    ),
)  # fmt: skip
"""(question, answer): what the answer to a question of a kind must contain."""
_WHO = rf"{_START}(?:who|whom|whose)\b"


class QuoteSigns(NamedTuple):
    """The signs that a quoted sentence answers the question; more is better.

    Attributes:
        similarity: That of the sentence and the question.
        share: The share of the question's content words in the sentence and its passage's title.
        lead: How far it is ahead of the next sentence by all that decides the choice; at most
            ``_MAX_LEAD``, and little if there is no other.
        odds: The logarithm of the reader's odds of it against the refusal, between -10 and 10.
    """

    similarity: float
    share: float
    lead: float
    odds: float

    @classmethod
    def of(
        cls,
        questions: Sequence[str],
        sentences: Sequence[NearestSentence],
        chances: Sequence[float],
        chosen: int,
    ) -> QuoteSigns:
        """Return the signs of one of the sentences.

        Args:
            questions: The question, and in a chat that after the previous one.
            sentences: All that the reader chose from; ``score`` is the similarity.
            chances: The reader's, of each and last of the refusal.
            chosen: The index of the quoted one.
        """
        logs = [math.log(max(chance, _MIN_PROBABILITY)) for chance in chances]
        quote = sentences[chosen]
        features = features_of(questions, quote)
        others = [
            log + value
            for log, value, one in zip(
                logs[:-1], values_of(questions, sentences), sentences, strict=True
            )
            if one.text != quote.text and value > -math.inf
        ]
        value = logs[chosen] + _weighed(CHOICE_WEIGHTS, features)
        lead = value - max(others) if others else _LONE_LEAD
        return cls(
            *features[:2],
            lead=min(max(lead, -_MAX_LEAD), _MAX_LEAD),
            odds=min(max(logs[chosen] - logs[-1], -_MAX_LEAD), _MAX_LEAD),
        )

    @property
    def chance(self) -> float:
        """The chance that the quote answers the question."""
        return 1 / (1 + math.exp(-_weighed(SIGN_WEIGHTS, self) - BIAS))


_MIN_PROBABILITY, _MAX_LEAD = 1e-6, 10.0
_LONE_LEAD = 1.0  # that of a low quarter of the questions without an answer


def refuse(
    question: str, history: Sequence[Message], passages: Sequence[Passage], source: object
) -> tuple[str, list[NearestSentence]]:
    """Return why the bundled reader must not answer, or "", and the sentences with similarities.

    The sentences are all of the passages, in order; [] without an embedder.

    Args:
        question: The question.
        history: The chat so far, as messages.
        passages: The passages found for the question.
        source: The retriever; its ``embedder`` is reused if that is the default one.
    """
    if not (is_english(question) and any(is_english(passage.text) for passage in passages)):
        return NOT_ENGLISH, []
    embedder = _default_embedder(source)
    if embedder is None:
        return "", []
    sentences = _scored(embedder, queries_of(question, history), passages)
    nearest = max((one.score for one in sentences), default=-1.0)
    return (NOT_NEAR if nearest < FLOOR else ""), sentences


def judging_constraint(
    prompt: Prompt, tokenizer: Tokenizer, history: Sequence[Message] = ()
) -> QuoteConstraint:
    """Return a constraint that chooses as ``RAG`` does, and says the refusal where that refuses.

    If the default embedder is not on this machine, the reader alone decides.

    Args:
        prompt: A prompt of ``build_prompt`` for the bundled reader.
        tokenizer: The reader's.
        history: The chat before the question.
    """
    if not (prompt.passages and _is_embedder_here()):
        return QuoteConstraint(prompt.token_ids, tokenizer)
    refusal, sentences = refuse(prompt.question, history, prompt.passages, None)
    asked = queries_of(prompt.question, history)

    def is_sure(chances: Sequence[float], best: int) -> bool:
        if refusal or len(chances) != len(sentences) + 1:
            return False
        return QuoteSigns.of(asked, sentences, chances, best).chance >= MIN_CHANCE

    return QuoteConstraint(prompt.token_ids, tokenizer, values_of(asked, sentences), is_sure)


@cache
def _is_embedder_here() -> bool:
    from ragaccel.retrieval.embedder import local_default_folder

    return local_default_folder() is not None


def _scored(
    embedder: Embedder, queries: Sequence[str], passages: Sequence[Passage]
) -> list[NearestSentence]:
    """Return all sentences of passages, in order, with their highest similarity to a query."""
    sentences: list[NearestSentence] = []
    for query in queries:
        scored = score_sentences(embedder, query, passages)
        found = [
            NearestSentence(passage, *one)
            for passage, of_passage in zip(passages, scored, strict=True)
            for one in of_passage
        ]
        known = sentences or found
        sentences = [
            max(pair, key=lambda one: one.score) for pair in zip(known, found, strict=True)
        ]
    return sentences


def values_of(questions: Sequence[str], sentences: Sequence[NearestSentence]) -> list[float]:
    """Return what each sentence has for being quoted, beside the reader's chance of it.

    It is minus infinity for a heading, for a sentence that adds no word to the question, and for
    one of a passage that is not English.

    Args:
        questions: Those of ``queries_of``.
        sentences: Those of the passages with their similarities, as ``refuse`` returns them.
    """
    return [
        _weighed(CHOICE_WEIGHTS, features_of(questions, one))
        if may_be_quoted(questions[0], one)
        else -math.inf
        for one in sentences
    ]


def may_be_quoted(question: str, sentence: NearestSentence) -> bool:
    """Return whether a sentence is English, no heading, and adds a word to the question.

    A line without a full stop must add one to the title of its passage, too: in text from a PDF
    nothing else tells a heading.
    """
    passage, text = sentence.passage, sentence.text
    known = question if text.rstrip().endswith(_STOPS) else f"{question} {passage.title}"
    heading = is_heading(passage.text, sentence.start, sentence.end)
    return not heading and adds_words(text, known) and is_english(passage.text)


def features_of(questions: Sequence[str], sentence: NearestSentence) -> tuple[float, float, float]:
    """Return the similarity and the share of words of a sentence, and 1 if it holds what is asked.

    That is what the kind of question asks for, such as a number after "how many" or a name after
    "who". For the first two see ``QuoteSigns``.
    """
    text = f"{sentence.passage.title}\n{sentence.text}"
    return (
        sentence.score,
        max(share_of_words(question, text) for question in questions),
        float(holds_what_is_asked(questions[0], sentence)),
    )


def _weighed(weights: Sequence[float], signs: Sequence[float]) -> float:
    return sum(weight * sign for weight, sign in zip(weights, signs, strict=True))


def queries_of(question: str, history: Sequence[Message]) -> list[str]:
    """Return the question, and in a chat that after the previous one."""
    return [question, *filter(None, [with_previous_question(question, history)])]


def check_quote(
    answer: Answer,
    questions: Sequence[str],
    sentences: Sequence[NearestSentence],
    constraint: QuoteConstraint,
) -> Answer:
    """Return the answer with the chance of its quote, or without it and the reason for that.

    Args:
        answer: The reader's answer.
        questions: Those of ``queries_of``.
        sentences: Those of the passages with their similarities, as ``refuse`` returns them.
        constraint: That of the answer's request.
    """
    if is_refusal(answer.text):
        is_banned = sentences and not any(may_be_quoted(questions[0], one) for one in sentences)
        return with_refusal(answer, NO_QUOTE if is_banned else NOT_TOLD)
    readable = [passage for passage in answer.passages if is_english(passage.text)]
    if not (is_quote(answer.text, readable) and adds_words(answer.text, questions[0])):
        return with_refusal(answer, NO_QUOTE)
    if not sentences:  # there is no embedder to judge with
        return answer
    chances: Sequence[float] = constraint.chances
    if chances:
        at = constraint.place_of(answer.token_ids)
    else:  # a prompt of the caller's
        chances = [1.0] * (len(sentences) + 1)
        said = _normalized(_CITATION.sub("", answer.text))
        at = next((n for n, one in enumerate(sentences) if said in _normalized(one.text)), None)
    if at is None or at >= len(sentences) or len(chances) != len(sentences) + 1:
        return with_refusal(answer, NOT_SURE)
    signs = QuoteSigns.of(questions, sentences, chances, at)
    if signs.chance < MIN_CHANCE:
        return with_refusal(answer, NOT_SURE)
    return replace(answer, chance=signs.chance)


def holds_what_is_asked(question: str, best: NearestSentence) -> bool:
    """Return whether a sentence holds a number, a time or a name if the question asks for one."""
    asked, sentence = _normalized(question).casefold(), _normalized(best.text)
    for kind, expected in _EXPECTED:
        if re.search(kind, asked):
            return bool(re.search(expected, sentence, re.IGNORECASE))
    if re.search(_WHO, asked):
        named = words_of(question)
        names = re.findall(r"\b[^\W\d_][\w’'-]+", sentence)
        return any(
            name[0].isupper() and name.casefold() not in named and content_words(name)
            for name in names
        )
    return True


def with_refusal(answer: Answer, refusal: str) -> Answer:
    """Return the answer with the reason why it is not shown, or "" if it is; it says so then."""
    if refusal not in ("", NOT_TOLD):
        answer = replace(answer, text=REFUSAL, copied_spans=())
    return replace(answer, refusal=refusal)


def with_nearest(
    answer: Answer,
    question: str,
    history: Sequence[Message],
    source: object,
    *,
    quotes: bool,
) -> Answer:
    """Return the answer with ``nearest``, the sentences that are nearest to the question.

    Args:
        answer: The model's answer.
        question: The question.
        history: The chat so far, as messages.
        source: The retriever. The nearest sentences are those of its ``nearest(query)`` if it has
            that method, else those of the answer's passages by its ``embedder``.
        quotes: Whether the model is the bundled reader, which must quote.
    """
    query = with_previous_question(question, history) or question
    nearest = _nearest(answer, query, source, quotes=quotes)
    if quotes and not is_foreign(question):
        latin = [one for one in nearest if not is_foreign(one.passage.text)]
        readable = tuple(passage for passage in answer.passages if not is_foreign(passage.text))
        answered = replace(answer, passages=readable)
        nearest = latin or _nearest(answered, query, None, quotes=True) or nearest
    return replace(answer, nearest=tuple(nearest[:_NUM_NEAREST]))


def is_refusal(text: str) -> bool:
    """Return whether a model says that the passages hold no answer."""
    return text.strip().rstrip(".") == REFUSAL.rstrip(".")


def with_previous_question(question: str, history: Sequence[Message]) -> str:
    """Return the previous question and this one as a query, or "" if this is the first one.

    A question such as "And who built it?" finds nothing alone.
    """
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
    """Return whether a quote has at least two words, a letter, and a word not in the question."""
    words, asked = words_of(_CITATION.sub("", text)), words_of(question)
    return (
        len(words) > 1
        and any(character.isalpha() for word in words for character in word)
        and not words <= asked
    )


def _is_heading_of(said: str, text: str) -> bool:
    return any(
        is_heading(text, start, end)
        for start, end in sentence_spans(text)
        if _normalized(text[start:end]) == said
    )


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
    """Return the default embedder, reusing the retriever's if equal; None if not installed."""
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
