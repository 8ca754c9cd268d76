"""Documents, passages, and their sentences."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isnan
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ragaccel import errors as checks
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclass(frozen=True, slots=True)
class Document:
    """The text of one file, with its page starts and line numbers.

    ``page_starts[i]`` is the character offset of page ``i + 1`` (a slide, a notebook cell or a
    chapter counts as a page); empty for formats without pages. ``markup`` is the syntax of
    headings: ``"markdown"``, ``"rst"``, ``"code"``, ``"rows"`` (one record a line) or ``""``.
    ``line_numbers[i]`` is the line of the file that line ``i + 1`` of the text comes from, for
    formats in which they differ (HTML, JSON, rows of a sheet, paragraphs); empty if they are equal.
    """

    path: str
    text: str
    title: str = ""
    page_starts: tuple[int, ...] = ()
    markup: str = ""
    line_numbers: tuple[int, ...] = ()

    def page_at(self, offset: int) -> int | None:
        """Return the 1-based page of a character offset, or None if the format has no pages."""
        return bisect_right(self.page_starts, offset) or None

    def line_at(self, offset: int) -> int:
        """Return the 1-based line of the file at a character offset of the text."""
        line = self.text.count("\n", 0, offset)
        return self.line_numbers[line] if self.line_numbers else line + 1


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document: ``document.text[start:end] == text``, exactly.

    ``passage_id`` stays the same when an unchanged file is indexed again. ``page`` and ``line`` are
    the 1-based location of the first character: a format with pages has a page, other files a
    line, passages without a file neither. ``locations`` holds (offset, number) pairs: from that
    offset of the text on, the page or line is the given number (lines count up from there).
    ``score`` is the retrieval score, higher for better matches.
    """

    passage_id: str
    text: str
    title: str = ""
    path: str = ""
    start: int = 0
    end: int = 0
    page: int | None = None
    line: int | None = None
    score: float = 0.0
    locations: tuple[tuple[int, int], ...] = ()

    @property
    def citation(self) -> str:
        """Return the passage's file and page or line, as in ``guide.pdf:3``, ``notes.md:12``."""
        return self.citation_at(0)

    def citation_at(self, offset: int) -> str:
        """Return the citation of a character of the text, with that character's page or line."""
        page, line = self._location_at(offset)
        place = page if page is not None else line
        where = self.path or self.passage_id
        return where if place is None else f"{where}:{place}"

    def cut(self, start: int, end: int) -> Passage:
        """Return ``text[start:end]`` as a passage with its own page or line, and the same id."""
        page, line = self._location_at(start)
        locations = tuple((at - start, number) for at, number in self.locations if start < at < end)
        return replace(
            self,
            text=self.text[start:end],
            start=self.start + start,
            end=self.start + end,
            page=page,
            line=line,
            locations=locations,
        )

    def _location_at(self, offset: int) -> tuple[int | None, int | None]:
        last = bisect_right(self.locations, offset, key=itemgetter(0)) - 1
        since, number = self.locations[last] if last >= 0 else (0, self.page or self.line)
        if self.page is not None:
            return number, None
        if self.line is None or number is None:
            return None, None
        return None, number + self.text.count("\n", since, offset)


@dataclass(frozen=True, slots=True)
class NearestSentence:
    """The sentence of a passage that is nearest to a question: ``passage.text[start:end]``.

    ``score`` is the chance that it answers, by the sentence ranker, if that has ranked it; else the
    cosine of the question and the sentence below the passage's title.
    """

    passage: Passage
    start: int
    end: int
    score: float

    @property
    def text(self) -> str:
        """Return the text of the sentence."""
        return self.passage.text[self.start : self.end]


_TEXT_KEYS = ("text", "page_content", "content")
_ID_KEYS = ("passage_id", "id", "_id", "node_id")
_PATH_KEYS = ("path", "source", "file_path", "file_name", "url")
_OTHER_KEYS = ("title", "page", "page_label", "line", "score", "metadata")
_MAX_PAGE = 100_000
_FORMS = "a string, a Passage, a Document, or a dictionary with a 'text'"


