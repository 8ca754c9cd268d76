"""The language of a text, told by its script and its frequent words."""

import pytest

from ragaccel.retrieval.language import language_of


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Who was it an hour ago?", "English"),
        ("kaffemaschine alle lichter gleichzeitig an, was tun", "German"),
        ("was an alle geschickt wurde", "German"),
        ("Iron Man actor", "English"),
        ("Mir space station", "English"),
        ("was it sent to all", "English"),
        ("Anna's phone number: 555 0199.", "English"),
        ("Copper pipe 22 mm: 9.5 l, size S, vitamin C, 3 m", "English"),
        ("l’eau est chaude", "French"),
        ("O preço: 30", "English"),
        ("Siobhan O'Neill: engineer; Jean d'Artagnan: engineer", "English"),
        (
            "What does error E mean at seven o'clock, fish 'n' chips, plan Y, Côte d'Ivoire",
            "English",
        ),
        ("Vitamin E: 15 mg; blood group O; D'Artagnan's office", "English"),
        ("é o sal", "Portuguese"),
        ("È aperto?", "Italian"),
        ("Двери красит Мина", ""),
    ],
)
def test_the_language_of_few_words_is_that_with_most_frequent_ones(text, language):
    assert language_of(text) == language
