"""Documents retrieved earlier in a run whose text is not in the prompt."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from ragaccel.frameworks import default_registry
from tiny_llm import tiny_llm

from langchain_ragaccel import ChatRagaccel, RagaccelLLM

FULL = "The keeper of station {} trims the wick at dusk, and again at midnight, in all weathers."


class FakeRetriever(BaseRetriever):
    """Returns the one document of a query."""

    def _get_relevant_documents(self, query, *, run_manager):
        return [Document(page_content=FULL.format(query), id=f"d-{query}")]


@pytest.fixture(autouse=True)
def nothing_known():
    default_registry().clear()
    yield
    default_registry().clear()


@pytest.fixture
def given(monkeypatch):
    """The passages used for each prompt, by the prompt's question."""
    llm, seen = tiny_llm(), {}
    plan = llm._prepare

    def watched(prompt, references, settings):
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        seen.setdefault(text, []).append({passage.passage_id for passage in references})
        return plan(prompt, references, settings)

    monkeypatch.setattr(llm, "_prepare", watched)
    return seen


def chain(model):
    """Retrieve, put only the first words into the prompt, and answer."""
    short = RunnableLambda(lambda documents: documents[0].page_content[:25])
    write = RunnableLambda(lambda found: f"{found['context']} … {found['query']}")
    return {"context": FakeRetriever() | short, "query": RunnablePassthrough()} | write | model


def models():
    common = {"llm": tiny_llm(), "max_tokens": 2, "track": "run-tree", "adjacent_chunks": False}
    return ChatRagaccel(**common), RagaccelLLM(**common)


QUERIES = [str(number) for number in range(6)]


def check(given, times=1):
    assert len(given) == len(QUERIES)
    for text, references in given.items():
        query = text.rpartition(" ")[2]
        assert references == [{f"d-{query}"}] * times


@pytest.mark.parametrize("kind", [0, 1])
def test_documents_that_a_prompt_only_hints_at_are_references(given, kind):
    chained = chain(models()[kind])
    for query in QUERIES:
        chained.invoke(query)
    check(given)
    for query in QUERIES:
        list(chained.stream(query))
    check(given, 2)
    chained.batch(QUERIES)
    check(given, 3)


@pytest.mark.parametrize("kind", [0, 1])
async def test_documents_hinted_at_are_references_with_asyncio(given, kind):
    chained = chain(models()[kind])
    for query in QUERIES:
        await chained.ainvoke(query)
    check(given)
    for query in QUERIES:
        _ = [piece async for piece in chained.astream(query)]
    check(given, 2)
    await chained.abatch(QUERIES)
    check(given, 3)


def test_runs_without_a_common_root_share_nothing(given):
    chat, llm = models()
    FakeRetriever().invoke("0")
    chat.invoke("What of 0?")
    llm.invoke("What of 0?")
    assert list(given.values()) == [[set(), set()]]


def test_tracking_is_off_by_default(given):
    chain(ChatRagaccel(llm=tiny_llm(), max_tokens=2)).invoke("0")
    assert [references for own in given.values() for references in own] == [set()]


def test_identical_prompts_without_a_caller_get_no_documents(given):
    """A model called directly has no parent run, even while others are answered."""
    chat, _ = models()

    def ask_beside(found):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: list(chat.stream("What of 0?"))).result()
        return found

    (FakeRetriever() | RunnableLambda(ask_beside)).invoke("0")
    assert list(given.values()) == [[set()]]
