import json
import random

import pytest
import torch
from hash_embedder import HashEmbedder
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragaccel.errors import ConfigurationError
from ragaccel.models import Tokenizer
from ragaccel.training import read_samples, write_samples
from recipes.reader import samples
from recipes.reader.batches import BATCH_TOKENS, Batches
from recipes.reader.corpus import Article, HumanQuestion
from recipes.reader.entity_replacement import EntityReplacer
from recipes.reader.examples import ExampleMaker
from recipes.reader.fit import Fit
from recipes.reader.network import TrainingForward, new_reader
from recipes.reader.passages import Shape
from recipes.reader.publish import publish
from recipes.reader.vocabulary import CITATIONS, MARKERS, REFUSAL, train_tokenizer

SMALL = Shape(192, 2, 60)
FOUND = Shape(384, 4, 150, min_passages=2, max_sentences=2)
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
            Article(f"Station {number}", sentences, "tech_docs", held_out=number % 5 == 0)
        )
    return articles


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([" " + s for a in _articles() for s in a.sentences], vocab_size=700)


@pytest.fixture(scope="module")
def maker(tokenizer):
    articles = _articles()
    asked = HumanQuestion(
        "Who painted Port B3?", "Station 3", articles[3].sentences, 1, "squad", answer="Port B3"
    )
    trained = [a for a in articles if not a.held_out]
    return ExampleMaker(trained, [asked], tokenizer, seed=3, embedder=HashEmbedder())


@pytest.fixture(scope="module")
def reader(tokenizer):
    torch.manual_seed(0)
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return new_reader(len(tokenizer), ids, hidden=64, layers=4)


def test_the_answer_is_one_of_the_marked_sentences_and_of_those_alone(maker, tokenizer):
    for shape in (Shape(256, 3, 80), Shape(512, 4, 110)):
        for _ in range(100):
            example = maker.make(shape)
            ids = example.token_ids
            assert len(ids) <= shape.length
            answer = ids[example.answer_start + 1 :]
            assert answer[-1] == tokenizer.eos_token_id
            prompt = ids[: example.answer_start]
            spans = [prompt[i : i + len(answer) - 1] for i in range(len(prompt))]
            assert spans.count(answer[:-1]) == 1
            assert ids[example.sentence_ends[example.gold_end]] == answer[0]
            texts = sentences_of(example)
            assert texts.count(texts[example.gold_end]) == 1


def test_examples_follow_the_chat_template(maker, tokenizer):
    """Training examples have the format of the chat template."""
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


def test_decoding_gives_plain_text_with_citations_and_loses_nothing(tokenizer):
    text = "<s3> The ferry left. [2]<s4> It came back. [1]"
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    assert decoded == "The ferry left. [2] It came back. [1]"
    assert {*MARKERS, *CITATIONS} <= set(tokenizer.get_vocab())
    for text in ("naïve café — 42 % «ok»", "日本語 🚢 \t\n x", "  two  spaces "):
        assert tokenizer.decode(tokenizer.encode(" " + text, add_special_tokens=False)) == text


def sentences_of(example):
    """Return the ids of all sentences and the refusal, without citations and markers."""
    ends, ids = example.sentence_ends, example.token_ids
    starts = [max(i for i in range(end) if ids[i] == ids[end]) for end in ends]
    return [tuple(ids[s + 1 : e - 1]) for s, e in zip(starts, ends, strict=True)]


def test_found_passages_are_short_and_the_nearest_stand_first(maker, tokenizer):
    embedder = HashEmbedder()
    first = rising = 0
    for _ in range(100):
        example = maker.make(FOUND)
        citations = [example.token_ids[end - 1] for end in example.sentence_ends[:-1]]
        assert 2 <= len(set(citations)) <= 4
        assert max(citations.count(c) for c in citations) <= 2
        texts = [tokenizer.decode(text) for text in sentences_of(example)]
        others = [text for at, text in enumerate(texts) if at != example.gold_end]
        assert texts[example.gold_end] not in others
        assert example.origin == "made" or not any("Port B3." in text for text in others)
        question = embedder.embed_documents([example.question])[0]
        near = embedder.embed_documents(texts[:-1]) @ question
        best = [
            max(n for n, c in zip(near, citations, strict=True) if c == number)
            for number in dict.fromkeys(citations)
        ]
        first += best[0] == max(best)
        rising += best[0] < best[-1]
    assert first > 60
    assert rising < 20


