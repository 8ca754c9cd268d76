"""Unknown argument names are refused early, with what to use instead."""

import warnings

import pytest
from framework_llms import tiny_llm
from ragaccel import RagaccelError

from langchain_ragaccel import (
    ChatRagaccel,
    RagaccelEmbeddings,
    RagaccelLLM,
    RagaccelRetriever,
    RagaccelVectorStore,
)

MODELS = [ChatRagaccel, RagaccelLLM]
ELSEWHERE = {
    "base_url": "in this process",
    "do_sample": "temperature=0",
    "frequency_penalty": "repetition_penalty",
    "logit_bias": "logits_processors",
    "logprobs": "without probabilities",
    "num_beams": "one answer is decoded",
    "presence_penalty": "repetition_penalty",
    "reasoning": "chat_template_kwargs",
    "top_logprobs": "forward pass",
}


def made(kind, **more):
    """Create an object of a class with its required arguments and further ones."""
    needed = {
        RagaccelEmbeddings: {},
        RagaccelRetriever: {"index": "nowhere"},
        RagaccelVectorStore: {"embedding": None},
    }
    return kind(**needed.get(kind, {"model": "no/such-model"}), **more)


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        (ChatRagaccel, "temprature", "temperature"),
        (RagaccelLLM, "max_token", "max_tokens"),
        (RagaccelEmbeddings, "modle", "model"),
        (RagaccelRetriever, "embedding", "embeddings"),
        (RagaccelVectorStore, "paht", "path"),
    ],
)
def test_a_misspelt_argument_is_refused_with_a_suggestion(kind, name, meant):
    with pytest.raises(TypeError, match=rf"{name}: did you mean {meant}\?") as told:
        made(kind, **{name: 1})
    assert kind.__name__ in str(told.value)
    assert isinstance(told.value, RagaccelError | TypeError)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (RagaccelEmbeddings, "encode_kwargs"),
        (RagaccelEmbeddings, "model_name"),
        (RagaccelRetriever, "search_kwargs"),
        (RagaccelVectorStore, "persist_directory"),
    ],
)
def test_foreign_argument_names_are_refused_with_a_replacement(kind, name):
    with pytest.raises(TypeError, match=f"takes no {name}: ..."):
        made(kind, **{name: {}})


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_unsupported_arguments_are_refused_with_an_alternative(kind, name):
    told = f"takes no {name}: .*{ELSEWHERE[name]}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TypeError, match=told):
            made(kind, **{name: 0.5})
        model = made(kind)
        with pytest.raises(TypeError, match=told):
            model.bind(**{name: 0.5})
        with pytest.raises(TypeError, match=told):
            model.invoke("Who?", **{name: 0.5})


@pytest.mark.parametrize("kind", MODELS)
def test_values_that_ask_for_nothing_pass(kind):
    nothing = {
        "logprobs": False,
        "top_logprobs": None,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": None,
        "n": 1,
    }
    model = kind(llm=tiny_llm(), max_tokens=4, **nothing)
    (found,), (expected,) = (
        one.generate([_asked(kind)], **given).generations
        for one, given in ((model, nothing), (kind(llm=tiny_llm()), {"max_tokens": 4}))
    )
    assert [one.text for one in found] == [one.text for one in expected]


@pytest.mark.parametrize("kind", MODELS)
def test_settings_among_the_options_of_loading_are_refused(kind):
    for name in ("temperature", "max_new_tokens", "repeat_penalty"):
        with pytest.raises(TypeError, match=f"{name}: it is an argument of its own"):
            kind(model_kwargs={name: 1})
    assert kind(model_kwargs={"trust_remote_code": False}).model_kwargs
    with pytest.raises(TypeError, match=r"trust_remote_code: .*model_kwargs"):
        kind(trust_remote_code=True)


def test_call_arguments_are_refused_by_the_constructor():
    with pytest.raises(TypeError, match=r"response_format: .*bind"):
        ChatRagaccel(response_format={"type": "json_object"})
    with pytest.raises(TypeError, match=r"references: .*calls"):
        ChatRagaccel(references=["x"])
    with pytest.raises(TypeError, match="takes no format: pass it to a call of a chat"):
        RagaccelLLM().invoke("x", format="json")


def test_a_stream_reports_usage_unless_disabled():
    chat = ChatRagaccel(llm=tiny_llm(), max_tokens=4)
    for given, told in (
        ({}, True),
        ({"stream_usage": True}, True),
        ({"stream_usage": False}, False),
    ):
        *_, last = chat.stream("Who?", **given)
        assert bool(last.usage_metadata) is told
    *_, last = ChatRagaccel(llm=tiny_llm(), max_tokens=4, stream_usage=False).stream("Who?")
    assert last.usage_metadata is None


def _asked(kind):
    if kind is RagaccelLLM:
        return "Who trims?"
    from langchain_core.messages import HumanMessage

    return [HumanMessage("Who trims?")]
