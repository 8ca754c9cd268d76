"""The sentence splitter: exact, ordered spans; Markdown, code and tables kept whole."""

import pytest
from hypothesis import given, strategies as st

from ragaccel.passage import is_heading, is_statement, sentence_spans, split_sentences

PIECES = [
    "The lamp burns. ", "It costs 3.5 EUR. ", "Dr. Smith", "\n", "\n\n", "# Head\n", "- item\n",
    "1. First\n", "```\ncode x = 1\n\nmore\n```\n", "| a | b |\n", "|---|---|\n", "a", ".", "! ",
    "Name: Ada\n", "你好。", "  ", "e.g. this", "```", "=====\n", "—", "🙂", "\t", "No. 5", "\r\n",
    "It ends.[2] ", "[a]",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=30).map("".join)


@given(texts)
def test_spans_are_exact_ordered_trimmed_and_whole(text):
    position, sentences = 0, []
    for start, end in sentence_spans(text):
        assert position <= start < end <= len(text)
        sentences.append(text[start:end])
        assert sentences[-1] == sentences[-1].strip()
        position = end
    assert [c for c in "".join(sentences) if c.isalnum()] == [c for c in text if c.isalnum()]
    assert len(sentences) < 2 or min(map(len, sentences)) > 2, "a fragment stands alone"
    assert split_sentences(text) == sentences


CODE = "```bash\npip install x\n\npip check\n```"


@pytest.mark.parametrize(
    "sentences",
    [
        [
            "Some prose, hard wrapped over\ntwo lines as e.g. Dr. Smith does.",
            *(" Then another!", " It costs 3.5 EUR.", ' "Quoted."', " Next?", " Yes."),
        ],
        [
            "Der Brief muss bis zum 30. September bei Nr. 7 sein, vgl. § 4 Abs. 2.",
            *(" Sie kam im Jahr 1930.", " September war es.", " Mme. Roche a 12 ans."),
        ],
        [
            "# Title",
            "\nIntro without a stop",
            "\n\n## Next one",
            "\n1. Mix.",
            " Stir.",
            "\n2. Bake",
        ],
        ["- item one,\n  long", "\n- item two"],
        ["Run this:", f"\n\n{CODE}", "\nThen go on."],
        ["| a | b |\n|---|---|", "\n| one | 1 |", "\n| two | 2 |"],
        ["Name: Ada Lovelace", "\nBorn: 1815", "\n\n---\n\nTail"],
        [
            "What the display shows, what it may mean and what you can do about it\n"
            "E1 No water coming in, or too slowly Open the tap; clean the sieve",
            "\nE2 Water in the base tray Leave the plug in, so that the pump can\n"
            "run, and have the hoses looked at by our service before the next wash",
            "\nE4.1 Door not closed properly Push the lower rack in; check the catch",
        ],
        [
            "This printer takes sheets of two different sizes, which are\n"
            "A4 and A5, and for the smaller ones you have to turn the lever to\nB."
        ],
        ["Setext title\n=====", "\nBody follows."],
        ["我们来了。", "你们好吗？"],
        ["a"],
        [],
    ],
)
def test_what_the_sentences_of_a_text_are(sentences):
    expected = [one.removeprefix("\n\n---").strip() for one in sentences]
    assert split_sentences("".join(sentences)) == expected


