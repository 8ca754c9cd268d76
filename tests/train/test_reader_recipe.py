import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragaccel.sentences import split_sentences
from ragaccel.train.reader.corpus import Article, HumanQuestion
from ragaccel.train.reader.evaluate import evaluate, outcome
from ragaccel.train.reader.examples import ExampleMaker, Shape
from ragaccel.train.reader.fit import Fit, collate
from ragaccel.train.reader.network import TrainingForward, new_reader
from ragaccel.train.reader.publish import publish
from ragaccel.train.reader.questions import make_question
from ragaccel.train.reader.vocabulary import CITATIONS, MARKERS, REFUSAL, train_tokenizer

SUBJECTS = ("harbour", "lantern", "granite", "ferry", "orchard", "glacier", "railway", "violin")
VERBS = ("carried", "measured", "repaired", "painted", "sheltered", "delivered")


def _articles(count=40):
    rng = random.Random(5)
    articles = []
    for number in range(count):
        sentences = tuple(
            f"The {rng.choice(SUBJECTS)} of Keeper {number} {rng.choice(VERBS)} "
            f"{rng.randint(10, 9999)} {rng.choice(SUBJECTS)} boxes near Port {chr(65 + i)}{number}."
            for i in range(12)
        )
        articles.append(
            Article(f"Station {number}", sentences, "factbook", held_out=number % 5 == 0)
        )
    return articles


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([" " + s for a in _articles() for s in a.sentences], vocab_size=700)


@pytest.fixture(scope="module")
def maker(tokenizer):
    articles = _articles()
    asked = HumanQuestion("Who painted Port B3?", "Station 3", articles[3].sentences, 1, "squad")
    return ExampleMaker([a for a in articles if not a.held_out], [asked], tokenizer, seed=3)


@pytest.fixture(scope="module")
def reader(tokenizer):
    torch.manual_seed(0)
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "pad": tokenizer.pad_token_id,
    }
    return new_reader(len(tokenizer), ids, hidden=64, layers=4)


def test_the_answer_is_one_of_the_marked_sentences(maker, tokenizer):
    for _ in range(200):
        example = maker.make(Shape(256, 3, 80))
        ids = example.token_ids
        assert len(ids) <= 256
        answer = ids[example.answer_start + 1 :]
        assert answer[-1] == tokenizer.eos_token_id
        prompt = ids[: example.answer_start]
        spans = [prompt[i : i + len(answer) - 1] for i in range(len(prompt))]
        assert spans.count(answer[:-1]) == 1, "the answer must stand in the prompt exactly once"
        assert ids[example.sentence_ends[example.gold_end]] == answer[0]


def test_examples_follow_the_chat_template(maker, tokenizer):
    """What training feeds is what the template renders."""
    documents = [
        {"title": "Station 1", "text": "", "sentences": ["The ferry left.", "It came back."]},
        {"title": "", "text": "One box.", "sentences": []},
    ]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": " Who left? "}],
        documents=documents, add_generation_prompt=True, tokenize=False,
    )  # fmt: skip
    assert rendered == (
        "<bos><question> Who left?<passage> Station 1<s1> The ferry left. [1]<s1>"
        "<s2> It came back. [1]<s2><passage><s3> One box. [2]<s3>"
        f"<none> {REFUSAL}<none><question> Who left?<answer>"
    )
    example = maker.make(Shape(256, 3, 80))
    text = tokenizer.decode(example.token_ids, skip_special_tokens=False)
    assert text.startswith("<bos><question> ")
    assert f"<none> {REFUSAL}<none><question> " in text
    assert text.count(example.question) == 2


def test_decoding_gives_plain_text_with_citations(tokenizer):
    ids = tokenizer.encode(
        "<s3> The ferry left. [2]<s4> It came back. [1]", add_special_tokens=False
    )
    assert (
        tokenizer.decode(ids, skip_special_tokens=True) == "The ferry left. [2] It came back. [1]"
    )
    vocabulary = tokenizer.get_vocab()
    assert all(token in vocabulary for token in (*MARKERS, *CITATIONS))


