import logging

import pytest
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from ragaccel import reference_scope
from ragaccel.frameworks import ReferenceRegistry, default_registry

from langchain_ragaccel import ReferenceCollector, collecting_into
from langchain_ragaccel.convert import as_passage, content_id

TEXT = "The keeper of Gannet Ledge trims the wick at dusk, and again at midnight, in all weathers."


class FakeRetriever(BaseRetriever):
    """Returns the documents given to its constructor."""

    found: list

    def _get_relevant_documents(self, query, *, run_manager):
        return self.found


def ids(registry, text=TEXT, namespace=""):
    return [match.passage.passage_id for match in registry.match(f"Context: {text}", namespace)]


async def test_documents_of_any_retriever_are_registered():
    retriever = FakeRetriever(found=[Document(page_content=TEXT, id="a")])
    retriever.invoke("q")
    assert ids(default_registry()) == ["a"]
    default_registry().clear()
    await retriever.ainvoke("q")
    assert ids(default_registry()) == ["a"]
    default_registry().clear()
    (RunnableLambda(lambda query: retriever.invoke(query))).batch(["q", "r"])
    assert len(default_registry()) == 0  # documents stay inside their chain
    with reference_scope() as scope:
        (RunnableLambda(lambda query: retriever.invoke(query))).batch(["q", "r"])
    assert ids(scope.registry) == ["a"]
    assert len(default_registry()) == 0


async def test_collecting_into_leaves_other_registries_empty():
    own = ReferenceRegistry()
    retriever = FakeRetriever(found=[Document(page_content=TEXT, id="a")])
    async_chain = RunnableLambda(lambda query: retriever.invoke(query))
    with collecting_into(own, "tenant"):
        retriever.invoke("q")
        await retriever.ainvoke("q")
        async_chain.batch(["q", "r"])
        await async_chain.abatch(["q", "r"])
        assert ids(own, namespace="tenant") == ["a"]
        assert len(default_registry()) == 0
        with collecting_into(namespace="b"):
            retriever.invoke("q")
        assert ids(default_registry(), namespace="b") == ["a"]
    own.clear()
    default_registry().clear()
    retriever.invoke("q")
    assert (len(own), len(default_registry())) == (0, 1)


def test_a_context_that_is_entered_within_a_run_takes_over_there():
    own, inner = ReferenceRegistry(), ReferenceRegistry()
    retriever = FakeRetriever(found=[Document(page_content=TEXT, id="a")])

    def find(query):
        with collecting_into(inner):
            return retriever.invoke(query)

    RunnableLambda(find).invoke("q")
    assert (len(inner), len(default_registry())) == (1, 0)
    inner.clear()
    with collecting_into(own):
        RunnableLambda(find).invoke("q")
    assert (len(inner), len(own), len(default_registry())) == (1, 0, 0)


def test_an_invalid_document_does_not_affect_the_others():
    class Odd(dict):
        def get(self, name, default=None):
            raise ValueError("odd")

    odd = Document(page_content=TEXT[::-1], id="odd")
    odd.metadata = Odd()
    FakeRetriever(found=[odd, Document(page_content=TEXT, id="a")]).invoke("q")
    assert ids(default_registry()) == ["a"]


@pytest.mark.parametrize("score", [10**400, float("inf"), float("nan"), -1, "high", True, None])
def test_invalid_scores_and_positions_are_ignored(score):
    odd = {"score": score, "start_index": 10**400, "page_label": "9" * 5000, "line": "x"}
    passage = as_passage(Document(page_content=TEXT, metadata={**odd, "title": 3}))
    assert (passage.score, passage.start, passage.page, passage.line) == (0.0, 0, None, None)
    assert passage.title == "3"


def test_nothing_is_registered_where_that_is_switched_off(monkeypatch):
    monkeypatch.setenv("RAGACCEL_AUTO_REFERENCES", "0")
    FakeRetriever(found=[Document(page_content=TEXT)]).invoke("q")
    assert len(default_registry()) == 0


def test_registration_errors_are_logged_and_fail_no_chain(caplog):
    class Broken(ReferenceRegistry):
        def register(self, passages, namespace=""):
            raise ValueError("broken")

    retriever = FakeRetriever(found=[Document(page_content=TEXT)])
    with caplog.at_level(logging.WARNING):
        found = retriever.invoke("q", {"callbacks": [ReferenceCollector(Broken())]})
    assert found == retriever.found
    assert "a retrieved document was not registered" in caplog.text


def test_a_document_keeps_its_place_as_a_passage():
    metadata = {"source": "log.pdf", "title": "Log", "start_index": 40, "score": 0.5}
    passage = as_passage(Document(page_content=TEXT, id="p7", metadata=metadata))
    assert (passage.passage_id, passage.text) == ("p7", TEXT)
    assert (passage.path, passage.title, passage.score) == ("log.pdf", "Log", 0.5)
    assert (passage.start, passage.end) == (40, 40 + len(TEXT))
    assert as_passage(Document(page_content=TEXT)).passage_id == content_id(TEXT)


@pytest.mark.parametrize(
    ("metadata", "page"),
    [
        ({"page": 3}, 3),
        ({"page_number": 4}, 4),
        ({"page": 0, "page_label": "1", "total_pages": 9}, 1),
        ({"page": 2, "page_label": "iii", "total_pages": 9}, None),
        ({"page": 2, "total_pages": 9}, None),  # such loaders count from 0, others do not
        ({"page": "2"}, None),
        ({}, None),
    ],
)
def test_ambiguous_page_numbers_are_left_out(metadata, page):
    assert as_passage(Document(page_content=TEXT, metadata=metadata)).page == page
