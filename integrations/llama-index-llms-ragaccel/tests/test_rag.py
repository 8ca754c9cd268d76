"""``ragaccel.RAG`` takes LlamaIndex's retrievers, documents, nodes and messages."""

from hash_embedder import HashEmbedder
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import Document, NodeWithScore, TextNode
from ragaccel import RAG
from tiny_llm import tiny_llm

METADATA = {"file_path": "lamp.md", "title": "Oil"}
LAMP = TextNode(text="The lamp burns rapeseed oil.", metadata=METADATA)


class Shelf(BaseRetriever):
    """Finds the lamp."""

    def _retrieve(self, query_bundle):
        return [NodeWithScore(node=LAMP, score=0.7)]


def test_retrievers_nodes_and_documents_of_llama_index():
    (passage,) = RAG(tiny_llm(), Shelf()).prompt("What burns?").passages
    assert (passage.text, passage.path, passage.title) == (LAMP.text, "lamp.md", "Oil")
    assert (passage.passage_id, passage.score) == (LAMP.node_id, 0.7)
    for text in (LAMP, Document(text=LAMP.text, metadata=METADATA)):
        rag = RAG.from_texts([text], tiny_llm(), embedder=HashEmbedder())
        (passage,) = rag.prompt("What burns?").passages
        assert (passage.text, passage.path, passage.title) == (LAMP.text, "lamp.md", "Oil")


def test_messages_of_llama_index():
    rag = RAG(tiny_llm(), Shelf())
    history = [ChatMessage("Tide?"), ChatMessage("Four metres.", role="assistant")]
    prompt = rag.prompt("What burns?", history)
    assert prompt.token_ids == rag.prompt("What burns?", ["Tide?", "Four metres."]).token_ids
