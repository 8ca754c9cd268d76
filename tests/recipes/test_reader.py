"""The recipe of the bundled reader: prompts as in use, training that resumes, a stock model."""

import json
import random
from functools import partial
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from hash_embedder import HashEmbedder
from lamps import lamps
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragaccel.errors import ConfigurationError
from ragaccel.models import Tokenizer
from ragaccel.training import read_samples, write_samples
from recipes.reader import samples
from recipes.reader.batches import batched, batches_of
from recipes.reader.corpus import TRAIN
from recipes.reader.evaluate import chances, evaluate
from recipes.reader.examples import ExampleMaker
from recipes.reader.fit import Fit
from recipes.reader.folder import ANSWER, Folder, Nearest
from recipes.reader.muon import orthogonal
from recipes.reader.network import TrainingForward, new_reader
from recipes.reader.publish import publish
from recipes.reader.vocabulary import CITATIONS, MARKERS, REFUSAL, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([f" {s}" for p in lamps().paragraphs for s in p.sentences], 700)


@pytest.fixture(scope="module")
def maker(tokenizer, tmp_path_factory):
    cache = tmp_path_factory.mktemp("vectors")
    return ExampleMaker(Folder(lamps(), TRAIN, HashEmbedder(), cache), tokenizer)


@pytest.fixture
def reader(tokenizer):
    torch.manual_seed(0)
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return new_reader(len(tokenizer), ids, hidden=64, layers=4)


def _drawn(maker, count=60, shuffled_share=0.5):
    rng = random.Random(3)
    numbers = [rng.randrange(len(maker.folder.questions)) for _ in range(3 * count)]
    made = (maker.draw(number, rng, shuffled_share) for number in numbers)
    return list(islice((example for example in made if example is not None), count))


def test_short_prompts_come_first_with_their_answers(maker, tokenizer, reader, tmp_path):
    fit = Fit(reader, maker, tmp_path, tokens=1_000_000, learning_rate=1e-3)
    first = fit.draw(0)
    assert sum(len(batch.gold) for batch in first) > 20
    for batch in first:  # two sentences and the refusal, never the right one
        assert batch.end_mask.shape[1] == 3
        assert bool((batch.gold < 2).all())
        ends = (batch.token_ids == tokenizer.eos_token_id).any(1)
        assert bool(ends.all())
    fit.progress.tokens = 400_000
    later = fit.draw(0)
    assert max(batch.end_mask.shape[1] for batch in later) > 3
    assert not all(bool((b.token_ids == tokenizer.eos_token_id).any(1).all()) for b in later)


def test_the_answer_is_one_of_the_marked_sentences_and_of_those_alone(maker, tokenizer):
    refused = 0
    for example in _drawn(maker):
        ids = example.token_ids
        answer = ids[example.answer_start + 1 :]
        assert answer[-1] == tokenizer.eos_token_id
        prompt = ids[: example.answer_start]
        spans = [prompt[i : i + len(answer) - 1] for i in range(len(prompt))]
        assert spans.count(answer[:-1]) == 1
        assert ids[example.sentence_ends[example.gold]] == answer[0]
        is_refusal = example.gold == len(example.sentence_ends) - 1
        refused += is_refusal
        question = example.question
        sentence = maker.folder.corpus.paragraphs[question.paragraph].sentences[question.sentence]
        said = tokenizer.decode(answer, skip_special_tokens=True)
        assert said == REFUSAL if is_refusal else said.startswith(sentence)
        shown = tokenizer.decode(prompt, skip_special_tokens=True)
        assert not (is_refusal and sentence in shown)
    assert 0 < refused < 30


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
    near = folder.nearest(0, random.Random(0), without=ANSWER)[:3]
    assert example.nearest == near
    documents = [
        {"title": one.passage.title, "text": "", "sentences": [one.text]}
        for one in folder.sentences_of(example.nearest)
    ]
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": example.question.text}],
        documents=documents, add_generation_prompt=True, tokenize=False,
    )  # fmt: skip
    assert tokenizer.decode(example.token_ids[: example.answer_start + 1]) == expected


