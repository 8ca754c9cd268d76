"""The recipe of the sentence ranker: passages as in use, training that resumes, its adapter."""

import random
import re
from collections import Counter
from dataclasses import replace
from difflib import get_close_matches
from itertools import islice

import pytest
import torch
from hash_embedder import HashEmbedder
from lamps import SUBJECTS, lamps

from ragaccel.retrieval.embedder import find_model_folder, read_tokenizer
from ragaccel.retrieval.encoder import load_encoder
from ragaccel.retrieval.sentence_ranker import RankerNetwork, SentenceRanker
from recipes.ranker.evaluate import evaluate, ranked
from recipes.ranker.examples import ExampleMaker, TrainingExamples, as_typed, names_in
from recipes.ranker.fit import Fit, adapter_of, averaged, batches_of, publish
from recipes.ranker.pages import PageMaker, PageQuestion
from recipes.reader.corpus import TRAIN
from recipes.reader.folder import ANSWER, NOTHING, Folder

FIRST = 2  # segment of a row's first sentence


@pytest.fixture(scope="module")
def tokenizer():
    return read_tokenizer(find_model_folder())


@pytest.fixture(scope="module")
def maker(tmp_path_factory, tokenizer):
    vectors = tmp_path_factory.mktemp("vectors")
    folder = Folder(lamps(), TRAIN, HashEmbedder(), vectors)
    return ExampleMaker(folder, tokenizer)


@pytest.fixture
def network():
    return _network()


def _drawn(maker, number=40):
    drawn = [(n, maker.draw(n, random.Random(n))) for n in islice(maker.folder.order(0), number)]
    return [(number, example) for number, example in drawn if example is not None]


def test_an_example_has_the_sentences_of_whole_passages_and_which_is_right(maker):
    folder = maker.folder
    for number, example in _drawn(maker):
        passages = list(dict.fromkeys(folder.passage_of[row] for row in example.sentences))
        assert 2 <= len(passages) <= 4
        assert [row for at in passages for row in folder.passages[at]] == example.sentences
        assert example.size == len(example.sentences)
        if example.gold < example.size:
            gold = folder.gold_row(folder.questions[number])
            assert example.sentences[example.gold] == gold


def test_few_questions_are_asked_whose_nearest_sentence_answers(maker, monkeypatch):
    def is_easy(number):
        (nearest,) = maker.folder.nearest(number, random.Random(number), count=1)
        return nearest.row == maker.folder.gold_row(maker.folder.questions[number])

    monkeypatch.setattr("recipes.ranker.examples.EASY_SHARE", 1.0)
    easy = {number for number, _ in _drawn(maker) if is_easy(number)}
    assert easy
    monkeypatch.setattr("recipes.ranker.examples.EASY_SHARE", 0.0)
    assert easy.isdisjoint(number for number, _ in _drawn(maker))


def test_passages_without_the_answer_have_no_sentence_with_its_words(maker):
    folder = maker.folder
    for number, question in enumerate(folder.questions[:8]):
        without = maker.make(number, random.Random(number), 3, without=ANSWER)
        if without is not None:
            assert without.gold == without.size
            texts = [folder.sentence(row).casefold() for row in without.sentences]
            assert not any(question.answer.casefold() in text for text in texts)


def test_an_exchanged_name_is_in_none_of_the_passages(tokenizer, tmp_path):
    maker = ExampleMaker(Folder(lamps(), TRAIN, HashEmbedder(), tmp_path), tokenizer)
    changed = 0
    for number, question in enumerate(maker.folder.questions):
        example = maker.make(number, random.Random(number), 3, added=True, exchanged=True)
        if example is None:
            continue
        assert example.gold == example.size
        assert maker.folder.gold_row(question) in example.sentences
        ids, segments = example.rows[0]
        text = tokenizer.decode([i for i, at in zip(ids, segments, strict=True) if at == 1])
        (port,) = re.findall("port [a-z0-9]+", text)
        told = [maker.folder.sentence(row).casefold() for row in example.sentences]
        assert not any(f"{port}." in one for one in told)
        changed += 1
    assert changed > 20


def test_names_and_numbers_of_a_question_are_found():
    assert names_in("When did Nora Pell leave Port-Ellery in 1934?") == [
        "Nora Pell", "Port-Ellery", "1934",
    ]  # fmt: skip
    assert names_in("Why does it cost 1,250 crowns?") == ["1,250"]
    assert names_in("What is it?") == []


def test_a_question_as_typed_keeps_its_order_of_words():
    rng = random.Random(0)
    for question in ("What did Augusta say?", "Why is it so?", "What is it?"):
        words = question.split()
        typed = {as_typed(question, rng) for _ in range(300)}
        assert {question, question.rstrip("?")} <= typed
        assert any("Augusta" in one for one in typed) == ("Augusta" in question)
        for one in typed:
            nearest = [get_close_matches(word, words, 1)[0] for word in one.split()]
            assert nearest == [word for word in words if word in nearest] != []


NAMES = [f"{subject} master" for subject in SUBJECTS]
PHRASES = [f"to the {subject} and back" for subject in SUBJECTS]


@pytest.fixture(scope="module")
def named(tmp_path_factory, tokenizer):
    corpus = lamps()
    answers = [text for pair in zip(NAMES, PHRASES, strict=True) for text in pair]
    corpus.questions = [
        replace(one, answer=answer)
        for one, answer in zip(corpus.questions, answers * 3, strict=True)
    ]
    folder = Folder(corpus, TRAIN, HashEmbedder(), tmp_path_factory.mktemp("named"))
    return ExampleMaker(folder, tokenizer)


