"""Static passes that torch compiles, on a CPU with a C++ compiler, and those that it does not."""

import shutil

import pytest
import torch
from decoding import OracleDrafter, decode
from static_passes import static_target
from tiny_llm import tiny_tokenizer
from tiny_models import generate, make_tiny_model, random_prompt, tiny_model

from ragaccel.decoding import NoDrafter, Request
from ragaccel.engine import Engine
from ragaccel.llm import LLM

PROMPT = random_prompt(21)
NO_COMPILER = all(shutil.which(name) is None for name in ("g++", "clang++", "c++"))


@pytest.fixture
def compiles(monkeypatch, tmp_path):
    """Nothing is read from what was compiled before."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch.compiler.reset()


def slow(test):
    return pytest.mark.slow(pytest.mark.filterwarnings("ignore::DeprecationWarning")(test))


@slow
@pytest.mark.skipif(NO_COMPILER, reason="no C++ compiler")
def test_a_static_pass_compiles_as_a_whole(compiles):
    target = static_target("gemma3")
    assert target.compile()
    expected = generate(tiny_model("gemma3"), PROMPT, 25)
    request = Request(PROMPT, max_new_tokens=25)
    assert decode(Engine(target), request, OracleDrafter(PROMPT, expected)) == expected
    assert not compiles["graph_break"]
    assert compiles["stats"]["unique_graphs"] >= 1
    assert target._static._network is not target._static._eager
    assert target.is_compiled


@slow
@pytest.mark.skipif(NO_COMPILER, reason="no C++ compiler")
def test_a_warm_up_compiles_what_answers_run_through(compiles):
    model = make_tiny_model("llama", vocab_size=400)
    target = static_target(model=model)
    llm = LLM(target, tiny_tokenizer(), drafter=NoDrafter())
    llm.warm_up(compile=True, context=20)
    assert target.is_compiled
    made = compiles["stats"]["unique_graphs"]
    assert made >= 1
    answer = llm.generate(PROMPT, max_new_tokens=25)
    assert list(answer.token_ids) == generate(model, PROMPT, 25)
    assert target.is_compiled
    assert compiles["stats"]["unique_graphs"] == made


@pytest.mark.parametrize("detail", ["", "\n\nSet TORCHDYNAMO_VERBOSE=1 for more\n"])
def test_a_model_that_does_not_compile_runs_as_it_is(monkeypatch, caplog, detail):
    def fails(*_args, **_settings):
        raise RuntimeError("no compiler" + detail)

    target = static_target()
    monkeypatch.setattr(torch, "compile", lambda *_args, **_settings: fails)
    assert target.compile()
    found = decode(Engine(target), Request(PROMPT, max_new_tokens=9))
    assert found == generate(tiny_model("llama"), PROMPT, 9)
    assert [record.message for record in caplog.records] == [
        "torch.compile fails on this model, which runs uncompiled: no compiler"
    ]
