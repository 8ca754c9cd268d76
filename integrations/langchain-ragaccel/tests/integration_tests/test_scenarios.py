"""In every kind of chain and call, a call gets only the documents of its own prompt."""

from __future__ import annotations

import asyncio
import gc
import operator
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial
from operator import itemgetter
from typing import Annotated, Any, TypedDict
from weakref import WeakSet

import concurrency
import pytest
from langchain.agents import create_agent
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import EnsembleRetriever
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel, RunnablePassthrough, chain
from langchain_core.tools import create_retriever_tool
from langgraph.graph import START, StateGraph
from langgraph.types import Send
from ragaccel import reference_scope
from ragaccel.frameworks import ReferenceScope, default_registry
from recording_models import recording_chat_model, recording_llm
from scenario_documents import QUERY, QuestionRetriever, ReferenceRecorder, documents_of

from langchain_ragaccel import RagaccelVectorStore, collecting_into

MANY = 24
QUESTIONS = [f"What does the keeper say to question-{number}?" for number in range(MANY)]
PROMPT = ChatPromptTemplate.from_template(
    "Answer from the context.\n\n{context}\n\nQuestion: {input}\nAnswer:"
)
MODELS = {"llm": recording_llm, "chat": recording_chat_model}


def joined(documents):
    return "\n\n".join(document.page_content for document in documents)


def lcel(model, retriever=None):
    context = (retriever or QuestionRetriever()) | joined
    return {"context": context, "input": RunnablePassthrough()} | PROMPT | model


def prompt_for(question, documents):
    return PROMPT.invoke({"context": joined(documents), "input": question})


def partly_shown(model):
    """Show two of three documents; the third is an adjacent chunk."""
    return lcel(model, QuestionRetriever() | RunnableLambda(lambda documents: documents[:2]))


def parsed(model):
    return lcel(model) | StrOutputParser()


def assigned(model):
    found = RunnablePassthrough.assign(context=itemgetter("input") | QuestionRetriever() | joined)
    return RunnableLambda(lambda question: {"input": question}) | found | PROMPT | model


def classic(model):
    stuffed = create_stuff_documents_chain(model, PROMPT)
    return RunnableLambda(lambda q: {"input": q}) | create_retrieval_chain(
        QuestionRetriever(), stuffed
    )


def retried(model):
    again = QuestionRetriever().with_retry().with_config(tags=["retriever"])
    return lcel(model.with_retry().with_fallbacks([model]), again)


def plain_code(model, around=nullcontext, settings=lambda _: {}):
    """Call a retriever, then the model, without a common run."""

    def answer(question):
        with around(question):
            found = QuestionRetriever().invoke(question)
            return model.invoke(prompt_for(question, found), **settings(question))

    async def aanswer(question):
        with around(question):
            found = await QuestionRetriever().ainvoke(question)
            return await model.ainvoke(prompt_for(question, found), **settings(question))

    return PlainFunctions(answer, aanswer)


def in_a_scope(model):
    return plain_code(model, lambda _: reference_scope())


def in_a_namespace(model):
    return plain_code(
        model,
        lambda question: collecting_into(namespace=question),
        lambda question: {"namespace": question},
    )


class PlainFunctions:
    """Plain functions, not runnables, so that no run surrounds what they call."""

    def __init__(self, sync, native):
        self.invoke, self.ainvoke = sync, native


def two_of_one_root(model):
    return RunnableParallel(left=lcel(model), right=RunnableLambda(other_question) | lcel(model))


def other_question(question):
    return question.replace("question-", "question-9")


def looped(model):
    @chain
    def loop(question):
        return [
            lcel(model).invoke(question.replace("question-", f"question-{i}")) for i in (7, 8, 9)
        ]

    return loop


def in_one_thread(work, *given):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work, *given).result()


def in_a_raw_thread(model):
    """Call the model in a new thread, without the chain's context."""
    return lcel(RunnableLambda(lambda value: in_one_thread(model.invoke, value)))


def in_a_thread_with_its_context(model):
    def answer(value):
        return in_one_thread(copy_context().run, model.invoke, value)

    return lcel(RunnableLambda(answer))


def in_a_thread_with_its_config(model):
    def answer(value, config):
        return in_one_thread(lambda: list(model.stream(value, config)))[-1]

    return lcel(RunnableLambda(answer))


def with_callbacks_of_its_own(model):
    """Call retriever and model inside a chain's step, each with its own callbacks."""

    def own():
        return {"callbacks": [BaseCallbackHandler()]}

    def ask(question):
        found = QuestionRetriever().invoke(question, own())
        return model.invoke(prompt_for(question, found), own())

    async def aask(question):
        found = await QuestionRetriever().ainvoke(question, own())
        return [piece async for piece in model.astream(prompt_for(question, found), own())]

    knows_tasks = sys.version_info >= (3, 11)  # before, LangChain's context does not reach them
    return RunnableLambda(ask, afunc=aask if knows_tasks else None)


