"""Engines, chats and agents pass the model the passages of their own question only.

No model runs: a stand-in records the references of each call. Each question has a number and its
own passages, so that a passage of another question would show.
"""

from __future__ import annotations

import asyncio
import gc
import random
import re
from contextlib import nullcontext
from functools import cache

import pytest
from concurrency import in_tasks, in_threads
from framework_llms import TEMPLATE, RecordingLLM
from llama_index.core import get_response_synthesizer
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.instrumentation.dispatcher import instrument_tags
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.retrievers import BaseRetriever, QueryFusionRetriever
from llama_index.core.schema import NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode
from llama_index.core.tools import FunctionTool
from ragaccel import Passage, Reference, reference_scope

from llama_index.llms.ragaccel import Ragaccel, citations

SYLLABLES = "ba ke lo mi nu ra se to vi zu dra fle gri sto pla".split()
CHUNKS = 3
MANY = range(16)


@cache
def chunks_of(number):
    """Return the passages of a question: made-up words, so that no two share any."""
    chance = random.Random(number)
    words = ["".join(chance.choices(SYLLABLES, k=chance.randrange(2, 5))) for _ in range(150)]
    size = len(words) // CHUNKS
    return [" ".join([f"q{number}", *words[i * size : (i + 1) * size]]) for i in range(CHUNKS)]


def nodes_of(number):
    # Files of all questions have one name, as those of tenants may.
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="handbook.md")}
    return [
        NodeWithScore(
            node=TextNode(
                text=text, id_=f"q{number}-{i}", relationships=source, start_char_idx=1000 * i
            ),
            score=1.0 - i / 10,
        )
        for i, text in enumerate(chunks_of(number))
    ]


def numbers_in(text):
    return set(map(int, re.findall(r"\bq(\d+)\b", text)))


class FakeRetriever(BaseRetriever):
    """Returns the passages of the question whose number is in the query, after a delay."""

    def __init__(self, part=slice(None)):
        super().__init__()
        self.part = part

    def _retrieve(self, query_bundle):
        (number,) = numbers_in(query_bundle.query_str)
        return nodes_of(number)[self.part]

    async def _aretrieve(self, query_bundle):
        await asyncio.sleep(random.random() / 500)
        return self._retrieve(query_bundle)


class Model(RecordingLLM):
    """Answers without naming a question, unless asked to write one."""

    def __init__(self, template=TEMPLATE, say=None):
        super().__init__(template, say or self._reply)

    @staticmethod
    def _reply(text):
        asked_to_rewrite = "standalone question" in text.lower()
        found = re.findall(r"\bq\d+\b", text)
        return f"What of {found[-1]}?" if asked_to_rewrite and found else "So it is written."

    def check(self, calls, *, without=0):
        """Check that every call got all passages in its prompt and none of other questions."""
        assert len(self.asked) == calls
        wanted = found = bare = 0
        for text, references, _ in self.asked:
            asked = numbers_in(text)
            passages = {one.passage_id for one in references if isinstance(one, Passage)}
            beside = [one for one in references if isinstance(one, Reference)]
            said = [self.tokenizer.decode(one.token_ids) for one in beside]
            leaked = {name for name in passages if numbers_in(name.split("-")[0]) - asked}
            assert not leaked
            assert not set().union(*map(numbers_in, said)) - asked
            there = {
                f"q{number}-{i}"
                for number in asked
                for i, chunk in enumerate(chunks_of(number))
                if chunk in text
            }
            bare += not there
            assert there or not references
            wanted += len(there)
            found += len(there & passages)
        assert bare == without
        assert found >= 0.99 * wanted
        assert wanted >= calls - without


TEMPLATES = pytest.mark.parametrize("template", [TEMPLATE, None], ids=["chat", "plain"])
MODES = [
    ("compact", False),
    ("refine", False),
    ("tree_summarize", False),
    ("tree_summarize", True),
    ("accumulate", False),
    ("accumulate", True),
    ("simple_summarize", False),
]
CALLS = {"refine": CHUNKS, "accumulate": CHUNKS}


def engine(model, **options):
    synthesizer = get_response_synthesizer(llm=Ragaccel(llm=model), **options)
    return RetrieverQueryEngine(FakeRetriever(), synthesizer)


