"""The recipe of the sentence ranker: passages as in use, training that resumes, its adapter."""

import random
from itertools import islice

import pytest
import torch
from hash_embedder import HashEmbedder
from lamps import lamps

from ragaccel.errors import ConfigurationError
from ragaccel.retrieval.embedder import find_model_folder, read_tokenizer
from ragaccel.retrieval.encoder import load_encoder
from ragaccel.retrieval.sentence_ranker import RankerNetwork, SentenceRanker
from recipes.ranker.evaluate import evaluate, ranked
from recipes.ranker.examples import ExampleMaker
from recipes.ranker.fit import Fit, batches_of, publish
from recipes.reader.corpus import TRAIN
from recipes.reader.folder import ANSWER, NOTHING, Folder


@pytest.fixture(scope="module")
def maker(tmp_path_factory):
    vectors = tmp_path_factory.mktemp("vectors")
    folder = Folder(lamps(), TRAIN, HashEmbedder(), vectors)
    return ExampleMaker(folder, read_tokenizer(find_model_folder()))


@pytest.fixture
def network():
    return _network()


def _drawn(maker, number=40):
    drawn = [maker.draw(n, random.Random(n)) for n in islice(maker.folder.order(0), number)]
    return [example for example in drawn if example is not None]


def test_an_example_has_the_sentences_of_whole_passages_and_which_is_right(maker):
    folder = maker.folder
    for example in _drawn(maker):
        passages = list(dict.fromkeys(folder.passage_of[row] for row in example.sentences))
        assert 2 <= len(passages) <= 4
        assert [row for at in passages for row in folder.passages[at]] == example.sentences
        if example.gold < len(example.sentences):
            gold = folder.gold_row(folder.questions[example.number])
            assert example.sentences[example.gold] == gold
    without = maker.make(0, random.Random(0), 3, without=ANSWER)
    assert without.gold == len(without.sentences)
    assert folder.gold_row(folder.questions[0]) not in without.sentences


def test_batches_hold_every_example_once(maker):
    examples = _drawn(maker)
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
    maker, network, tmp_path, monkeypatch
):
    monkeypatch.setattr("recipes.ranker.fit.BLOCK", 8)
    monkeypatch.setattr("recipes.ranker.fit.WARM_UP_STEPS", 1)
    monkeypatch.setattr("recipes.ranker.fit.SECONDS_BETWEEN_CHECKPOINTS", 0)
    settings = {"tokens": 16_000, "learning_rate": 2e-3}
    whole = Fit(network, maker, tmp_path / "whole", **settings)
    before = [p.clone() for p in network.encoder.parameters() if not p.requires_grad]
    whole.run()
    losses = [row["loss"] for row in whole.log]
    assert sum(losses[-2:]) < 0.9 * sum(losses[:2])
    frozen = [p for p in network.encoder.parameters() if not p.requires_grad]
    assert all(map(torch.equal, before, frozen))

    interrupted = Fit(_network(), maker, tmp_path / "parts", **settings)
    monkeypatch.setattr(interrupted, "_step", _interrupted_after(interrupted._step, 3))
    with pytest.raises(KeyboardInterrupt):
        interrupted.run()
    resumed = Fit(_network(), maker, tmp_path / "parts", **settings)
    resumed.run()
    for one, other in zip(whole.trained, resumed.trained, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ConfigurationError, match="give those to go on"):
        Fit(_network(), maker, tmp_path / "parts", tokens=1, learning_rate=1.0)

    publish(network, tmp_path / "adapter.safetensors")
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


def test_figures_are_shares_of_the_questions(maker, network):
    figures = evaluate(network, maker, questions=6)
    assert figures["questions"] == 6
    assert figures["right"] <= figures["among_five"] <= figures["found"] <= 100
    assert 0 <= figures["off_topic"] <= 100
