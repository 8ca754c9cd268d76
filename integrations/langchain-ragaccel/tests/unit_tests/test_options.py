"""Unknown names and invalid values are refused early, with what to use instead."""

import pytest
from framework_llms import tiny_llm
from langchain_core.messages import HumanMessage
from ragaccel import ConfigurationError
from ragaccel.frameworks import ReferenceRegistry

from langchain_ragaccel import (
    ChatRagaccel,
    RagaccelEmbeddings,
    RagaccelLLM,
    RagaccelRetriever,
    RagaccelVectorStore,
)

MODELS = pytest.mark.parametrize("kind", [ChatRagaccel, RagaccelLLM])


@pytest.mark.parametrize(
    ("kind", "given", "name", "told"),
    [
        (ChatRagaccel, {}, "temprature", r"did you mean temperature\?"),
        (ChatRagaccel, {}, "reasoning", "chat_template_kwargs"),
        (ChatRagaccel, {}, "response_format", ".*bind"),
        (ChatRagaccel, {}, "references", ".*calls"),
        (ChatRagaccel, {}, "trust_remote_code", ".*model_kwargs"),
        (RagaccelLLM, {}, "max_token", r"did you mean max_tokens\?"),
        (RagaccelEmbeddings, {}, "modle", r"did you mean model\?"),
        (RagaccelEmbeddings, {}, "encode_kwargs", "vectors"),
        (RagaccelEmbeddings, {}, "model_name", "use model="),
        (RagaccelRetriever, {"index": "nowhere"}, "embedding", r"did you mean embeddings\?"),
        (RagaccelRetriever, {"index": "nowhere"}, "search_kwargs", "pass its fields"),
        (RagaccelVectorStore, {"embedding": None}, "paht", r"did you mean path\?"),
        (RagaccelVectorStore, {"embedding": None}, "persist_directory", "use path="),
    ],
)
def test_an_unknown_name_is_refused_by_the_constructor(kind, given, name, told):
    with pytest.raises(TypeError, match=f"{kind.__name__} takes no {name}: .*{told}"):
        kind(**given, **{name: 1})


@MODELS
@pytest.mark.parametrize(
    ("name", "told"), [("logprobs", "without probabilities"), ("top_logprobs", "forward pass")]
)
def test_what_the_engine_cannot_do_is_refused_before_loading(kind, name, told):
    model = kind(model="no/such-model")
    for refused in (
        lambda: kind(**{name: 0.5}),
        lambda: model.bind(**{name: 0.5}),
        lambda: model.invoke("Who?", **{name: 0.5}),
    ):
        with pytest.raises(TypeError, match=f"takes no {name}: .*{told}"):
            refused()
    with pytest.raises(TypeError, match="temperature: it is an argument of its own"):
        kind(model_kwargs={"temperature": 1})
    assert kind(model_kwargs={"trust_remote_code": False}).model_kwargs


def test_a_completion_has_no_format():
    with pytest.raises(TypeError, match="takes no format: pass it to a call of a chat"):
        RagaccelLLM().invoke("x", format="json")


@MODELS
def test_values_that_ask_for_nothing_pass(kind):
    nothing = {"logprobs": False, "top_logprobs": None, "presence_penalty": 0.0, "n": 1}
    asked = "Who trims?" if kind is RagaccelLLM else [HumanMessage("Who trims?")]
    found, expected = (
        one.generate([asked], **given).generations[0][0].text
        for one, given in (
            (kind(llm=tiny_llm(), max_tokens=4, **nothing), nothing),
            (kind(llm=tiny_llm()), {"max_tokens": 4}),
        )
    )
    assert found == expected


@MODELS
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
        ({"max_reference_tokens": -1}, "max_reference_tokens"),
        ({"capacity": 0}, "capacity"),
        ({"registry": 5}, "registry must be a ragaccel.frameworks.ReferenceRegistry, not int"),
        ({"llm": "gpt"}, "llm must be a ragaccel.LLM, not str: pass a model's name as model="),
        ({"llm": tiny_llm(), "capacity": 10}, "already loaded and takes no capacity"),
        ({"llm": tiny_llm(), "exact": False}, "already loaded and takes no exact"),
        ({"llm": tiny_llm(), "model_kwargs": {"revision": "r"}}, "takes no model_kwargs"),
    ],
)
def test_an_invalid_option_is_refused_by_the_constructor(kind, options, told):
    with pytest.raises(ValueError, match=told):
        kind(**options)


def test_an_invalid_option_is_refused_by_a_call():
    chat = ChatRagaccel(llm=tiny_llm(), max_tokens=2)
    for options, told in (
        ({"timeout": 0}, "timeout must be above 0 seconds, not 0"),
        ({"registry": 5}, "registry must be a ragaccel"),
        ({"max_reference_tokens": -1}, "max_reference_tokens must be 0 or more"),
        ({"max_tokens": "3"}, "max_new_tokens must be a whole number"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            chat.invoke("Who?", **options)
    assert chat.invoke("Who?", registry=ReferenceRegistry(), timeout=60).content


def test_values_at_a_limit_are_accepted():
    options = {"temperature": 0, "top_p": 1, "min_p": 0, "top_k": 0, "max_tokens": 1}
    assert ChatRagaccel(**options, min_tokens=1, stop=[], max_reference_tokens=0).max_tokens == 1


def test_a_stream_reports_usage_unless_disabled():
    chat = ChatRagaccel(llm=tiny_llm(), max_tokens=4)
    for model, given, told in (
        (chat, {}, True),
        (chat, {"stream_usage": False}, False),
        (ChatRagaccel(llm=tiny_llm(), max_tokens=4, stream_usage=False), {}, False),
    ):
        *_, last = model.stream("Who?", **given)
        assert bool(last.usage_metadata) is told