def test_decoding_gives_plain_text_with_citations_and_loses_nothing(tokenizer):
    text = "<s3> The ferry left. [2]<s4> It came back. [1]"
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    assert decoded == "The ferry left. [2] It came back. [1]"
    assert {*MARKERS, *CITATIONS} <= set(tokenizer.get_vocab())
    for text in ("naïve café — 42 % «ok»", "日本語 🚢 \t\n x", "  two  spaces "):
        assert tokenizer.decode(tokenizer.encode(" " + text, add_special_tokens=False)) == text


def test_a_token_matches_if_the_question_has_its_word(maker, tokenizer):
    for example in _drawn(maker, 20):
        for place, is_match in example.matches.items():
            word = tokenizer.decode(example.token_ids[place]).strip()
            if word in ("boxes", "moved", "of", "Keeper"):
                assert is_match == (word in ("boxes", "moved"))


def test_batches_hold_every_example_once_and_point_at_the_right_tokens(maker, tokenizer):
    examples = _drawn(maker)
    batches = batches_of(examples, tokenizer.pad_token_id, 2048, random.Random(0))
    assert sum(len(batch.start) for batch in batches) == len(examples)
    passage = tokenizer.convert_tokens_to_ids("<passage>")
    copied = 0
    for batch in batches:
        rows, length = torch.arange(len(batch.start)), batch.token_ids.shape[1]
        flat = batch.token_ids.flatten()
        assert bool((batch.token_ids[:, 0] == tokenizer.bos_token_id).all())
        answer = tokenizer.convert_tokens_to_ids("<answer>")
        assert bool((batch.token_ids[rows, batch.start] == answer).all())
        asked = [
            token
            for ids, start in zip(batch.token_ids.tolist(), batch.start.tolist(), strict=True)
            for token in [*ids[2 : ids.index(passage)], ids[start]]
        ]
        assert flat[batch.question_tokens + 1].tolist() == asked
        starts = batch.start[batch.answer_tokens // length]
        assert bool((batch.answer_tokens % length > starts).all())
        assert tokenizer.pad_token_id not in flat[batch.answer_tokens + 1]
        gold = batch.ends[rows, batch.gold]
        assert bool(batch.end_mask[rows, batch.gold].all())
        markers = {*MARKERS, "<none>"}
        assert set(tokenizer.convert_ids_to_tokens(batch.token_ids[rows, gold])) <= markers
        copied += len(batch.answer_tokens)
    for e in examples:
        copy = e.token_ids[e.question_start : e.answer_start]
        assert copy == e.token_ids[1 : 1 + len(copy)]
        assert e.question_start > e.sentence_ends[-1]
    assert 0 < copied < sum(len(e.token_ids) - e.answer_start - 2 for e in examples)


def test_lengths_of_rows_are_rounded_but_not_above_the_models(maker, tokenizer):
    example = _drawn(maker, 1)[0]
    length = len(example.token_ids)
    rounded = -(-length // 32) * 32
    assert length < rounded - 1
    padding = tokenizer.pad_token_id
    assert batched([example], padding, 2048).token_ids.shape == (1, rounded)
    assert batched([example], padding, rounded - 1).token_ids.shape == (1, rounded - 1)


def test_room_for_whole_paragraphs_goes_to_the_answers_first(maker, monkeypatch):
    folder = maker.folder
    answer, nearer = folder.first_row[0], folder.first_row[5]
    size = max(
        sum(len(maker._sentences[row]) + 3 for row in range(first, first + 5))
        for first in (answer, nearer)
    )
    make = partial(maker.make, 0, random.Random(0), whole_tokens=size)  # room for one paragraph
    monkeypatch.setattr(folder, "nearest", lambda *_, **__: [Nearest(nearer, 0.9)])
    assert make() is None
    assert make(reserved=True) is None
    added = make(reserved=True, added=True)
    near = [Nearest(nearer, 0.9), Nearest(answer, 0.8)]
    monkeypatch.setattr(folder, "nearest", lambda *_, **__: near)
    assert make() is None
    for example in (added, make(reserved=True)):
        rows = [one.row for one in example.nearest]
        assert rows == list(range(answer, answer + 5))
        assert rows[example.gold] == folder.gold_row(folder.questions[0])
    both = maker.make(0, random.Random(0), whole_tokens=2 * size, reserved=True)
    assert both.nearest[0].row == nearer  # in their order all the same


def test_a_small_last_batch_goes_to_the_one_before(maker, tokenizer, monkeypatch):
    monkeypatch.setattr("recipes.reader.batches.MIN_ROWS", 5)
    examples = _drawn(maker, 17)
    longest = max(len(example.token_ids) for example in examples)
    for tokens in range(longest, 8 * longest, longest // 2):
        monkeypatch.setattr("recipes.reader.batches.BATCH_TOKENS", tokens)
        batches = batches_of(examples, tokenizer.pad_token_id, 2048, random.Random(0))
        starts = sorted(int(start) for batch in batches for start in batch.start)
        assert starts == sorted(example.answer_start for example in examples)


def test_the_training_pass_is_the_models_own(reader, maker):
    ids = torch.tensor([_drawn(maker, 1)[0].token_ids])
    with torch.inference_mode():
        expected = reader(ids).logits
        hidden, _, scores = TrainingForward(reader)(ids)
        torch.testing.assert_close(reader.lm_head(hidden), expected, rtol=1e-4, atol=1e-4)
        with torch.autocast("cpu", torch.bfloat16):
            _, matches, scores = TrainingForward(reader)(ids)
    assert scores.shape == matches.shape == ids.shape
    assert scores.dtype == matches.dtype == torch.float32


def test_evaluation_sees_the_models_own_chances(reader, maker):
    examples = _drawn(maker, 12)
    for example, found in zip(examples, chances(reader, examples), strict=True):
        with torch.inference_mode():
            logits = reader(torch.tensor([example.token_ids[: example.answer_start + 1]])).logits
        markers = [example.token_ids[end] for end in example.sentence_ends]
        expected = logits[0, -1, markers].softmax(0)
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-5)
    figures = evaluate(reader, maker, questions=20)
    assert figures["all"] == figures["lamps"]
    assert figures["all"]["questions"] == 20
    assert figures["all"]["nearest"] <= figures["all"]["found"] <= 100


def test_muon_turns_a_gradient_into_one_without_small_directions():
    made = orthogonal(torch.randn(3, 48, 16, generator=torch.Generator().manual_seed(0)))
    strengths = torch.linalg.svdvals(made)
    assert strengths.min() > 0.5
    assert strengths.max() < 1.5


def test_a_resumed_run_trains_on_what_an_uninterrupted_one_would(
    tmp_path, reader, maker, monkeypatch
):
    monkeypatch.setattr("recipes.reader.fit.BLOCK", 8)
    monkeypatch.setattr("recipes.training_run.SECONDS_BETWEEN_CHECKPOINTS", -1)
    start = {name: value.clone() for name, value in reader.state_dict().items()}

    def fit(folder, tokens=8000):
        torch.manual_seed(1)
        reader.load_state_dict(start)
        return Fit(reader, maker, folder, tokens=tokens, learning_rate=1e-3)

    whole = fit(tmp_path / "whole")
    whole.run()
    expected = {name: value.clone() for name, value in reader.state_dict().items()}
    cut = fit(tmp_path / "cut")
    step = cut._step

    def interrupted(batch):
        if cut.progress.tokens > 4000:
            raise KeyboardInterrupt
        step(batch)

    monkeypatch.setattr(cut, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cut.run()
    with pytest.raises(ConfigurationError, match="give those"):
        fit(tmp_path / "cut", tokens=9000)
    again = fit(tmp_path / "cut")
    assert 0 < again.progress.tokens < 8000
    again.run()
    losses = [row["loss"] for row in whole.progress.log]
    assert [row["loss"] for row in again.progress.log] == pytest.approx(losses, rel=1e-3)
    for name, value in reader.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)
    assert not (tmp_path / "cut" / "checkpoint.tmp").exists()


def test_copies_of_answers_and_of_questions_have_a_loss_each(tmp_path, reader, maker, monkeypatch):
    fit = Fit(reader, maker, tmp_path, tokens=8000, learning_rate=1e-3)
    monkeypatch.setattr("recipes.reader.fit.CHOICE_WEIGHT", 0.0)
    monkeypatch.setattr("recipes.reader.fit.RELEVANCE_WEIGHT", 0.0)
    monkeypatch.setattr("recipes.reader.fit.MATCH_WEIGHT", 0.0)
    examples = _drawn(maker, 6)
    batch = batched(examples, fit.padding, 2048)
    metrics, _ = fit.losses(batch)
    with torch.inference_mode():
        logits = fit.model(batch.token_ids).logits.flatten(0, 1)
    of_each = F.cross_entropy(logits[:-1], batch.token_ids.flatten()[1:], reduction="none")
    answer, question = of_each[batch.answer_tokens].mean(), of_each[batch.question_tokens].mean()
    close = partial(torch.testing.assert_close, rtol=0.02, atol=0.02)
    close(metrics["answer_copy"].detach(), answer)
    close(metrics["question_copy"].detach(), question)
    close(metrics["loss"].detach(), answer + 0.3 * question)
    for example in examples:
        del example.token_ids[example.answer_start + 1 :]
    metrics, _ = fit.losses(batched(examples, fit.padding, 2048))
    assert not {"answer_copy", "answer_copied"} & set(metrics)
    close(metrics["loss"], 0.3 * metrics["question_copy"])


def test_a_report_is_of_the_batches_that_have_a_value(tmp_path, reader, maker, capsys):
    fit = Fit(reader, maker, tmp_path, tokens=8000, learning_rate=1e-3)
    fit.progress.log = [{"loss": 1.0}, {"loss": 2.0, "answer_copied": 0.5}]
    fit._report()
    assert "loss 1.500 answer_copied 0.500" in capsys.readouterr().err


def test_training_learns(tmp_path, reader, maker, monkeypatch):
    monkeypatch.setattr("recipes.reader.batches.BATCH_TOKENS", 800)
    monkeypatch.setattr("recipes.reader.fit.WARM_UP_STEPS", 5)
    fit = Fit(reader, maker, tmp_path, tokens=25_000, learning_rate=3e-3)
    fit.run()
    first, last = fit.progress.log[0], fit.progress.log[-1]
    assert last["loss"] < 0.9 * first["loss"]
    assert last["match"] < 0.95 * first["match"]


def test_a_published_reader_is_a_stock_model(tmp_path, reader, tokenizer, maker):
    publish(reader, tokenizer, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.float32
    assert loaded.chat_template == tokenizer.chat_template
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert "/" not in settings.get("name_or_path", "")
    ids = torch.tensor([_drawn(maker, 1)[0].token_ids])
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, reader(ids).logits, rtol=2e-2, atol=2e-2)


def test_questions_become_training_samples(maker, tokenizer, tmp_path):
    path = tmp_path / "samples.jsonl"
    assert write_samples(path, islice(samples.rows(maker, seed=2), 12)) == 12
    found = read_samples(path, Tokenizer(tokenizer), vocab_size=len(tokenizer))
    assert len(found.rows) == 12
    for sample in found.rows:
        assert tokenizer.decode(sample.prompt_ids[-1]) == "<answer>"
        assert sample.answer_ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(sample.answer_ids[0]) in (*MARKERS, "<none>")
    example = _drawn(maker, 1)[0]
    row = samples.row(example)
    assert [*row["prompt_ids"], *row["answer_ids"]] == example.token_ids
    assert row["question"] == example.question.text