def test_a_seed_draws_the_same_examples_whatever_was_drawn_before(maker, tokenizer):
    drawn = []
    for _ in range(2):
        maker.make(FOUND)
        maker.reseed(7)
        drawn.append([maker.make(shape).token_ids for shape in (FOUND, SMALL, FOUND)])
    assert drawn[0] == drawn[1]
    with pytest.raises(ConfigurationError, match="embedder"):
        ExampleMaker(_articles(5), [], tokenizer).make(FOUND)


def test_a_replaced_name_is_the_same_everywhere_and_no_two_become_one():
    texts = [" Paris met London in 1966 with 25 ships, and film reels of 1874 left Paris. Film!"]
    tokenizer = train_tokenizer(texts * 50, vocab_size=420)
    entity_replacer = EntityReplacer(tokenizer, random.Random(0))
    ids = tokenizer.encode(texts[0], add_special_tokens=False)
    for _ in range(30):
        other = {}
        replaced = entity_replacer.replace(ids, other)
        assert entity_replacer.replace(ids, other) == replaced != ids
        assert len(set(other.values())) == len(other)
        assert len(set(replaced)) == len(set(ids))
        written = tokenizer.decode(replaced)
        assert written.count(" ") == texts[0].strip().count(" ")
        assert "Film" in written, "a word that is written small as well stays"


def test_batches_hold_examples_of_one_length_and_point_at_the_right_tokens(maker, tokenizer):
    batches = Batches(maker, tokenizer.pad_token_id)
    for _ in range(4):
        batch = batches.draw(((0.5, SMALL), (0.5, FOUND)))
        rows, length = batch.token_ids.shape
        assert rows == BATCH_TOKENS // length
        assert bool((batch.token_ids[:, 0] == tokenizer.bos_token_id).all())
        assert torch.equal(batch.token_ids.flatten()[batch.positions + 1], batch.next_ids)
        assert int(batch.first.sum()) == rows
        gold = batch.ends.gather(1, batch.gold[:, None])[:, 0]
        markers = batch.token_ids[torch.arange(rows), gold]
        assert torch.equal(markers, batch.next_ids[batch.first])


def test_the_training_pass_is_the_models_own(reader, maker):
    example = maker.make(Shape(256, 3, 80))
    ids = torch.tensor([example.token_ids])
    with torch.inference_mode():
        expected = reader(ids).logits
        hidden, _, scores = TrainingForward(reader)(ids)
        torch.testing.assert_close(reader.lm_head(hidden), expected, rtol=1e-4, atol=1e-4)
    assert scores.shape == ids.shape


def test_training_resumes_where_it_stopped(tmp_path, reader, maker, monkeypatch):
    torch.manual_seed(1)
    monkeypatch.setattr("recipes.reader.fit.CURRICULUM", ((0.0, ((1.0, SMALL),)),))
    monkeypatch.setattr("recipes.reader.batches.BATCH_TOKENS", 400)
    first = Fit(reader, maker, tmp_path, tokens=1000, compiled=False)
    first.run()
    assert first.progress.steps == 3
    again = Fit(reader, maker, tmp_path, tokens=2000, compiled=False)
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


def test_questions_become_training_samples(maker, tokenizer, tmp_path):
    path = tmp_path / "samples.jsonl"
    drawn = samples.rows(maker, 12)
    assert write_samples(path, drawn) == 12
    found = read_samples(path, Tokenizer(tokenizer), vocab_size=len(tokenizer))
    assert len(found.rows) == 12
    for sample in found.rows:
        assert tokenizer.decode(sample.prompt_ids[-1]) == "<answer>"
        assert sample.answer_ids[-1] == tokenizer.eos_token_id
        marker = tokenizer.decode(sample.answer_ids[0])
        assert marker in (*MARKERS, "<none>")
    example = maker.make(SMALL)
    row = samples.row(example)
    assert [*row["prompt_ids"], *row["answer_ids"]] == example.token_ids
    assert row["question"] == example.question
