"""The report of an answer: citations, passages and statistics, ready for JSON."""

import json

from ragaccel.answer import Answer, citations
from ragaccel.decoding import GenerationResult, Stats
from ragaccel.passage import Passage

LAMP = Passage("a", "The lamp burns rapeseed oil.", "Lamp", "lamp.pdf", page=3)
TIDE = Passage("b", "First. The tide rises four metres at the mole.")
OIL, RISES = LAMP.text, TIDE.text[7:]
SAID = f"So: {RISES} And: {OIL}"
CITED = [
    {
        "text": RISES,
        "passage_id": "b",
        "citation": "b",
        "start": 7,
        "end": len(TIDE.text),
        "out_start": 4,
        "out_end": 4 + len(RISES),
    },
    {
        "text": OIL,
        "passage_id": "a",
        "citation": "lamp.pdf:3",
        "start": 0,
        "end": len(OIL),
        "out_start": SAID.index(OIL),
        "out_end": len(SAID),
    },
]


def answer_of(text):
    stats = Stats(
        prompt_tokens=10, new_tokens=6, draft_tokens=5, accepted_tokens=4, verify_passes=2
    )
    result = GenerationResult((5,) * 6, "stop", stats)
    return Answer.of(text, result, [LAMP, TIDE], [Passage("c", "Left out.")])


def test_citations_say_what_was_copied_and_from_where():
    assert citations(SAID, [LAMP, TIDE]) == CITED
    assert citations("Own words.", [LAMP, TIDE]) == []


def test_a_caller_may_format_citations():
    cited = citations(SAID, [LAMP, TIDE], format_citation=lambda passage: passage.title or "?")
    assert [one["citation"] for one in cited] == ["?", "Lamp"]


def test_a_report_tells_how_an_answer_was_made_and_what_it_is_from():
    answer = answer_of(SAID)
    report = json.loads(json.dumps(answer.report()))
    assert report["citations"] == [{**one, "passage": n} for n, one in enumerate(CITED)]
    assert report["passages"] == [
        {"passage_id": "b", "citation": "b"},
        {
            "passage_id": "a",
            "citation": "lamp.pdf:3",
            "title": "Lamp",
            "source": "lamp.pdf",
            "page": 3,
        },
    ]
    assert report["dropped_passages"] == ["c"]
    counts = ("draft_tokens", "accepted_tokens", "forward_passes", "acceptance_length", "seconds")
    stats = answer.stats
    assert [report[name] for name in counts] == [
        5, 4, 2, stats.acceptance_length, stats.total_seconds,
    ]  # fmt: skip
    placed = answer.report(format_citation=lambda passage: "here")
    assert {one["citation"] for one in placed["citations"] + placed["passages"]} == {"here"}


def test_the_rest_of_a_shortened_text_is_cited_at_its_own_offsets():
    report = answer_of(SAID).report(OIL)
    assert [(one["passage_id"], one["out_start"]) for one in report["citations"]] == [("a", 0)]
    assert [one["passage_id"] for one in report["passages"]] == ["a"]
