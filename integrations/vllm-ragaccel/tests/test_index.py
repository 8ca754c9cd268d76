"""The option ``index``: text that only an index holds is drafted from."""

import logging
import subprocess
import sys
from types import ModuleType

import pytest
from hash_embedder import HashEmbedder
from ragaccel import Store, index_folder
from ragaccel.errors import ConfigurationError, RagaccelError
from test_proposer import config_of, create_custom_proposer, install
from vllm_batch import Engine

WORDS = [f"word{number:04}" for number in range(1800)]
PROMPT = list(range(300, 340))


class WordTokenizer:
    """A tokenizer whose token ids are the numbers of words."""

    def decode(self, ids):
        return " ".join(WORDS[token] if token < len(WORDS) else "other" for token in ids)

    def encode(self, text, *, add_special_tokens):
        assert add_special_tokens is False
        return [WORDS.index(word) for word in text.split()]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """An index of two files of words."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "first.txt").write_text(" ".join(WORDS[:600]), encoding="utf-8")
    (folder / "second.txt").write_text(" ".join(WORDS[600:]), encoding="utf-8")
    path = folder.parent / "words.db"
    with Store(path) as store:
        index_folder(store, HashEmbedder(), folder, passage_tokens=40)
        assert store.count_passages() > 15
    return path


@pytest.fixture
def vllm(monkeypatch):
    """A vLLM with the interface of 0.32, and a tokenizer of words."""
    install(monkeypatch)
    module = ModuleType("vllm.tokenizers")
    module.cached_tokenizer_from_config = lambda model_config: WordTokenizer()
    monkeypatch.setitem(sys.modules, "vllm.tokenizers", module)
    return module


def engine_with(options, requests):
    """Answer requests, and return the engine."""
    proposer = create_custom_proposer(config_of({"ragaccel": options}))
    proposer.load_model(object())
    engine = Engine(proposer, max_len=256, num_tokens=8)
    running = [engine.add(prompt, target) for prompt, target in requests]
    engine.run()
    assert [one.said for one in running] == [target for _, target in requests]
    return engine


@pytest.mark.parametrize("reproducible", [False, True])
def test_text_around_a_passage_in_the_prompt_is_drafted(vllm, index, reproducible):
    around = [(PROMPT, list(range(340, 420))), (PROMPT, list(range(220, 300)))]
    options = {"reproducible": reproducible}
    assert engine_with(options, around).num_accepted == 0
    assert engine_with({**options, "index": str(index)}, around).num_accepted > 80


def test_text_of_other_documents_is_not_drafted(vllm, index):
    elsewhere = [(PROMPT, list(range(700, 780))), ([5, 900, 17, 300, 901] * 4, PROMPT)]
    assert engine_with({"index": str(index)}, elsewhere).num_accepted == 0


def test_a_tokenizer_that_fails_costs_drafts_from_the_index_alone(vllm, index, caplog):
    broken = WordTokenizer()
    broken.decode = None
    vllm.cached_tokenizer_from_config = lambda model_config: broken
    with caplog.at_level(logging.ERROR, "ragaccel"):
        engine = engine_with({"index": str(index)}, [(PROMPT, PROMPT), (PROMPT, PROMPT)])
    assert engine.num_accepted > 40
    assert [record.message.split(":")[0] for record in caplog.records] == ["drafting failed"]


def test_an_index_that_cannot_be_used_ends_the_start(vllm, index, tmp_path):
    empty, broken = tmp_path / "empty.db", tmp_path / "broken.db"
    with Store(empty) as store, store.writing():
        pass
    broken.write_bytes(index.read_bytes()[:5000])
    for path, message in (
        (tmp_path / "missing.db", r"no index at .*missing\.db: build one with `ragaccel index"),
        (empty, "empty.db has no passages: index documents with `ragaccel index FOLDER --index"),
        (broken, "damaged"),
    ):
        with pytest.raises(RagaccelError, match=message):
            create_custom_proposer(config_of({"ragaccel": {"index": str(path)}}))


def test_without_a_tokenizer_an_index_is_refused(vllm, index):
    vllm.cached_tokenizer_from_config = lambda model_config: None
    with pytest.raises(ConfigurationError, match="without --skip-tokenizer-init"):
        create_custom_proposer(config_of({"ragaccel": {"index": str(index)}}))
    del vllm.cached_tokenizer_from_config
    with pytest.raises(ConfigurationError, match=r"works with vLLM 0\.32"):
        create_custom_proposer(config_of({"ragaccel": {"index": str(index)}}))


def test_an_index_larger_than_its_memory_is_searched_in_part(index, caplog):
    from vllm_ragaccel.index import IndexReferences

    with caplog.at_level(logging.WARNING, "ragaccel"):
        part = IndexReferences(str(index), WordTokenizer(), max_bytes=64 << 10)
    assert "are not looked for in prompts" in caplog.text
    assert part.references(range(40, 80))
    assert not part.references(range(1700, 1740))


def test_neither_torch_nor_an_embedder_is_imported(index):
    code = (
        "import sys\n"
        "from vllm_ragaccel.index import IndexReferences\n"
        "class Tokenizer:\n    decode = encode = None\n"
        f"IndexReferences({str(index)!r}, Tokenizer())\n"
        "heavy = {'torch', 'transformers', 'faiss', 'sentence_transformers', 'numba', 'vllm'}\n"
        "layers = {'ragaccel.llm', 'ragaccel.models', 'ragaccel.engine',\n"
        "    'ragaccel.retrieval.embedder', 'ragaccel.retrieval.vector_index'}\n"
        "print(*(heavy | layers) & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
