"""A corpus of made-up articles, each with two questions a paragraph."""

import random

from recipes.reader.corpus import TRAIN, Corpus, Paragraph, Question

SUBJECTS = ("harbour", "lantern", "granite", "ferry", "orchard", "glacier", "railway", "violin")


def lamps():
    """Return twelve articles of two paragraphs."""
    rng = random.Random(5)
    paragraphs, questions = [], []
    for number in range(24):
        sentences = tuple(
            f"The {rng.choice(SUBJECTS)} of Keeper {number} moved {rng.randint(10, 9999)} boxes "
            f"near Port {chr(65 + i)}{number}."
            for i in range(5)
        )
        station = f"Station {number // 2}"
        paragraphs.append(Paragraph(station, sentences, station, TRAIN))
        for i in (0, 3):
            port = f"Port {chr(65 + i)}{number}"
            questions.append(Question(f"Which boxes moved near {port}?", number, i, port, "lamps"))
    return Corpus(paragraphs, questions)
