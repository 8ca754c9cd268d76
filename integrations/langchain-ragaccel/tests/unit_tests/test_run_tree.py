"""Documents retrieved earlier in a run whose text is not in the prompt."""

from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tracers import context
from ragaccel.frameworks import default_registry
from tiny_llm import tiny_llm

from langchain_ragaccel import ChatRagaccel, RagaccelLLM, callbacks as run_tree
from langchain_ragaccel.callbacks import RunTree

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
    assert len(run_tree._TREE) == 0  # every root has ended


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


def test_it_is_installed_once_and_not_inline():
    models()
    models()
    hooks = [hook for hook in context._configure_hooks if hook[0] is run_tree._HANDLER]
    assert len(hooks) == 1
    handler = run_tree._HANDLER.get()
    assert not handler.run_inline
    assert not handler.ignore_agent  # it would hide tools


def documents(*names):
    return [Document(page_content=name) for name in names]


def texts(found):
    return [document.page_content for document in found]


def test_the_nearest_run_above_that_retrieved_anything_counts():
    tree = RunTree()
    root, left, right, find, more = (uuid4() for _ in range(5))
    tree.start(root, None)
    tree.start(left, root)
    tree.start(right, root)
    tree.start(find, left)
    tree.add_documents(find, documents("a", "b"))
    tree.start(more, right)
    tree.add_documents(more, documents("c"))
    assert texts(tree.retrieved_below(right)) == ["c"]
    assert texts(tree.retrieved_below(root)) == ["c", "b", "a"]
    assert tree.retrieved_below(None) == []
    tree.end(root)
    assert len(tree) == 0
    assert tree.retrieved_below(right) == []


def test_identical_prompts_without_a_caller_get_no_documents(given):
    """A model called directly has no parent run, even while others are answered."""
    chat, _ = models()

    def ask_beside(found):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: list(chat.stream("What of 0?"))).result()
        return found

    (FakeRetriever() | RunnableLambda(ask_beside)).invoke("0")
    assert list(given.values()) == [[set()]]


def test_trees_and_documents_are_bounded(monkeypatch):
    monkeypatch.setattr(run_tree, "_MAX_TREES", 3)
    monkeypatch.setattr(run_tree, "_MAX_DOCUMENTS", 2)
    tree = RunTree()
    for _ in range(10):
        root, find = uuid4(), uuid4()
        tree.start(root, None)
        tree.start(find, root)
        tree.add_documents(find, documents("a", "b", "c"))
    assert len(tree) <= 6
    assert texts(tree.retrieved_below(root)) == ["c", "b"]
    tree.end(uuid4())  # a run that never started