def question(number):
    return f"What is told of q{number}?"


@TEMPLATES
@pytest.mark.parametrize(("mode", "use_async"), MODES)
@pytest.mark.parametrize("how", ["in turn", "in threads", "awaited"])
def test_query_engines(how, mode, use_async, template):
    model = Model(template)
    asked = engine(model, response_mode=ResponseMode(mode), use_async=use_async)
    if how == "in turn":
        done = [asked.query(question(number)) for number in range(3)]
    elif how == "in threads":
        done = in_threads(lambda number: asked.query(question(number)), MANY)
    else:
        done = in_tasks(lambda number: asked.aquery(question(number)), MANY)
    model.check(len(done) * CALLS.get(mode, 1))


@TEMPLATES
def test_streams_read_in_threads(template):
    model = Model(template)
    asked = engine(model, streaming=True)
    in_threads(lambda number: "".join(asked.query(question(number)).response_gen), MANY)
    model.check(len(MANY))


@TEMPLATES
def test_streams_read_late_and_in_turns(template):
    model = Model(template)
    asked = engine(model, streaming=True)
    streams = [asked.query(question(number)).response_gen for number in range(6)]
    left = list(reversed(streams))
    while left:
        left = [stream for stream in left if next(stream, None) is not None]
    model.check(6)


@TEMPLATES
def test_streams_that_are_awaited(template):
    model = Model(template)
    asked = engine(model, streaming=True, use_async=True)

    async def read(number):
        response = await asked.aquery(question(number))
        await asyncio.sleep(random.random() / 200)
        return [piece async for piece in response.response_gen]

    assert all("".join(pieces) == "So it is written." for pieces in in_tasks(read, MANY))
    model.check(len(MANY))


@TEMPLATES
def test_a_summary_of_summaries_copies_only_its_own_text(template):
    model = Model(template)
    model.context_length = 500
    synthesizer = get_response_synthesizer(
        llm=Ragaccel(llm=model, max_new_tokens=50), response_mode=ResponseMode.TREE_SUMMARIZE
    )
    RetrieverQueryEngine(FakeRetriever(), synthesizer).query(question(1))
    assert len(model.asked) > 2
    assert model.asked[-1][1] == []
    assert all(references for _, references, _ in model.asked[:-1])


CHATS = {"context": ContextChatEngine, "condense": CondensePlusContextChatEngine}


def chat_engine(kind, model):
    return CHATS[kind].from_defaults(retriever=FakeRetriever(), llm=Ragaccel(llm=model))


@TEMPLATES
@pytest.mark.parametrize("kind", CHATS)
@pytest.mark.parametrize("how", ["chat", "stream_chat", "achat", "astream_chat"])
def test_chat_engines(how, kind, template):
    model = Model(template)

    def talk(number):
        response = getattr(chat_engine(kind, model), how)(question(number))
        return "".join(response.response_gen) if how == "stream_chat" else str(response)

    async def atalk(number):
        response = await getattr(chat_engine(kind, model), how)(question(number))
        if how == "achat":
            return str(response)
        return "".join([piece async for piece in response.async_response_gen()])

    said = in_tasks(atalk, MANY) if how.startswith("a") else in_threads(talk, MANY)
    assert set(said) == {"So it is written."}
    model.check(len(MANY))


@TEMPLATES
@pytest.mark.parametrize("kind", CHATS)
def test_the_second_turn_of_a_chat(kind, template):
    model = Model(template)
    chat = chat_engine(kind, model)
    chat.chat(question(1))
    chat.chat(question(2))
    rewrites = int(kind == "condense")
    model.check(2 + rewrites, without=rewrites)


@TEMPLATES
@pytest.mark.parametrize("how", ["query", "aquery"])
def test_a_fusion_of_retrievers(how, template):
    model = Model(template)
    llm = Ragaccel(llm=model)
    fused = QueryFusionRetriever(
        [FakeRetriever(slice(0, 2)), FakeRetriever(slice(1, 3))],
        llm=llm,
        num_queries=1,
        similarity_top_k=CHUNKS,
        use_async=True,
    )
    asked = RetrieverQueryEngine(fused, get_response_synthesizer(llm=llm))
    if how == "query":
        in_threads(lambda number: asked.query(question(number)), MANY)
    else:
        in_tasks(lambda number: asked.aquery(question(number)), MANY)
    model.check(len(MANY))


