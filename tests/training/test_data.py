"""Training data: recipes, samples, the model's own answers, and packed rows with mask tokens."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from small_tokenizers import byte_fallback, byte_level
from tiny_models import generate, make_tiny_model

from ragaccel.errors import ConfigurationError
from ragaccel.llm import LLM
from ragaccel.models import Tokenizer
from ragaccel.training import (
    IGNORED,
    Collator,
    Plan,
    Sample,
    Samples,
    answer_samples,
    make_recipe,
    pack,
    plan_epoch,
    plan_rows,
    plan_sample,
    read_answers,
    read_samples,
    split_held_out,
    truncate_samples,
    write_samples,
)

# Recipes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "lora"}, "mode must be gated or paper"),
        ({"precision": "float16"}, "precision must be float32 or bfloat16"),
        ({"num_masks": 0}, "num_masks must be 1 or more, not 0"),
        ({"steps": 0}, "steps must be 1"),
        ({"epochs": 0}, "epochs must be"),
        ({"accumulate": 0}, "accumulate must be"),
        ({"evaluate_every": -1}, "evaluate_every must be 0"),
        ({"learning_rate": 0}, "learning_rate must be above 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be above 0"),
        ({"rank": 0}, "rank must be 1"),
        ({"mode": "paper", "rank": 4}, "do not give a rank"),
        ({"row_tokens": 12}, "row_tokens must be 13"),
        ({"speed": 3}, "a recipe has no field speed"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        make_recipe(**changes)


# Samples

CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)


@pytest.fixture
def words():
    return Tokenizer(byte_level())


@pytest.fixture
def chatty():
    own = byte_level().__class__(tokenizer_object=byte_level().backend_tokenizer)
    own.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    own.chat_template = CHAT
    return Tokenizer(own)


def read(tmp_path, rows, tokenizer, **settings):
    path = tmp_path / "samples.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return read_samples(path, tokenizer, **{"vocab_size": 500, **settings})


def test_texts_get_begin_and_end(tmp_path):
    tokenizer = Tokenizer(byte_fallback())
    row = {"prompt": "The keeper's log:", "answer": " wind 7", "source": "kept out"}
    (sample,) = read(tmp_path, [row], tokenizer).rows
    assert sample.prompt_ids[0] == tokenizer.tokenizer.bos_token_id
    assert sample.answer_ids[-1] == tokenizer.tokenizer.eos_token_id
    assert tokenizer.tokenizer.bos_token_id not in sample.answer_ids
    assert "wind 7" in tokenizer.decode(sample.answer_ids)


def test_every_turn_of_an_assistant_is_an_answer(tmp_path, chatty):
    turns = ["one light", "two lights"]
    messages = [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": turns[0]},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": turns[1]},
    ]
    samples = read(tmp_path, [{"messages": messages}], chatty).rows
    assert [chatty.decode(sample.answer_ids) for sample in samples] == turns
    for turn, sample in zip((1, 3), samples, strict=True):
        assert list(sample.prompt_ids) == chatty.chat(messages[:turn])
        assert sample.answer_ids[-1] in chatty.eos_ids


def test_an_answer_begins_as_the_model_would_write_it(tmp_path):
    """The answer has no extra space, which the tokenizer puts before a whole text."""
    words = Tokenizer(byte_fallback())
    (sample,) = read(tmp_path, [{"prompt": "The keeper", "answer": "'s log"}], words).rows
    assert list(sample.token_ids[:-1]) == words.encode("The keeper's log", add_special_tokens=True)
    (sample,) = read(tmp_path, [{"prompt": "The keep", "answer": "er's log"}], words).rows
    assert list(sample.prompt_ids) == words.encode("The keep", add_special_tokens=True)


def test_an_answer_that_spells_the_end_goes_on_behind_it(tmp_path, chatty):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a</s>b"}]
    (sample,) = read(tmp_path, [{"messages": messages}], chatty).rows
    assert chatty.decode(sample.answer_ids) == "a</s>b"
    assert [token in chatty.eos_ids for token in sample.answer_ids].count(True) == 1


def test_a_template_that_writes_turns_otherwise(tmp_path, chatty):
    """If the turn does not begin as its prompt ends, the answer is content and end token."""
    chatty.tokenizer.chat_template = CHAT.replace("<s>assistant {%", "<s>think {%")
    words = Tokenizer(chatty.tokenizer)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "light"}]
    (sample,) = read(tmp_path, [{"messages": messages}], words).rows
    assert list(sample.answer_ids) == [*words.encode("light"), words.tokenizer.eos_token_id]


def test_ids_are_taken_as_they_are(tmp_path, words):
    rows = [{"prompt_ids": [1, 2], "answer_ids": [3, 4, 5], "question": "?"}, ""]
    assert read(tmp_path, rows, words).rows == (Sample((1, 2), (3, 4, 5)),)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "recursion"),
        ("[1]", "must be a JSON object"),
        ({"prompt": "a"}, "this one has prompt"),
        ({}, "this one has no keys"),
        ({"prompt": "a", "answer": 3}, "prompt and answer must be texts"),
        ({"prompt": "", "answer": "b"}, "the prompt is empty"),
        ({"prompt_ids": [1, "2"], "answer_ids": [3, 4]}, "lists of integers"),
        ({"prompt_ids": [1, 999], "answer_ids": [3, 4]}, "token 999 is not in the model's"),
        ({"prompt_ids": [1], "answer_ids": [-3, 4]}, "token -3"),
        ({"messages": []}, "no message of the assistant"),
        ({"messages": "hello"}, "a list of"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no answer to learn"),
        ({"messages": [{"role": "user", "content": "a"}] * 2 + [{"role": "assistant",
          "content": "b"}]}, "chat template"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named(tmp_path, words, row, message):
    good = {"prompt_ids": [1], "answer_ids": [2, 3]}
    with pytest.raises(ConfigurationError, match=f"samples.jsonl, line 2: .*{message}"):
        read(tmp_path, [good, row], words)


def test_lines_are_those_of_any_editor(tmp_path, words):
    path = tmp_path / "deep" / "samples.jsonl"

    def count():
        return len(read_samples(path, words, vocab_size=500).rows)

    for separator in "\u2028\u2029\x85\x0b\x1c":  # which end no line, and are written unescaped
        rows = [{"prompt": f"one{separator}two", "answer": "Žižkov?"}] * 2
        assert (write_samples(path, rows), count()) == (2, 2)
    assert "Žižkov" in path.read_text(encoding="utf-8")
    row = json.dumps({"prompt": "one", "answer": "two lights"})
    path.write_bytes(f"\ufeff{row}\r\n\r\n{row}\r\n".encode())
    assert count() == 2
    path.write_text("\n \n")
    with pytest.raises(ConfigurationError, match="holds no samples"):
        count()
    path.unlink()
    with pytest.raises(ConfigurationError, match="there is no file"):
        count()


def test_long_answers_are_cut_and_counted():
    samples = [Sample((1,) * n, (2,) * 6) for n in (2, 5, 7, 20)] + [Sample((1,), (2,))]
    found = truncate_samples(samples, max_tokens=10)
    assert [len(sample) for sample in found.rows] == [8, 10, 10]
    assert (found.num_cut, found.num_skipped) == (2, 2)
    assert found.digest != truncate_samples(samples[:1]).digest


def test_the_same_prompts_are_held_out_whatever_stands_beside_them():
    samples = Samples(tuple(Sample((i, i + 1), (3, 4)) for i in range(400)))
    kept, held_out = split_held_out(samples, 0.1)
    assert 20 < len(held_out.rows) < 60
    assert len(kept.rows) + len(held_out.rows) == 400
    again = Samples(samples.rows[::2])
    assert set(split_held_out(again, 0.1)[1].rows) <= set(held_out.rows)
    assert not split_held_out(samples, 0)[1].rows
    with pytest.raises(ConfigurationError, match="give a held-out file"):
        split_held_out(Samples(samples.rows[:1]), 0.1)
    for count in (2, 5, 20):  # a small set holds one prompt out
        for start in range(0, 400, count):
            samples = Samples(tuple(Sample((start + i,), (3, 4)) for i in range(count)))
            assert all(part.rows for part in split_held_out(samples, 0.05))


# A model's own answers, written batch by batch and checked when they are read

PROMPTS = [Sample((i, i + 1, i + 2), (9, 9)) for i in range(40)]


class Doubling:
    """A model that doubles its prompt's ids and is interrupted after some batches."""

    def __init__(self, context_length=None, batches=99):
        self.context_length, self.batches, self.asked = context_length, batches, []

    def generate(self, prompt, *, max_new_tokens):
        if len(self.asked) == self.batches:
            raise KeyboardInterrupt
        self.asked.append((len(prompt), max_new_tokens))
        return [SimpleNamespace(token_ids=tuple(2 * i for i in ids)) for ids in prompt]


