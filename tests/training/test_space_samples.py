"""Samples: three kinds of lines, truncation, errors by line number, the held-out split."""

import json

import pytest
from small_tokenizers import byte_fallback, byte_level

from ragaccel.errors import ConfigurationError
from ragaccel.models import Tokenizer
from ragaccel.training import (
    Sample,
    Samples,
    read_samples,
    split_held_out,
    truncate_samples,
    write_samples,
)

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


@pytest.mark.parametrize("break_", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c"])
def test_a_break_within_a_text_ends_no_line(tmp_path, words, break_):
    """This package writes such lines itself."""
    path = tmp_path / "samples.jsonl"
    write_samples(path, [{"prompt": f"one{break_}two", "answer": "three"}] * 2)
    assert len(read_samples(path, words, vocab_size=500).rows) == 2


def test_files_of_other_editors(tmp_path, words):
    path = tmp_path / "samples.jsonl"
    row = json.dumps({"prompt": "one", "answer": "two lights"})
    path.write_bytes(f"\ufeff{row}\r\n\r\n{row}\r\n".encode())
    assert len(read_samples(path, words, vocab_size=500).rows) == 2


def test_no_file_or_nothing_in_it(tmp_path, words):
    with pytest.raises(ConfigurationError, match="holds no samples"):
        read(tmp_path, ["", " "], words)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_samples(tmp_path / "none", words, vocab_size=9)


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


@pytest.mark.parametrize("count", [2, 5, 20])
def test_a_small_set_holds_one_prompt_out(count):
    for start in range(0, 400, count):
        samples = Samples(tuple(Sample((start + i,), (3, 4)) for i in range(count)))
        kept, held_out = split_held_out(samples, 0.05)
        assert kept.rows
        assert held_out.rows


def test_what_is_written_is_read(tmp_path, words):
    path = tmp_path / "deep" / "samples.jsonl"
    rows = [{"prompt_ids": [1, 2], "answer_ids": [3, 4], "question": "Žižkov?"}]
    assert write_samples(path, rows) == 1
    assert "Žižkov" in path.read_text(encoding="utf-8")
    assert len(read_samples(path, words, vocab_size=9).rows) == 1
