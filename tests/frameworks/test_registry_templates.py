"""The registry against a slow, obvious matcher, on texts that share most of their content."""

import random
import textwrap

import numpy as np
import pytest

from ragaccel.frameworks import ReferenceRegistry
from ragaccel.passage import Passage

VOCABULARY = [
    "".join(random.Random(n).choices("abcdefghiklmnoprstuvw", k=2 + n % 7)) for n in range(300)
]


def paragraph(numbers, words):
    return " ".join(numbers.choices(VOCABULARY, k=words))


def template_texts(numbers, count):
    """Return texts of shared paragraphs, some with a changed word, and of own paragraphs."""
    shared = [paragraph(numbers, numbers.randint(12, 60)) for _ in range(8)]
    texts = set()
    while len(texts) < count:
        parts = numbers.sample(shared, numbers.randint(1, 3))
        if numbers.random() < 0.5:
            words = parts[0].split()
            words[numbers.randrange(len(words))] = f"no{numbers.randrange(1_000)}"
            parts[0] = " ".join(words)
        if numbers.random() < 0.7:
            parts.insert(numbers.randrange(3), paragraph(numbers, numbers.randint(5, 50)))
        texts.add("\n\n".join(parts))
    return sorted(texts)


def prompt_of(numbers, texts):
    shown = []
    for text in numbers.sample(texts, 6):
        first = numbers.randrange(len(text) // 2)
        kind = numbers.randrange(4)
        shown += [
            text,
            text[first : first + 250],
            textwrap.fill(text, 37, initial_indent="  ", subsequent_indent="\t"),
            text[:130] + " [...] " + text[-130:],
        ][kind : kind + 1]
        if numbers.random() < 0.3:
            shown.append(paragraph(numbers, 20))
    return "\n---\n".join(shown)


def compact(text):
    return "".join(text.split())


def common_runs(text, prompt):
    """Return every maximal common run of at least 96 characters, as offsets in the prompt."""
    positions = {}
    for at in range(len(prompt) - 95):
        positions.setdefault(prompt[at : at + 96], []).append(at)
    runs = set()
    for own in range(len(text) - 95):
        for at in positions.get(text[own : own + 96], ()):
            if own and at and text[own - 1] == prompt[at - 1]:
                continue  # it began before
            size = 96
            while text[own + size : own + size + 1] == prompt[at + size : at + size + 1] != "":
                size += 1
            runs.add((at, at + size))
    return sorted(runs)


@pytest.mark.parametrize("seed", range(12))
def test_what_an_obvious_matcher_finds_in_texts_of_templates_is_found(seed):
    numbers = random.Random(seed)
    texts = template_texts(numbers, 40)
    registry = ReferenceRegistry()
    registry.register(Passage(str(n), text) for n, text in enumerate(texts))
    for _ in range(2):
        prompt = prompt_of(numbers, texts)
        whole = compact(prompt)
        matches = registry.match(prompt)
        found = {int(match.passage.passage_id): match for match in matches}
        told = [(match.passage.passage_id, match.passage.text) for match in matches]
        assert len(set(told)) == len(told)
        assert {n for n, match in found.items() if match.whole} == {
            n for n, text in enumerate(texts) if compact(text) in whole
        }
        for match in matches:
            part = compact(prompt[match.start : match.end])
            assert part == compact(match.passage.text)  # nothing that does not stand there
            assert match.passage.text in texts[int(match.passage.passage_id)]
            assert match.whole or len(" ".join(prompt[match.start : match.end].split())) >= 96
        assert_the_rest_is_covered_or_shared(texts, whole, found)


def assert_the_rest_is_covered_or_shared(texts, prompt, found):
    """Assert that no text which was not found has a distinctive part in the prompt."""
    runs = {n: common_runs(compact(text), prompt) for n, text in enumerate(texts)}
    sharing, covered = np.zeros(len(prompt), int), np.zeros(len(prompt), bool)
    for number, own in runs.items():
        for begin, end in own:
            sharing[begin:end] += 1
            covered[begin:end] |= number in found
    for number in runs.keys() - found.keys():
        telling = [
            np.count_nonzero(~covered[begin:end]) >= 20
            and np.count_nonzero(sharing[begin:end] <= 4) >= 20
            for begin, end in runs[number]
        ]
        assert not telling or not all(telling), (number, runs[number])