def check_passage(passage: Any) -> None:
    """Check that an object is a passage whose fields have the right types.

    Raises:
        ConfigurationError: the object is something else; the message names the field.
    """
    if not isinstance(passage, Passage):
        raise ConfigurationError(
            f"a passage must be a ragaccel.Passage, not {checks.brief(passage)}"
        )
    _check_texts("a passage's", passage, ("passage_id", "text", "title", "path"))
    checks.number("a passage's score", passage.score)


def _check_texts(whose: str, item: Any, names: Iterable[str]) -> None:
    for name in names:
        checks.text(f"{whose} {name}", getattr(item, name))


def as_passage(item: Any, name: str) -> Passage:
    """Return a text in any common form as a passage.

    Args:
        item: a string, a ``Passage``, a ``Document``, a dictionary with a ``text`` (also
            ``page_content`` or ``content``), or a document or node of LangChain or LlamaIndex. Its
            ``id``, ``title``, ``path`` (or ``source``), ``page``, ``line`` and ``score``, or those
            of its ``metadata``, are kept. A pair of one of these and its score is taken, too.
        name: the ``passage_id`` if it has neither an id nor a path; messages begin with it.

    Raises:
        ConfigurationError: the item has no text, or one that cannot be encoded.
    """
    if isinstance(item, tuple) and len(item) == 2 and not isinstance(item[1], str):
        return replace(as_passage(item[0], name), score=checks.number(f"{name}'s score", item[1]))
    passage = item if isinstance(item, Passage) else _read_passage(item, name)
    check_passage(passage)
    return passage


def _read_passage(item: Any, name: str) -> Passage:
    found = {"text": item} if isinstance(item, str) else _fields_of(item)
    text = next((found[key] for key in _TEXT_KEYS if key in found), None)
    if not isinstance(text, str):
        raise ConfigurationError(f"{name} must be {_FORMS}, not {checks.brief(item)}")
    path = str(_first(found, _PATH_KEYS) or "")
    return Passage(
        passage_id=str(_first(found, _ID_KEYS) or path or name),
        text=str(text),
        title=str(found.get("title") or ""),
        path=path,
        end=len(text),
        page=_number(found.get("page_label")) or _number(found.get("page")),
        line=_number(found.get("line")),
        score=checks.number(f"{name}'s score", found.get("score", 0.0)),
    )


def as_document(item: Any, name: str) -> Document:
    """Return a text in any form that ``as_passage`` takes as a document; ``path`` is its name."""
    if isinstance(item, Document):
        _check_texts("a document's", item, ("path", "text", "title"))
        return item
    passage = as_passage(item, name)
    first, lines = passage.line or 0, passage.text.count("\n") + 1
    return Document(
        passage.path or passage.passage_id,
        passage.text,
        passage.title,
        page_starts=(0,) * min(passage.page or 0, _MAX_PAGE),
        line_numbers=tuple(range(first, first + lines)) if first > 0 else (),
    )


def _fields_of(item: Any) -> dict[str, Any]:
    """Return the fields of a dictionary or an object, after those of its metadata.

    Those that are None or not a number, as in an empty cell of a table, are left out.
    """
    if isinstance(item, Mapping):
        found = dict(item)
    else:
        node = getattr(item, "node", item)  # a node of LlamaIndex, beside its score
        keys = (*_TEXT_KEYS, *_ID_KEYS, *_PATH_KEYS, *_OTHER_KEYS)
        found = {key: getattr(node, key, None) for key in keys}
        found |= {"score": getattr(item, "score", None)}
        if callable(content := getattr(node, "get_content", None)):
            found["text"] = content()
    metadata = found.get("metadata")
    known = {**metadata, **_without_gaps(found)} if isinstance(metadata, Mapping) else found
    return _without_gaps(known)


def _without_gaps(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in found.items()
        if not (value is None or (isinstance(value, float) and isnan(value)))
    }


def _first(found: Mapping[str, Any], keys: Iterable[str]) -> Any:
    return next((found[key] for key in keys if found.get(key) not in (None, "")), None)


def _number(value: Any) -> int | None:
    with suppress(TypeError, ValueError, OverflowError):
        return int(value)
    return None


