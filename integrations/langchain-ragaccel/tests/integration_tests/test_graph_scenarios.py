"""In graphs and agents, a call gets only the documents of its own prompt."""

from __future__ import annotations

import asyncio
import operator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_classic.retrievers import ContextualCompressionRetriever, EnsembleRetriever
from langchain_core.documents import Document
from langchain_core.documents.compressor import BaseDocumentCompressor
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tools import create_retriever_tool
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from recording_models import recording_chat_model, recording_llm
from scenario_documents import QuestionRetriever, ReferenceRecorder

# Quoted, since the scripted model calls its tool with the quoted text.
QUESTIONS = [f"What does the keeper say to 'question-{number}'?" for number in range(16)]
PROMPT = ChatPromptTemplate.from_template("Context:\n\n{context}\n\nQuestion: {question}")
MODELS = {"llm": recording_llm, "chat": recording_chat_model}


def joined(documents):
    return "\n\n".join(document.page_content for document in documents)


class State(TypedDict, total=False):
    question: str
    questions: list[str]
    documents: list[Document]
    answers: Annotated[list[Any], operator.add]


def sync_graph(model):
    def retrieve(state):
        return {"documents": QuestionRetriever().invoke(state["question"])}

    def answer(state):
        context = joined(state["documents"])
        said = model.invoke(PROMPT.invoke({"context": context, "question": state["question"]}))
        return {"answers": [said]}

    return compiled(retrieve, answer)


def async_graph(model):
    async def retrieve(state):
        return {"documents": await QuestionRetriever().ainvoke(state["question"])}

    async def answer(state):
        value = PROMPT.invoke(
            {"context": joined(state["documents"]), "question": state["question"]}
        )
        return {"answers": [await model.ainvoke(value)]}

    return compiled(retrieve, answer)


def compiled(retrieve, answer):
    graph = StateGraph(State)
    graph.add_node("retrieve", retrieve)
    graph.add_node("answer", answer)
    graph.add_edge(START, "retrieve")
    graph.add_edge("retrieve", "answer")
    graph.add_edge("answer", END)
    return graph.compile()


def fanned_out(model):
    """One run sends each question to its own worker, which retrieves and answers."""

    def work(state):
        documents = QuestionRetriever().invoke(state["question"])
        value = PROMPT.invoke({"context": joined(documents), "question": state["question"]})
        return {"answers": [model.invoke(value)]}

    graph = StateGraph(State)
    graph.add_node("work", work)
    sends = lambda state: [Send("work", {"question": q}) for q in state["questions"]]  # noqa: E731
    graph.add_conditional_edges(START, sends, ["work"])
    graph.add_edge("work", END)
    return graph.compile()


def asking(questions):
    return [{"question": question} for question in questions]


def in_threads(graph):
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(graph.invoke, asking(QUESTIONS)))


def streamed_messages(graph):
    def read(state):
        return list(graph.stream(state, stream_mode="messages"))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(read, asking(QUESTIONS)))


def batched(graph):
    graph.batch(asking(QUESTIONS))


def gathered(graph):
    async def all_of_them():
        await asyncio.gather(*map(graph.ainvoke, asking(QUESTIONS)))

    asyncio.run(all_of_them())


def all_sent(graph):
    graph.invoke({"questions": QUESTIONS})


def all_sent_async(graph):
    asyncio.run(graph.ainvoke({"questions": QUESTIONS}))


CASES = [
    *((sync_graph, call) for call in (in_threads, streamed_messages, batched, gathered)),
    (async_graph, gathered),
    *((fanned_out, call) for call in (all_sent, all_sent_async)),
]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("build", "call"), CASES, ids=lambda function: function.__name__)
def test_references_in_a_graph_are_this_prompts_documents(build, call, kind):
    given = ReferenceRecorder(is_one_caller=build is fanned_out)
    call(build(MODELS[kind](given)))
    assert len(given.calls) == len(QUESTIONS)
    assert all(len(standing) == 3 for standing, _ in given.calls)
    assert given.leaks == []
    assert given.completeness >= 0.99


def agent_asking(given, response_format):
    tool = create_retriever_tool(
        QuestionRetriever(), "search", "Find what the keeper said.", response_format=response_format
    )
    return create_agent(recording_chat_model(given), [tool])


def said_by_user(question):
    return {"messages": [{"role": "user", "content": question}]}


@pytest.mark.parametrize("response_format", ["content", "content_and_artifact"])
@pytest.mark.parametrize("how", ["threads", "stream", "gather"])
def test_an_agent_gets_the_documents_of_its_tool(how, response_format):
    given = ReferenceRecorder()
    agent = agent_asking(given, response_format)
    inputs = [said_by_user(question) for question in QUESTIONS]
    if how == "gather":
        asyncio.run(gather(agent, inputs))
    else:
        ask = (
            agent.invoke
            if how == "threads"
            else lambda v: list(agent.stream(v, stream_mode="messages"))
        )
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(ask, inputs))
    assert len(given.calls) == 2 * len(QUESTIONS)  # the call of the tool, and the answer
    assert sum(len(standing) == 3 for standing, _ in given.calls) == len(QUESTIONS)
    assert given.leaks == []
    assert given.completeness >= 0.99


async def gather(agent, inputs):
    await asyncio.gather(*map(agent.ainvoke, inputs))


class FirstWordsCompressor(BaseDocumentCompressor):
    """Keeps three words of every document, too few to be found in a prompt."""

    def compress_documents(self, documents, query, callbacks=None):
        return [
            Document(" ".join(d.page_content.split()[:3]), metadata=d.metadata) for d in documents
        ]


def chain_over(retriever, model):
    return {"context": retriever | joined, "question": RunnablePassthrough()} | PROMPT | model


@pytest.mark.parametrize("kind", MODELS)
def test_documents_of_parallel_retrievers_are_merged(kind):
    given = ReferenceRecorder()
    both = EnsembleRetriever(retrievers=[QuestionRetriever(count=3), QuestionRetriever(count=2)])
    chain_over(both, MODELS[kind](given)).invoke(QUESTIONS[0])
    assert given.leaks == []
    assert given.completeness == 1.0


@pytest.mark.parametrize("kind", MODELS)
def test_compressed_documents_need_run_tracking(kind):
    found = {}
    for track in (None, "run-tree"):
        given = ReferenceRecorder()
        squeezed = ContextualCompressionRetriever(
            base_compressor=FirstWordsCompressor(), base_retriever=QuestionRetriever()
        )
        chain_over(squeezed, MODELS[kind](given, track=track)).invoke(QUESTIONS[0])
        found[track] = given.calls[-1][1]
    assert found[None] == frozenset()
    assert found["run-tree"] >= {f"question-0/{number}" for number in (1, 2, 3)}
