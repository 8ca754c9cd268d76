"""The constructor refuses invalid options and says what to do."""

import pytest
from framework_llms import tiny_llm
from ragaccel import ConfigurationError
from ragaccel.frameworks import ReferenceRegistry

from langchain_ragaccel import ChatRagaccel, RagaccelLLM


@pytest.mark.parametrize("kind", [ChatRagaccel, RagaccelLLM])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_new_tokens": -3}, "max_tokens"),
        ({"min_tokens": 10, "max_tokens": 3}, r"min_tokens \(10\) is more than max_tokens \(3\)"),
        ({"min_tokens": 300}, r"min_tokens \(300\) is more than max_tokens \(256\)"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop": ""}, "stop contains an empty string"),
        ({"stop": ["a", ""]}, "stop contains an empty string"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"max_reference_tokens": -1}, "max_reference_tokens"),
        ({"capacity": 0}, "capacity"),
        (
            {"registry": 5},
            "registry must be a ragaccel.frameworks.ReferenceRegistry, not int",
        ),
        ({"llm": "gpt"}, "llm must be a ragaccel.LLM, not str: pass a model's name as model="),
    ],
)
def test_an_invalid_option_is_refused_by_the_constructor(kind, options, told):
    with pytest.raises(ValueError, match=told):
        kind(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"capacity": 10},
        {"dtype": "float16"},
        {"device": "cuda"},
        {"memory": "kept"},
        {"exact": False},
        {"model_kwargs": {"revision": "r"}},
    ],
)
def test_a_ready_llm_takes_no_options_of_loading(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"llm= is already loaded and takes no {name}"):
        ChatRagaccel(llm=tiny_llm(), **options)
    assert ChatRagaccel(llm=tiny_llm(), model="mine").model_name == "mine"


def test_an_invalid_option_is_refused_by_a_call():
    chat = ChatRagaccel(llm=tiny_llm(), max_tokens=2)
    with pytest.raises(ConfigurationError, match="timeout must be above 0 seconds, not 0"):
        chat.invoke("Who?", timeout=0)
    with pytest.raises(ConfigurationError, match="registry must be a ragaccel"):
        chat.invoke("Who?", registry=5)
    with pytest.raises(ConfigurationError, match="max_reference_tokens must be 0 or more"):
        chat.invoke("Who?", max_reference_tokens=-1)
    assert chat.invoke("Who?", registry=ReferenceRegistry(), timeout=60).content


def test_values_at_a_limit_are_accepted():
    options = {"temperature": 0, "top_p": 1, "min_p": 0, "top_k": 0, "max_tokens": 1}
    assert ChatRagaccel(**options, min_tokens=1, stop=[], max_reference_tokens=0).max_tokens == 1
