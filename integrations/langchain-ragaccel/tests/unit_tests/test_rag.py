"""``ragaccel.RAG`` takes LangChain's retrievers, vector stores, documents and messages."""

from hash_embedder import HashEmbedder
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore
from ragaccel import RAG
from tiny_llm import tiny_llm

LAMP = Document("The lamp burns rapeseed oil.", metadata={"source": "lamp.md", "title": "Oil"})


class Shelf(BaseRetriever):
    """Finds the lamp."""

    def _get_relevant_documents(self, query, *, run_manager):
        return [LAMP]


def sources_of(rag):
    return [(p.text, p.path, p.title) for p in rag.prompt("What burns?").passages]


def test_retrievers_stores_and_embeddings_of_langchain():
    expected = [(LAMP.page_content, "lamp.md", "Oil")]
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
    store.add_documents([LAMP])
    assert sources_of(RAG(tiny_llm(), Shelf())) == expected
    assert sources_of(RAG(tiny_llm(), store)) == expected
    embeddings = DeterministicFakeEmbedding(size=8)
    assert sources_of(RAG.from_texts([LAMP], tiny_llm(), embedder=embeddings)) == expected
    assert sources_of(RAG.from_texts([LAMP], tiny_llm(), embedder=HashEmbedder())) == expected


def test_messages_of_langchain():
    rag = RAG(tiny_llm(), Shelf())
    history = [HumanMessage("Tide?"), AIMessage("Four metres.")]
    prompt = rag.prompt("What burns?", history)
    assert prompt.token_ids == rag.prompt("What burns?", ["Tide?", "Four metres."]).token_ids
