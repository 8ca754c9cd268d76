"""Quotes of the bundled reader: what it may say, and whether its quote is shown.

The reader gets sentences of the passages found, and may only say one of them, or where none may be
quoted that they do not tell. The sentence ranker (``ragaccel.retrieval.sentence_ranker``) and the
reader's own chance of each decide together (``QuoteConstraint``). A question counts as not answered
if

- the retriever finds no passage (``NOT_FOUND``; any model);
- the model says so (``NOT_TOLD``; any model);
- the question, or every passage, is not in English (``NOT_ENGLISH``);
- no sentence may be quoted (``may_be_quoted``), or what is said is no quote (``NO_QUOTE``);
- the signs that the quote is the answer are too weak (``NOT_SURE``, see ``QuoteSigns``).

``NOT_FOUND`` and ``NOT_ENGLISH`` are known before generation: one token is generated then, and not
shown.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ragaccel.passage import (
    NearestSentence,
    as_passage,
    is_statement,
    sentence_spans,
    without_notes,
)
from ragaccel.retrieval.compression import (
    likeliest_sentences,
    nearest_sentences,
    rank_sentences,
)
from ragaccel.retrieval.language import frequent_words, is_english, is_foreign, words_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from torch import Tensor

    from ragaccel.answer import Answer
    from ragaccel.models.tokenizer import Tokenizer
    from ragaccel.passage import Passage
    from ragaccel.prompt import Message, Prompt


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
            none, the reader's chances alone decide, and no sentence is sure.
        is_sure: Tells by the place of the best sentence whether to say it; nothing but that
            sentence, or else the refusal, may be said then.
    """

    takes_batches = True

    def __init__(
        self,
        prompt_ids: Sequence[int],
        tokenizer: Tokenizer,
        values: Sequence[float] = (),
        is_sure: Callable[[int], bool] | None = None,
    ) -> None:
        special = filter(_MARKER.fullmatch, tokenizer.special_tokens)
        markers = {token for text in special for token in tokenizer.encode(text)}
        self._num_prompt = len(prompt_ids)
        self._quotes = _quotes_of(prompt_ids, markers, sorted(tokenizer.eos_ids)[:1])
        self._values: list[float] = [0.0] * len(self._quotes)
        self._is_sure = is_sure
        self._has_values = len(values) == len(self._quotes) - 1
        if self._has_values:
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
                total = known.to(scores) + scores.new_tensor(self._values)
                if self._is_sure is not None:
                    best, refusal = int(total.argmax()), len(allowed) - 1
                    is_said = best == refusal or (self._has_values and self._is_sure(best))
                    kept = best if is_said else refusal
                    total[:kept] = total[kept + 1 :] = float("-inf")
                constrained[row, allowed] = total
        return constrained

    def place_of(self, answer: Sequence[int]) -> int | None:
        """Return which sentence that has a value an answer quotes; None if it quotes none."""
        places = {marker: place for place, marker in enumerate([*self._quotes][:-1])}
        return places.get(answer[0]) if answer and self._has_values else None

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
NOT_TOLD = "not told"
NOT_ENGLISH, NO_QUOTE, NOT_SURE = "not English", "no quote", "not sure"

CHOICE_WEIGHT = 5.2
"""The weight of a sentence's relevance beside the logarithm of the reader's chance of it, by which
the quote is chosen.

Fitted on development questions by ``python -m eval quotes``.
"""

SIGN_WEIGHTS, BIAS, MIN_CHANCE = (0.74, 0.54), -2.29, 0.14
"""The chance that a quote is the answer is the logistic function of its ``QuoteSigns``, with these
weights, and the bias; the quote is shown if it is ``MIN_CHANCE`` or more.

Fitted on development questions by ``python -m eval quotes``.
"""

PREVIOUS_SHARE = 0.4
"""What a sentence that answers the previous question of a chat loses of its relevance to that.

Of 46 development questions with a pronoun, behind another one of their article, 22 get the right
sentence at 0, 26 at 0.3 and 31 at 0.5; but a sentence may answer both.
"""

_NUM_NEAREST = 6
_STOPS = (".", "!", "?", "…")
_CITATION = re.compile(r"\s*\[\d{1,3}\]\s*\.?$")