_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})([^\n]*)$", re.MULTILINE)
_HEADING = re.compile(r"[ \t]{0,3}#{1,6}[ \t]")
_TABLE_ROW = re.compile(r"[ \t]*\|")
_RULE = re.compile(  # no two parts match the same characters, so it cannot backtrack
    r"[|:+ \t]*---[-|:+ \t]*\n?$|[ \t]*\|[ \t]*(?::-|-[-:])[-|: \t]*\n?$"
    r"|[ \t]*(?:={3,}|~{3,}|\*{3,}|_{3,})[ \t]*\n?$"
)
_PAIRS = [*zip(("**", "__", *"*_`([\"“„«'‘"), ("**", "__", *"*_`)]\"”“»'’"), strict=True)]
_QUESTION_ENDS = "?", "?!", "？"
_ITEM = re.compile(r"[ \t]*(?:[-*+•▪◦>][ \t]|\d{1,3}[.)][ \t]|:[\w-]+:)")
_UNFINISHED_LINE = re.compile(
    r"(?:[,(\[–—/&-]|\b(?:a|an|and|as|at|by|for|from|in|is|of|on|or|the|to|with))$"
)
# A reference to a note, as encyclopedias have some behind a full stop: ".[2][note 1] The"
_NOTE = r"(?:\[(?:\w{1,3}|\d+(?:[,–-]\ ?\d+)+|(?:nb|note)\ \d+|citation\ needed)\](?::\d+)?)"
_END = re.compile(
    rf"""
    (?<=[.!?…])["'”’)\]*_`]*{_NOTE}*\s+(?=["'“‘(\[*_`<]*[A-Z0-9À-ÖØ-ÞΑ-ΩА-Я])  # before a capital
  | (?<=[.!?…:])["'”’)\]*_`]*{_NOTE}*[ \t]*\n                      # or at the end of a line
  | (?<=[。！？।؟])\s*
    """,
    re.VERBOSE,
)
_LAST_NOTES = re.compile(rf"(?:\s?{_NOTE}){{1,9}}$")  # bounded: else it takes quadratic time
_ABBREVIATION = re.compile(
    r"(?:\b(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|No|Nos|vs?|[Ff]igs?|[Ee]q|Vol|Jr|Sr|Gen|Col|Capt|Lt|Rev|Mt"
    r"|Ft|e\.g|i\.e|etc|cf|al|approx|ca|p|pp|Inc|Ltd|Co|Corp|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sep|Sept"
    r"|Oct|Nov|Dec|Nr|Abs|Str|Tel|Tél|bzw|ggf|inkl|vgl|Mme|Mlle))\.$"
)
_NUMBERED = re.compile(  # words if no number follows, as in "no." and "(r. 1521–1567)"
    r"\b(?:nos?|vol|[Ss]ect?|[Cc]h|[Aa]rt)\.$|[(;,–-]\s*(?:b|c|d|fl|r)\.$"
)
_LABEL = re.compile(  # a letter that is no initial: "to Schedule B.", "from A to D.", "170 °C."
    r"(?:\S\s+(?i:annex|appendix|block|building|category|class|exhibit|figure|gate|grade|group|option"
    r"|plan|platform|schedule|section|size|table|type|vitamin|zone)\s+"
    r"|\b[A-Z]\s+(?:and|or|to)\s+|°\s?)[A-Z]\.$"
)
_LETTER = re.compile(r"(?<![a-z]\.)(?<![a-z]\. )(?<=\S[. ])[A-Z]\.$")  # not in "z. B.", "i.d.R."
_OPENER = re.compile(  # and no surname, as in "K. He, X. Li"
    r"""["'“‘(\[*_`<]*
    (?:A|After|All|And|Any|Are|As|At|Before|But|By|Dr|Each|Every|For|From|He|Her|Here|His|How|I|If|In
    |Is|It|Its|Mr|Mrs|Ms|My|No|Not|On|Once|Only|Or|Our|Please|Prof|She|Some|That|The|Their|Then|There
    |These|They|This|Those|Was|We|What|When|Where|Which|While|Who|Why|With|You|Your)
    \b(?!\s*[,.;)]|\s+(?:and|et|&)\b)
    """,
    re.VERBOSE,
)
_ORDINAL = re.compile(r"(?<!\d)[0-3]?\d\.$")  # of a date in German: "am 30. September"
_MONTH = re.compile(
    "Januar|Jänner|Februar|März|April|Mai|Juni|Juli|August|September|Oktober|November|Dezember"
)
_LIST_NUMBER = re.compile(r"\s*\d{1,3}\.$")
_SHORT_LINE = 45
_CODE = re.compile(r"[ \t]*(?:[A-Z]{1,3}|Error )-?\d{1,4}[A-Z]?(?:\.\d+)?:?\s")  # "E4 No water"
_LONG_SENTENCE = 500
_LONG_HEADING = 12  # words
_NO_HEADING = re.compile(r"[.!?:;,…]$")
_BLANK_LINE = re.compile(r"[ \t]*\n[ \t]*\n")
_WORD = re.compile(r"\w")
_VISIBLE = re.compile(r"\S")

