"""Tool calling: which tool a choice means."""

import pytest

from ragaccel.errors import ConfigurationError
from ragaccel.models import resolve_tool_choice

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("tide", "wind")]


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        (None, None), (False, None), ("auto", None), ("none", "none"), ("any", ""), (True, ""),
        ("wind", "wind"), ({"name": "wind"}, "wind"),
        ({"type": "function", "function": {"name": "wind"}}, "wind"),
        ({"type": "function", "function": "wind"}, "wind"),
    ],
)  # fmt: skip
def test_a_choice_is_read_however_it_is_written(choice, chosen):
    assert resolve_tool_choice(TOOLS, choice) == chosen


@pytest.mark.parametrize("choice", ["rain", 7, {"function": "rain"}, {"type": "any"}, ["wind"]])
def test_a_choice_of_no_tool_is_refused_as_it_was_given(choice):
    message = "is not one of the tools: choose one of tide, wind"
    with pytest.raises(ConfigurationError, match=message) as refused:
        resolve_tool_choice(TOOLS, choice)
    assert repr(choice) in str(refused.value)
