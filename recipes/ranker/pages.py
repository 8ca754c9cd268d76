"""Made-up pages of tables, lists and frequent questions, which the question sets do not have.

Names and phrases are people's short answers, so that no list of words is needed.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragaccel.passage import split_sentences
from recipes.reader.corpus import Question
from recipes.reader.folder import Folder, content_words

MAX_NAME_WORDS, MAX_PHRASE_WORDS = 3, 8
MIN_ROWS, MAX_ROWS = 3, 8
FREQUENT_QUESTIONS_SHARE, SECOND_PAGE_SHARE, SHORTENED_SHARE = 0.3, 0.4, 0.3
NEAR_MISS_SHARE = 0.5  # of the tables without an answer, twice
_HOURS, _MINUTES = range(6, 23), ("00", "15", "20", "30", "45")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September",
           "October", "November", "December")  # fmt: skip
_CURRENCIES, _UNITS = ("£{}", "€{}", "${}", "{} €"), ("m", "cm", "kg", "g", "l", "km", "mm", "mph")


@dataclass(frozen=True, slots=True)
class Column:
    """What a table tells of a thing.

    Attributes:
        headers: Names of the column, of which one is drawn.
        questions: Ways to ask for it; ``{}`` stands for the thing.
        value: Draws one.
    """

    headers: tuple[str, ...]
    questions: tuple[str, ...]
    value: Callable[[random.Random], str]


def _price(rng: random.Random) -> str:
    amount = rng.choice((f"{rng.randint(1, 900)}", f"{rng.randint(1, 80)}.{rng.randint(10, 99)}"))
    return rng.choice(_CURRENCIES).format(amount)


def _time(rng: random.Random) -> str:
    hour, minutes = rng.choice(_HOURS), rng.choice(_MINUTES)
    return f"{rng.choice(_DAYS)} " * (rng.random() < 0.3) + f"{hour}{rng.choice(':.')}{minutes}"


def _date(rng: random.Random) -> str:
    day = f"{rng.randint(1, 28)} {rng.choice(_MONTHS)}"
    return day + f" {rng.randint(1980, 2030)}" * (rng.random() < 0.5)


COLUMNS = (
    Column(
        ("Price", "Cost", "Fee", "Charge", "Rate"),
        ("how much is {}", "what does {} cost", "price of {}", "what did we pay for {}",
         "what do they charge for {}", "how much do I have to pay for {}"),
        _price,
    ),
    Column(
        ("Time", "Start", "Begins", "Opens", "Departure"),
        ("when does {} start", "what time is {}", "at what time does {} begin", "{} when",
         "when do they open for {}"),
        _time,
    ),
    Column(
        ("Date", "Due", "Deadline", "Last day", "Held on"),
        ("when is {}", "what day is {}", "by when do I need {}", "deadline for {}",
         "on which date was {}"),
        _date,
    ),
    Column(
        ("Phone", "Telephone", "Call", "Number to ring"),
        ("phone number of {}", "how can I reach {}", "what number do I ring for {}", "call {}"),
        lambda rng: f"0{rng.randint(1000, 1999)} {rng.randint(100, 999)} {rng.randint(100, 999)}",
    ),
    Column(
        ("Quantity", "Number", "Seats", "Pieces", "Stock"),
        ("how many {} are there", "number of {}", "how many of {} do we have"),
        lambda rng: str(rng.randint(2, 400)),
    ),
    Column(
        ("Size", "Length", "Weight", "Height", "Dose"),
        ("how big is {}", "how much does {} weigh", "how long is {}", "how tall is {}",
         "how much {} do I need", "size of {}"),
        lambda rng: f"{rng.randint(1, 900)} {rng.choice(_UNITS)}",
    ),
    Column(
        ("Duration", "Takes", "Notice", "Guarantee"),
        ("how long does {} take", "how long does {} last", "for how long is {}",
         "what is the notice for {}"),
        lambda rng: f"{rng.randint(2, 90)} {rng.choice(('minutes', 'hours', 'days', 'weeks'))}",
    ),
)  # fmt: skip
_PERSON = ("Contact", "Responsible", "Run by", "Keeper"), (
    "who looks after {}", "who is responsible for {}", "who runs {}", "whom do I ask about {}",
)  # fmt: skip
_PLACE = ("Where", "Room", "Place", "Kept in"), (
    "where is {}", "where do I find {}", "in which room is {}", "where do they keep {}",
)  # fmt: skip
_REMEDY = ("Remedy", "What to do", "Meaning", "Cause"), (
    "what does {} mean", "{} what do i do", "it shows {}, what now", "why does it say {}",
    "the display flashes {}",
)  # fmt: skip
_TITLES = (
    "Prices",
    "Timetable",
    "Contacts",
    "Stock",
    "List",
    "Overview",
    "Notes",
    "Rules",
    "Guide",
)

_WHEN = frozenset({*COLUMNS[1].headers, *COLUMNS[2].headers})
_CODES = ("E{}", "F{}", "Error {}", "E0{}", "code {}", "Stage {}")

Page = tuple[str, list[str]]
"""Title and sentences."""


@dataclass(slots=True)
class PageQuestion:
    """A question of pages.

    Attributes:
        text: The question.
        pages: The answering one first.
        gold: Index of the sentence of the first page that answers; None if none does.
    """

    text: str
    pages: list[Page]
    gold: int | None


class PageMaker:
    """Makes pages of the answers and questions of a folder."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        answers = sorted({question.answer for question in folder.questions})
        names, phrases = (
            [answer for answer in answers if least <= len(answer.split()) <= most]
            for least, most in ((1, MAX_NAME_WORDS), (MAX_NAME_WORDS, MAX_PHRASE_WORDS))
        )
        self._names = [name for name in names if not any(map(str.isdigit, name))]
        self._columns = [
            *COLUMNS,
            Column(*_PERSON, lambda rng: rng.choice(self._names)),
            Column(*_PLACE, lambda rng: rng.choice(self._names)),
            Column(*_REMEDY, lambda rng: rng.choice(phrases)),
        ]
        self._is_able = len(self._names) >= MAX_ROWS and bool(phrases)
        self._of_row: dict[int, list[Question]] = defaultdict(list)
        self._rows: dict[str, list[int]] = defaultdict(list)
        for question in folder.questions:
            row = folder.gold_row(question)
            if row not in self._of_row:
                article = folder.corpus.paragraphs[question.paragraph].article
                self._rows[article].append(row)
            self._of_row[row].append(question)
        self._articles = [name for name, rows in self._rows.items() if len(rows) >= MIN_ROWS]

    def draw(self, rng: random.Random, *, answered: bool) -> PageQuestion | None:
        """Return a question of a page with or without its answer; None if none can be made."""
        if self._articles and rng.random() < FREQUENT_QUESTIONS_SHARE:
            return self._frequent_questions(rng, answered)
        return self._table(rng, answered) if self._is_able else None

    def _frequent_questions(self, rng: random.Random, answered: bool) -> PageQuestion | None:
        folder = self.folder
        rows = self._rows[rng.choice(self._articles)]
        rows = rng.sample(rows, rng.randint(MIN_ROWS, min(len(rows), MAX_ROWS)))
        gold = rng.choice(rows)
        asked, heading = rng.choice(self._of_row[gold]), rng.choice(self._of_row[gold])
        mark = rng.choice(("**{}**", "## {}", "{}"))
        entries = {
            row: (heading if row == gold else self._of_row[row][0]).text
            for row in rows
            if (answered if row == gold else not folder.has_words_of(row, asked))
        }
        said = folder.sentence(gold)
        parts = [f"{mark.format(head)}\n\n{folder.sentence(row)}" for row, head in entries.items()]
        page = folder.title(gold), split_sentences("\n\n".join(parts))
        if not parts or (answered and said not in page[1]):  # it is split otherwise on this page
            return None
        return PageQuestion(asked.text, [page], page[1].index(said) if answered else None)

    def _table(self, rng: random.Random, answered: bool) -> PageQuestion | None:
        columns = rng.sample(self._columns, rng.randint(1, 3))
        names = rng.sample(self._names, rng.randint(MIN_ROWS, MAX_ROWS))
        is_code = columns[0].headers == _REMEDY[0]
        if is_code:
            code = rng.choice(_CODES)
            names = [code.format(number) for number in range(1, len(names) + 1)]
        gold = rng.choice(names)
        shown = rng.choice((_table_lines, _table_lines, _list_lines))
        headers = [rng.choice(("Name", "What", "Item")), *(rng.choice(c.headers) for c in columns)]
        titles = self._titles_of(rng)
        # A near miss has another column of what is asked for, or only another page has its row.
        column = columns[0]
        other = self._other_column(columns, rng)
        if not answered and not is_code and rng.random() < NEAR_MISS_SHARE:
            column, missing = other, []
        else:
            missing = [] if answered else [0] if rng.random() < NEAR_MISS_SHARE else [0, 1]
        pages = []
        said: list[str] = []
        for number, (title, _) in enumerate(titles):
            rows = [[name, *(c.value(rng) for c in columns)] for name in names]
            opening, lines = shown(headers, rows, rng)
            said = said or lines
            kept = [
                line for line, name in zip(lines, names, strict=True)
                if name != gold or number not in missing
            ]  # fmt: skip
            text = "\n".join([*opening, *kept])
            pages.append((title, split_sentences(f"{self._preamble(rng)}{text}")))
        name = gold if is_code else _shortened(gold, rng)
        asked = rng.choice(column.questions).format(name) + titles[0][1]
        line = said[names.index(gold)]
        if answered and line not in pages[0][1]:  # a name with a full stop, perhaps
            return None
        return PageQuestion(asked, pages, pages[0][1].index(line) if answered else None)

    def _other_column(self, columns: Sequence[Column], rng: random.Random) -> Column:
        """Return a column that tells nothing of what these tell."""
        told = {header for column in columns for header in column.headers}
        if told & _WHEN:
            told |= _WHEN
        return rng.choice([one for one in self._columns if not told.intersection(one.headers)])

    def _titles_of(self, rng: random.Random) -> list[tuple[str, str]]:
        """Return titles of pages with how the question names the first."""
        about, kind = rng.choice(self._names), rng.choice(_TITLES)
        if rng.random() >= SECOND_PAGE_SHARE:
            return [(rng.choice((about, f"{about}: {kind}", kind)), "")]
        if rng.random() < 0.5:
            years = rng.sample(range(2015, 2027), 2)
            return [(f"{about} > {kind} {year}", f" in {year}") for year in years]
        places = rng.sample(self._names, 2)
        return [(f"{place} > {kind}", f" at {place}") for place in places]

    def _preamble(self, rng: random.Random) -> str:
        if rng.random() < 0.5:
            return f"## {rng.choice(_TITLES)}\n\n" * (rng.random() < 0.5)
        return f"{self.folder.sentence(rng.randrange(len(self.folder.passage_of)))}\n\n"


def _table_lines(
    headers: Sequence[str], rows: Sequence[Sequence[str]], _rng: random.Random
) -> tuple[list[str], list[str]]:
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (headers, *rows))
    return [head, "|---" * len(headers) + "|"], lines


def _list_lines(
    headers: Sequence[str], rows: Sequence[Sequence[str]], rng: random.Random
) -> tuple[list[str], list[str]]:
    start, middle = rng.choice(("- ", "* ", "")), rng.choice((": ", " - ", ", "))
    told = rng.random() < 0.5  # what the values are
    lines = []
    for name, *values in rows:
        cells = [f"{h.lower()} {v}" * told or v for h, v in zip(headers[1:], values, strict=True)]
        lines.append(f"{start}{name}{middle}{', '.join(cells)}")
    return [], lines


def _shortened(name: str, rng: random.Random) -> str:
    """Return a name, sometimes without one of its words."""
    words = name.split()
    if len(words) > 1 and rng.random() < SHORTENED_SHARE:
        del words[rng.randrange(len(words))]
    return " ".join(words) if content_words(" ".join(words)) else name