@pytest.mark.parametrize("text", ["naïve café — 42 % «ok»", "日本語 🚢 \t\n x", "  two  spaces "])
def test_the_tokenizer_loses_nothing(tokenizer, text):
    ids = tokenizer.encode(" " + text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_questions_share_words_with_their_sentence_only():
    rng = random.Random(0)
    sentence = (
        "The granite tower of Keeper Island was built by Anna Verrill in 1884 over nine winters."
    )
    made = [make_question(rng, sentence, "History") for _ in range(300)]
    assert all(question is not None for question in made)
    assert len(set(made)) > 200
    stems = {word[:4].lower() for word in sentence.replace(".", "").split()}
    content = [w for q in made for w in q.rstrip("?").split() if w[:4].lower() in stems]
    assert len(content) > 300 * 2
    assert make_question(rng, "It is so.", "") is None


def test_distractors_never_hold_the_answer(maker):
    for _ in range(200):
        example = maker.make(Shape(512, 4, 110))
        ends, ids = example.sentence_ends, example.token_ids
        starts = [max(i for i in range(end) if ids[i] == ids[end]) for end in ends]
        texts = [tuple(ids[s + 1 : e - 1]) for s, e in zip(starts, ends, strict=True)]
        gold = texts[example.gold_end]
        assert texts.count(gold) == 1


def test_the_training_pass_is_the_models_own(reader, maker):
    example = maker.make(Shape(256, 3, 80))
    ids = torch.tensor([example.token_ids])
    with torch.inference_mode():
        expected = reader(ids).logits
        hidden, _, scores = TrainingForward(reader)(ids)
        torch.testing.assert_close(reader.lm_head(hidden), expected, rtol=1e-4, atol=1e-4)
    assert scores.shape == ids.shape


def test_collate_points_at_the_right_tokens(maker, tokenizer):
    examples = [maker.make(Shape(256, 3, 80)) for _ in range(4)]
    batch = collate(examples, 256, tokenizer.pad_token_id)
    flat = batch.token_ids.flatten()
    assert torch.equal(flat[batch.positions + 1], batch.next_ids)
    assert int(batch.first.sum()) == 4
    gold = batch.ends.gather(1, batch.gold[:, None])[:, 0]
    markers = batch.token_ids[torch.arange(4), gold]
    assert torch.equal(markers, batch.next_ids[batch.first])


def test_training_resumes_where_it_stopped(tmp_path, reader, maker, monkeypatch):
    torch.manual_seed(1)
    monkeypatch.setattr("ragaccel.train.reader.fit.CURRICULUM", ((0.0, Shape(192, 2, 60), 2),))
    first = Fit(reader, maker, tmp_path, minutes=0.02, compiled=False)
    first.run()
    assert first.progress.steps > 0
    again = Fit(reader, maker, tmp_path, minutes=0.04, compiled=False)
    again.run()
    assert again.progress.steps > first.progress.steps
    assert again.progress.tokens > first.progress.tokens
    assert not (tmp_path / "checkpoint.tmp").exists()


def test_a_published_reader_is_a_stock_model(tmp_path, reader, tokenizer, maker):
    publish(reader, tokenizer, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.float32
    assert loaded.chat_template == tokenizer.chat_template
    assert "/" not in json.loads((tmp_path / "tokenizer_config.json").read_text()).get(
        "name_or_path", ""
    )
    ids = torch.tensor([maker.make(Shape(256, 3, 80)).token_ids])
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, reader(ids).logits, rtol=2e-2, atol=2e-2)


def test_figures_know_right_from_wrong(reader, maker):
    class Oracle(torch.nn.Module):
        """Says every next token right."""

        device = torch.device("cpu")

        def forward(self, ids):
            logits = torch.zeros(1, ids.shape[1], 700)
            shifted = self.answer[1 : ids.shape[1] + 1]
            logits[0, torch.arange(len(shifted)), torch.tensor(shifted)] = 1.0
            return type("Output", (), {"logits": logits})

    oracle = Oracle()
    example = maker.make(Shape(256, 3, 80))
    oracle.answer = example.token_ids
    assert outcome(oracle, example)["verbatim"]
    figures = evaluate(reader, maker, examples=3)
    assert set(figures) == {"made", "squad"}
    assert figures["made"]["verbatim"] == 0.0


def test_sentences_are_what_the_template_numbers():
    assert split_sentences("One stands here. Two follows it.") == [
        "One stands here.",
        "Two follows it.",
    ]