def searched_by_hand(model):
    """Search a RagaccelVectorStore directly inside a chain's step, which sends no event."""
    stores = {}

    def find(question):
        if question not in stores:
            store = stores[question] = RagaccelVectorStore(DeterministicFakeEmbedding(size=4))
            store.add_documents(documents_of(QUERY.search(question).group()))
        return stores[question].similarity_search(question, k=3)

    return lcel(model, RunnableLambda(find))


def one_after_another(built, questions):
    for question in questions[:6]:
        built.invoke(question)


def in_threads(built, questions):
    concurrency.in_threads(built.invoke, questions)


def streamed(built, questions):
    concurrency.in_threads(lambda question: list(built.stream(question)), questions)


def streams_begun_before_read(built, questions):
    """Advance several streams in turn in one thread."""
    open_streams = [built.stream(question) for question in questions]
    while open_streams:
        open_streams = [stream for stream in open_streams if next(stream, None) is not None]


def batched(built, questions):
    built.batch(questions)


def batched_in_groups(built, questions):
    built.batch(questions, config={"max_concurrency": 3})


def gathered(built, questions):
    concurrency.in_tasks(built.ainvoke, questions)


def streams_gathered(built, questions):
    async def read(question):
        return [piece async for piece in built.astream(question)]

    concurrency.in_tasks(read, questions)


def abatched(built, questions):
    asyncio.run(built.abatch(questions))


def to_threads(built, questions):
    concurrency.in_tasks(partial(asyncio.to_thread, built.invoke), questions)


def events(built, questions):
    async def read(question):
        return [event async for event in built.astream_events(question, version="v2")]

    concurrency.in_tasks(read, questions)


CALLS = [
    one_after_another, in_threads, streamed, streams_begun_before_read, batched,
    batched_in_groups, gathered, streams_gathered, abatched, to_threads, events,
]  # fmt: skip
PLAIN_CALLS = (one_after_another, in_threads, gathered, to_threads)
CASES = [
    *((built, call) for built in (lcel, parsed, assigned, classic) for call in CALLS),
    *((built, call) for built in (in_a_scope, in_a_namespace) for call in PLAIN_CALLS),
    *((built, call) for built in (searched_by_hand, with_callbacks_of_its_own)
      for call in (in_threads, gathered, streamed)),
    *((built, call) for built in (two_of_one_root, retried, in_a_thread_with_its_context,
                                  in_a_thread_with_its_config) for call in (in_threads, gathered)),
    *((looped, call) for call in (one_after_another, in_threads, streamed)),
]  # fmt: skip


def check(given, calls=None):
    """Check that all calls got the documents of their prompts, and no others."""
    assert len(given.calls) >= 6 if calls is None else len(given.calls) == calls
    assert given.leaks == []
    assert given.completeness >= 0.99


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("build", "call"), CASES, ids=lambda function: function.__name__)
def test_references_are_this_prompts_documents(build, call, kind):
    given = ReferenceRecorder()
    call(build(MODELS[kind](given)), QUESTIONS)
    check(given)
    assert all(standing for standing, _ in given.calls)


ALONE = [
    *((plain_code, call) for call in PLAIN_CALLS),
    *((in_a_raw_thread, call) for call in (in_threads, gathered)),
]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("build", "call"), ALONE, ids=lambda function: function.__name__)
def test_unrelated_runs_share_no_references(build, call, kind):
    given = ReferenceRecorder()
    call(build(MODELS[kind](given)), QUESTIONS)
    assert len(given.calls) >= 6
    assert all(standing and not found for standing, found in given.calls)
    assert not given.adjacent_chunks


@pytest.mark.parametrize("kind", MODELS)
def test_a_scope_is_freed_when_its_chain_ends(kind, monkeypatch):
    made, make = WeakSet(), ReferenceScope.__init__
    kept = len(default_registry())  # by tests before this one

    def noted(scope):
        make(scope)
        made.add(scope)

    monkeypatch.setattr(ReferenceScope, "__init__", noted)
    built = lcel(MODELS[kind](ReferenceRecorder()))
    for call in (streamed, batched, gathered, streams_gathered):
        call(built, QUESTIONS)
        gc.collect()
        assert list(made) == []
        left = built.stream(QUESTIONS[0])
        next(left)
        gc.collect()
        assert len(made) == 1  # of the stream that is still read
        del left
        gc.collect()
        assert list(made) == []
    assert len(default_registry()) == kept


