"""References of answers: given, or retrieved and found in the prompt."""

import pytest
from concurrency import in_tasks, in_threads
from framework_llms import scripted_llm
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import AsyncCallbackManager, BaseCallbackHandler, CallbackManager
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from ragaccel import ConfigurationError, Passage, Reference, reference_scope
from ragaccel.frameworks import ReferenceRegistry, default_registry

from langchain_ragaccel import ChatRagaccel, RagaccelLLM, ReferenceCollector
from langchain_ragaccel.convert import as_passages, as_references

WICK = "The keeper of Gannet Ledge trims the wick at dusk, and again at midnight, in all weathers."
TIDE = "The tide at the mole rises four metres in spring, and falls again before the second watch."


class FakeRetriever(BaseRetriever):
    """Returns the document that its table has for a query."""

    table: dict

    def _get_relevant_documents(self, query, *, run_manager):
        return [self.table[query]]


def found_by(name="wick", **metadata):
    """Return a retriever that finds a document of this id for the query ``wick``."""
    return FakeRetriever(table={"wick": Document(WICK, id=name, metadata=metadata)})


def written(documents):
    return "\n".join(document.page_content for document in documents)


def chain(retriever, model):
    prompt = ChatPromptTemplate.from_template("Answer from this:\n{context}\n\n{question}")
    return {"context": retriever | written, "question": RunnablePassthrough()} | prompt | model


def copied(message):
    report = message.response_metadata["ragaccel"]
    return [span["passage_id"] for span in report["copied_spans"]]


@pytest.fixture
def quoting():
    return scripted_llm(lambda prompt: f"It says: {WICK}")


def test_a_chain_cites_its_retrievers_documents(quoting):
    model = ChatRagaccel(llm=quoting)
    retriever = found_by(title="Log", source="log.md", start_index=10)
    message = chain(retriever, model).invoke("wick")
    report = message.response_metadata["ragaccel"]
    (span,) = report["copied_spans"]
    assert message.content[span["out_start"] : span["out_end"]] == WICK
    assert WICK[span["start"] : span["end"]] == WICK
    assert (span["passage_id"], span["text"], span["citation"]) == ("wick", WICK, "log.md")
    assert "citations" not in report
    assert report["passages"] == [
        {"passage_id": "wick", "citation": "log.md", "title": "Log", "source": "log.md"}
    ]
    pieces = list(chain(retriever, model).stream("wick"))
    assert copied(pieces[-1]) == ["wick"]
    assert not any("ragaccel" in piece.response_metadata for piece in pieces[:-1])


def test_completions_carry_metadata(quoting):
    retriever = found_by()
    with reference_scope():
        documents = retriever.invoke("wick")
        result = RagaccelLLM(llm=quoting).generate([written(documents), "Nothing of that."])
    reports = [one.generation_info["ragaccel"] for (one,) in result.generations]
    assert [len(report["copied_spans"]) for report in reports] == [1, 0]


def test_references_can_be_given_and_switched_off(quoting):
    own = Passage("own", WICK)
    asked = "Who trims the wick?"
    chat = ChatRagaccel(llm=quoting)
    assert copied(chat.invoke(asked, references=[own])) == ["own"]
    assert copied(chat.bind(references=[WICK]).invoke(asked)) == ["reference-1"]
    default_registry().register(own)
    assert copied(chat.invoke(WICK)) == []  # the model does not have that registry
    chat = ChatRagaccel(llm=quoting, registry=default_registry())
    assert copied(chat.invoke(WICK)) == ["own"]
    assert copied(chat.invoke(WICK, auto_references=False)) == []
    off = ChatRagaccel(llm=quoting, registry=default_registry(), auto_references=False)
    assert copied(off.invoke(WICK)) == []
    with pytest.raises(ConfigurationError, match="references must be a list"):
        chat.invoke(asked, references=WICK)
    with pytest.raises(ConfigurationError, match="references must be a list"):
        chat.invoke([HumanMessage(asked, additional_kwargs={"references": WICK})])
    with pytest.raises(ConfigurationError, match="not int"):
        chat.invoke(asked, references=[7])


def test_tenants_do_not_see_each_others_documents(quoting):
    ours, theirs = ReferenceRegistry(), ReferenceRegistry()
    collected = {"callbacks": [ReferenceCollector(ours)]}
    asked = found_by().invoke("wick", collected)[0].page_content
    assert copied(ChatRagaccel(llm=quoting, registry=theirs).invoke(asked)) == []
    assert copied(ChatRagaccel(llm=quoting, registry=ours).invoke(asked)) == ["wick"]
    shared = ReferenceRegistry()
    shared.register(Passage("a", WICK), "tenant-a")
    chat = ChatRagaccel(llm=quoting, registry=shared, namespace="tenant-b")
    assert copied(chat.invoke(WICK)) == []
    assert copied(chat.invoke(WICK, namespace="tenant-a")) == ["a"]


