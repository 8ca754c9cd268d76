"""Copied spans: which runs of an answer stand word for word in which passage, and where."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.passage import Passage

MIN_TOKENS = 5
MIN_CHARACTERS = 24

# Scripts written without spaces: every character is a token of its own.
SINGLE = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff"
)
SYMBOL = (
    r"!-/:-@\[-\^`{-~\xa1-\xa9\xab-\xb4\xb6-\xb9\xbb-\xbf\xd7\xf7\u060c\u061b\u061f\u0964\u0965"
    r"\u2010-\u2bff\u3001-\u3030\ufe10-\ufe1f\ufe30-\ufe6f\uff01-\uff0f\uff1a-\uff20"
)
_WORD = rf"[^\s{SINGLE}{SYMBOL}]+"
# Contractions, compounds, names of files and numbers are one token: "don't", "a.txt", "1,000".
TOKEN = re.compile(rf"\s+|[{SINGLE}]|{_WORD}(?:(?:['’.\-]|(?<=\d),(?=\d)){_WORD})*|[{SYMBOL}]")
_BETWEEN_PASSAGES, _IN_NO_PASSAGE, _FIRST_CODE = "\0", "\1", 2

_CITATION = re.compile(r"(?<!\w)\[(\d{1,3}(?:\s*(?:[,;]|-|–)\s*\d{1,3})*)\]")
_NUMBER_OR_RANGE = re.compile(r"(\d+)(?:\s*[-–]\s*(\d+))?")
_NEXT_CITATION = re.compile(r"[\s.,;:!?…\"'”’)»]*(\[\d[\d\s,;–-]*\])")
_CITATION_BEGUN = re.compile(r"[\s.,;:!?…\"'”’)»]*(\[(\d[\d\s,;–-]*)?)?")


@dataclass(frozen=True, slots=True)
class CopiedSpan:
    """A run of the answer that a passage holds word for word.

    ``answer.text[start:end] == passage.text[passage_start:passage_end]``, exactly, in characters.
    ``passage_number`` is the passage's number in the prompt, counted from 1.
    """

    start: int
    end: int
    passage_id: str
    passage_number: int
    passage_start: int
    passage_end: int


def copied_spans(text: str, passages: Sequence[Passage]) -> tuple[CopiedSpan, ...]:
    """Find the maximal runs that an answer shares with its passages, in order.

    A run has at least 5 tokens (words and punctuation marks) or 24 characters, begins and ends at
    word boundaries on both sides, and lies within no longer one; two runs may overlap where
    passages do. The result is a function of the texts alone, so it is the same whatever drafted
    the answer. Of several places that hold a run, the passage cited right after it wins, then the
    passage of the run before it, then the best ranked.
    """
    index = PassageIndex([passage.text for passage in passages])
    window = Window(index)
    runs: list[tuple[int, int]] = []
    for found in TOKEN.finditer(text):
        runs += window.push(found.group())
    runs += window.ended()
    spans: list[CopiedSpan] = []
    for first, last in runs:
        start, end = window.starts[first], window.starts[last]
        wanted = next_cited(text[end:]) + ([spans[-1].passage_number] if spans else [])
        number, offset = index.locate(window.codes(first, last), wanted)
        passage_id = passages[number - 1].passage_id
        spans.append(CopiedSpan(start, end, passage_id, number, offset, offset + end - start))
    return tuple(spans)


def cited_numbers(text: str, num_passages: int, spans: Sequence[CopiedSpan] = ()) -> list[int]:
    """The passage numbers that an answer cites as ``[2]``, ``[1, 3]`` or ``[1-3]``, each once.

    Numbers without a passage do not count, nor do brackets inside a copied span, which are the
    passage's own.
    """
    numbers: dict[int, None] = {}
    for found in _CITATION.finditer(text):
        if not any(span.start <= found.start() and found.end() <= span.end for span in spans):
            numbers.update(dict.fromkeys(_numbers_in(found.group(1))))
    return [number for number in numbers if 1 <= number <= num_passages]


def next_cited(text: str) -> list[int]:
    """The passage numbers of the citation that a text begins with, behind punctuation."""
    cited = _NEXT_CITATION.match(text)
    return _numbers_in(cited.group(1)) if cited else []


def may_become_citation(text: str) -> bool:
    """Whether more text could still make this one begin with a citation."""
    return _CITATION_BEGUN.fullmatch(text) is not None


class PassageIndex:
    """The tokens of all passages as characters of one string, so that the search runs in C."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._code_of: dict[str, str] = {}
        self._tokens = [TOKEN.findall(text) for text in texts]
        self._codes = [self._encoded(tokens) for tokens in self._tokens]
        self.joined = _BETWEEN_PASSAGES.join(self._codes)

    def _encoded(self, tokens: Sequence[str]) -> str:
        code_of = self._code_of
        for token in tokens:
            if token not in code_of:
                code_of[token] = chr(len(code_of) + _FIRST_CODE)
        return "".join([code_of[token] for token in tokens])

    def code(self, token: str) -> str:
        """The character that stands for a token of an answer."""
        return self._code_of.get(token, _IN_NO_PASSAGE)

    def holders(self, codes: str) -> list[int]:
        """The numbers of the passages that hold a run."""
        return [n for n, passage in enumerate(self._codes, start=1) if codes in passage]

    def locate(self, codes: str, wanted: Sequence[int]) -> tuple[int, int]:
        """The number of the passage to name for a run, and its first character there."""
        holders = self.holders(codes)
        number = next((n for n in wanted if n in holders), holders[0])
        token = self._codes[number - 1].index(codes)
        return number, sum(map(len, self._tokens[number - 1][:token]))