class QuoteSigns(NamedTuple):
    """The signs that a quoted sentence answers the question; more is better.

    Attributes:
        relevance: What the sentence ranker gives it, between -10 and 10.
        lead: How far that is ahead of the next sentence that may be quoted, likewise; little if
            there is no other. One in another language counts, too, if it has more relevance.
    """

    relevance: float
    lead: float

    @classmethod
    def of(cls, question: str, sentences: Sequence[NearestSentence], chosen: int) -> QuoteSigns:
        """Return the signs of one of the sentences.

        Args:
            question: The question.
            sentences: All that the reader chose from; ``score`` is the relevance.
            chosen: The index of the quoted one.
        """
        quote = sentences[chosen]
        others = [
            one.score
            for one, may_be in zip(sentences, may_be_quoted(question, sentences), strict=True)
            if one.text != quote.text
            and (may_be or (one.score > quote.score and _is_foreign_answer(question, one)))
        ]
        lead = quote.score - max(others) if others else _LONE_LEAD
        return cls(*(min(max(sign, -_MAX_SIGN), _MAX_SIGN) for sign in (quote.score, lead)))

    @property
    def chance(self) -> float:
        """The chance that the quote answers the question."""
        weighed = sum(weight * sign for weight, sign in zip(SIGN_WEIGHTS, self, strict=True))
        return 1 / (1 + math.exp(-weighed - BIAS))


_MAX_SIGN = 10.0
_LONE_LEAD = 1.0  # that of a low quarter of the questions without an answer


def refuse(
    question: str,
    history: Sequence[Message],
    passages: Sequence[Passage],
    source: object = None,
) -> tuple[str, list[NearestSentence]]:
    """Return why the bundled reader must not answer, or "", and the sentences with relevances.

    The sentences are all of the passages, in order; [] without the ranker's model.

    Args:
        question: The question.
        history: The chat so far, as messages.
        passages: The passages found for the question.
        source: The retriever, see ``ruled_out``.
    """
    if not (is_english(question) and any(is_english(passage.text) for passage in passages)):
        return NOT_ENGLISH, []
    return "", ruled_out(question, _ranked(question, history, passages), source)


def ruled_out(
    question: str, sentences: Sequence[NearestSentence], source: object = None
) -> list[NearestSentence]:
    """Return the sentences, with relevance minus infinity those of documents about others.

    A document must have the numbers and codes of the question, such as "2022" or "D80", in its path
    or a title, or in a sentence given; or anywhere in its text, if the retriever can tell.

    Args:
        question: The question.
        sentences: Sentences with their relevances.
        source: The retriever. Its ``document_passages(path)``, if it has that method, returns all
            passages of a document, in forms that ``as_passage`` takes.
    """
    asked = _codes_of(question)
    if not asked:
        return [*sentences]
    missing: dict[str, set[str]] = {}
    for passage in {id(one.passage): one.passage for one in sentences}.values():
        lacks = missing.setdefault(passage.path, asked - _told_codes(passage.path))
        lacks -= _told_codes(f"{passage.title} {passage.text}")
    for path, lacks in missing.items():
        for text in _texts_of(source, path) if lacks else ():
            lacks -= _told_codes(text)
            if not lacks:
                break
    return [
        replace(one, score=-math.inf) if missing[one.passage.path] else one for one in sentences
    ]


def _texts_of(source: object, path: str) -> Iterator[str]:
    """Yield the titles and texts of a document's passages, if a retriever can return them."""
    find = getattr(source, "document_passages", None)
    if path and find is not None:
        for item in find(path) or ():
            passage = as_passage(item, path)
            yield f"{passage.title} {passage.text}"


def judging_constraint(
    prompt: Prompt, tokenizer: Tokenizer, history: Sequence[Message] = ()
) -> QuoteConstraint:
    """Return a constraint that chooses as ``RAG`` does, and says the refusal where that refuses.

    Numbers and codes are looked for in the passages alone (``ruled_out``). If the ranker's model is
    not on this machine, the reader alone decides.

    Args:
        prompt: A prompt of ``build_prompt`` for the bundled reader.
        tokenizer: The reader's.
        history: The chat before the question.
    """
    refusal, sentences = refuse(prompt.question, history, prompt.passages)
    values = values_of(prompt.question, sentences)

    def is_sure(best: int) -> bool:
        return not refusal and QuoteSigns.of(prompt.question, sentences, best).chance >= MIN_CHANCE

    is_judged = bool(refusal or sentences)
    return QuoteConstraint(prompt.token_ids, tokenizer, values, is_sure if is_judged else None)


