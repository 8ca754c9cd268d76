"""People's questions: articles whole in one part, and the sentences nearest to a question."""

import json
import lzma
import random

import pytest
from hash_embedder import HashEmbedder
from lamps import lamps

from ragaccel.errors import ConfigurationError
from recipes.reader.corpus import HELD_OUT, TRAIN, load_corpus
from recipes.reader.folder import ANSWER, ARTICLE, SHARED_WORD_WEIGHT, Folder, content_words


def test_the_nearest_sentences_stand_first_and_without_the_answer_it_is_not_there(tmp_path):
    folder = Folder(lamps(), TRAIN, HashEmbedder(), tmp_path)
    for number, question in enumerate(folder.questions):
        found = folder.nearest(number, random.Random(number))
        asked = content_words(question.text)
        values = []
        for row, score, _ in found:
            words = content_words(f"{folder.title(row)}\n{folder.sentence(row)}")
            values.append(score + SHARED_WORD_WEIGHT * len(asked & words) / len(asked))
        assert values == sorted(values, reverse=True)
        assert len({folder.paragraph_of(row) for row, *_ in found}) <= 6
        for row, score, _ in found:
            own = folder.vectors[row] @ folder.question_vectors[number]
            assert score == pytest.approx(float(own))
        without = folder.nearest(number, random.Random(number), without=ANSWER)
        assert not any(question.answer in folder.sentence(row) for row, *_ in without)
        article = folder.corpus.paragraphs[question.paragraph].article
        elsewhere = folder.nearest(number, random.Random(number), without=ARTICLE)
        articles = {folder.corpus.paragraphs[folder.paragraph_of(r)].article for r, *_ in elsewhere}
        assert articles
        assert article not in articles


def test_vectors_are_kept(tmp_path):
    first = Folder(lamps(), TRAIN, HashEmbedder(), tmp_path)
    again = Folder(lamps(), TRAIN, _NoEmbedder(), tmp_path)
    assert (first.vectors == again.vectors).all()
    assert (first.question_vectors == again.question_vectors).all()


class _NoEmbedder(HashEmbedder):
    def embed_documents(self, texts):
        raise AssertionError("embedded again")


def _write_sets(folder, monkeypatch):
    monkeypatch.setattr("recipes.reader.corpus.QUESTION_SETS", ("lamps",))
    text = "The lamp burns oil. It was lit in 1864."
    row = {"question": "When was it lit?", "answer": "1864", "sentence": "It was lit in 1864."}
    lines = [
        {**row, "passages": [{"title": f"Lamp_{n}", "text": text + f" Keeper {n} left."}]}
        for n in range(80)
    ]
    (folder / "qa").mkdir()
    (folder / "rag").mkdir()
    packed = lzma.compress("\n".join(map(json.dumps, lines)).encode())
    (folder / "qa" / "lamps.jsonl.xz").write_bytes(packed)
    for name in ("squad_like", "nq_open_oracle"):
        (folder / "rag" / f"{name}.jsonl").write_text("")


def test_an_article_is_in_one_part_whole(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match="--data FOLDER"):
        load_corpus(tmp_path)
    _write_sets(tmp_path, monkeypatch)
    corpus = load_corpus(tmp_path)
    assert len(corpus.questions) == len(corpus.paragraphs) == 80
    assert corpus.paragraphs[0].title == "Lamp 0"
    assert all(question.sentence == 1 for question in corpus.questions)
    held_out = {corpus.paragraphs[q.paragraph].article for q in corpus.of_part(HELD_OUT)}
    trained = {corpus.paragraphs[q.paragraph].article for q in corpus.of_part(TRAIN)}
    assert held_out
    assert trained
    assert not held_out & trained
    assert load_corpus(tmp_path).digest() == corpus.digest()


def test_what_other_sets_ask_about_a_held_out_article_of_xquad_is_left_out(tmp_path, monkeypatch):
    _write_sets(tmp_path, monkeypatch)
    monkeypatch.setattr("recipes.reader.corpus.XQUAD_START", 0)
    row = {"question": "What turns?", "answer": "The tide", "passages": [{"title": "Lamp 7"}]}
    row["passages"][0]["text"] = "The tide turns. The lamp does not."
    (tmp_path / "rag" / "squad_like.jsonl").write_text(json.dumps(row))
    corpus = load_corpus(tmp_path)
    about = [p for p in corpus.paragraphs if p.title == "Lamp 7"]
    assert [(p.part, p.sentences[0]) for p in about] == [(HELD_OUT, "The tide turns.")]
    assert len(corpus.paragraphs) == 80
