"""References of answers: given, or retrieved and found in the prompt; tenants are isolated."""

import asyncio
import logging

import pytest
from framework_llms import RecordingLLM, Say, tiny_llm
from llama_index.core.instrumentation.dispatcher import instrument_tags
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.llms import ChatMessage
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode
from ragaccel import ConfigurationError, Passage, Reference, reference_scope
from ragaccel.frameworks import ReferenceRegistry, default_registry

from llama_index.llms.ragaccel import Ragaccel, RetrievalCollector
from llama_index.llms.ragaccel.citations import as_passage

WICK = "The keeper trims the wick at dusk and again at midnight, whatever the weather may be."
TIDE = "The tide rises four metres at the mole in spring, and boats are moored on long lines then."
OIL = "The lamp burns rapeseed oil, of which nine barrels are landed from the tender each summer."
KEEPERS = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="keepers")}


def node(text, name, **more):
    return TextNode(text=text, id_=name, **more)


class FakeRetriever(BaseRetriever):
    """Returns the same nodes for every query."""

    def __init__(self, *nodes):
        super().__init__()
        self.nodes = [NodeWithScore(node=one, score=0.5) for one in nodes]

    def _retrieve(self, query_bundle):
        return self.nodes


@pytest.fixture
def joined():
    """Open a reference scope around each test."""
    with reference_scope():
        yield


def copied_from(llm, text, **given):
    llm.complete(text, **given)
    return llm.llm.asked[-1][1]


def ids(references):
    return [one.passage_id for one in references if isinstance(one, Passage)]


def test_a_number_too_long_for_a_page_is_none():
    assert as_passage(node(WICK, "n1", metadata={"page_label": "9" * 5000})).page is None


def test_a_node_is_a_passage_of_its_document():
    made = node(
        WICK,
        "n1",
        start_char_idx=40,
        metadata={"file_name": "keepers.pdf", "file_path": "/x/keepers.pdf", "page_label": "7"},
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id="doc-1")},
    )
    passage = as_passage(NodeWithScore(node=made, score=0.25))
    assert passage == Passage(
        "n1",
        WICK,
        title="keepers.pdf",
        path="doc-1",
        start=40,
        end=40 + len(WICK),
        page=7,
        score=0.25,
    )
    bare = as_passage(node(WICK, "n2", metadata={"file_path": "/x/a.md", "title": "A"}))
    assert (bare.path, bare.title, bare.start, bare.page) == ("/x/a.md", "A", 0, None)
    assert as_passage(NodeWithScore(node=made, score=-2.0)).score == 0.0


def test_references_of_every_kind_may_be_given():
    llm = Ragaccel(llm=RecordingLLM(), auto_references=False)
    passage, tokens = Passage("p", TIDE), Reference((5, 6, 7))
    given = [
        WICK,
        node(OIL, "n1"),
        NodeWithScore(node=node("Short.", "n2"), score=1.0),
        passage,
        tokens,
    ]
    found = copied_from(llm, "?", references=given)
    assert found == [WICK, as_passage(node(OIL, "n1")), Passage("n2", "Short.", end=6, score=1.0),
                     passage, tokens]  # fmt: skip
    for one in (WICK, passage, tokens):
        assert copied_from(llm, "?", references=one) == [one]
    assert copied_from(llm, "?", references=node(OIL, "n1")) == [as_passage(node(OIL, "n1"))]
    assert copied_from(llm, "?", references=None) == []
    for odd, kind in (([3], "int"), ({"a": "b"}, "dict"), (b"text", "bytes"), ([None], "NoneType")):
        with pytest.raises(
            ConfigurationError, match=f"a reference must be a str, node, .* not {kind}"
        ):
            copied_from(llm, "?", references=odd)
    with pytest.raises(ConfigurationError, match=r"registry must be a .*, not int"):
        copied_from(Ragaccel(llm=RecordingLLM(), registry=3), "?")


def test_references_are_copied_from_and_change_nothing():
    llm = Ragaccel(llm=tiny_llm(token_budget=32))  # by measured time: none if the machine is busy
    say = {"logits_processors": [Say(WICK)], "remember": False}
    plain = llm.complete("Who trims it?", **say)
    drafted = llm.complete("Who trims it?", references=[node(WICK, "wick")], **say)
    assert plain.text == drafted.text == WICK
    assert drafted.raw["ragaccel"]["forward_passes"] < plain.raw["ragaccel"]["forward_passes"] / 2
    assert plain.raw["ragaccel"]["citations"] == []
    (cited,) = drafted.raw["ragaccel"]["citations"]
    assert (cited["passage_id"], cited["text"]) == ("wick", WICK)
    assert drafted.additional_kwargs["citations"] == [cited]


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("how", ["retrieve", "aretrieve"])
@pytest.mark.parametrize("kind", ["complete", "chat", "predict"])
def test_retrieved_nodes_in_the_prompt_are_copied(how, kind):
    retriever, llm = (
        FakeRetriever(node(WICK, "wick"), node(TIDE, "tide")),
        Ragaccel(llm=RecordingLLM()),
    )
    if how == "retrieve":
        retriever.retrieve("wick")
    else:
        asyncio.run(retriever.aretrieve("wick"))
    if kind == "complete":
        llm.complete(f"Read this:\n  {WICK}\nWho trims?")
    elif kind == "chat":
        llm.chat([ChatMessage(role="system", content=WICK), ChatMessage(content="Who trims?")])
    else:
        from llama_index.core.prompts import PromptTemplate

        llm.predict(PromptTemplate("{context}\nWho trims?"), context=WICK)
    assert ids(llm.llm.asked[-1][1]) == ["wick"]
    assert copied_from(llm, "Nothing of that is in here.") == []