def answered(path, llm, **settings):
    answer_samples(llm, PROMPTS, path, **settings)
    return read_answers(path, PROMPTS)


def test_answers_are_the_models(tmp_path):
    told = []
    path = tmp_path / "run" / "answers.jsonl"
    found = answered(path, Doubling(), report=lambda *counts: told.append(counts))
    assert [s.prompt_ids for s in found] == [s.prompt_ids for s in PROMPTS]
    assert [s.answer_ids for s in found] == [tuple(2 * i for i in s.prompt_ids) for s in PROMPTS]
    assert told == [(0, 40), (16, 40), (32, 40), (40, 40)]


def test_a_model_that_was_stopped_goes_on(tmp_path):
    path = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        answered(path, Doubling(batches=1))
    assert len(read_answers(path, PROMPTS)) == 16
    path.write_bytes(path.read_bytes()[:-7])  # the last line was being written
    llm = Doubling()
    found = answered(path, llm)
    assert [size for size, _ in llm.asked] == [16, 9]
    assert found == answered(tmp_path / "whole.jsonl", Doubling())
    again = Doubling()
    assert answered(path, again) == found
    assert not again.asked


def test_answers_end_where_the_context_does(tmp_path):
    llm = Doubling(context_length=10)
    answered(tmp_path / "answers.jsonl", llm, max_new_tokens=50)
    assert {most for _, most in llm.asked} == {7}


