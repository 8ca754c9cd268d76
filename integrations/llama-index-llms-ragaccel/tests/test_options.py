"""Options of the constructor and of calls; invalid ones are refused early."""

import copy
import json
import pickle
from functools import partial

import pytest
import torch
from framework_llms import RecordingLLM, tiny_llm, tiny_model, tiny_tokenizer
from llama_index.core.extractors import TitleExtractor
from llama_index.core.ingestion.pipeline import get_transformation_hash
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode
from methods import MESSAGES, PROMPT, TURNS, call
from pydantic import ValidationError
from ragaccel import ConfigurationError
from ragaccel.frameworks import ReferenceRegistry

from llama_index.embeddings.ragaccel import RagaccelEmbedding
from llama_index.llms.ragaccel import Ragaccel
from llama_index.retrievers.ragaccel import RagaccelRetriever
from llama_index.vector_stores.ragaccel import RagaccelVectorStore


def settings_of(llm, **given):
    llm.complete("?", **given)
    return llm.llm.asked[-1][2]


def test_object_settings_are_defaults_for_calls():
    llm = Ragaccel(
        llm=RecordingLLM(), max_new_tokens=7, temperature=0.5, generate_kwargs={"top_p": 0.9}
    )
    made = {"max_new_tokens": 7, "temperature": 0.5, "top_p": 0.9, "namespace": ""}
    assert settings_of(llm) == made
    assert settings_of(llm, max_new_tokens=3) == {**made, "max_new_tokens": 3}
    assert settings_of(llm, max_tokens=4) == {**made, "max_new_tokens": 4}
    assert settings_of(llm, temperature=0.0, seed=5) == {**made, "temperature": 0.0, "seed": 5}
    given = {"stop": ["."], "namespace": "tenant", "remember": False}
    assert settings_of(llm, top_p=None, **given) == {**made, **given}
    assert settings_of(Ragaccel(llm=RecordingLLM(), remember=False))["remember"] is False
    llm.max_new_tokens = 11
    assert settings_of(llm)["max_new_tokens"] == 11


METHODS = pytest.mark.parametrize("method", ["complete", "stream_complete", "chat", "stream_chat"])


@METHODS
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"temprature": 1.0}, r"takes no temprature: did you mean temperature\?"),
        ({"num_beams": 4}, "takes no num_beams: one answer"),
        ({"max_tokens": 4, "max_new_tokens": 4}, "got max_new_tokens twice"),
    ],
)
def test_an_unknown_setting_is_refused_before_anything_is_loaded(method, settings, told):
    with pytest.raises(TypeError, match=told):
        call(Ragaccel("no/such-model"), method, **settings)


@METHODS
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"stop": [""]}, "stop"),
        ({"top_p": 2.0}, "top_p"),
        ({"max_new_tokens": 9000}, "8,192"),
        ({"max_tokens": "9"}, "a whole number, not '9'"),
    ],
)
def test_an_invalid_setting_is_refused_before_streaming(method, settings, told):
    with pytest.raises(ConfigurationError, match=told):
        call(Ragaccel(llm=tiny_llm()), method, **settings)


def test_what_is_no_text_and_no_message_is_refused():
    llm = Ragaccel(llm=RecordingLLM())
    with pytest.raises(ConfigurationError, match="must be a str, not NoneType"):
        llm.complete(None)
    with pytest.raises(ConfigurationError, match="takes ChatMessages, not dict"):
        llm.stream_chat([{"role": "user", "content": "?"}])


@pytest.mark.parametrize("name", ["generate_kwargs", "model_kwargs", "llm"])
def test_contradicting_constructor_arguments_are_refused(name):
    with pytest.raises(ConfigurationError, match=f"{name} must be a .*, not int"):
        Ragaccel(**{name: 3})


def test_foreign_names_are_refused_with_a_replacement():
    for name in ("tokenizer_name", "is_chat_model", "stopping_ids", "api_key"):
        with pytest.raises(TypeError, match=f"Ragaccel takes no {name}: "):
            Ragaccel(**{name: "x"})
    with pytest.raises(TypeError, match=r"max_new_token: did you mean max_new_tokens\?"):
        Ragaccel(max_new_token=3)
    with pytest.raises(TypeError, match="takes no do_sample: temperature"):
        Ragaccel(generate_kwargs={"do_sample": True})
    with pytest.raises(TypeError, match=r"devise: did you mean device\?; its .*device"):
        Ragaccel(devise="cpu")
    with pytest.raises(TypeError, match="got model twice"):
        Ragaccel("a/name", model_name="another/name")
    with pytest.raises(ValidationError, match="max_new_tokens"):
        Ragaccel(max_new_tokens=0)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("logprobs", "without probabilities"),
        ("n", "another seed"),
        ("response_format", "as_structured_llm"),
        ("trust_remote_code", "model_kwargs"),
    ],
)
def test_unsupported_arguments_are_refused_with_an_alternative(name, instead):
    for refused in (
        lambda: Ragaccel(**{name: 0.5}),
        lambda: Ragaccel(generate_kwargs={name: 0.5}),
        lambda: Ragaccel("no/such-model").complete("?", **{name: 0.5}),
    ):
        with pytest.raises(TypeError, match=f"takes no {name}: .*{instead}"):
            refused()