Span = tuple[int, int]


def sentence_spans(text: str) -> Iterator[Span]:
    """Yield (start, end) of every sentence in order, without surrounding white space.

    A rule-based splitter for prose and Markdown. A heading, a list item, a table row and a fenced
    code block count as sentences; abbreviations, initials and list numbers do not end one. A
    capital letter is an initial unless it follows a degree sign or a word such as "Schedule", or
    precedes a word that begins sentences, such as "The". Spans never overlap; only white space and
    rules (``---``) lie between them.
    """
    ready: Span | None = None
    held: Span | None = None
    for start, end in _pieces(text):
        begins = held[0] if held else start
        held = (begins, end) if _is_fragment(text, begins, end) else None
        if held is None:
            if ready:
                yield ready
            ready = begins, end
    last = (ready[0], held[1]) if ready and held else ready or held
    if last:
        yield last


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text, as strings."""
    return [text[start:end] for start, end in sentence_spans(text)]


def is_heading(text: str, start: int, end: int) -> bool:
    """Return whether a sentence is a heading.

    A heading is a line like ``# Ropes``, an underlined line, or a short line without a full stop
    that is followed by a blank line, or that is the last line and follows one. The head of a table
    is a heading, too. List items and other table rows are not.
    """
    if _HEADING.match(text, start, end):
        return True
    first, *rest = text[start:end].split("\n")
    if _ITEM.match(first) or (_TABLE_ROW.match(first) and not rest):
        return False
    if rest:
        return bool(_RULE.match(rest[-1]))
    if len(first.split()) > _LONG_HEADING or _NO_HEADING.search(without_notes(first)):
        return False
    if _BLANK_LINE.match(text, end):
        return not text[text.rfind("\n", 0, start) + 1 : start].strip()
    return not _VISIBLE.search(text, end) and _follows_blank_line(text, start)


def is_statement(text: str, start: int, end: int) -> bool:
    """Return whether a sentence can answer something: it is neither heading nor question.

    A question may be marked up, in brackets or quoted as a whole, and have a citation behind it.
    """
    said = text[start:end].strip()
    said = without_notes(said[:-1] if said.endswith("].") else said)
    for opening, closing in _PAIRS:
        inner = said.removeprefix(opening).removesuffix(closing)
        if len(inner) == len(said) - len(opening + closing) and closing not in inner:
            said = inner.strip()
    return not (said.endswith(_QUESTION_ENDS) or is_heading(text, start, end))


def without_notes(sentence: str) -> str:
    """Return a sentence without the references to notes, or the citation, that it ends with."""
    return _LAST_NOTES.sub("", sentence)


def _follows_blank_line(text: str, start: int) -> bool:
    newline = text.rfind("\n", 0, start)
    above = text.rfind("\n", 0, max(newline, 0))
    return above >= 0 and not text[above:start].strip(" \t\n")


def _is_fragment(text: str, start: int, end: int) -> bool:
    """Return whether a piece is one or two characters or a list number; it joins the next one."""
    return end - start <= 2 or bool(_LIST_NUMBER.fullmatch(text, start, end))


def _pieces(text: str) -> Iterator[Span]:
    """Yield the spans of sentences and fragments; fragments are not joined to sentences yet."""
    for start, end in _blocks(text):
        for piece in _sentences_of(text, start, end):
            first, last = trimmed(text, *piece)
            if first < last and (_WORD.search(text, first, last) or last - first == len(text)):
                yield first, last


def _blocks(text: str) -> Iterator[Span]:
    """Yield spans that no sentence crosses: fenced code blocks, and runs of lines between them."""
    position = 0
    for start, end in fenced_spans(text):
        yield from _line_runs(text, position, start)
        yield from _fence_pieces(text, start, end)
        position = end
    yield from _line_runs(text, position, len(text))


def fenced_spans(text: str, start: int = 0, end: int | None = None) -> Iterator[Span]:
    """Yield (start, end) of every fenced code block in ``text[start:end]``, with both fences.

    A fence without a closing one is ignored: a passage may begin inside a block.
    """
    opened: tuple[int, str] | None = None
    for line in _FENCE.finditer(text, start, len(text) if end is None else end):
        marks, rest = line.groups()
        if opened is None:
            opened = (line.start(), marks) if "`" not in rest else None
        elif marks.startswith(opened[1]) and not rest.strip():
            yield opened[0], line.end()
            opened = None


def _line_runs(text: str, start: int, end: int) -> Iterator[Span]:
    run, position = start, start
    previous = ""
    while position < end:
        newline = text.find("\n", position, end)
        stop = end if newline < 0 else newline + 1
        line = text[position:stop]
        if _starts_run(previous, line) or _is_row(text, run, previous, line):
            yield run, position
            run = position
        previous, position = line, stop
    yield run, end


def _starts_run(previous: str, line: str) -> bool:
    """Return whether a line cannot continue the sentence of the previous line."""
    if not previous.strip() or not line.strip():
        return True
    if _RULE.match(line):
        return False  # the underline of a heading, or the rule below a table's head
    if _HEADING.match(previous) or _HEADING.match(line) or _RULE.match(previous):
        return True
    if _TABLE_ROW.match(previous) or _TABLE_ROW.match(line) or _ITEM.match(line):
        return True
    ended, started = previous.strip(), line.lstrip()
    if started[0].islower() or len(ended) >= _SHORT_LINE:
        return False
    return not _UNFINISHED_LINE.search(ended)


def _is_row(text: str, run: int, previous: str, line: str) -> bool:
    """Return whether a line is a further row of codes: a PDF file's tables have no cells."""
    is_row = _CODE.match(line) is not None
    return is_row and (_CODE.match(previous) or _CODE.match(text, run)) is not None


