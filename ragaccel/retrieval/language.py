"""Tell a text's language from its script and its most frequent words; compare texts by words."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from functools import cache

from ragaccel.answer import TOKEN_PATTERN

_FOREIGN_SHARE = 0.5  # of the letters
_FUNCTION_WORDS = {
    "English": "the of and to is are was were what who whom whose when where which how why do does"
    " did has have had can will would should with for from that this these it its on in at by be"
    " or not an a i my me we our us you your he she they their there if many much any as",
    "German": "der die das und ist nicht ein eine einen einem einer mit von zu zum zur den dem des"
    " im in am auf für wie wer wann wo was war welche welcher welches sind wird werden hat haben"
    " ich wir sie er es bei nach aus kann muss darf soll viel viele um ab bis mein meine wieviel"
    " an tun wenn nur auch dass ohne wurde",
    "French": "le la les l' d' c' n' s' j' m' qu' du de des et est un une dans pour que qui quel"
    " quelle quels quelles quand où comment combien pourquoi sur au aux par avec ce cette ces il"
    " elle nous vous je on son sa ses mon ma pas sont était a à ne se faut peut",
    "Spanish": "el la los las de del y es un una en que qué quién cuándo cómo dónde cuánto cuántos"
    " cuál por para con su se al lo no está son fue a",
    "Italian": "il lo la i gli le di del della dei delle e è un una in che chi quando come dove"
    " quanto quanti quale per con su si al non sono ha",
    "Portuguese": "o a os as de do da dos das e é um uma em no na que quem quando como onde quanto"
    " quantos qual por para com se ao não são foi",
    "Dutch": "de het een en is van in op te dat die voor met niet aan er wie wat waar wanneer hoe"
    " welke zijn was naar om ook als bij",
    "Norwegian": "og i er på som en et av for til med det den de har ikke om hva hvem når hvor"
    " hvordan hvilken hvilke var ble fra",
}
_LANGUAGES: dict[str, list[str]] = {}
for _language, _words in _FUNCTION_WORDS.items():
    for _word in _words.split():
        _LANGUAGES.setdefault(_word, []).append(_language)
_LANGUAGES["¿"] = ["Spanish"]

# Frequent words of another language that are English words, too: "part no. 7", "price per night".
# They count for both, but not for English before a German noun or date, or as the first word of a
# question.
_ALSO_ENGLISH = frozenset(
    "no per non con come dove die den am war hat son mon van met hoe com dos ha".split()
)
_IS_FOREIGN = re.compile(
    r"(?:[Dd]ie|[Dd]en|(?<!\d)(?<!\d )[Aa]m)\s+(?:[A-ZÄÖÜ]\w|\d\d?\. )"
    r"|^(?:[Cc]ome|[Dd]ove|[Hh]oe)\b[^.!]*\?\s*$"
)

# Foreign words of a name or an English phrase: "Las Vegas", "Rio de Janeiro", "en suite".
_NAMES = re.compile(
    r"\b(?:(?:El|La|Las|Los|Le|Les)(?=[ -][A-ZÀ-ÖØ-Þ])|en[ -](?:suite|route)|et al\b"
    r"|([A-ZÀ-ÖØ-Þ]\w*)[ -](?:de|del|della|di|da|do|dos|du|des|van)(?:[ -]l[ae]s?)?[ -]"
    r"(?=[A-ZÀ-ÖØ-Þ]))"
)

# A letter is a word only if it is elided before a small letter or stands alone: "2 l", "Vitamin C",
# "O'Neill" and "Côte d'Ivoire" have no such word.
_WORDS = re.compile(
    r"\b(?:[Qq]u|[cdjlmnsCDJLMNS])['’](?=[a-zß-öø-ÿœ])|[^\W\d_]{2,}|(?<![^\s¿¡\"(«“])[aeioyàèéAIÀÈÉ](?!\S)|¿"
)


def is_english(text: str) -> bool:
    """Return whether a text may be English; a text without frequent words in Latin script may.

    It is not if most letters are of another script, or if another language (German, French,
    Spanish, Italian, Portuguese, Dutch or Norwegian) has more of its frequent words in it.
    """
    return language_of(text) == "English"


def language_of(text: str) -> str:
    """Return the language whose frequent words a text has most of; "" for another script.

    Those that are English words, too, also count for English; those within a name count for none.
    """
    if is_foreign(text):
        return ""
    counts = Counter({"English": 0})
    text = _NAMES.sub(r"\1 ", text)
    for found in _WORDS.finditer(text):
        word = found.group().casefold().replace("’", "'")
        counts.update(_LANGUAGES.get(word, []))
        if word in _ALSO_ENGLISH and not _IS_FOREIGN.match(text, found.start()):
            counts["English"] += 1
    return counts.most_common(1)[0][0]  # the first of equals, which is English


def frequent_words(language: str) -> frozenset[str]:
    """Return the frequent words of a language, in lower case; none for an unknown one."""
    return frozenset(_FUNCTION_WORDS.get(language, "").replace("'", "").split())


class WordMatch:
    """Tells how many words of a question a text has, whatever their endings.

    A word of the text may also only contain that of the question: German has compounds.
    """

    def __init__(self, question: str) -> None:
        frequent = frequent_words(language_of(question))
        words = re.findall(r"\w{3,}", question.casefold())
        kept = [word for word in words if word not in frequent] or words
        self._stems = {_without_accents(_shortened(word)) for word in kept}

    def share(self, text: str, title: str = "") -> float:
        """Return the share of the question's words that a text has.

        Frequent words do not count, nor do words that the text's title has: they tell nothing
        about one of its sentences.
        """
        folded, head = (_without_accents(part.casefold()) for part in (text, title))
        stems = [stem for stem in self._stems if stem not in head]
        return sum(stem in folded for stem in stems) / max(1, len(stems))


def _shortened(word: str) -> str:
    """Return a word without what may be its ending: two letters, but four letters are left."""
    return word[: max(4, len(word) - 2)]


def _without_accents(text: str) -> str:
    letters = unicodedata.normalize("NFKD", text)
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


def is_foreign(text: str) -> bool:
    """Return whether most letters of a text are not Latin."""
    letters = [character for character in text if character.isalpha()]
    return sum(not _is_latin(letter) for letter in letters) > _FOREIGN_SHARE * len(letters)


@cache
def _is_latin(letter: str) -> bool:
    return letter.isascii() or unicodedata.name(letter, "").startswith(("LATIN", "FULLWIDTH LATIN"))


def words_of(text: str) -> set[str]:
    """Return the words of a text in lower case."""
    return {word.casefold() for word in TOKEN_PATTERN.findall(text) if any(map(str.isalnum, word))}