def test_answers_to_other_prompts_are_refused(tmp_path):
    path = tmp_path / "answers.jsonl"
    answered(path, Doubling())
    with pytest.raises(ConfigurationError, match="other prompts: delete"):
        read_answers(path, PROMPTS[1:])
    with pytest.raises(ConfigurationError, match="other prompts: delete"):
        read_answers(path, PROMPTS[:5])
    path.write_text(json.dumps({"prompt_ids": [1]}) + "\n")
    with pytest.raises(ConfigurationError, match="line 1 is not a generated answer"):
        read_answers(path, PROMPTS)


def test_a_language_model_answers_greedily(tmp_path):
    tokenizer = byte_level()
    model = make_tiny_model("llama", torch.float64, vocab_size=len(tokenizer))
    llm = LLM(model, tokenizer, save_measurements=False)
    samples = PROMPTS[:3]
    answer_samples(llm, samples, tmp_path / "answers.jsonl", max_new_tokens=9)
    found = read_answers(tmp_path / "answers.jsonl", samples)
    for sample in found:
        assert list(sample.answer_ids) == generate(
            model, sample.prompt_ids, 9, eos_token_id=tokenizer.eos_token_id
        )


# The layout of samples with mask tokens: the paper's figure, packing and cuts

VOCAB = 100
SAMPLE = Sample((10, 11, 12), (20, 21, 22, 23, 24, 25, 26))  # real tokens 0 to 9


def collate(plans, num_masks):
    return Collator(num_masks, VOCAB)([plans])


def sees(batch):
    return batch["attention_mask"][0, 0]


def column(batch, name):
    return batch[name][0].tolist()


def drawn(batch):
    """Return the attention mask as lines, with # for True."""
    return ["".join("#" if seen else "." for seen in row) for row in sees(batch).tolist()]


@pytest.mark.parametrize("num_masks", [1, 2, 5])
def test_the_plain_variant_is_the_papers_figure(num_masks):
    """Lay out 3 prompt tokens, 2 answer tokens, and mask tokens in place of the rest."""
    labels = [23, 24, 25, 26, IGNORED][:num_masks]
    found = collate([Plan(SAMPLE, (4,), shortened=True)], num_masks)
    masks = [VOCAB + i for i in range(num_masks)]
    assert column(found, "input_ids") == [10, 11, 12, 20, 21, *masks]
    assert column(found, "position_ids") == list(range(5 + num_masks))
    assert column(found, "labels") == [IGNORED, IGNORED, 20, 21, 22, *labels]
    assert torch.equal(sees(found), torch.ones(5 + num_masks, 5 + num_masks).tril().bool())


@pytest.mark.parametrize("num_masks", [1, 2, 5])
@pytest.mark.parametrize("cut", [2, 4, 7])
def test_the_efficient_variant_is_the_papers_figure(num_masks, cut):
    """Lay out a whole sample and mask tokens that do not attend past the cut."""
    found = collate([Plan(SAMPLE, (cut,))], num_masks)
    ids = SAMPLE.token_ids
    masks = [VOCAB + i for i in range(num_masks)]
    assert column(found, "input_ids") == [*ids, *masks]
    assert column(found, "position_ids") == [*range(10), *range(cut + 1, cut + 1 + num_masks)]
    ahead = [ids[i] if (i := cut + 1 + n) < 10 else IGNORED for n in range(1, num_masks + 1)]
    assert column(found, "labels") == [IGNORED, IGNORED, *ids[3:], IGNORED, *ahead]
    expected = torch.zeros(10 + num_masks, 10 + num_masks).bool()
    expected[:10, :10] = torch.ones(10, 10).tril().bool()
    expected[10:, : cut + 1] = True
    expected[10:, 10:] = torch.ones(num_masks, num_masks).tril().bool()
    assert torch.equal(sees(found), expected)
    # the real token before the label that a mask token has
    places = [i if (i := cut + n) < 9 else -1 for n in range(1, num_masks + 1)]
    assert column(found, "teachers") == [-1] * 10 + places


