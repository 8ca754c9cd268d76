import pytest
from hash_embedder import HashEmbedder

from ragaccel import CompressingRetriever
from ragaccel.errors import ConfigurationError
from ragaccel.passage import Passage

TEXT = "The ferry sleeps at night.\nMina paints boats. Green paint is best.\nRopes lie on the quay."


class Found:
    embedder = HashEmbedder(dimension=500)

    def __init__(self, *passages):
        self.passages = passages

    def search(self, query, k=6):
        return list(self.passages[:k])


def passage(text, name="a", start=100, line=7):
    return Passage(name, text, "Harbour", "a.md", start, start + len(text), None, line)


def search(query, *passages, **options):
    return CompressingRetriever(Found(*passages), **options).search(query)


def test_the_sentences_nearest_to_the_question_are_kept_in_place():
    for count, expected in (
        (1, "Green paint is best."),
        (2, "Mina paints boats. Green paint is best."),
        (9, TEXT),
    ):
        (cut,) = search("Which green paint is of Mina?", passage(TEXT), sentences=count)
        assert cut.text == expected
        assert TEXT[cut.start - 100 : cut.end - 100] == cut.text
        assert cut.line == 7 + TEXT[: cut.start - 100].count("\n")
        assert (cut.passage_id, cut.title, cut.path) == ("a", "Harbour", "a.md")


def test_passages_are_ordered_by_their_best_sentence():
    first, second = passage("Nothing here. Nothing there."), passage("Green paint dries.", "b")
    found = search("green paint", first, second)
    assert [p.passage_id for p in found] == ["b", "a"]
    assert found[0].score > found[1].score
    assert search("x", passage("  ")) == [passage("  ")]  # no sentence: it stays as it is
    assert search("x") == []


def test_a_heading_is_not_taken_for_an_answer():
    whole = passage("# Green paint\n\nIt is best, says Mina of the green.\n\nRopes lie here.")
    for given, expected in (
        (whole, "It is best, says Mina of the green."),
        (passage("# Green paint"), "# Green paint"),
    ):
        assert search("Green paint", given, sentences=1)[0].text == expected


def test_a_margin_leaves_out_what_is_far_from_the_best():
    near, far = passage("Green paint dries."), passage("Ropes lie here.", "c")
    for margin, names in ((None, "abc"), (0.0, "a"), (0.5, "ab"), (2.0, "abc")):
        found = search("green paint", near, passage("Green doors.", "b"), far, margin=margin)
        assert "".join(p.passage_id for p in found) == names
    for options in ({"margin": -0.1}, {"sentences": 0}):
        with pytest.raises(ConfigurationError, match=r"margin|one or more"):
            search("x", **options)
