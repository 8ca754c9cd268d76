"""Unknown arguments are refused with what to use instead."""

import pytest

from ragaccel.errors import check_arguments, has_no_effect


def test_known_names_pass():
    check_arguments("A thing", ["size"], ["size", "shape"])


def test_all_unknown_names_are_told_and_the_close_ones_corrected():
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