@pytest.mark.parametrize("method", ["stream_complete", "stream_chat"])
def test_references_are_resolved_before_a_stream_is_read(method):
    registry = ReferenceRegistry()
    llm = Ragaccel(llm=RecordingLLM(), registry=registry)
    registry.register(Passage("before", WICK))
    text = f"{WICK} {TIDE}"
    given = [ChatMessage(content=text)] if method == "stream_chat" else text
    pieces = getattr(llm, method)(given)
    registry.clear()
    registry.register([Passage("after", WICK), Passage("after-too", TIDE)])
    list(pieces)
    list(getattr(llm, method)(given))
    assert [ids(references) for _, references, _ in llm.llm.asked] == [
        ["before"],
        ["after", "after-too"],
    ]


def test_tenants_are_isolated():
    with instrument_tags({"ragaccel_namespace": "one"}):
        FakeRetriever(node(WICK, "wick")).retrieve("?")
    FakeRetriever(node(TIDE, "tide")).retrieve("?")
    text = f"{WICK} {TIDE}"
    given = Ragaccel(llm=RecordingLLM(), registry=default_registry())
    assert ids(copied_from(given, text)) == ["tide"]
    for namespace, expected in (("one", ["wick"]), ("two", []), ("", [])):
        llm = Ragaccel(llm=RecordingLLM(), namespace=namespace)
        assert ids(copied_from(llm, text)) == expected
        assert llm.llm.asked[-1][2]["namespace"] == namespace
    assert ids(copied_from(llm, text, namespace="one")) == ["wick"]


def test_a_custom_registry_is_filled_by_a_custom_collector():
    mine = ReferenceRegistry()
    RetrievalCollector(registry=mine).handle(
        RetrievalEndEvent(str_or_query_bundle="?", nodes=[NodeWithScore(node=node(OIL, "oil"))])
    )
    text = f"{WICK} {OIL}"
    with reference_scope():
        FakeRetriever(node(WICK, "wick")).retrieve("?")
        assert ids(copied_from(Ragaccel(llm=RecordingLLM()), text)) == ["wick"]
    assert ids(copied_from(Ragaccel(llm=RecordingLLM(), registry=mine), text)) == ["oil"]
    assert ids(copied_from(Ragaccel(llm=RecordingLLM()), text)) == []


def test_a_shared_text_reveals_nothing_of_other_tenants():
    """Tenants share a clause and a file name, in one process, without namespaces."""
    clause = f"{TIDE} {OIL}"
    theirs = [node(f"{clause} Theirs alone.", "theirs", relationships=KEEPERS)]
    theirs.append(node(WICK, "next", relationships=KEEPERS, start_char_idx=900))
    FakeRetriever(*theirs).retrieve("?")
    with reference_scope():
        FakeRetriever(*theirs).retrieve("?")
    RetrieverQueryEngine.from_args(FakeRetriever(*theirs), llm=Ragaccel(llm=RecordingLLM())).query(
        "?"
    )
    llm = Ragaccel(llm=RecordingLLM())
    assert copied_from(llm, f"What does this mean? {clause}") == []
    with reference_scope():
        FakeRetriever(node(clause, "mine", relationships=KEEPERS)).retrieve("?")
        found = copied_from(llm, f"What does this mean? {clause}")
    assert found == [Passage("mine", clause, path="keepers", end=len(clause), score=0.5)]


def test_registration_errors_are_logged_and_retrieval_continues(caplog, monkeypatch):
    monkeypatch.setattr("llama_index.llms.ragaccel.citations.as_passage", lambda node: 1 / 0)
    with caplog.at_level(logging.WARNING):
        assert len(FakeRetriever(node(WICK, "wick")).retrieve("?")) == 1
    assert "were not registered" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_nothing_is_collected_or_searched_where_that_is_switched_off(monkeypatch):
    shown = FakeRetriever(node(WICK, "wick"))
    with reference_scope() as scope:
        monkeypatch.setenv("RAGACCEL_AUTO_REFERENCES", "0")
        shown.retrieve("?")
        assert scope.registry is None
        monkeypatch.delenv("RAGACCEL_AUTO_REFERENCES")
        shown.retrieve("?")
        assert ids(copied_from(Ragaccel(llm=RecordingLLM()), WICK)) == ["wick"]
        assert copied_from(Ragaccel(llm=RecordingLLM(), auto_references=False), WICK) == []