def _ranked(
    question: str, history: Sequence[Message], passages: Sequence[Passage]
) -> list[NearestSentence]:
    """Return all sentences of passages, in order, with their relevances to a question.

    Where the question refers to the previous one, it is that to the question, or if this is more
    that to both. A share of that to the previous one is taken from it, whose answer would seem to
    answer both, but not if the question has no word that is new: "Why?" asks for more of the same.
    """

    def ranked(query: str) -> list[NearestSentence]:
        return [
            NearestSentence(passage, *one)
            for passage, scored in zip(passages, rank_sentences(query, passages), strict=False)
            for one in scored
        ]

    alone = ranked(question)
    if not refers(question, history):
        return alone
    scores = [one.score for one in ranked(with_previous_question(question, history))]
    asked = _asked(history)
    if not _own_words(question) <= words_of(asked):
        shares = [PREVIOUS_SHARE * max(0.0, one.score) for one in ranked(asked)]
        scores = [score - share for score, share in zip(scores, shares, strict=True)]
    return [
        replace(one, score=max(one.score, score)) for one, score in zip(alone, scores, strict=True)
    ]


def values_of(question: str, sentences: Sequence[NearestSentence]) -> list[float]:
    """Return what each sentence has for being quoted, beside the reader's chance of it.

    It is minus infinity for one that may not be (``may_be_quoted``).

    Args:
        question: The question.
        sentences: Those of the passages with their relevances, as ``refuse`` returns them.
    """
    return [
        CHOICE_WEIGHT * one.score if may_be else -math.inf
        for one, may_be in zip(sentences, may_be_quoted(question, sentences), strict=True)
    ]


def may_be_quoted(question: str, sentences: Sequence[NearestSentence]) -> list[bool]:
    """Return of each sentence whether it is an English statement that adds a word.

    One that is ``ruled_out`` may not be quoted, either.
    """
    return [
        one.score > -math.inf and _is_english(one.passage.text) and _may_answer(question, one)
        for one in sentences
    ]


# Numbers, codes and what lies between their hyphens: "1,200", "D80", "2000-01", "5kg".
_CODE = re.compile(r"(?<!\w)[^\W\d]*\d\w*(?:[.,:'’]\d\w*)*")
_MARKS = re.compile(r"[.,:'’]")
_UNIT = re.compile(r"^v(?=\d)|(?<=\d)[^\W\d_]{1,2}$")  # "v4.0", "5kg", "19th", "1980s"
_SPELLED = {*range(13), *range(20, 101, 10)}  # numbers that are often words
_LETTERED = re.compile(r"[^\W\d_]+(\d+)")
_PARTED = (  # "P-17", "500 mAh"
    re.compile(r"(?<!\w)[^\W\d_]{1,8}[-‑– ]\d\w*"),
    re.compile(r"(?<![\w.,])\d+[- ][^\W\d_]{1,8}(?!\w)"),
)
_YEAR_DIGITS = 4
_PARTING = re.compile("[-‑– ]")


def _codes_of(text: str) -> set[str]:
    """Return numbers that are seldom spelled, and codes with digits, without marks and units."""
    found = [_UNIT.sub("", code) for code in _CODE.findall(text.casefold())]
    return {_MARKS.sub("", one) for one in found if not (one.isdecimal() and int(one) in _SPELLED)}


def _told_codes(text: str) -> set[str]:
    """Return all codes and numbers that a text tells, also in other forms.

    Of "5.2.1" also "5.2", of "ISO 9001:2015" also "2015" and "ISO9001", of "P17" also "17", and of
    "P-17" and "500 mAh" also "P17" and "500mAh".
    """
    text = text.casefold()
    told = {_PARTING.sub("", one) for pattern in _PARTED for one in pattern.findall(text)}
    for code in _CODE.findall(text):
        code = _UNIT.sub("", code)
        told.add(_MARKS.sub("", code))
        if lettered := _LETTERED.fullmatch(code):
            told.add(lettered[1])
        parts = re.split("[.:]", code, maxsplit=4)
        told |= {part for part in parts if len(part) == _YEAR_DIGITS}
        if len(parts) > 2:
            told |= {"".join(parts[:count]) for count in range(1, len(parts))}
    return told


def _is_foreign_answer(question: str, sentence: NearestSentence) -> bool:
    return not _is_english(sentence.passage.text) and _may_answer(question, sentence)


def _may_answer(question: str, sentence: NearestSentence) -> bool:
    """Return whether a sentence in any language is a statement, and adds a word.

    A line without a full stop must add one to the title of its passage, too: in text from a PDF
    nothing else tells a heading.
    """
    passage, text = sentence.passage, sentence.text
    ends = without_notes(text.rstrip()).endswith(_STOPS)
    known = question if ends else f"{question} {passage.title}"
    return is_statement(passage.text, sentence.start, sentence.end) and adds_words(text, known)


_is_english = lru_cache(64)(is_english)  # a passage has many sentences


