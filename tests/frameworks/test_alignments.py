"""Registered texts are found in prompts that frameworks build from real documents."""

import random
import textwrap
from pathlib import Path

import pytest

from ragaccel.frameworks import ReferenceRegistry
from ragaccel.passage import Passage

DOCUMENTS = Path(__file__).parents[2] / "demos" / "documents"
WORDS = [
    "".join(random.Random(n).choices("abcdefghiklmnoprstuvw", k=2 + n % 8)) for n in range(4_000)
]


def prose(seed, size):
    words = random.Random(seed).choices(WORDS, k=size // 3)
    return " ".join(words)[:size].strip()


def registered(texts):
    registry = ReferenceRegistry()
    registry.register(Passage(str(n), text) for n, text in enumerate(texts))
    return registry


def found(registry, text):
    return [int(match.passage.passage_id) for match in registry.match(text)]


def chunks(size=700, overlap=120):
    texts = [path.read_text(encoding="utf-8") for path in sorted(DOCUMENTS.rglob("*.[mr][ds]*"))]
    return [
        text[start : start + size]
        for text in texts
        for start in range(0, len(text), size - overlap)
        if len("".join(text[start : start + size].split())) > 200
    ]


def numbered(texts):
    return "\n\n".join(f"[{n}] Document {n}\n{text}" for n, text in enumerate(texts, start=1))


def rewrapped(text, width):
    return textwrap.fill(" ".join(text.split()), width, subsequent_indent="    ")


SHOWN = {
    "whole": str,
    "stripped": str.strip,
    "narrow": lambda text: rewrapped(text, 41),
    "on one line": lambda text: " ".join(text.split()),
    "quoted": lambda text: "<document>\n" + text.strip() + "\n</document>",
    "cut at the end": lambda text: text[:300] + "…",
    "cut at the start": lambda text: "…" + text[-350:],
    "cut at both ends": lambda text: text[150:420],
}


@pytest.mark.parametrize("shown", SHOWN.values(), ids=SHOWN.keys())
def test_passages_of_real_documents_are_found_however_they_are_shown(shown):
    texts = chunks()
    registry = registered(texts)
    chosen = random.Random(0)
    wanted = hits = 0
    for _ in range(60):
        numbers = chosen.sample(range(len(texts)), 5)
        own = set(found(registry, numbered(shown(texts[n]) for n in numbers)))
        wanted += len(numbers)
        hits += len(own & set(numbers))
        assert len(own - set(numbers)) <= 1  # the documents quote each other
    assert len(texts) > 60
    assert hits >= 0.99 * wanted


def test_positions_are_characters_of_the_given_text():
    text = prose(1, 400)
    shown = "Q:\n" + rewrapped(text, 33) + "\n\nA:"
    (match,) = registered([f"  {text}\n"]).match(shown)
    assert shown[match.start : match.end] == rewrapped(text, 33)
    assert match.whole


def test_every_part_of_96_characters_is_found_where_it_stands_and_no_shorter_one():
    text = prose(2, 3_000).replace(" ", "-")
    registry = registered([prose(1, 500), text, prose(3, 500)])
    for start in range(0, len(text) - 96):
        (match,) = registry.match("🙂 " + text[start : start + 96])
        assert (match.start, match.whole, match.passage.start) == (2, False, start)
        assert match.passage.text == text[start : start + 96]
    assert found(registry, f"?? {text[:80]} ??") == []


@pytest.mark.parametrize("count", [2, 10, 400])
def test_of_versions_the_one_that_is_there_is_found(count):
    words = prose(4, 1_000).split()
    texts = [
        " ".join([*words[:at], f"version{n:04}", *words[at:]])
        for n in range(count)
        for at in [(37 * n) % len(words)]
    ]
    registry = registered(texts)
    for number in range(0, count, max(1, count // 10)):
        registry.register(Passage(str(number), texts[number]))  # it was retrieved just now
        assert found(registry, numbered([texts[number]])) == [number]
        at = texts[number].index("version")
        assert found(registry, texts[number][max(0, at - 150) : at + 150]) == [number]
    both = [0, count - 1]
    assert found(registry, numbered(texts[n] for n in both)) == both


def test_of_versions_that_look_the_same_in_a_part_the_newest_is_found():
    text = prose(5, 800)
    registry = registered([f"{text} This is version {n}." for n in range(10)])
    assert found(registry, text[:600]) == [9]


@pytest.mark.parametrize("size", [150, 600, 2_500])
def test_text_shared_by_many_is_not_distinctive(size):
    licence = prose(6, size)
    texts = [
        f"{licence}\n\n{prose(n, 300)}" if n % 2 else f"{prose(n, 300)}\n\n{licence}"
        for n in range(100, 300)
    ]
    registry = registered(texts)
    assert found(registry, f"What does this mean?\n{licence}") == []
    assert found(registry, f"{prose(7, 400)}\n{licence}") == []
    assert found(registry, f"{licence}\n" * 40) == []
    many = list(range(0, 200, 4))
    assert found(registry, numbered(texts[n][:420] for n in many)) == many
    for numbers in ([3], [8, 150, 199], [198, 2]):
        assert found(registry, numbered(texts[n] for n in numbers)) == numbers
        assert found(registry, numbered(texts[n][:260] for n in numbers if not n % 2)) == [
            n for n in numbers if not n % 2
        ]
    if size < 600:
        assert found(registry, texts[4][:-20]) == [4]


def test_a_text_that_is_boilerplate_is_found_for_itself():
    licence = prose(8, 300)
    registry = registered([*[f"{prose(n, 200)} {licence}" for n in range(50, 90)], licence])
    assert found(registry, f"Explain: {licence}") == [40]


@pytest.mark.parametrize(
    ("text", "wrap"),
    [
        ("灯塔看守人每天记录风向、海况和经过的每一艘船只，晚上点亮灯火，早晨再把它熄灭。" * 2, 13),
        (
            "燈台守は毎日、風と海の様子、そして通り過ぎるすべての船を書き留めています。夜は灯をともす。",
            11,
        ),
        ("ผู้ดูแลประภาคารจดบันทึกลมทะเลและเรือทุกลำที่ผ่านไปทุกวันแล้วจุดไฟในตอนกลางคืน", 17),
        (
            "def keep(light):\n    if not light.is_on:\n\t\tlight.on()\n    return light  # always",
            999,
        ),
        ("🙂 смотритель маяка записывает ветер, море и каждое судно, которое проходит мимо 🙂", 20),
    ],
    ids=["chinese", "japanese", "thai", "code", "cyrillic"],
)
def test_any_script_is_found_however_it_is_wrapped(text, wrap):
    registry = registered([FILLER, text])
    broken = "\n".join(text[i : i + wrap] for i in range(0, len(text), wrap))
    (match,) = registry.match(f"参考 1:\n{broken}\n问题")
    assert match.passage.text == text
    assert match.whole


FILLER = prose(12, 500)


@pytest.mark.parametrize(
    "text",
    ["a" * 80_000, "ab" * 40_000, "All rights reserved, of course. " * 2_500, "\n" * 80_000],
    ids=["one letter", "two letters", "one line", "nothing"],
)
def test_endless_repetition_is_found_and_ends(text):
    registry = registered([FILLER, text, *[f"{FILLER[:200]} {n}" for n in range(60)]])
    assert found(registry, f"{FILLER}\n" * 1_000) == [0]
    expected = [1] if text.strip() else []
    assert found(registry, text) == expected
    assert found(registry, "x" + text[1:-1] + "x") == expected