def in_turn(work, items):
    return list(map(work, items))


@pytest.mark.parametrize("how", [in_turn, in_threads, in_tasks])
@pytest.mark.parametrize("manager", [CallbackManager, AsyncCallbackManager])
def test_a_shared_callback_manager_does_not_join_requests(quoting, how, manager):
    """All tenants' documents have the same words, so a foreign citation would show."""
    names = [f"tenant-{number}" for number in range(4)] * 2
    model = ChatRagaccel(llm=quoting)
    chains = {name: chain(found_by(name), model) for name in names}
    shared = manager.configure([BaseCallbackHandler()])
    for config in ({"callbacks": shared}, {"callbacks": shared.copy()}):

        def ask(name, config=config):
            asked = chains[name].ainvoke if how is in_tasks else chains[name].invoke
            return asked("wick", config)

        assert [copied(one) for one in how(ask, names)] == [[name] for name in names]
    assert len(default_registry()) == 0


def test_a_models_callback_manager_does_not_join_requests(quoting):
    model = ChatRagaccel(llm=quoting, callbacks=CallbackManager.configure())
    for name in ("tenant-a", "tenant-b"):
        assert copied(chain(found_by(name), model).invoke("wick")) == [name]


def test_a_manually_started_run_is_the_root_of_runs_below_it(quoting):
    run = CallbackManager.configure().on_chain_start({}, {})
    config = {"callbacks": run.get_child()}
    (document,) = found_by().invoke("wick", config)
    message = ChatRagaccel(llm=quoting).invoke(document.page_content, config)
    run.on_chain_end({})
    assert copied(message) == ["wick"]
    assert len(default_registry()) == 0


def test_given_objects_become_references():
    document = Document(page_content=WICK, id="w")
    ids = Reference((1, 2, 3))
    made = as_references([document, TIDE, Passage("t", TIDE), ids])
    assert made == [Passage("w", WICK, end=len(WICK)), TIDE, Passage("t", TIDE), ids]
    assert [one.text for one in as_passages([WICK, document])] == [WICK, WICK]
    assert as_passages(None) == []
    with pytest.raises(ConfigurationError, match="a Reference has no text"):
        as_passages([ids])


def test_spans_distinguish_passages_with_the_same_id():
    quoting_both = scripted_llm(lambda prompt: f"{TIDE} And: {WICK}")
    given = [
        Document(WICK, id="1", metadata={"source": "log.md"}),
        Document(TIDE, id="1", metadata={"source": "tides.md"}),
    ]
    message = ChatRagaccel(llm=quoting_both).invoke("Tell.", references=given)
    report = message.response_metadata["ragaccel"]
    told = [report["passages"][span["passage"]]["source"] for span in report["copied_spans"]]
    assert told == ["tides.md", "log.md"]
    assert [span["passage_id"] for span in report["copied_spans"]] == ["1", "1"]


@pytest.mark.parametrize("kind", [ChatRagaccel, RagaccelLLM])
def test_cache_keys_of_a_documents_only_model_include_the_registry(kind):
    question = "When does the keeper of Gannet Ledge trim the wick?"
    asked = f"{WICK}\n\nQuestion: {question}"
    cache = InMemoryCache()
    process = {"registry": default_registry()}
    model = kind(device="cpu", cache=cache, **process)
    assert model._identifying_params == kind(device="cpu", **process)._identifying_params
    for _ in range(2):
        model.invoke(asked)
    assert len(cache._cache) == 1
    default_registry().register(Passage("w", WICK))
    for _ in range(2):
        model.invoke(asked)
    assert len(cache._cache) == 2
    model.invoke(asked, namespace="b")
    model.invoke(asked, auto_references=False)
    for _ in range(2):
        model.invoke(asked, auto_references=False, references=[Document(WICK, id="given")])
    own, other = ReferenceRegistry(), ReferenceRegistry()
    for registry in (own, other, own):
        kind(device="cpu", cache=cache, registry=registry).invoke(asked)
    assert len(cache._cache) == 7


def test_the_bundled_reader_reads_retrieved_documents():
    document = Document(page_content=f"{TIDE} {WICK}", metadata={"source": "log.md"})
    retriever = FakeRetriever(
        table={"When does the keeper of Gannet Ledge trim the wick?": document}
    )
    (question,) = retriever.table
    message = chain(retriever, ChatRagaccel(device="cpu")).invoke(question)
    assert "trims the wick at dusk" in message.content
    (passage,) = message.response_metadata["ragaccel"]["passages"]
    assert passage["citation"] == "log.md"
    told = chain(retriever, RagaccelLLM(device="cpu")).invoke(question)
    assert told == message.content
    given = ChatRagaccel(device="cpu").invoke(question, documents=[document])
    assert given.content == message.content
