"""Answer quality: what the bundled reader says, scored as SQuAD scores short answers.

Exact match, F1 and containment. Texts are compared in lower case, without punctuation and the
articles *a*, *an* and *the* (Rajpurkar et al., 2016). A reader that quotes a whole sentence can
match a short answer exactly only where the sentence is nothing else: containment tells whether the
answer is in what it said.
"""

from __future__ import annotations

import re
import string
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from eval.examples import in_data
from eval.questions import DEMOS, ask_all, plain, read_questions, write_held_out
from eval.ratios import spread
from eval.script import note

Row = dict[str, Any]

ANSWERED = ("answers_held_out", "answers_demo")

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def words_of(text: str) -> list[str]:
    """Return the words of a text as they are compared."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def exact_match(said: str, wanted: str) -> float:
    """1 if both are the same words in the same order, else 0."""
    return float(words_of(said) == words_of(wanted))


def f1(said: str, wanted: str) -> float:
    """The harmonic mean of precision and recall of words, each counted as often as it stands."""
    ours, theirs = words_of(said), words_of(wanted)
    if not ours or not theirs:
        return float(ours == theirs)
    common = (Counter(ours) & Counter(theirs)).total()
    return 2 * common / (len(ours) + len(theirs))


def contains(said: str, wanted: str) -> float:
    """1 if the words wanted stand in what was said, one after the other, else 0."""
    ours, theirs = words_of(said), words_of(wanted)
    starts = range(len(ours) - len(theirs) + 1)
    return float(any(ours[i : i + len(theirs)] == theirs for i in starts))


SCORES = {"exact": exact_match, "f1": f1, "contains": contains}


def answer_row(name: str, data: Path | None) -> Row:
    """Let the bundled reader answer; keep what it said and what was wanted."""
    note(f"{name}: the bundled reader answers")
    with tempfile.TemporaryDirectory() as folder:
        if name == "answers_demo":
            documents = DEMOS / "documents"
            questions = read_questions(DEMOS / "questions.jsonl")
        else:
            documents = Path(folder)
            questions = write_held_out(in_data("rag", data).parent, documents)
        said = ask_all(questions, documents)
    groups = [question["file"] for question in questions]
    return {"set": name, "answers": said, "groups": groups}


def answer_figures(row: Row) -> dict[str, Any]:
    """Average the scores of a set's answers, of all and of those whose passage was found.

    Wanted is the short answer, or the sentence where no shorter one is known. ``quotation`` has the
    scores of the very sentence that answers: the best that quoting one sentence can do.
    """
    pairs = list(zip(row["answers"], row["groups"], strict=True))
    kept = [(said, group) for said, group in pairs if said["expected"] is not None]
    found = [(said, group) for said, group in kept if said["retrieved"]]
    groups = [group for _, group in kept]
    judged = {
        name: spread([float(said[name]) for said, _ in kept], groups)
        for name in ("right", "retrieved", "cited")
    }
    refusals = [said["right"] for said, _ in pairs if said["expected"] is None]
    return {
        "questions": len(kept),
        "groups": len(set(groups)),
        "answer": _scores(kept, "answer"),
        "quotation": _scores(kept, "expected"),
        "found": len(found),
        "answer_when_found": _scores(found, "answer") if found else None,
        **judged,
        "unanswerable": len(refusals),
        "refused": sum(refusals),
    }


def _scores(kept: list[tuple[Row, str]], whose: str) -> dict[str, list[float]]:
    groups = [group for _, group in kept]
    texts = [(plain(said[whose]), said["words"] or said["expected"]) for said, _ in kept]
    return {
        name: spread([score(*pair) for pair in texts], groups) for name, score in SCORES.items()
    }
