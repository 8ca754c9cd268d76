"""In every kind of chain and call, a call gets only the documents of its own prompt."""

from __future__ import annotations

import asyncio
import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from operator import itemgetter
from weakref import WeakSet

import pytest
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel, RunnablePassthrough, chain
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


def lcel(model):
    sources = {"context": QuestionRetriever() | joined, "input": RunnablePassthrough()}
    return sources | PROMPT | model


def partly_shown(model):
    """Show two of three documents; the third is an adjacent chunk."""
    found = QuestionRetriever() | RunnableLambda(lambda documents: documents[:2])
    return {"context": found | joined, "input": RunnablePassthrough()} | PROMPT | model


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
    steady = model.with_retry().with_fallbacks([model])
    sources = {"context": again | joined, "input": RunnablePassthrough()}
    return sources | PROMPT | steady


def plain_code(model):
    """Call a retriever, then the model, without a common run or scope."""

    def answer(question):
        return model.invoke(
            PROMPT.invoke(
                {"context": joined(QuestionRetriever().invoke(question)), "input": question}
            )
        )

    async def aanswer(question):
        found = await QuestionRetriever().ainvoke(question)
        return await model.ainvoke(PROMPT.invoke({"context": joined(found), "input": question}))

    return PlainFunctions(answer, aanswer)


def in_a_scope(model):
    """Call both inside a reference scope."""
    bare = plain_code(model)

    def answer(question):
        with reference_scope():
            return bare.invoke(question)

    async def aanswer(question):
        with reference_scope():
            return await bare.ainvoke(question)

    return PlainFunctions(answer, aanswer)


def in_a_namespace(model):
    """Call both in the same namespace."""

    def answer(question):
        with collecting_into(namespace=question):
            return plain_code(model.bind(namespace=question)).invoke(question)

    async def aanswer(question):
        with collecting_into(namespace=question):
            return await plain_code(model.bind(namespace=question)).ainvoke(question)

    return PlainFunctions(answer, aanswer)


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


def in_a_raw_thread(model):
    """Call the model in a new thread, without the chain's context."""

    def answer(value):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(model.invoke, value).result()

    sources = {"context": QuestionRetriever() | joined, "input": RunnablePassthrough()}
    return sources | PROMPT | RunnableLambda(answer)


def in_a_thread_with_its_context(model):
    def answer(value):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(copy_context().run, model.invoke, value).result()

    sources = {"context": QuestionRetriever() | joined, "input": RunnablePassthrough()}
    return sources | PROMPT | RunnableLambda(answer)


def in_a_thread_with_its_config(model):
    def answer(value, config):
        with ThreadPoolExecutor(1) as pool:
            streamed = pool.submit(lambda: list(model.stream(value, config)))
            return streamed.result()[-1]

    sources = {"context": QuestionRetriever() | joined, "input": RunnablePassthrough()}
    return sources | PROMPT | RunnableLambda(answer)


def with_callbacks_of_its_own(model):
    """Call retriever and model inside a chain's step, each with its own callbacks."""

    def own():
        return {"callbacks": [BaseCallbackHandler()]}

    def ask(question):
        found = QuestionRetriever().invoke(question, own())
        return model.invoke(PROMPT.invoke({"context": joined(found), "input": question}), own())

    async def aask(question):
        found = await QuestionRetriever().ainvoke(question, own())
        prompt = PROMPT.invoke({"context": joined(found), "input": question})
        return [piece async for piece in model.astream(prompt, own())]

    knows_tasks = sys.version_info >= (3, 11)  # before, LangChain's context does not reach them
    return RunnableLambda(ask, afunc=aask if knows_tasks else None)


def searched_by_hand(model):
    """Search a RagaccelVectorStore directly inside a chain's step, which sends no event."""
    stores = {}

    def find(question):
        if question not in stores:
            store = stores[question] = RagaccelVectorStore(DeterministicFakeEmbedding(size=4))
            store.add_documents(documents_of(QUERY.search(question).group()))
        return joined(stores[question].similarity_search(question, k=3))

    sources = {"context": RunnableLambda(find), "input": RunnablePassthrough()}
    return sources | PROMPT | model


def one_after_another(built, questions):
    for question in questions[:6]:
        built.invoke(question)


def in_threads(built, questions):
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(built.invoke, questions))


def streamed(built, questions):
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda question: list(built.stream(question)), questions))


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
    async def all_of_them():
        await asyncio.gather(*(built.ainvoke(question) for question in questions))

    asyncio.run(all_of_them())


def streams_gathered(built, questions):
    async def read(question):
        return [piece async for piece in built.astream(question)]

    async def all_of_them():
        await asyncio.gather(*map(read, questions))

    asyncio.run(all_of_them())


def abatched(built, questions):
    asyncio.run(built.abatch(questions))


def to_threads(built, questions):
    async def all_of_them():
        await asyncio.gather(*(asyncio.to_thread(built.invoke, question) for question in questions))

    asyncio.run(all_of_them())


def events(built, questions):
    async def read(question):
        return [event async for event in built.astream_events(question, version="v2")]

    async def all_of_them():
        await asyncio.gather(*map(read, questions))

    asyncio.run(all_of_them())


CALLS = [
    one_after_another, in_threads, streamed, streams_begun_before_read, batched,
    batched_in_groups, gathered, streams_gathered, abatched, to_threads, events,
]  # fmt: skip
CASES = [
    *((built, call) for built in (lcel, parsed, assigned, classic) for call in CALLS),
    *((in_a_scope, call) for call in (one_after_another, in_threads, gathered, to_threads)),
    *((in_a_namespace, call) for call in (one_after_another, in_threads, gathered, to_threads)),
    *((searched_by_hand, call) for call in (in_threads, gathered, streamed)),
    *((with_callbacks_of_its_own, call) for call in (in_threads, gathered, streamed)),
    *((two_of_one_root, call) for call in (in_threads, gathered)),
    *((retried, call) for call in (in_threads, gathered)),
    *((in_a_thread_with_its_context, call) for call in (in_threads, gathered)),
    *((in_a_thread_with_its_config, call) for call in (in_threads, gathered)),
    *((looped, call) for call in (one_after_another, in_threads, streamed)),
]  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("build", "call"), CASES, ids=lambda function: function.__name__)
def test_references_are_this_prompts_documents(build, call, kind):
    given = ReferenceRecorder()
    call(build(MODELS[kind](given)), QUESTIONS)
    assert len(given.calls) >= 6
    assert all(standing for standing, _ in given.calls)
    assert given.leaks == []
    assert given.completeness >= 0.99


ALONE = [
    *((plain_code, call) for call in (one_after_another, in_threads, gathered, to_threads)),
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
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(built.invoke, [f"question-{number}?" for number in range(1000, 2000)]))
    assert len(given.calls) == 1000
    assert given.leaks == []
    assert given.completeness >= 0.99


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("adjacent_chunks", [True, False])
def test_adjacent_chunks_come_from_documents_in_the_prompt(adjacent_chunks, kind):
    given = ReferenceRecorder()
    in_threads(partly_shown(MODELS[kind](given, adjacent_chunks=adjacent_chunks)), QUESTIONS)
    assert given.leaks == []
    assert given.completeness >= 0.99
    assert bool(given.adjacent_chunks) == adjacent_chunks