@pytest.mark.parametrize("kind", MODELS)
def test_a_call_without_retrieval_gets_no_references(kind):
    given = ReferenceRecorder()
    model = MODELS[kind](given)
    lcel(model).invoke(QUESTIONS[0])
    model.invoke("What does the keeper say to question-0?")
    assert [len(found) for _, found in given.calls] == [3, 0]


@pytest.mark.parametrize("kind", MODELS)
def test_a_thousand_concurrent_calls_get_only_their_own_documents(kind):
    given = ReferenceRecorder()
    built = lcel(MODELS[kind](given))
    in_threads(built, [f"question-{number}?" for number in range(1000, 2000)])
    check(given, 1000)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("adjacent_chunks", [True, False])
def test_adjacent_chunks_come_from_documents_in_the_prompt(adjacent_chunks, kind):
    given = ReferenceRecorder()
    in_threads(partly_shown(MODELS[kind](given, adjacent_chunks=adjacent_chunks)), QUESTIONS)
    check(given)
    assert bool(given.adjacent_chunks) == adjacent_chunks


# Graphs and agents

# Quoted, since the scripted model calls its tool with the quoted text.
QUOTED = [f"What does the keeper say to 'question-{number}'?" for number in range(16)]


class State(TypedDict, total=False):
    question: str
    questions: list[str]
    documents: list[Document]
    answers: Annotated[list[Any], operator.add]


def sync_graph(model):
    def retrieve(state):
        return {"documents": QuestionRetriever().invoke(state["question"])}

    def answer(state):
        return {"answers": [model.invoke(prompt_for(state["question"], state["documents"]))]}

    return compiled(retrieve, answer)


def async_graph(model):
    async def retrieve(state):
        return {"documents": await QuestionRetriever().ainvoke(state["question"])}

    async def answer(state):
        value = prompt_for(state["question"], state["documents"])
        return {"answers": [await model.ainvoke(value)]}

    return compiled(retrieve, answer)


def compiled(retrieve, answer):
    graph = StateGraph(State)
    graph.add_sequence([("retrieve", retrieve), ("answer", answer)])
    graph.add_edge(START, "retrieve")
    return graph.compile()


def fanned_out(model):
    """One run sends each question to its own worker, which retrieves and answers."""
    work = plain_code(model).invoke
    graph = StateGraph(State)
    graph.add_node("work", lambda state: {"answers": [work(state["question"])]})
    sends = lambda state: [Send("work", {"question": q}) for q in state["questions"]]  # noqa: E731
    graph.add_conditional_edges(START, sends, ["work"])
    return graph.compile()


def streamed_messages(graph, questions):
    concurrency.in_threads(
        lambda state: list(graph.stream(state, stream_mode="messages")), questions
    )


def all_sent(graph, states):
    graph.invoke({"questions": [state["question"] for state in states]})


def all_sent_async(graph, states):
    asyncio.run(graph.ainvoke({"questions": [state["question"] for state in states]}))


GRAPH_CASES = [
    *((sync_graph, call) for call in (in_threads, streamed_messages, batched, gathered)),
    (async_graph, gathered),
    *((fanned_out, call) for call in (all_sent, all_sent_async)),
]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("build", "call"), GRAPH_CASES, ids=lambda function: function.__name__)
def test_references_in_a_graph_are_this_prompts_documents(build, call, kind):
    given = ReferenceRecorder(is_one_caller=build is fanned_out)
    call(build(MODELS[kind](given)), [{"question": question} for question in QUOTED])
    check(given, len(QUOTED))
    assert all(len(standing) == 3 for standing, _ in given.calls)


@pytest.mark.parametrize("response_format", ["content", "content_and_artifact"])
@pytest.mark.parametrize("call", [in_threads, streamed_messages, gathered])
def test_an_agent_gets_the_documents_of_its_tool(call, response_format):
    given = ReferenceRecorder()
    tool = create_retriever_tool(
        QuestionRetriever(), "search", "Find what the keeper said.", response_format=response_format
    )
    agent = create_agent(recording_chat_model(given), [tool])
    call(agent, [{"messages": [{"role": "user", "content": question}]} for question in QUOTED])
    check(given, 2 * len(QUOTED))  # the call of the tool, and the answer
    assert sum(len(standing) == 3 for standing, _ in given.calls) == len(QUOTED)


@pytest.mark.parametrize("kind", MODELS)
def test_documents_of_parallel_retrievers_are_merged(kind):
    given = ReferenceRecorder()
    both = EnsembleRetriever(retrievers=[QuestionRetriever(count=3), QuestionRetriever(count=2)])
    lcel(MODELS[kind](given), both).invoke(QUESTIONS[0])
    assert given.leaks == []
    assert given.completeness == 1.0
