import asyncio
import threading

import numpy as np
import pytest
from hash_embedder import HashEmbedder
from ragaccel import ModelNotFoundError, load_embedder

from langchain_ragaccel import RagaccelEmbeddings


def test_making_one_loads_nothing():
    embeddings = RagaccelEmbeddings(model="/nowhere")
    with pytest.raises(ModelNotFoundError):
        embeddings.embed_query("x")


def test_the_vectors_are_those_of_the_library():
    embeddings, embedder = RagaccelEmbeddings(), load_embedder()
    texts = ["The lamp burns oil.", "A gannet dives."]
    assert np.array_equal(embeddings.embed_documents(texts), embedder.embed_documents(texts))
    assert np.array_equal(embeddings.embed_query(texts[0]), embedder.embed_query(texts[0]))
    assert embeddings.fingerprint == embedder.fingerprint
    assert embeddings.embed_documents([]) == []
    assert isinstance(embeddings.embed_query("x")[0], float)


def test_questions_and_documents_are_embedded_as_the_model_means_them():
    class Asymmetric(HashEmbedder):
        def embed_query(self, text):
            return -super().embed_query(text)

    embeddings = RagaccelEmbeddings(embedder=Asymmetric())
    (document,), query = embeddings.embed_documents(["lamp"]), embeddings.embed_query("lamp")
    assert np.allclose(document, np.negative(query))


def test_a_name_and_a_ready_embedder_are_one_too_many():
    with pytest.raises(ValueError, match="both given"):
        RagaccelEmbeddings(model="x", embedder=HashEmbedder())


async def test_awaiting_leaves_the_loop_free():
    loop_is_free = threading.Event()

    class LoopWaitingEmbeddings(HashEmbedder):
        def _vectors(self, texts):
            assert loop_is_free.wait(5), "the loop was held up"
            return super()._vectors(texts)

    embeddings = RagaccelEmbeddings(embedder=LoopWaitingEmbeddings())
    for work in (embeddings.aembed_query("x"), embeddings.aembed_documents(["x"])):
        loop_is_free.clear()
        asyncio.get_running_loop().call_soon(loop_is_free.set)
        assert await work
