"""Models by name: loaded once, at first use, with metadata read from files before."""

import asyncio
import time

import pytest
from framework_llms import RecordingLLM, tiny_folder, tiny_llm
from ragaccel import LLM, CapacityError, ConfigurationError

from llama_index.llms.ragaccel import Ragaccel


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(str(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def loads(monkeypatch):
    made = []

    def load(name, **options):
        time.sleep(0.01)  # so that unsynchronized threads collide here
        made.append((name, options))
        return RecordingLLM()

    monkeypatch.setattr(LLM, "load", load)
    return made


def test_a_folder_answers_like_its_llm(folder):
    llm = Ragaccel(folder, device="cpu", max_new_tokens=10)
    turns = [{"role": "user", "content": "Who trims the wick?"}]
    answer = LLM.load(folder, device="cpu").generate(turns, max_new_tokens=10)
    assert llm.complete("Who trims the wick?").text == answer.text
    assert llm.load().context_length == 8192


def test_metadata_is_known_without_the_weights(folder, loads):
    llm = Ragaccel(folder, max_new_tokens=99)
    metadata = llm.metadata
    assert (metadata.context_window, metadata.num_output) == (8192, 99)
    assert metadata.is_chat_model
    assert metadata.model_name == str(folder)
    assert not metadata.is_function_calling_model
    assert llm.tokenize("Who trims") == tiny_llm().tokenizer.encode("Who trims")
    assert Ragaccel(folder, model_kwargs={"capacity": 300}).metadata.context_window == 300
    assert Ragaccel(folder, context_window=200).metadata.context_window == 200
    assert not loads


def test_more_context_than_the_model_reads_is_refused(folder):
    with pytest.raises(ConfigurationError, match="context_window=9,000 is more than the 8,192"):
        _ = Ragaccel(folder, context_window=9000).metadata


def test_a_context_window_is_kept_to(folder):
    llm = Ragaccel(folder, max_new_tokens=40)
    usage = llm.complete("word " * 60, formatted=True, max_new_tokens=4).raw["usage"]
    plain = usage["prompt_tokens"]
    assert Ragaccel(folder, context_window=plain + 4).complete(
        "word " * 60, formatted=True, max_new_tokens=4
    ).raw["usage"] == usage  # fmt: skip
    close = Ragaccel(folder, context_window=plain + 3)
    for ask, given in ((close.complete, {"formatted": True}), (close.complete, {}),
                       (close.stream_complete, {})):  # fmt: skip
        with pytest.raises(CapacityError, match=f"exceed context_window={plain + 3}"):
            ask("word " * 60, max_new_tokens=4, **given)
    wide = Ragaccel(folder, context_window=8192).complete("Who?", max_new_tokens=2)
    assert wide.raw["usage"]["completion_tokens"] == 2


def test_metadata_of_a_ready_model():
    plain = Ragaccel(llm=tiny_llm(None)).metadata
    assert (plain.context_window, plain.is_chat_model) == (8192, False)
    assert plain.model_name == "tiny"
    endless = Ragaccel(llm=RecordingLLM(context_length=None))
    assert endless.metadata.context_window == 3900
    assert Ragaccel().metadata.model_name == "ragaccel-reader"


def test_it_can_be_loaded_when_a_server_starts(loads):
    llm = Ragaccel("one/server's-model")
    assert asyncio.run(llm.aload()) is llm.load()
    assert len(loads) == 1
