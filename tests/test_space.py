"""An LLM with a SPACE adapter: the same answers through every method, and clear refusals."""

import asyncio

import pytest
import torch
from space_models import random_adapter
from tiny_llm import tiny_tokenizer
from tiny_models import make_tiny_model

from eval.robustness.stand_ins import save_tiny_model
from ragaccel import (
    LLM,
    ConfigurationError,
    ModelNotFoundError,
    NoDrafter,
    SpaceAdapter,
    SpaceDrafter,
)
from ragaccel.drafting import JIT_WARMUP, PaperSpaceDrafter
from ragaccel.engine import EngineVerifier, engine
from ragaccel.models import HuggingFaceModel

PROMPTS = ["Who trims the wick?", "What rises at the mole?", "Nobody", "Answer the question."]


@pytest.fixture(autouse=True)
def _compiled():
    assert JIT_WARMUP.wait(120)


@pytest.fixture(scope="module")
def llm():
    model = make_tiny_model("llama", vocab_size=380, max_position_embeddings=2048)
    return LLM(model, tiny_tokenizer(), space=random_adapter(model))


@pytest.fixture
def _free_rows(monkeypatch):
    """Set the cost of rows to 0: drafts must not depend on how busy the machine is."""
    monkeypatch.setattr(EngineVerifier, "step_costs", lambda self: lambda rows: 1.0)


def plainly(llm, prompt, **settings):
    return llm.generate(prompt, drafter=NoDrafter(), max_new_tokens=24, **settings)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 3}])
def test_answers_are_the_same_whole_streamed_batched_and_awaited(llm, settings):
    wanted = [plainly(llm, prompt, **settings).token_ids for prompt in PROMPTS]
    for drafter in (None, SpaceDrafter(llm.mask_ids), PaperSpaceDrafter(llm.mask_ids)):
        given = {**settings, "drafter": drafter, "max_new_tokens": 24}
        assert llm.generate(PROMPTS[0], **given).token_ids == wanted[0]
        assert [answer.token_ids for answer in llm.generate(PROMPTS, **given)] == wanted
        with llm.stream(PROMPTS[0], **given) as stream:
            text = "".join(stream)
        assert (stream.answer.token_ids, stream.answer.text) == (wanted[0], text)
        assert asyncio.run(llm.agenerate(PROMPTS[1], **given)).token_ids == wanted[1]


@pytest.mark.usefixtures("_free_rows")
def test_its_own_drafts_have_mask_tokens_and_namespaces_learn_separately(llm):
    answer = llm.generate(PROMPTS[0], max_new_tokens=40, namespace="one")
    assert answer.token_ids[:24] == plainly(llm, PROMPTS[0]).token_ids
    one, two = (llm.memory.of(name).space_calibration for name in ("one", "two"))
    assert len(llm.mask_ids) == 3
    assert one.values != two.values == type(two)().values  # it has seen mask tokens


def test_no_adapter_no_mask_tokens():
    bare = LLM(make_tiny_model("llama", vocab_size=380), tiny_tokenizer())
    assert len(bare.mask_ids) == 0
    with pytest.raises(ConfigurationError, match=r"space=\.\.\."):
        SpaceDrafter(bare.mask_ids)
    with pytest.raises(ConfigurationError, match="uses the mask token 381"):
        bare.generate("Who?", drafter=SpaceDrafter((380, 381)))
    with pytest.raises(ConfigurationError, match="uses the mask token 381"):
        LLM(bare.model, tiny_tokenizer(), drafter=PaperSpaceDrafter((380, 381)))
    # A mask token of the vocabulary, as published checkpoints have it, needs no adapter.
    wanted = bare.generate("Who?", drafter=NoDrafter(), max_new_tokens=20).token_ids
    found = bare.generate("Who?", drafter=PaperSpaceDrafter((379,) * 3), max_new_tokens=20)
    assert found.token_ids == wanted


def test_exact_mode_takes_mask_tokens_only_if_its_passes_are_ordinary_ones():
    model = make_tiny_model("llama", vocab_size=380)
    with pytest.raises(ConfigurationError, match="in exact mode only with bfloat16 models"):
        LLM(model, tiny_tokenizer(), space=random_adapter(model), exact=True)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 384}
    target = HuggingFaceModel(make_tiny_model("llama", torch.bfloat16, **sizes), pack=True)
    if not target.is_batch_invariant:
        pytest.skip("nothing is compiled for bfloat16 here")
    plain = LLM(target, tiny_tokenizer(), exact=True, drafter=NoDrafter(), remember=False)
    wanted = plain.generate("Who?", max_new_tokens=24).token_ids
    llm = LLM(target, tiny_tokenizer(), space=random_adapter(target.model), exact=True)
    read, forward = [], target.forward
    target.forward = lambda rows, keep: read.append(rows.is_mask) or forward(rows, keep)
    assert llm.generate("Who?", max_new_tokens=24).token_ids == wanted
    assert any(is_mask is not None for is_mask in read)


def test_a_model_that_fails_the_check_of_exact_mode_takes_no_mask_tokens(monkeypatch):
    model = make_tiny_model("llama", vocab_size=380)
    monkeypatch.setattr(HuggingFaceModel, "is_batch_invariant", True)  # rows of float32 are not
    monkeypatch.setattr(engine, "_is_batch_invariant", lambda model: False)
    with pytest.raises(ConfigurationError, match="in exact mode only with bfloat16 models"):
        LLM(model, tiny_tokenizer(), space=random_adapter(model), exact=True)


def test_an_adapter_is_loaded_by_its_folder_or_as_the_models_own(tmp_path):
    folder = save_tiny_model(tmp_path / "model")
    bare = LLM.load(folder)
    wanted = bare.generate("Who?", max_new_tokens=16).token_ids
    with pytest.raises(ModelNotFoundError, match="has no SPACE adapter"):
        LLM.load(folder, space=True)
    assert len(LLM.load(folder, space=False).mask_ids) == 0
    adapter = random_adapter(bare.model.model, num_masks=2)
    adapter.save(tmp_path / "other")
    adapter.save(folder / "space")
    for space in (True, tmp_path / "other", str(tmp_path / "other"), adapter):
        llm = LLM.load(folder, space=space)
        assert len(llm.mask_ids) == 2
        assert llm.generate("Who?", max_new_tokens=16).token_ids == wanted
    with pytest.raises(ConfigurationError, match="holds no space_config"):
        LLM.load(folder, space=tmp_path)
    assert SpaceAdapter.load(folder / "space").num_masks == 2


def test_what_space_learned_outlives_the_process(tmp_path):
    model = make_tiny_model("llama", vocab_size=380)
    space = random_adapter(model)
    llm = LLM(model, tiny_tokenizer(), space=space, memory=tmp_path / "memory")
    llm.generate(PROMPTS[0], max_new_tokens=30)
    llm.memory.save()
    again = LLM(llm.model, tiny_tokenizer(), memory=tmp_path / "memory")
    learned = llm.memory.of("").space_calibration
    assert again.memory.of("").space_calibration.values == learned.values