def _sentences_of(text: str, start: int, end: int) -> Iterator[Span]:
    if _HEADING.match(text, start, end) or text.startswith(("```", "~~~", "|"), start):
        yield start, end
        return
    position = start
    for found in _END.finditer(text, start, end):
        closing = found.group().rstrip()
        stop = found.start() + len(closing)
        before = text[max(position, found.start() - 24) : found.start()]
        if _is_abbreviated(before, text, found.end()):
            continue
        if _ORDINAL.search(before) and _MONTH.match(text, found.end()):
            continue
        yield from _split_long(text, position, stop)
        position = found.end()
    yield from _split_long(text, position, end)


def _is_abbreviated(before: str, text: str, end: int) -> bool:
    """Return whether the full stop that ``before`` ends with is that of an abbreviation.

    Args:
        before: The end of the sentence so far.
        text: The text.
        end: Where the next sentence would begin.
    """
    if _LABEL.search(before) or (_LETTER.search(before) and _OPENER.match(text, end)):
        return False
    is_numbered = _NUMBERED.search(before) and text[end : end + 1].isdigit()
    return bool(is_numbered or _ABBREVIATION.search(before))


def _split_long(text: str, start: int, end: int) -> Iterator[Span]:
    """Yield the span of a sentence, split at line breaks if it is too long to be prose."""
    while end - start > _LONG_SENTENCE:
        newline = text.find("\n", start, end)
        if newline < 0:
            break
        yield start, newline
        start = newline + 1
    yield start, end


def _fence_pieces(text: str, start: int, end: int) -> Iterator[Span]:
    """Yield the span of a fenced code block, split at blank lines if it is long."""
    position = start
    if end - start > _LONG_SENTENCE:
        for gap in re.finditer(r"\n[ \t]*\n", text[start:end]):
            yield position, start + gap.start()
            position = start + gap.end()
    yield position, end


def trimmed(text: str, start: int, end: int) -> Span:
    """Return the span of ``text[start:end]`` without the white space around it."""
    piece = text[start:end]
    first = start + len(piece) - len(piece.lstrip())
    return first, first + len(piece.strip())