@pytest.mark.parametrize(
    ("kind", "name", "told"),
    [
        (RagaccelEmbedding, "modle_name", "did you mean model_name"),
        (RagaccelEmbedding, "query_instruction", "own prompts"),
        (RagaccelVectorStore, "pth", "did you mean path"),
        (RagaccelVectorStore, "persist_dir", "from_persist_dir"),
        (partial(RagaccelRetriever, "nowhere"), "similarity_topk", "did you mean similarity_top_k"),
        (partial(RagaccelRetriever, "nowhere"), "vector_store_query_mode", "mode="),
    ],
)
def test_names_that_other_classes_take_are_refused_too(kind, name, told):
    with pytest.raises(TypeError, match=f"{name}: .*{told}"):
        kind(**{name: 1})


def test_a_model_may_be_named_loaded_or_ready():
    assert Ragaccel("a/name").model == Ragaccel(model_name="a/name").model == "a/name"
    loaded = Ragaccel(model=tiny_model(), tokenizer=tiny_tokenizer(), max_new_tokens=9)
    assert loaded.complete(PROMPT).text == tiny_llm().generate(TURNS, max_new_tokens=9).text
    for wrong in (
        {"model": tiny_model()},
        {"model": "a/name", "tokenizer": tiny_tokenizer()},
        {"model": "a/name", "llm": tiny_llm()},
        {"llm": tiny_llm(), "device": "cpu"},
    ):
        with pytest.raises(ConfigurationError):
            Ragaccel(**wrong)


def test_loading_options_have_one_name():
    made = Ragaccel("m", dtype=torch.bfloat16, device_map="auto", model_kwargs={"revision": "x"})
    assert made.model_kwargs == {"revision": "x", "device_map": "auto", "dtype": "bfloat16"}
    older = Ragaccel("m", model_kwargs={"torch_dtype": torch.bfloat16})
    assert older.model_kwargs == {"dtype": "bfloat16"}


MADE = {
    "model": "a/name",
    "dtype": "bfloat16",
    "model_kwargs": {"revision": "main"},
    "context_window": 512,
    "max_new_tokens": 33,
    "temperature": 0.25,
    "generate_kwargs": {"top_k": 5, "stop": ["\n"]},
    "namespace": "tenant",
    "auto_references": False,
    "adjacent_chunks": False,
    "system_prompt": "Be brief.",
}


def test_an_object_is_saved_and_pickled_by_its_options(caplog):
    llm = Ragaccel(**MADE)
    saved = json.loads(llm.to_json())
    assert saved["class_name"] == "Ragaccel"
    for again in (Ragaccel.from_dict(saved), pickle.loads(pickle.dumps(llm))):
        assert again.to_dict() == llm.to_dict()
        assert again._model is llm._model
    assert not caplog.records
    assert {name: saved[name] for name in MADE.keys() - {"dtype", "model_kwargs"}} == {
        name: MADE[name] for name in MADE.keys() - {"dtype", "model_kwargs"}
    }


def test_saved_and_traced_data_hold_no_secrets():
    llm = Ragaccel("a/name", model_kwargs={"token": "hf_secret"}, system_prompt="Our secret.")
    assert "hf_secret" not in llm.to_json()
    assert "hf_secret" not in repr(llm) + str(llm)
    payload = llm.to_payload()
    assert payload["model_name"] == "a/name"
    assert "secret" not in json.dumps(payload)


def test_a_ready_model_cannot_be_saved():
    loaded = Ragaccel(
        tiny_model(), tokenizer=tiny_tokenizer(), model_kwargs={"capacity": 99}, max_new_tokens=5
    )
    assert loaded.metadata.context_window == 99
    saved = loaded.to_dict()
    with pytest.raises(ConfigurationError, match=r"from_dict\(data, llm=\.\.\.\)"):
        Ragaccel.from_dict(saved)
    again = Ragaccel.from_dict(saved, llm=tiny_llm())
    assert again.llm is tiny_llm()
    assert again.max_new_tokens == 5
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(Ragaccel(llm=tiny_llm()))
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(Ragaccel(registry=ReferenceRegistry()))


def test_answer_cache_keys_distinguish_ready_models():
    one, same, other = (Ragaccel(llm=llm) for llm in (tiny_llm(), tiny_llm(), tiny_llm(None)))
    node = TextNode(text="The lamp burns oil.")
    keys = [get_transformation_hash([node], TitleExtractor(llm=llm)) for llm in (one, same, other)]
    assert keys[0] == keys[1] != keys[2]


def test_copies_share_the_model():
    registry = ReferenceRegistry()
    llm = Ragaccel(llm=tiny_llm(), registry=registry, generate_kwargs={"stop": ["x"]})
    for copied in (copy.copy(llm), copy.deepcopy(llm), llm.model_copy(deep=True)):
        assert copied.llm is llm.llm
        assert copied.registry is registry
        assert (
            copied.complete("?", max_new_tokens=5).text == llm.complete("?", max_new_tokens=5).text
        )
        assert copied.chat(MESSAGES, max_new_tokens=5) is not None
    deep = copy.deepcopy(llm)
    deep.generate_kwargs["stop"].append("y")
    assert llm.generate_kwargs == {"stop": ["x"]}


def test_model_fields_are_frozen():
    llm = Ragaccel("a/name")
    with pytest.raises(ValidationError, match="frozen"):
        llm.model = "another"
    llm.system_prompt = "Be brief."
    assert llm.system_prompt == "Be brief."


def test_a_subclass_may_have_fields_of_its_own():
    class Mine(Ragaccel):
        mood: str = "calm"

    assert Mine(llm=tiny_llm(), mood="glad").mood == "glad"
    assert Ragaccel(query_wrapper_prompt=PromptTemplate("{query_str}")).query_wrapper_prompt
