import asyncio
import copy
import pickle
from pathlib import Path
from threading import Event, current_thread, main_thread
from time import sleep
from types import SimpleNamespace

import pytest
import torch
from framework_llms import tiny_folder, tiny_llm
from langchain_core.caches import InMemoryCache
from ragaccel import LLM
from ragaccel.frameworks import get_shared_model

from langchain_ragaccel import ChatRagaccel, RagaccelLLM

MODELS = pytest.mark.parametrize("kind", [ChatRagaccel, RagaccelLLM])


@pytest.fixture
def loads(monkeypatch):
    """Record loads instead of loading."""
    seen = []

    def load(name=None, **options):
        seen.append((name, options))
        return tiny_llm()

    monkeypatch.setattr(LLM, "load", staticmethod(load))
    return seen


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny_folder(str(tmp_path_factory.mktemp("model")))


def test_the_same_name_and_options_share_one_llm_and_others_do_not(loads):
    held = ChatRagaccel(model="some", dtype="float32")
    assert loads == []
    held.invoke("Who?", max_tokens=1)
    assert held.ready_llm is get_shared_model("some", dtype=torch.float32).load()
    RagaccelLLM(model="some", dtype="float32", temperature=1.0).invoke("Who?", max_tokens=1)
    written = RagaccelLLM(model=Path("some"), torch_dtype=torch.float32, namespace="b")
    assert (written.model, written.dtype) == ("some", "float32")
    written.invoke("Who?", max_tokens=1)
    assert loads == [("some", {"dtype": "float32"})]
    RagaccelLLM(model="some", num_ctx=512).invoke("Who?", max_tokens=1)
    RagaccelLLM(model="some", model_kwargs={"revision": "r"}).invoke("Who?", max_tokens=1)
    assert loads[1:] == [("some", {"capacity": 512}), ("some", {"revision": "r"})]


def test_model_info_is_available_before_loading(folder):
    chat = ChatRagaccel(model=folder, max_tokens=5, device="cpu")
    assert chat.profile["max_input_tokens"] == 8192
    for capacity, least in ((300, 300), (99_999, 8192)):
        model = ChatRagaccel(model=folder, capacity=capacity)
        assert model.profile["max_input_tokens"] == least
    assert chat.get_num_tokens("Who?") == len(tiny_llm().tokenizer.encode("Who?"))
    assert chat.shared.loaded is None
    bare = LLM.load(folder, device="cpu", save_measurements=False)
    turns = [{"role": "user", "content": "Who?"}]
    message = chat.invoke("Who?")
    assert message.content == bare.generate(turns, max_new_tokens=5).text
    assert message.response_metadata["model_name"] == folder
    assert chat.shared.loaded is chat.ready_llm


@pytest.mark.parametrize("ask", ["invoke", "ainvoke", "stream", "astream"])
@MODELS
def test_the_time_of_an_answer_begins_with_its_call_and_includes_loading(monkeypatch, kind, ask):
    def load(name=None, **options):
        sleep(0.2)
        return tiny_llm()

    async def read(model):
        if ask == "ainvoke":
            return await model.ainvoke("Who?")
        return [one async for one in model.astream("Who?")]

    monkeypatch.setattr(LLM, "load", staticmethod(load))
    model = kind(model=f"slow {kind} {ask}", timeout=0.1, max_tokens=1)
    with pytest.raises(TimeoutError, match=r"within timeout=0.1 seconds"):
        asyncio.run(read(model)) if ask.startswith("a") else list(getattr(model, ask)("Who?"))
    again = kind(model=f"slow {kind} {ask}", timeout=60, max_tokens=1)
    assert again.invoke("Who?")


@MODELS
async def test_waiting_for_a_model_does_not_occupy_worker_threads(monkeypatch, kind):
    may_load = Event()

    def load(name=None, **options):
        assert may_load.wait(30)
        return tiny_llm()

    async def read(model):
        return [one async for one in model.astream("Who?", max_tokens=1)]

    monkeypatch.setattr(LLM, "load", staticmethod(load))
    slow, ready = kind(model=f"slow {kind} beside"), kind(llm=tiny_llm())
    waiting = [asyncio.create_task(slow.ainvoke("Who?", max_tokens=1)) for _ in range(40)]
    waiting += [asyncio.create_task(read(slow)) for _ in range(40)]
    await asyncio.sleep(0.05)
    try:
        assert await asyncio.wait_for(ready.ainvoke("Who?", max_tokens=1), 20)
    finally:
        may_load.set()
        answers = await asyncio.gather(*waiting)
    assert len(answers) == 80


@MODELS
async def test_a_caches_key_reads_no_file_on_the_event_loop(monkeypatch, loads, kind):
    read_in = []

    def read_info(name, **options):
        read_in.append(current_thread())
        return SimpleNamespace(tokenizer=tiny_llm().tokenizer)

    monkeypatch.setattr("ragaccel.models.load.read_model_info", read_info)
    model = kind(model=f"looked up {kind}", max_tokens=2, cache=InMemoryCache())
    assert await model.ainvoke("Who?")
    assert read_in
    assert main_thread() not in read_in


def test_constructing_a_chat_model_reads_no_files(monkeypatch):
    def read_info(name, **options):
        raise AssertionError("read while it was made")

    monkeypatch.setattr("ragaccel.models.load.read_model_info", read_info)
    chat = ChatRagaccel(model="some")
    copies = [chat.model_copy(), copy.deepcopy(chat), pickle.loads(pickle.dumps(chat))]
    assert all(one == chat for one in copies)
    assert all(one.shared is chat.shared for one in copies)
    with pytest.raises(AssertionError, match="read while"):
        _ = chat.profile


def test_a_name_that_is_changed_means_another_model(loads):
    chat = ChatRagaccel(model="some")
    chat.invoke("Who?", max_tokens=1)
    chat.model = "other"
    chat.invoke("Who?", max_tokens=1)
    assert [name for name, _ in loads] == ["some", "other"]
    assert chat.model_name == "other"


def test_the_identity_of_a_ready_llm():
    assert RagaccelLLM(llm=tiny_llm(), model="mine").model_name == "mine"
    named = RagaccelLLM(llm=tiny_llm(), model="mine").identity_params
    assert named == RagaccelLLM(model="mine").identity_params
    first, second = RagaccelLLM(llm=tiny_llm()), RagaccelLLM(llm=tiny_llm(None))
    assert first.identity_params["llm"] != second.identity_params["llm"]
    assert first.identity_params == RagaccelLLM(llm=tiny_llm()).identity_params
