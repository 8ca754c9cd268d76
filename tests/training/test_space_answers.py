"""A model's own answers are written batch by batch and checked when they are read."""

import json
from types import SimpleNamespace

import pytest
import torch
from small_tokenizers import byte_level
from tiny_models import generate, make_tiny_model

from ragaccel.errors import ConfigurationError
from ragaccel.llm import LLM
from ragaccel.training import Sample, answer_samples, read_answers

SAMPLES = [Sample((i, i + 1, i + 2), (9, 9)) for i in range(40)]


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
    answer_samples(llm, SAMPLES, path, **settings)
    return read_answers(path, SAMPLES)


def test_answers_are_the_models(tmp_path):
    told = []
    path = tmp_path / "run" / "answers.jsonl"
    found = answered(path, Doubling(), report=lambda *counts: told.append(counts))
    assert [s.prompt_ids for s in found] == [s.prompt_ids for s in SAMPLES]
    assert [s.answer_ids for s in found] == [tuple(2 * i for i in s.prompt_ids) for s in SAMPLES]
    assert told == [(0, 40), (16, 40), (32, 40), (40, 40)]


def test_a_model_that_was_stopped_goes_on(tmp_path):
    path = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        answered(path, Doubling(batches=1))
    assert len(read_answers(path, SAMPLES)) == 16
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
        read_answers(path, SAMPLES[1:])
    with pytest.raises(ConfigurationError, match="other prompts: delete"):
        read_answers(path, SAMPLES[:5])
    path.write_text(json.dumps({"prompt_ids": [1]}) + "\n")
    with pytest.raises(ConfigurationError, match="line 1 is not a generated answer"):
        read_answers(path, SAMPLES)


def test_a_language_model_answers_greedily(tmp_path):
    tokenizer = byte_level()
    model = make_tiny_model("llama", torch.float64, vocab_size=len(tokenizer))
    llm = LLM(model, tokenizer, save_measurements=False)
    samples = SAMPLES[:3]
    answer_samples(llm, samples, tmp_path / "answers.jsonl", max_new_tokens=9)
    found = read_answers(tmp_path / "answers.jsonl", samples)
    for sample in found:
        assert list(sample.answer_ids) == generate(
            model, sample.prompt_ids, 9, eos_token_id=tokenizer.eos_token_id
        )