@pytest.mark.parametrize(
    "sentences",
    [
        ["It was built in 1889.[2][a]", "Its tower is tall.[note 1]:23", "See (note [4])."],
        ["Some say so.[citation needed]", "It fell.[1, 3]", "As e.g.[3] Then, it stood."],
        ["It is listed in Schedule B.", "For any sum that is late interest is due."],
        ["See the terms in\nSchedule B.", "Rent is due in May."],
        ["Bake it at 170 °C.", "My cousin got it.", "At 38 °C.", "Bake on."],
        ["She marks groups A to D.", "Dr Lindqvist marks the others, E and F.", "Water is free."],
        ["Vitamin C.", "It helps.", "He flew to the U.S.", "In May he was in Washington D.C."],
        ["J. R. Smith and Harry S. Truman met M. A. Jones of the U.S. Senate in a U.S. Navy yard."],
        ["K. He, X. Li and K. He et al. wrote it.", "J. He and J. S. Bach did not."],
        ["A. The first thing is this.", "B. The second one is for J. Smith."],
        ["Appendix C. Colours of the rooms.", "They met with K. Brown."],
        ["Das ist z.B. In den Ferien so."],
        ["It is shown in fig. 3 and the hose in fig. 4.", "Do not bend it."],
        ["See vol. 2, sec. 3, ch. 5, eq. 6, figs. 2 and 3, p. 4, no. 7.", "It says no.", "Ask."],
        ["Attendez le vol.", "Le train part."],
        ["He (r. 1521–1567) heard Brown v. Board.", "Ada (b. 1815; d. 1852) did not."],
        ["We chose plan b.", "Nobody had tested it."],
    ],
)  # fmt: skip
def test_a_letter_ends_a_sentence_if_it_is_no_initial(sentences):
    assert split_sentences(" ".join(sentences)) == sentences


def test_a_long_block_of_code_is_cut_at_blank_lines():
    lines = "\n\n".join(f"value_{i} = compute({i}) + {'x' * 60}" for i in range(12))
    assert len(split_sentences(f"```\n{lines}\n```")) == 12


@pytest.mark.parametrize(
    ("text", "headings"),
    [
        ("# Ropes\nThey are long.", ["# Ropes"]),
        ("Ropes\n=====\n\nThey are long.", ["Ropes\n====="]),
        ("Nora Pell (1934-2018)\n\nNora Pell swam.", ["Nora Pell (1934-2018)"]),
        ("Keep in mind\n\n- one rope\n- two boats\n\nGo on.", ["Keep in mind"]),
        ("She swam.\n\nEdda Lorne", ["Edda Lorne"]),
        ("It is short.\n\nThat is all\nthere is.", []),
        ("Bring these:\n\n| rope | 20 m |\n", []),
        ("| rope | m |\n|---|---|\n| hemp | 20 |\n", ["| rope | m |\n|---|---|"]),
        ("| rope | m |\n|:-:|--|\n| hemp | 20 |\n", ["| rope | m |\n|:-:|--|"]),
        ("| rope | m |\n|---|---|\n| hemp | 20 |\n| - | - |", ["| rope | m |\n|---|---|"]),
        ("The last words stand alone", []),
    ],
)
def test_headings_say_nothing_themselves(text, headings):
    assert [text[s:e] for s, e in sentence_spans(text) if is_heading(text, s, e)] == headings


def test_a_sentence_on_a_line_of_its_own_is_no_heading_because_of_its_note():
    text = "The lamp stands in the harbour.[1]\nIt was built in 1889.[2]\n\nHistory[3]\n\nMore."
    headings = [text[s:e] for s, e in sentence_spans(text) if is_heading(text, s, e)]
    assert headings == ["History[3]"]


@pytest.mark.parametrize(
    ("sentence", "states"),
    [
        ("**Is there a shop that I can visit?**", False),
        ('"Is the washer quiet?"', False),
        ("(Is it too short?)", False),
        ("Is it too short? [3]", False),
        ("Is it too short?[2][a] [3].", False),
        ("It is too short.[12]", True),
        ("Is it too short?!", False),
        ("短いですか？", False),
        ("# The shop", False),
        ('He shouted: "Who stole them?"', True),
        ("It is too short [3].", True),
        ("Ask for the extension [3]", True),
        ("...", True),
        ("The Wren weighs two kilos (or three?)", True),
        ("Her second novel was *Who Goes There?*", True),
        ('"Who Goes There?" is the sequel of "Is It Late?"', True),
        ("?", False),
    ],
)
def test_a_question_states_nothing_however_it_is_marked(sentence, states):
    assert is_statement(f"It is long. {sentence}\nGo on.", 12, 12 + len(sentence)) == states
