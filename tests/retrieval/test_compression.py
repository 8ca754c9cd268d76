import numpy as np
import pytest

from ragaccel import CompressingRetriever
from ragaccel.errors import ConfigurationError
from ragaccel.passage import Passage

TEXT = "The ferry sleeps at night.\nMina paints boats. Green paint is best.\nRopes lie on the quay."


class WordEmbedder:
    """One dimension per word, so that texts with shared words are near."""

    def __init__(self):
        self.words = {}

    def embed_documents(self, texts):
        vectors = np.zeros((len(texts), 200), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.lower().replace(".", " ").replace("?", " ").split():
                vectors[row, self.words.setdefault(word, len(self.words))] = 1.0
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)

    def embed_query(self, text):
        return self.embed_documents([text])[0]


class Found:
    embedder = WordEmbedder()

    def __init__(self, *passages):
        self.passages = passages

    def search(self, query, k=6):
        return list(self.passages[:k])


def passage(text, name="a", start=100, line=7):
    return Passage(name, text, "Harbour", "a.md", start, start + len(text), None, line)


def test_the_sentences_nearest_to_the_question_are_kept_in_place():
    whole = passage(TEXT)
    for count, expected in (
        (1, "Green paint is best."),
        (2, "Mina paints boats. Green paint is best."),
        (9, TEXT),
    ):
        (cut,) = CompressingRetriever(Found(whole), sentences=count).search("Which green paint?")
        assert cut.text == expected
        assert TEXT[cut.start - 100 : cut.end - 100] == cut.text
        assert cut.line == 7 + TEXT[: cut.start - 100].count("\n")
        assert (cut.passage_id, cut.title, cut.path) == ("a", "Harbour", "a.md")


def test_passages_are_ordered_by_their_best_sentence():
    first, second = passage("Nothing here. Nothing there."), passage("Green paint dries.", "b")
    found = CompressingRetriever(Found(first, second)).search("green paint")
    assert [p.passage_id for p in found] == ["b", "a"]
    assert found[0].score > found[1].score


def test_what_has_no_sentence_stays_as_it_is():
    empty = passage("  ")
    assert CompressingRetriever(Found(empty)).search("x") == [empty]
    assert CompressingRetriever(Found()).search("x") == []


def test_fewer_than_one_sentence_is_refused():
    with pytest.raises(ConfigurationError, match="one or more"):
        CompressingRetriever(Found(), sentences=0)


def test_a_heading_is_not_taken_for_an_answer():
    whole = passage("# Green paint\n\nIt is best, says Mina of the green.\n\nRopes lie here.")
    (cut,) = CompressingRetriever(Found(whole), sentences=1).search("Green paint")
    assert cut.text == "It is best, says Mina of the green."
    (alone,) = CompressingRetriever(Found(passage("# Green paint")), sentences=1).search(
        "Green paint"
    )
    assert alone.text == "# Green paint"


def test_a_margin_leaves_out_what_is_far_from_the_best():
    found = Found(
        passage("Green paint dries."), passage("Green doors.", "b"), passage("Ropes lie here.", "c")
    )
    names = {
        margin: [
            p.passage_id for p in CompressingRetriever(found, margin=margin).search("green paint")
        ]
        for margin in (None, 0.0, 0.5, 2.0)
    }
    assert names == {None: ["a", "b", "c"], 0.0: ["a"], 0.5: ["a", "b"], 2.0: ["a", "b", "c"]}
    with pytest.raises(ConfigurationError, match="margin"):
        CompressingRetriever(found, margin=-0.1)
