import copy
import pickle
import threading
from functools import partial

import numpy as np
import pytest
from hash_embedder import HashEmbedder
from llama_index.core.ingestion import IngestionCache, IngestionPipeline
from llama_index.core.schema import TextNode
from ragaccel import ModelNotFoundError, load_embedder
from thread_records import record_threads

from llama_index.embeddings.ragaccel import RagaccelEmbedding


def test_the_vectors_are_those_of_the_library():
    embedding, embedder = RagaccelEmbedding(), load_embedder()
    texts = ["The lamp burns oil.", "A gannet dives.", "The wick is cotton."]
    same = partial(np.testing.assert_allclose, atol=1e-6)  # alone or in a batch, but for rounding
    same(embedding.get_text_embedding_batch(texts), embedder.embed_documents(texts))
    same(embedding.get_text_embedding(texts[0]), embedder.embed_query(texts[0]))
    same(embedding.get_query_embedding(texts[0]), embedder.embed_query(texts[0]))
    assert embedding.fingerprint == embedder.fingerprint
    assert isinstance(embedding.get_query_embedding("x")[0], float)


def test_questions_and_texts_are_embedded_as_the_model_means_them():
    class Asymmetric(HashEmbedder):
        def embed_query(self, text):
            return -super().embed_query(text)

    embedding = RagaccelEmbedding(embedder=Asymmetric())
    text, query = embedding.get_text_embedding("lamp"), embedding.get_query_embedding("lamp")
    assert np.allclose(text, np.negative(query))


def test_making_one_loads_nothing():
    embedding = RagaccelEmbedding(model_name="/nowhere")
    with pytest.raises(ModelNotFoundError):
        embedding.get_query_embedding("x")


def test_a_ready_embedder_is_not_confused_with_the_named_model():
    embedder = HashEmbedder()
    told = RagaccelEmbedding(embedder=embedder).to_dict()
    with pytest.raises(ValueError, match="pass it again"):
        RagaccelEmbedding.from_dict(told)
    assert RagaccelEmbedding.from_dict(told, embedder=embedder).load() is embedder
    named = RagaccelEmbedding(embed_batch_size=7)
    for again in (RagaccelEmbedding.from_dict(named.to_dict()), pickle.loads(pickle.dumps(named))):
        assert again.to_dict() == named.to_dict()
    assert pickle.loads(pickle.dumps(RagaccelEmbedding(embedder=embedder))).embedder is not None
    bound = RagaccelEmbedding(embedder=load_embedder())
    with pytest.raises(TypeError, match="pass model_name instead"):
        pickle.dumps(bound)
    assert bound.get_query_embedding("x")
    assert copy.deepcopy(bound).load() is bound.load()


def test_embedding_cache_keys_depend_on_the_model():
    cache, sizes = IngestionCache(), []
    for dimension in (8, 16, 8):
        embedder = HashEmbedder(f"hash {dimension}", dimension)
        pipeline = IngestionPipeline(
            transformations=[RagaccelEmbedding(embedder=embedder)], cache=cache
        )
        (node,) = pipeline.run(nodes=[TextNode(text="The lamp burns oil.", id_="lamp")])
        sizes.append((len(node.embedding), len(embedder.embedded)))
    assert sizes == [(8, 1), (16, 1), (8, 0)]


@pytest.mark.parametrize(
    "work",
    [
        lambda embedding: embedding.aget_query_embedding("x"),
        lambda embedding: embedding.aget_text_embedding("x"),
        lambda embedding: embedding.aget_text_embedding_batch(["x", "y"]),
    ],
)
async def test_awaiting_leaves_the_loop_free(work, monkeypatch):
    seen = record_threads(monkeypatch, HashEmbedder, ["embed_documents", "embed_query"])
    assert await work(RagaccelEmbedding(embedder=HashEmbedder()))
    assert seen
    assert threading.get_ident() not in seen
