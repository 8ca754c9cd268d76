"""Shared models: one per process, loaded when needed, described before."""

import asyncio
import copy
import gc
import pickle
import threading
import time

import pytest
import torch
from tiny_llm import DOCUMENTS_TEMPLATE, tiny_llm, tiny_tokenizer
from tiny_models import make_tiny_model

from eval.robustness.stand_ins import save_tiny_model
from ragaccel.errors import ModelNotFoundError
from ragaccel.frameworks import SharedModel, get_shared_model
from ragaccel.llm import LLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", context=777)


@pytest.fixture
def loads(monkeypatch):
    """Record the names of models instead of loading them."""
    made = []

    def load(name, **options):
        time.sleep(0.01)  # so that unsynchronized threads meet here
        made.append((name, options))
        return object.__new__(LLM)

    monkeypatch.setattr(LLM, "load", load)
    return made


def test_it_is_loaded_once_by_all_who_name_it(loads):
    same = [get_shared_model("one/model", device="cpu") for _ in range(6)]
    other = get_shared_model("one/model")
    assert not loads
    assert same[0].loaded is None
    threads = [threading.Thread(target=one.load) for one in [*same, other]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(loads, key=str) == [("one/model", {"device": "cpu"}), ("one/model", {})]
    assert len({id(one.load()) for one in same}) == 1
    assert other.load() is not same[0].load()
    assert same[0].loaded is same[0].load()


def test_paths_and_what_torch_calls_it_mean_the_same(folder):
    model = get_shared_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    assert get_shared_model(str(folder), device="cpu", dtype="float32") is model
    assert model.options == {"dtype": "float32", "device": "cpu"}
    assert get_shared_model(folder, dtype="float32") is not model
    assert get_shared_model(folder, dtype="float32") != model


def test_the_one_loaded_last_stays_and_others_go_with_their_last_user(loads):
    for _ in range(3):
        get_shared_model("made/for-one-call").load()
    assert len(loads) == 1
    get_shared_model("another/model").load()
    gc.collect()
    get_shared_model("made/for-one-call").load()
    first, other, again = [name for name, _ in loads]
    assert (first, other, again) == ("made/for-one-call", "another/model", first)


def test_those_who_wait_for_one_model_take_no_thread_from_another(monkeypatch):
    begun, go_on, made = threading.Event(), threading.Event(), []

    def load(name, **options):
        if name == "slow/model":
            begun.set()
            assert go_on.wait(20), "the event loop stood still"
        made.append(name)
        return object.__new__(LLM)

    monkeypatch.setattr(LLM, "load", load)

    async def ask():
        slow = [asyncio.create_task(get_shared_model("slow/model").aload()) for _ in range(50)]
        while not begun.is_set():
            await asyncio.sleep(0.001)
        running = [one.name for one in threading.enumerate()]
        slow[0].cancel()
        other = await get_shared_model("other/model").aload()
        go_on.set()
        loaded = await asyncio.gather(*slow, return_exceptions=True)
        assert isinstance(loaded[0], asyncio.CancelledError)
        assert {id(one) for one in loaded[1:]} == {id(get_shared_model("slow/model").loaded)}
        assert await get_shared_model("slow/model").aload() is loaded[1]
        return running, other

    held = get_shared_model("slow/model")
    running, other = asyncio.run(ask())
    assert sum(name.startswith("ragaccel-loading") for name in running) == 1
    assert other is not held.loaded
    assert made == ["other/model", "slow/model"]


def test_a_load_that_fails_is_told_to_all_who_wait_and_tried_again(monkeypatch):
    def fails(name, **options):
        raise ModelNotFoundError("no such model")

    model = get_shared_model("comes/too-late")
    monkeypatch.setattr(LLM, "load", fails)
    with pytest.raises(ModelNotFoundError):
        model.load()

    async def ask():
        return await asyncio.gather(model.aload(), model.aload(), return_exceptions=True)

    assert [type(one) for one in asyncio.run(ask())] == [ModelNotFoundError] * 2
    monkeypatch.setattr(LLM, "load", lambda name, **options: tiny_llm())
    assert asyncio.run(model.aload()) is model.load() is tiny_llm()
    assert asyncio.run(SharedModel(ready=tiny_llm()).aload()) is tiny_llm()


def test_it_is_known_before_its_weights(folder, loads):
    model = get_shared_model(folder)
    assert (model.label, model.context_length, model.is_chat_model) == (str(folder), 777, True)
    assert model.tokenizer.decode(model.tokenizer.encode("Who?")) == "Who?"
    assert not model.is_documents_only
    assert get_shared_model(folder, capacity=300).context_length == 300
    reader = get_shared_model()
    assert (reader.context_length, reader.is_chat_model) == (2048, True)
    assert (reader.label, reader.is_documents_only) == ("ragaccel-reader", True)
    assert not loads
    with pytest.raises(ModelNotFoundError):
        _ = get_shared_model(folder / "nothing").context_length


def test_a_loaded_one_speaks_for_itself(folder):
    model = get_shared_model(folder, device="cpu", capacity=64, save_measurements=False)
    llm = model.load()
    assert model.tokenizer is llm.tokenizer
    assert model.context_length == llm.context_length == 64
    assert llm.generate("Who?", max_new_tokens=2).usage.completion_tokens == 2


def test_a_ready_llm_is_called_by_its_own_name_or_by_the_one_it_is_given():
    llm = tiny_llm()
    model = SharedModel(ready=llm)
    assert (model.ready, model.loaded, model.load()) == (llm, llm, llm)
    assert model.label == "ragaccel"
    assert SharedModel("mine", ready=llm).label == "mine"
    documents_only = tiny_tokenizer(DOCUMENTS_TEMPLATE)
    named = LLM(make_tiny_model("llama", vocab_size=380), documents_only, save_measurements=False)
    named.model.model.config._name_or_path = "org/name"
    assert SharedModel(ready=named).label == "org/name"
    assert SharedModel(ready=named).is_documents_only


def test_ready_llms_have_identities_of_their_own():
    one, other = SharedModel(ready=tiny_llm()), SharedModel(ready=object.__new__(LLM))
    assert one == SharedModel(ready=tiny_llm())
    assert hash(one) == hash(SharedModel(ready=tiny_llm()))
    assert one.identity == SharedModel("mine", ready=tiny_llm()).identity
    assert one != SharedModel("mine", ready=tiny_llm())
    assert one != other
    assert one != "one"


def test_copies_are_the_same_and_pickles_hold_the_name(loads):
    model = get_shared_model("one/model", revision="r")
    model.load()
    assert copy.copy(model) is copy.deepcopy(model) is model
    pickled = pickle.dumps(model)
    assert pickle.loads(pickled) is model
    assert len(pickled) < 500
    with pytest.raises(TypeError, match="pass the model's name instead"):
        pickle.dumps(SharedModel(ready=tiny_llm()))