_PRONOUNS = frozenset("he her him his it its she their them these they this those".split())
_VERBS = frozenset("is are was were do does did has have had can will would should".split())
_OPENING = re.compile(
    r"\W*(?:(?:so|well|ok|okay|thanks)\b\W*)?(?:(?:and|but|or|also|then)\b\W*)?"
    r"(?:(?:what|how) about\b|what else\b)?",
    re.IGNORECASE,
)
_CONTRACTED = re.compile(r"(?:(?<!ca)n['’]t|['’](?:t|s|re|ve|ll|d|m))\b")
_COURTESIES = frozenset("thank thanks hi hello ok okay cheers please".split())
_MAX_OWN_WORDS = 3  # of a question whose pronoun refers to the question before, not to its own noun
_MAX_SHORT_WORDS = 2  # all words of a question that is not whole


def refers(question: str, history: Sequence[Message]) -> bool:
    """Return whether a question is judged together with the previous one of the chat.

    To a whole question that one's answer would seem to be an answer, too.
    """
    return bool(_asked(history)) and _may_refer(question)


def _may_refer(question: str) -> bool:
    """Return whether a question may be understood only with the one before.

    So may one that has

    - no words of its own: "Why?";
    - few, and a pronoun, or an opening such as "And" without a verb: "What about the old lamp?";
    - one, and an opening, or next to nothing else: "How heavy?", but not "Thanks!".
    """
    words, own = set(re.findall(r"\w+", question.casefold())), _own_words(question)
    if words & _COURTESIES and "?" not in question:
        return False
    is_opened = any(map(str.isalpha, _opening(question)))
    if words & _PRONOUNS or (is_opened and not words & _VERBS):
        return len(own) <= _MAX_OWN_WORDS
    asks = "?" in question or bool(words & frequent_words("English"))
    is_part = is_opened or (len(words) <= _MAX_SHORT_WORDS and asks)
    return not own or (len(own) == 1 and is_part)


def _own_words(question: str) -> set[str]:
    """Return the words of a question that tell what it is about."""
    rest = _CONTRACTED.sub(" ", question.removeprefix(_opening(question)).casefold())
    return set(re.findall(r"\w+", rest)) - frequent_words("English") - _PRONOUNS


def _opening(question: str) -> str:
    found = _OPENING.match(question)
    return found.group() if found else ""


def check_quote(
    answer: Answer,
    question: str,
    sentences: Sequence[NearestSentence],
    constraint: QuoteConstraint,
) -> Answer:
    """Return the answer with the chance of its quote, or without it and the reason for that.

    Args:
        answer: The reader's answer.
        question: The question.
        sentences: Those of the passages with their relevances, as ``refuse`` returns them.
        constraint: That of the answer's request.
    """
    if is_refusal(answer.text):
        is_banned = sentences and not any(may_be_quoted(question, sentences))
        return with_refusal(answer, NO_QUOTE if is_banned else NOT_TOLD)
    readable = [passage for passage in answer.passages if is_english(passage.text)]
    if not (is_quote(answer.text, readable) and adds_words(answer.text, question)):
        return with_refusal(answer, NO_QUOTE)
    if not sentences:  # there is no ranker to judge with
        return answer
    at = constraint.place_of(answer.token_ids)
    if at is None:  # a prompt of the caller's
        said = _normalized(_CITATION.sub("", answer.text))
        places = [n for n, one in enumerate(sentences) if said in _normalized(one.text)]
        at = max(places, key=lambda place: sentences[place].score, default=None)
    if at is None:
        return with_refusal(answer, NOT_SURE)
    signs = QuoteSigns.of(question, sentences, at)
    if signs.chance < MIN_CHANCE:
        return with_refusal(answer, NOT_SURE)
    return replace(answer, chance=signs.chance)


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
    whole = with_previous_question(question, history) if refers(question, history) else ""
    query = whole or question
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
    asked = _asked(history)
    return f"{asked} {question}" if asked else ""


def _asked(history: Sequence[Message]) -> str:
    asked = [message["content"] for message in history if message.get("role") == "user"]
    return asked[-1].strip() if asked else ""


def is_quote(text: str, passages: Sequence[Passage]) -> bool:
    """Return whether a text, without its citation, occurs in a passage and is a statement."""
    said = _normalized(_CITATION.sub("", text))
    return bool(said) and any(
        said in _normalized(passage.text) and not _is_no_statement(said, passage.text)
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


def _is_no_statement(said: str, text: str) -> bool:
    return any(
        not is_statement(text, start, end)
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
    embedder = getattr(source, "embedder", None)
    if quotes:
        ranked = likeliest_sentences(query, answer.passages, embedder)
        if ranked:
            return ranked
    return [] if embedder is None else nearest_sentences(embedder, query, answer.passages)