def test_a_decoder_sees_the_same():
    """Draw two groups of two mask tokens after their cuts."""
    sample = Sample((10,), (20, 21, 22))
    found = collate([Plan(sample, (0, 1))], 2)
    assert drawn(found) == [
        "#.......",
        "##......",
        "###.....",
        "####....",
        "#...#...",
        "#...##..",
        "##....#.",
        "##....##",
    ]
    assert column(found, "position_ids") == [0, 1, 2, 3, 1, 2, 2, 3]
    assert column(found, "labels") == [20, 21, 22, IGNORED, 21, 22, 22, IGNORED]


def test_packed_samples_see_themselves_only():
    """Real tokens of all samples come first, then the mask tokens of all."""
    plans = [Plan(Sample((1, 2), (3, 4, 5)), (1, 2)), Plan(SAMPLE, (4, 6)), Plan(SAMPLE)]
    packed, reals = collate(plans, 2), sum(plan.num_real for plan in plans)
    real, mask, taught = 0, reals, 0
    for plan in plans:
        single, size = collate([plan], 2), plan.num_real
        here = [*range(real, real + size), *range(mask, mask + 2 * len(plan.cuts))]
        assert torch.equal(sees(packed)[here][:, here], sees(single))
        assert sees(packed)[here].sum() == sees(single).sum()
        for name in ("input_ids", "position_ids", "labels"):
            assert torch.equal(packed[name][0, here], single[name][0])
        teachers = packed["teachers"][0, here]
        assert torch.equal(torch.where(teachers < 0, -1, teachers - real), single["teachers"][0])
        taught += int((teachers >= 0).sum())
        real, mask = real + size, mask + 2 * len(plan.cuts)
    assert mask == packed["input_ids"].shape[1]
    assert taught == 4 + 3  # one label beyond the end of the first sample is none


@pytest.mark.parametrize(
    ("mode", "places"), [("paper", {2, 3, 4, 5}), ("gated", {1, 2, 3, 4, 5, 6, 7})]
)
def test_where_samples_are_cut(mode, places):
    recipe = make_recipe(mode, num_masks=3)
    rng = random.Random(0)
    plans = [plan_sample(SAMPLE, recipe, rng) for _ in range(300)]
    assert {cut for plan in plans for cut in plan.cuts} == places
    for sample, cuts in ((Sample((1, 2, 3), (4, 5)), (1, 2)), (Sample((1,), (4, 5)), (0,))):
        wanted = {"gated": {cuts}, "paper": {(), (len(sample.prompt_ids) - 1,)}}[mode]
        assert {plan_sample(sample, recipe, rng).cuts for _ in range(30)} == wanted


def test_how_many_mask_tokens_a_sample_gets():
    rng = random.Random(0)
    for row_tokens, cuts in ((2048, 7), (17, 3)):
        recipe = make_recipe("gated", num_masks=2, row_tokens=row_tokens)
        assert len(plan_sample(SAMPLE, recipe, rng).cuts) == cuts
    plans = [plan_sample(SAMPLE, make_recipe("paper"), rng) for _ in range(2000)]
    assert 0.45 < sum(bool(plan.cuts) for plan in plans) / 2000 < 0.55
    assert all(plan.shortened == bool(plan.cuts) for plan in plans)


def test_rows_are_filled_in_order():
    plans = [Plan(SAMPLE, (4,)) for _ in range(7)]  # 12 tokens each
    assert [len(row) for row in pack(plans, 2, 40)] == [3, 3, 1]
    assert [len(row) for row in pack(plans, 2, 5)] == [1] * 7


def test_rows_are_those_of_the_epochs_one_after_another():
    samples = [Sample((i,), tuple(range(5 + i % 7))) for i in range(40)]
    recipe = make_recipe("gated", row_tokens=64, num_masks=2)
    epochs = [plan_epoch(samples, recipe, epoch) for epoch in range(4)]
    in_order = [row for epoch in epochs for row in epoch]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        seen = sorted(plan.sample.prompt_ids for row in epoch for plan in row)
        assert seen == sorted(sample.prompt_ids for sample in samples)
    assert plan_rows(samples, recipe) == epochs[0] + epochs[1]
    for steps, processes in ((1, 2), (len(epochs[0]), 3)):
        longer = make_recipe("gated", row_tokens=64, num_masks=2, steps=steps)
        assert plan_rows(samples, longer, processes) == in_order[: steps * processes]
    count = len(epochs[0]) + len(epochs[1])
    assert plan_rows(samples, recipe, 7) == in_order[: -(-count // 7) * 7]
