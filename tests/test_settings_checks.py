"""An invalid setting, option, prompt or reference is one error that names the field."""

import decimal
import fractions

import numpy as np
import pytest
import torch
from tiny_llm import tiny_llm

from ragaccel import LLM, Passage
from ragaccel.config import CHECKS, OPTION_CHECKS, OPTIONS, Settings
from ragaccel.errors import ConfigurationError, check_arguments, has_no_effect

ASKED = "Who trims the wick?"
NAN = float("nan")


class Unshowable:
    def __repr__(self):
        raise RuntimeError("no repr")


NUMBERS = ["max_new_tokens", "min_new_tokens", "top_k", "seed", "no_repeat_ngram_size"]
FLOATS = ["temperature", "top_p", "min_p", "repetition_penalty"]
NO_NUMBERS = ["x", b"1", [1], {}, object(), 1 + 2j, np.array([1, 2]), torch.ones(2), len]
NO_NUMBERS += [Unshowable()]
BAD = {
    **{name: [*NO_NUMBERS, NAN, 0.5, 2**70, True] for name in NUMBERS},
    **{name: [*NO_NUMBERS, NAN, float("inf"), 10**400, torch.tensor(NAN)] for name in FLOATS},
    "stop": ["", [""], ["x", 5], 5, {"a": 1}, b"x", "\ud800", ["\ud800"], object()],
    "prediction": ["", ["x", 5], 5, {"a": 1}, b"x", Unshowable()],
    "logits_processors": [5, [5], [None], len, "x", {"a": len}, [Unshowable()], [Unshowable]],
    "stopping_criteria": [5, [5], len, "x", {"a": 1}],
    "drafter": [5, "trees", object(), Unshowable, [], True],
    "namespace": [5, b"x", "\ud800", ["a"], object()],
    "remember": [np.array([1, 2]), torch.ones(2)],
}


OUT_OF_RANGE = {
    "max_new_tokens": 0, "min_new_tokens": 300, "temperature": -1.0, "top_p": 0.0, "min_p": 2.0,
    "top_k": -1, "repetition_penalty": 0.0, "no_repeat_ngram_size": -1, "stop": [3],
}  # fmt: skip


@pytest.fixture(scope="module")
def llm():
    return tiny_llm()


def test_every_setting_and_option_has_a_check():
    assert set(CHECKS) == set(Settings.__annotations__) == set(BAD)
    assert set(OPTION_CHECKS) | {"generation_config"} == OPTIONS


@pytest.mark.parametrize("name", sorted(BAD))
def test_what_a_setting_cannot_be_is_named(llm, name):
    for value in [*BAD[name], *([OUT_OF_RANGE[name]] if name in OUT_OF_RANGE else [])]:
        with pytest.raises(ConfigurationError, match=name):
            llm.stream(ASKED, **{name: value})
        with pytest.raises(ConfigurationError, match=name):
            llm.generate([ASKED, ASKED], **{name: value})


@pytest.mark.parametrize(
    "value", [fractions.Fraction(1, 2), decimal.Decimal("0.5"), np.float32(0.5)]
)
def test_numbers_of_all_kinds_are_numbers(llm, value):
    want = llm.generate(ASKED, temperature=0.5, max_new_tokens=4, remember=False)
    given = {"temperature": value, "max_new_tokens": np.int64(4), "remember": np.False_}
    assert llm.generate(ASKED, **given).token_ids == want.token_ids


def test_an_iterator_holds_for_every_prompt_of_a_batch(llm):
    stops = [llm.generate(ASKED, max_new_tokens=6, remember=False).text[2]]
    want = [answer.text for answer in llm.generate([ASKED] * 2, stop=stops, remember=False)]
    assert want[0] == want[1]
    got = llm.generate([ASKED] * 2, stop=iter(stops), remember=False)
    assert [answer.text for answer in got] == want
    passages = llm.generate(ASKED, references=iter(["The keeper."]), max_new_tokens=2).passages
    assert [passage.text for passage in passages] == ["The keeper."]


@pytest.mark.parametrize(
    "references",
    [5, None, b"x", "one text", {"a": 1}, [5], [None], torch.tensor(3), [Passage("p", None)],
     [Passage(5, "x")], [Passage("p", "x", score=NAN)], [["a"]]],
)  # fmt: skip
def test_references_that_are_none_are_refused(llm, references):
    with pytest.raises(ConfigurationError, match=r"reference|passage"):
        llm.generate(ASKED, references=references)


@pytest.mark.parametrize(
    "returned",
    [None, 5, "x", np.ones((1, 380)), torch.ones(1, 3), torch.ones(380), torch.ones(1, 380).long()],
)
def test_a_processor_that_returns_no_scores_is_named(llm, returned):
    with pytest.raises(ConfigurationError, match=r"logits processor .* returns"):
        llm.generate(ASKED, logits_processors=[lambda ids, scores: returned], max_new_tokens=3)
    assert llm.generate(ASKED, max_new_tokens=3).token_ids


def test_a_criterion_that_returns_no_bool_is_named(llm):
    with pytest.raises(ConfigurationError, match=r"stopping criterion .* returns"):
        llm.generate(ASKED, stopping_criteria=[lambda ids, scores: np.array([1, 2])])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("capacity", 0), ("capacity", "x"), ("capacity", NAN), ("token_budget", -1),
        ("token_budget", [1]), ("max_batch", 0), ("max_batch", "x"), ("exact", "yes"),
        ("save_measurements", object()), ("memory", 5), ("memory", ["a"]),
        ("memory", "\ud800"), ("drafter", "trees"), ("space", 5), ("space", [1]),
    ],
)  # fmt: skip
def test_an_option_that_cannot_work_is_named(llm, name, value):
    with pytest.raises(ConfigurationError, match=name):
        LLM(llm.model, llm.tokenizer, **{name: value})
    with pytest.raises(ConfigurationError, match=name):
        LLM.load("no such model", **{name: value})


@pytest.mark.parametrize("name", [5, b"x", ["a"], {5: Unshowable()}, Unshowable()])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ConfigurationError, match="must be a string or a path"):
        LLM.load(name)


def test_what_is_no_model_or_tokenizer_is_refused(llm):
    with pytest.raises(ConfigurationError, match=r"LLM\.load"):
        LLM("Qwen/Qwen2.5-1.5B-Instruct", llm.tokenizer)
    with pytest.raises(ConfigurationError, match="tokenizer"):
        LLM(llm.model, "a tokenizer")


def test_all_unknown_arguments_are_told_and_the_close_ones_corrected():
    check_arguments("A thing", ["size"], ["size", "shape"])
    with pytest.raises(TypeError) as told:
        check_arguments("A thing", ["szie", "logprobs", "x"], ["size", "shape"], {"x": "y"})
    text = str(told.value)
    assert "szie: did you mean size?" in text
    assert "logprobs: answers hold token ids" in text
    assert "x: y" in text
    assert text.endswith("its arguments are shape, size")


@pytest.mark.parametrize(
    ("name", "value", "nothing"),
    [("logprobs", False, True), ("logprobs", True, False), ("presence_penalty", 0.0, True),
     ("presence_penalty", 0.1, False), ("temperature", 0, False), ("logit_bias", {}, True)],
)  # fmt: skip
def test_values_that_ask_for_nothing(name, value, nothing):
    assert has_no_effect(name, value) is nothing
