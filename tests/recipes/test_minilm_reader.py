"""The recipe of the bundled reader: questions, prompts as in use, training, a stock model."""

import json
import lzma
import random

import pytest
import torch
from hash_embedder import HashEmbedder
from tokenizers import Tokenizer as Backend, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel

from ragaccel.errors import ConfigurationError
from ragaccel.models import Tokenizer
from ragaccel.training import read_samples, write_samples
from recipes.minilm_reader import samples
from recipes.minilm_reader.corpus import HELD_OUT, TRAIN, Corpus, Paragraph, Question, load_corpus
from recipes.minilm_reader.evaluate import evaluate
from recipes.minilm_reader.examples import ExampleMaker
from recipes.minilm_reader.fit import Fit, batched
from recipes.minilm_reader.nearest import ANSWER, ARTICLE, Folder
from recipes.minilm_reader.network import TrainingForward, new_reader
from recipes.minilm_reader.publish import publish
from recipes.minilm_reader.vocabulary import CITATIONS, MARKERS, REFUSAL, train_tokenizer

SUBJECTS = ("harbour", "lantern", "granite", "ferry", "orchard", "glacier", "railway", "violin")


def _corpus():
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


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([f" {s}" for p in _corpus().paragraphs for s in p.sentences], 700)


@pytest.fixture(scope="module")
def maker(tokenizer, tmp_path_factory):
    cache = tmp_path_factory.mktemp("vectors")
    return ExampleMaker(Folder(_corpus(), TRAIN, HashEmbedder(), cache), tokenizer)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A folder with a small BERT and its word pieces."""
    folder = tmp_path_factory.mktemp("encoder")
    words = [
        "[PAD]",
        "[UNK]",
        "the",
        "of",
        "keeper",
        "boxes",
        "near",
        "port",
        "s",
        "##s",
        "moved",
        ".",
    ]
    words += [f"{digit}" for digit in range(10)] + [f"##{digit}" for digit in range(10)]
    backend = Backend(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=5, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=512,
    )  # fmt: skip
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


@pytest.fixture
def reader(tokenizer, encoder):
    torch.manual_seed(0)
    return new_reader(tokenizer, encoder)


def _drawn(maker, count=60):
    rng = random.Random(3)
    numbers = [rng.randrange(len(maker.folder.questions)) for _ in range(3 * count)]
    return [e for n in numbers if (e := maker.draw(n, rng)) is not None][:count]


def test_the_answer_is_one_of_the_marked_sentences_and_of_those_alone(maker, tokenizer):
    for example in _drawn(maker):
        ids = example.token_ids
        answer = ids[example.answer_start + 1 :]
        assert answer[-1] == tokenizer.eos_token_id
        prompt = ids[: example.answer_start]
        spans = [prompt[i : i + len(answer) - 1] for i in range(len(prompt))]
        assert spans.count(answer[:-1]) == 1
        assert ids[example.sentence_ends[example.gold]] == answer[0]
        is_refusal = example.gold == len(example.sentence_ends) - 1
        question = example.question
        sentence = maker.folder.corpus.paragraphs[question.paragraph].sentences[question.sentence]
        said = tokenizer.decode(answer, skip_special_tokens=True)
        assert said == REFUSAL if is_refusal else said.startswith(sentence)


def test_examples_follow_the_chat_template(maker, tokenizer):
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": " Who left? "}],
        documents=[
            {"title": "Station 1", "text": "", "sentences": ["The ferry left.", "It came back."]},
            {"title": "", "text": "One box.", "sentences": []},
        ],
        add_generation_prompt=True, tokenize=False,
    )  # fmt: skip
    assert rendered == (
        "<bos><question> Who left?<passage> Station 1<s1> The ferry left. [1]<s1>"
        "<s2> It came back. [1]<s2><passage><s3> One box. [2]<s3>"
        f"<none> {REFUSAL}<none><question> Who left?<answer>"
    )
    folder = maker.folder
    example = maker.make(0, random.Random(0), 3, without=ANSWER)
    near = [row for row, _ in folder.nearest(0, random.Random(0), without=ANSWER)[:3]]
    titles = [folder.corpus.paragraphs[folder.paragraph_of(row)].title for row in near]
    documents = [
        {"title": title, "text": "", "sentences": [folder.sentence(row)]}
        for title, row in zip(titles, near, strict=True)
    ]
    asked = [{"role": "user", "content": example.question.text}]
    expected = tokenizer.apply_chat_template(
        asked, documents=documents, add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.decode(example.token_ids[: example.answer_start + 1]) == expected


def test_decoding_gives_plain_text_with_citations_and_loses_nothing(tokenizer):
    text = "<s3> The ferry left. [2]<s4> It came back. [1]"
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    assert decoded == "The ferry left. [2] It came back. [1]"
    assert {*MARKERS, *CITATIONS} <= set(tokenizer.get_vocab())
    for text in ("naïve café — 42 % «ok»", "日本語 🚢 \t\n x", "  two  spaces "):
        assert tokenizer.decode(tokenizer.encode(" " + text, add_special_tokens=False)) == text


def test_the_nearest_sentences_stand_first_and_without_the_answer_it_is_not_there(maker):
    folder = maker.folder
    for number, question in enumerate(folder.questions):
        found = folder.nearest(number, random.Random(number))
        scores = [score for _, score in found]
        assert scores == sorted(scores, reverse=True)
        assert len({folder.paragraph_of(row) for row, _ in found}) <= 6
        for row, score in found:
            own = folder.vectors[row] @ folder.question_vectors[number]
            assert score == pytest.approx(float(own))
        without = folder.nearest(number, random.Random(number), without=ANSWER)
        assert not any(question.answer in folder.sentence(row) for row, _ in without)
        article = folder.corpus.paragraphs[question.paragraph].article
        elsewhere = folder.nearest(number, random.Random(number), without=ARTICLE)
        articles = {folder.corpus.paragraphs[folder.paragraph_of(r)].article for r, _ in elsewhere}
        assert articles
        assert article not in articles


def test_vectors_are_kept(tmp_path):
    first = Folder(_corpus(), TRAIN, HashEmbedder(), tmp_path)
    again = Folder(_corpus(), TRAIN, _NoEmbedder(), tmp_path)
    assert (first.vectors == again.vectors).all()
    assert (first.question_vectors == again.question_vectors).all()


class _NoEmbedder(HashEmbedder):
    def embed_documents(self, texts):
        raise AssertionError("embedded again")


def test_a_seed_draws_the_same_examples(maker):
    one, two = maker.shuffled(7), maker.shuffled(7)
    assert [next(one).token_ids for _ in range(90)] == [next(two).token_ids for _ in range(90)]


def test_embeddings_are_those_of_the_word_pieces(reader, tokenizer, encoder):
    known = BertModel.from_pretrained(encoder, add_pooling_layer=False).embeddings.word_embeddings
    own = reader.get_input_embeddings().weight
    pieces = Backend.from_file(str(encoder / "tokenizer.json")).get_vocab()
    for token, piece in ((" boxes", "boxes"), (" near", "near"), ("s", "##s")):
        (number,) = tokenizer.encode(token, add_special_tokens=False)
        nearest = torch.cosine_similarity(own[number][None], known.weight)
        assert int(nearest.argmax()) == pieces[piece]


def test_batches_point_at_the_right_tokens(maker, tokenizer):
    batch = batched(_drawn(maker, 8), tokenizer.pad_token_id)
    rows = torch.arange(8)
    assert torch.equal(batch.token_ids.flatten()[batch.copied + 1], batch.copies)
    assert torch.equal(batch.token_ids[rows, batch.start + 1], batch.chosen)
    ends = batch.ends.gather(1, batch.gold[:, None])[:, 0]
    assert torch.equal(batch.token_ids[rows, ends], batch.chosen)
    cut = batched(_drawn(maker, 8), tokenizer.pad_token_id, random.Random(0))
    assert len(cut.copied) < len(batch.copied)


def test_the_training_pass_is_the_models_own(reader, maker):
    ids = torch.tensor([_drawn(maker, 1)[0].token_ids])
    with torch.inference_mode():
        hidden, scores = TrainingForward(reader)(ids)
        torch.testing.assert_close(reader.cls(hidden), reader(ids).logits, rtol=1e-4, atol=1e-4)
    assert scores.shape == ids.shape


def test_training_learns_and_resumes_where_it_stopped(tmp_path, reader, maker, monkeypatch):
    torch.manual_seed(1)
    monkeypatch.setattr("recipes.minilm_reader.fit.BATCH_TOKENS", 800)
    monkeypatch.setattr("recipes.minilm_reader.fit.SORTED_EXAMPLES", 16)
    monkeypatch.setattr("recipes.minilm_reader.fit.WARM_UP_STEPS", 1)
    for rate in ("LEARNING_RATE", "EMBEDDING_RATE", "HEAD_RATE"):
        monkeypatch.setattr(f"recipes.minilm_reader.fit.{rate}", 3e-3)
    first = Fit(reader, maker, tmp_path, tokens=20_000)
    first.run()
    again = Fit(reader, maker, tmp_path, tokens=40_000)
    assert again.progress.tokens == first.progress.tokens
    again.run()
    losses = [row["choice"] for row in again.progress.log]
    assert len(losses) == again.progress.steps > first.progress.steps
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert not (tmp_path / "checkpoint.tmp").exists()


def test_an_evaluation_counts_each_question_once(reader, maker):
    figures = evaluate(reader, maker, questions=12)
    assert figures["all"]["questions"] == figures["lamps"]["questions"] == 12
    assert 0 <= figures["all"]["right"] <= figures["all"]["found"] <= 100


def test_a_published_reader_is_a_stock_model(tmp_path, reader, tokenizer, maker):
    publish(reader, tokenizer, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert type(model).__name__ == "BertLMHeadModel"
    assert model.dtype == torch.float32
    assert loaded.chat_template == tokenizer.chat_template
    assert "/" not in json.loads((tmp_path / "tokenizer_config.json").read_text()).get(
        "name_or_path", ""
    )
    ids = torch.tensor([_drawn(maker, 1)[0].token_ids])
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, reader(ids).logits, rtol=2e-2, atol=2e-2)


def test_questions_become_training_samples(maker, tokenizer, tmp_path):
    path = tmp_path / "samples.jsonl"
    drawn = _drawn(maker, 12)
    assert write_samples(path, map(samples.row, drawn)) == 12
    found = read_samples(path, Tokenizer(tokenizer), vocab_size=len(tokenizer))
    for sample, example in zip(found.rows, drawn, strict=True):
        assert tokenizer.decode(sample.prompt_ids[-1]) == "<answer>"
        assert [*sample.prompt_ids, *sample.answer_ids] == example.token_ids
        assert tokenizer.decode(sample.answer_ids[0]) in (*MARKERS, "<none>")


def _write_sets(folder, monkeypatch):
    monkeypatch.setattr("recipes.minilm_reader.corpus.QUESTION_SETS", ("lamps",))
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
