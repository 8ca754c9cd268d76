"""Data augmentation: names replaced throughout an example, and near-copies of the answer.

A small model copies and compares names that it was trained on, such as "Paris", better than unknown
ones, such as "Wether Holm". Random names teach it to copy and compare token by token.
"""

from __future__ import annotations

import random
import re
from collections.abc import Container, Sequence

from transformers import PreTrainedTokenizerFast

from recipes.reader.questions import stem
from recipes.reader.sources import Piece, Source, Text

NAME, WORD, PIECE, NUMBER, DIGITS = range(5)
_ENTITY_KINDS = (NAME, NUMBER, DIGITS)
_PATTERNS = (r"Ġ[A-Z][a-z]*", r"Ġ[a-z]+", r"[a-z]+", r"Ġ\d+", r"\d+")


class EntityReplacer:
    """A replacer of tokens by others of the same class: name, word, piece of a word, number.

    Function words have no class, nor have capitalized words that also occur in lower case.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
        self.rng = rng
        self._class_of: dict[int, int] = {}
        self._members: list[list[int]] = [[] for _ in _PATTERNS]
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        special = set(tokenizer.all_special_ids)
        for piece, token in sorted(vocabulary.items(), key=lambda item: item[1]):
            kind = None if token in special else _class_of(piece, vocabulary)
            if kind is not None:
                self._class_of[token] = kind
                self._members[kind].append(token)

    def replace(self, ids: Sequence[int], other: dict[int, int]) -> list[int]:
        """Return a text with every token of names and numbers replaced; common words stay.

        Args:
            ids: The text.
            other: Replacements so far, by token; new ones are drawn and added, so that a token has
                one replacement in all texts that share ``other``. No two tokens have the same one.
        """
        replaced, in_name = [], False
        for token in ids:
            kind = self._class_of.get(token)
            in_name = kind == NAME or (in_name and kind == PIECE)
            if (in_name or kind in (NUMBER, DIGITS)) and token not in other:
                taken = set(other.values())
                drawn = (self._other(token) for _ in range(20))
                other[token] = next((new for new in drawn if new not in taken), token)
            replaced.append(other.get(token, token) if in_name or kind != PIECE else token)
        return replaced

    def near_copy(self, sentence: Text, asked: set[str]) -> Text | None:
        """Return a sentence with the question's words replaced, or None if it has none of them."""
        words = [i for i, word in enumerate(sentence.stems) if i and word in asked]
        words = [i for i in words if sentence.ids[i] in self._class_of]
        if not words:
            return None
        ids, stems = list(sentence.ids), list(sentence.stems)
        changed = self.rng.sample(words, min(len(words), self.rng.choice((1, 1, 2, 3))))
        known = [i for i in range(1, len(ids)) if self._class_of.get(ids[i]) in _ENTITY_KINDS]
        changed += self.rng.sample(known, min(len(known), self.rng.choice((0, 1, 2))))
        for i in changed:
            ids[i] = self._other(ids[i])
            stems[i] = ""
        return Text("", ids, stems)

    def names(self, ids: Sequence[int]) -> int:
        """Return the number of tokens that begin a name, without the first token."""
        return sum(self._class_of.get(token) == NAME for token in ids[1:])

    def _other(self, token: int) -> int:
        return self.rng.choice(self._members[self._class_of[token]])


def _class_of(piece: str, vocabulary: Container[str]) -> int | None:
    kind = next((n for n, pattern in enumerate(_PATTERNS) if re.fullmatch(pattern, piece)), None)
    if kind == NAME:
        begins_a_name = len(piece) == 2 and piece[1] not in "AI"
        is_word = not stem(piece) or f"Ġ{piece[1:].lower()}" in vocabulary
        return NAME if begins_a_name or not is_word else None
    return None if kind == WORD and not stem(piece) else kind


def insert_near_copy(
    rng: random.Random, pieces: Sequence[Piece], gold: tuple[Source, int], near_copy: Text
) -> list[Piece]:
    """Return passages in which a near-copy of the answer replaces a sentence of an adjacent one."""
    changed = list(pieces)
    at = next(i for i, p in enumerate(pieces) if p.source is gold[0] and gold[1] in p.span)
    beside = [i for i in (at - 1, at + 1) if 0 <= i < len(pieces)]
    if not beside:
        return changed
    i = rng.choice(beside)
    piece = pieces[i]
    sentences = list(piece.source.sentences[piece.start : piece.end])
    sentences[rng.randrange(len(sentences))] = near_copy
    source = Source(piece.source.title, sentences, piece.source.kind)
    changed[i] = Piece(source, 0, len(sentences))
    return changed