class Window:
    """The longest run of passage tokens that ends at the newest token, white space aside."""

    def __init__(self, index: PassageIndex) -> None:
        self._index = index
        self._codes: list[str] = []
        self._is_space: list[bool] = []
        self.starts = [0]  # of every token, and the end of the last
        self._weights = [0]  # tokens that are not white space, before each token
        self._words = [0]  # tokens with a letter or digit, before each token
        self._first = 0
        self._ended_at = 0

    @property
    def run(self) -> tuple[int, int]:
        """The run's first token, and the token after its last."""
        end = len(self._codes)
        return self._first, end - (end > self._first and self._is_space[-1])

    @property
    def long_enough(self) -> bool:
        """Whether the run is a copied span already."""
        first, last = self.run
        return self._words[last] > self._words[first] and (
            self._weights[last] - self._weights[first] >= MIN_TOKENS
            or self.starts[last] - self.starts[first] >= MIN_CHARACTERS
        )

    def codes(self, first: int, last: int) -> str:
        """The answer's tokens from ``first`` to before ``last``, as characters."""
        return "".join(self._codes[first:last])

    def push(self, token: str) -> list[tuple[int, int]]:
        """Take a token; return the run that it ended, if any, as (first, after the last)."""
        before, first = self.run, self._first
        was_long_enough = self.long_enough
        self._append(token)
        self._shrink()
        if self._first == first or not was_long_enough or before[1] <= self._ended_at:
            return []
        self._ended_at = before[1]
        return [before]

    def ended(self) -> list[tuple[int, int]]:
        """The run that the end of the answer ended, if any."""
        return [self.run] if self.long_enough and self.run[1] > self._ended_at else []

    def _append(self, token: str) -> None:
        space = token.isspace()
        self._codes.append(self._index.code(token))
        self._is_space.append(space)
        self.starts.append(self.starts[-1] + len(token))
        self._weights.append(self._weights[-1] + (not space))
        self._words.append(self._words[-1] + any(map(str.isalnum, token)))

    def _shrink(self) -> None:
        """Drop tokens at the front until the rest occurs; the less is left, the likelier."""
        end, joined = len(self._codes), self._index.joined
        if self._codes[-1] == _IN_NO_PASSAGE:
            self._first = end
        elif self.codes(self._first, end) not in joined:
            low, high = self._first + 1, end
            while low < high:
                middle = (low + high) // 2
                low, high = (
                    (low, middle) if self.codes(middle, end) in joined else (middle + 1, high)
                )
            self._first = low
        while self._first < end and self._is_space[self._first]:
            self._first += 1


def _numbers_in(citation: str) -> list[int]:
    numbers: list[int] = []
    for first, last in _NUMBER_OR_RANGE.findall(citation):
        numbers += range(int(first), min(int(last or first), int(first) + 99) + 1)
    return numbers
