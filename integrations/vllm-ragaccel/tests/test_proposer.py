"""The proposer against vLLM's interface, as recorded: nothing of vLLM is installed here."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
from ragaccel.errors import ConfigurationError
from vllm_batch import Engine

MODULE = "vllm.v1.spec_decode.custom_class_proposer"


def create_custom_proposer(vllm_config):
    from vllm_ragaccel import RagaccelProposer

    return RagaccelProposer(vllm_config)


def install(monkeypatch, create=create_custom_proposer):
    """Put a vLLM of this interface where imports find it."""
    for name in ("vllm", "vllm.v1", "vllm.v1.spec_decode", MODULE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm"].__version__ = "0.99.0"
    if create is not None:
        sys.modules[MODULE].create_custom_proposer = create


def config_of(additional_config=None, **speculative):
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=8, **speculative),
        model_config=SimpleNamespace(max_model_len=256, get_vocab_size=lambda: 1000),
        additional_config=additional_config or {},
    )


@pytest.mark.usefixtures("equal_steps")
@pytest.mark.parametrize("options", [{}, {"history": True}, {"reproducible": True}])
def test_vllm_gets_drafts_within_its_limits(monkeypatch, options):
    install(monkeypatch)
    proposer = create_custom_proposer(config_of({"ragaccel": options, "other": 1}))
    proposer.load_model(object())
    engine = Engine(proposer, max_len=256, num_tokens=8)
    prompt = list(range(10, 150))
    requests = [engine.add(prompt, prompt[start:]) for start in (0, 20, 40)]
    engine.run()
    assert [one.said for one in requests] == [prompt[start:256][:116] for start in (0, 20, 40)]
    assert engine.num_accepted > 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"historie": True}, "no option historie: there are history, reproducible and index"),
        ({"history": "yes"}, "must be true or false, not 'yes'"),
        ({"reproducible": 1}, "must be true or false, not 1"),
        ({"history": True, "reproducible": True}, "choose one of both"),
        ({"index": True}, "must be the path of an index file, not True"),
        ({"index": ""}, "must be the path of an index file, not ''"),
        (["history"], "must be an object"),
    ],
)
def test_options_that_do_not_exist_are_refused(monkeypatch, options, message):
    install(monkeypatch)
    with pytest.raises(ConfigurationError, match=message):
        create_custom_proposer(config_of({"ragaccel": options}))


def test_a_vllm_with_another_interface_is_refused_with_the_versions_that_work(monkeypatch):
    works = r"vLLM 0\.99\.0 has another interface .* works with vLLM 0\.32"
    for create in (None, lambda vllm_config, device: None):
        install(monkeypatch, create)
        with pytest.raises(ConfigurationError, match=works):
            create_custom_proposer(config_of())
    install(monkeypatch)
    config = config_of()
    del config.speculative_config.num_speculative_tokens
    with pytest.raises(ConfigurationError, match=works):
        create_custom_proposer(config)


def test_neither_torch_nor_transformers_is_imported():
    code = (
        "import sys, vllm_ragaccel\n"
        "assert 'numba' not in sys.modules and 'ragaccel.drafting' not in sys.modules\n"
        "from vllm_ragaccel import RagaccelDraft, RagaccelProposer\n"
        "RagaccelDraft(4)\n"
        "heavy = {'torch', 'transformers', 'faiss', 'sentence_transformers', 'vllm', 'llama_cpp'}\n"
        "layers = {'ragaccel.llm', 'ragaccel.models', 'ragaccel.engine', 'ragaccel.retrieval'}\n"
        "print(*(heavy | layers) & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