def _segment(example, index, tokenizer):
    """Return the text of a sentence of an example's rows."""
    for ids, segments in example.rows:
        if index <= (last := max(segments) - FIRST):
            kept = [i for i, at in zip(ids, segments, strict=True) if at == index + FIRST]
            return tokenizer.decode(kept)
        index -= last + 1
    return None


def test_made_up_pages_have_the_answer_or_not(named):
    pages = PageMaker(named.folder)
    rng = random.Random(0)
    asked = [(n % 2 == 0, pages.draw(rng, answered=n % 2 == 0)) for n in range(400)]
    made = [(answered, one) for answered, one in asked if one is not None]
    assert len(made) > 300
    tables = Counter()
    folder = named.folder
    golds = {one.text: folder.sentence(folder.gold_row(one)) for one in folder.questions}
    for answered, one in made:
        assert (one.gold is not None) == answered
        lines = one.pages[0][1]
        assert answered or golds.get(one.text) not in lines
        thing = re.sub(r" at \w+ master$", "", one.text)  # without the name of the page
        in_page = [line for line in lines for name in NAMES if name in thing and name in line]
        if answered and in_page:
            assert lines[one.gold] in in_page
            tables["answered"] += 1
        elif not answered and in_page:
            tables["near miss"] += 1
    assert min(tables["answered"], tables["near miss"]) > 10


def test_a_made_up_page_keeps_its_answer_among_other_passages(named, tokenizer):
    class OneQuestion:
        def draw(self, _rng, *, answered):
            page = ("Prices", ["| What | Price |", "| green lamp | 12 pounds |", "| oil | 3 |"])
            return PageQuestion("price of a green lamp", [page], 1 if answered else None)

    for seed in range(40):
        example = named.draw_page(OneQuestion(), random.Random(seed))
        if example.gold < example.size:
            assert "12 pounds" in _segment(example, example.gold, tokenizer)


def test_batches_hold_every_example_once(maker):
    examples = [example for _, example in _drawn(maker)]
    batches = batches_of(examples, 1024)
    assert sorted(id(one) for batch in batches for one in batch) == sorted(map(id, examples))
    for batch in batches:
        rows = [row for example in batch for row in example.rows]
        longest = max(len(ids) for ids, _ in rows)
        assert len(batch) == 1 or longest * len(rows) <= 1024


def _interrupted_after(step, count):
    left = iter(range(count))

    def run(batch):
        if next(left, None) is None:
            raise KeyboardInterrupt
        step(batch)

    return run


def _network():
    return RankerNetwork(load_encoder(find_model_folder(), "cpu"))


def test_training_lowers_the_loss_and_resumes_to_the_same_adapter(
    maker, named, network, tmp_path, monkeypatch
):
    monkeypatch.setattr("recipes.ranker.fit.BLOCK", 20)
    monkeypatch.setattr("recipes.ranker.fit.WARM_UP_STEPS", 1)
    monkeypatch.setattr("recipes.training_run.SECONDS_BETWEEN_CHECKPOINTS", 0)
    settings = {"tokens": 16_000, "learning_rate": 2e-3}
    whole = Fit(network, TrainingExamples(named, maker), tmp_path / "whole", **settings)
    before = [p.clone() for p in network.encoder.parameters() if not p.requires_grad]
    whole.run()
    losses = [row["loss"] for row in whole.progress.log]
    assert sum(losses[-2:]) < 0.9 * sum(losses[:2])
    frozen = [p for p in network.encoder.parameters() if not p.requires_grad]
    assert all(map(torch.equal, before, frozen))

    interrupted = Fit(_network(), TrainingExamples(named, maker), tmp_path / "parts", **settings)
    monkeypatch.setattr(interrupted, "_step", _interrupted_after(interrupted._step, 2))
    with pytest.raises(KeyboardInterrupt):
        interrupted.run()
    resumed = Fit(_network(), TrainingExamples(named, maker), tmp_path / "parts", **settings)
    resumed.run()
    for name, parameter in whole.trained.items():
        assert torch.equal(parameter, resumed.trained[name])

    publish(averaged([adapter_of(network)] * 2), tmp_path / "adapter.safetensors")
    ranker = SentenceRanker(find_model_folder(), tmp_path / "adapter.safetensors", "cpu")
    example = maker.make(1, random.Random(1), 3, without=NOTHING, added=True)
    folder = maker.folder
    asked = [
        (folder.title(rows[0]), [folder.sentence(row) for row in rows])
        for rows in (
            folder.passages[at]
            for at in dict.fromkeys(folder.passage_of[row] for row in example.sentences)
        )
    ]
    question = folder.questions[1].text
    said = [score for of in ranker.scores(question, asked) for score in of]
    (expected,) = ranked(network, [example])
    assert said == pytest.approx(expected, abs=0.05)  # the adapter is kept in half precision


def test_the_mean_of_runs_changes_a_matrix_by_the_mean_of_their_changes():
    runs = [
        {"q.lora_A.weight": torch.randn(2, 6), "q.lora_B.weight": torch.randn(5, 2)}
        | {"scale": torch.tensor(float(number))}
        for number in (4, 7)
    ]
    mean = averaged(runs)
    changes = [one["q.lora_B.weight"] @ one["q.lora_A.weight"] for one in (*runs, mean)]
    torch.testing.assert_close((changes[0] + changes[1]) / 2, changes[2])
    assert mean["scale"] == 5.5


def test_figures_are_shares_of_the_questions(maker, network):
    figures = evaluate(network, maker, questions=6)
    assert figures["questions"] == 6
    assert figures["right"] <= figures["among_five"] <= figures["found"] <= 100
    assert 0 <= figures["off_topic"] <= 100