def agent_says(text):
    number = re.findall(r"told of (q\d+)\?", text)[-1]
    if "Observation:" in text.rpartition("told of")[2]:
        return "Thought: I can answer without using any more tools.\nAnswer: So it is written."
    return f'Thought: I need a tool.\nAction: look_up\nAction Input: {{"what": "{number}"}}'


def agent(model):
    async def look_up(what: str) -> str:
        """Look something up."""
        return "\n\n".join(found.text for found in await FakeRetriever().aretrieve(what))

    tool = FunctionTool.from_defaults(async_fn=look_up, name="look_up")
    return ReActAgent(tools=[tool], llm=Ragaccel(llm=model))


@TEMPLATES
def test_react_agents_with_a_retriever_as_their_tool(template):
    model = Model(template, agent_says)

    async def ask(number):
        return str(await agent(model).run(question(number)))

    assert set(in_tasks(ask, range(8))) == {"So it is written."}
    model.check(16, without=8)  # nothing is retrieved before the first call


@TEMPLATES
def test_concurrent_agents_in_one_task(template):
    """Their runs return at once and leave a span active in the task that started them."""
    model = Model(template, agent_says)

    async def ask_all():
        runs = [agent(model).run(question(number)) for number in range(8)]
        said = await asyncio.gather(*runs)
        prompt = "\n".join([*chunks_of(0), question(0)])
        await Ragaccel(llm=model).acomplete(prompt)  # nothing was retrieved for it
        return set(map(str, said))

    assert asyncio.run(ask_all()) == {"So it is written."}
    assert model.asked.pop()[1] == []
    model.check(16, without=8)


@TEMPLATES
def test_roots_are_forgotten(template):
    model = Model(template)
    asked = engine(model, streaming=True)
    in_threads(lambda number: "".join(asked.query(question(number)).response_gen), MANY)
    in_tasks(lambda number: engine(model).aquery(question(number)), MANY)
    left = asked.query(question(1)).response_gen
    next(left)
    del left
    gc.collect()
    assert len(citations._ROOTS) < 5
    assert sum(isinstance(one, citations.RootSpan) for one in gc.get_objects()) < 5


@TEMPLATES
@pytest.mark.parametrize("how", [in_threads, in_tasks])
@pytest.mark.parametrize("joined", [None, "scope", "namespace"])
def test_plain_code_shares_only_what_a_scope_or_a_namespace_joins(how, joined, template):
    model = Model(template)
    llm = Ragaccel(llm=model)

    def by(number):
        if joined == "namespace":
            return instrument_tags({"ragaccel_namespace": str(number)})
        return reference_scope() if joined else nullcontext()

    def given(number, found):
        own = {"namespace": str(number)} if joined == "namespace" else {}
        return {"prompt": "\n".join([*(one.text for one in found), question(number)]), **own}

    def ask(number):
        with by(number):
            return llm.complete(**given(number, FakeRetriever().retrieve(question(number))))

    async def aask(number):
        with by(number):
            found = await FakeRetriever().aretrieve(question(number))
            return await llm.acomplete(**given(number, found))

    how(ask if how is in_threads else aask, MANY)
    if joined:
        model.check(len(MANY))
    else:
        assert [references for _, references, _ in model.asked] == [[]] * len(MANY)


def test_a_call_without_retrieval_gets_nothing_of_an_earlier_one():
    model = Model()
    engine(model).query(question(1))
    Ragaccel(llm=model).complete("What is told of q1?")
    assert model.asked[0][1]
    assert model.asked[1][1] == []


def test_a_thousand_at_once():
    model = Model()
    asked, streaming = engine(model), engine(model, streaming=True, use_async=True)

    async def ask(number):
        if number % 2:
            return str(await asked.aquery(question(number)))
        response = await streaming.aquery(question(number))
        return "".join([piece async for piece in response.response_gen])

    assert set(in_tasks(ask, range(1000))) == {"So it is written."}
    model.check(1000)
    assert {min(numbers_in(text)) for text, _, _ in model.asked} == set(range(1000))
