"""Generated questions: what a person might ask to get a sentence as the answer."""

from __future__ import annotations

import random
import re
from functools import lru_cache

_WORD = re.compile(r"[\w][\w'’.-]*[\w]|\w")
_STOP = frozenset(
    """
    a about after all also am an and any are as at be because been before being between
    both but by can could did do does during each for from had has have he her here hers
    him his how i if in into is it its itself just may me might more most must my no nor
    not of off on once only or other our out over own s same shall she should so some such
    t than that the their them then there these they this those through to too under until
    up very was we were what when where which while who whom why will with would you your
    one
    """.split()
)
_FILLER = ("did", "does", "is", "was", "the", "of", "in", "a", "are", "were", "to", "do", "for")
_NUMERIC = ("how many", "how much", "when", "in what year", "what year", "how long", "how old")
_NAMED = ("who", "where", "what", "which", "what is the name of", "in which", "which one")
_COMMON = ("what", "why", "how", "what kind of", "which", "what is", "how can i", "where")


def make_question(rng: random.Random, sentence: str, title: str, unrelated: str = "") -> str | None:
    """Ask for a span of a sentence, with some of its other content words.

    The span itself is left out. Each other content word is kept with a probability that differs
    from question to question, so that full paraphrases and two-word queries occur. Half of the
    questions also have a word or more of an ``unrelated`` sentence, as people use words of their
    own. Return None if the sentence has too few content words to be recognized.
    """
    words = _WORD.findall(sentence)
    content = [i for i, word in enumerate(words) if word.lower() not in _STOP]
    if len(content) < 4:
        return None
    asked = _asked_span(rng, words, content)
    interrogative = _interrogative(rng, words[asked[0]])
    kept = _keep_words(rng, words, content, asked)
    if len(kept) < 2:
        return None
    if title and rng.random() < 0.3:
        kept.insert(rng.choice((0, len(kept))), title)
    others = [word for word in _WORD.findall(unrelated) if word.lower() not in _STOP]
    if others and rng.random() < 0.5:
        for word in rng.sample(others, min(len(others), rng.choice((1, 1, 2, 3)))):
            kept.insert(rng.randrange(len(kept) + 1), word)
    if rng.random() < 0.3:
        rng.shuffle(kept)
    phrased = " ".join([interrogative, *_add_filler(rng, kept)])
    return _punctuate(rng, phrased)


@lru_cache(maxsize=100_000)
def stem(word: str) -> str:
    """Return a rough stem that inflections of a word share; empty for function words."""
    plain = re.sub(r"\W|Ġ", "", word).lower()
    if plain in _STOP or len(plain) < 2:
        return ""
    if plain.isdigit():
        return plain
    plain = plain[:-1] if plain.endswith("s") and len(plain) > 3 else plain
    return plain[:5]


def _asked_span(rng: random.Random, words: list[str], content: list[int]) -> range:
    """Draw the range of words to ask for: preferably a number or a name, else any short run."""
    striking = [i for i in content if words[i][0].isdigit() or (i > 0 and words[i][0].isupper())]
    start = rng.choice(striking if striking and rng.random() < 0.7 else content)
    end = start + 1
    while (
        end < len(words)
        and end - start < 3
        and words[end][0].isupper() == words[start][0].isupper()
    ):
        if rng.random() < 0.4:
            break
        end += 1
    return range(start, end)


def _interrogative(rng: random.Random, word: str) -> str:
    if word[0].isdigit():
        return rng.choice(_NUMERIC)
    return rng.choice(_NAMED if word[0].isupper() else _COMMON)


def _keep_words(
    rng: random.Random, words: list[str], content: list[int], asked: range
) -> list[str]:
    keep = rng.choice((0.35, 0.5, 0.65, 0.8, 1.0))
    keep_function_words = rng.random() < 0.4
    kept = []
    for i, word in enumerate(words):
        if i in asked:
            continue
        if i not in content:
            if keep_function_words and rng.random() < 0.7:
                kept.append(word)
        elif rng.random() < keep:
            kept.append(_inflect(rng, word))
    minimum = min(3, len(content) - len(asked))
    rest = [words[i] for i in content if i not in asked]
    present = sum(word.lower() not in _STOP for word in kept)
    return kept if present >= minimum else rng.sample(rest, min(len(rest), max(2, minimum)))[:8]


def _inflect(rng: random.Random, word: str) -> str:
    """Return another inflection of a word in one case of five, else the word itself."""
    if len(word) < 4 or not word.islower() or rng.random() > 0.2:
        return word
    for ending, other in (("ies", "y"), ("ing", ""), ("ed", ""), ("s", "")):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)] + other
    return word + rng.choice(("s", "ed", "ing"))


def _add_filler(rng: random.Random, kept: list[str]) -> list[str]:
    if rng.random() < 0.5:
        kept.insert(0, rng.choice(_FILLER))
    if len(kept) > 3 and rng.random() < 0.4:
        kept.insert(rng.randrange(1, len(kept)), rng.choice(_FILLER))
    return kept


def _punctuate(rng: random.Random, phrased: str) -> str:
    if rng.random() < 0.25:
        phrased = phrased.lower()
    if rng.random() < 0.8:
        phrased = phrased[0].upper() + phrased[1:]
    return phrased + ("?" if rng.random() < 0.8 else "")
