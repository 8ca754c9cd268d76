"""An experiment on tenants: concurrent requests, none of which may get another tenant's text."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache
from time import perf_counter
from typing import Any

import torch

from eval import cli
from eval.runner import note, result
from ragaccel import LLM

FILE = "handbook.md"
CHUNKS = 4  # of a tenant's file: a prompt shows two whole, one in part and one not at all
WORDS = 30  # words of a chunk other than the clause
SHOWN = 22  # words of the chunk that is shown in part
CLAUSE = [f"clause{number:02}" for number in range(24)]
END, MARK = "</s>", "ANSWER"
TENANT = re.compile(r"tenant\d+")
MODES = {
    "namespaces": "each tenant has a namespace",
    "shared": "no namespace is named",
    "no memory": "no namespace is named, and memory is off",
}
WAYS = ("langchain threads", "langchain asyncio", "llama-index threads", "llama-index asyncio")
KINDS = ("references", "passages", "citations", "drafts")
# Counts that must be 0 in each mode. Foreign drafts are allowed from a memory that all share.
PROMISES = {
    "namespaces": ("references", "passages", "citations", "drafts"),
    "shared": ("references", "passages", "citations"),
    "no memory": ("references", "passages", "citations", "drafts"),
}


def words_of(tenant: str, chunk: int) -> list[str]:
    """Return the words of a tenant's chunk; no other tenant or chunk has them."""
    return [f"{tenant}c{chunk}w{number:02}" for number in range(WORDS)]


def chunks_of(tenant: str) -> list[str]:
    """Return the chunks of a tenant's file; the first is the clause that all tenants share."""
    return [" ".join(words_of(tenant, chunk) if chunk else CLAUSE) for chunk in range(CHUNKS)]


def answer_to(tenant: str) -> list[str]:
    """Return the scripted answer of a tenant: the clause, shown words and hidden ones."""
    shown, cut, hidden = (words_of(tenant, chunk) for chunk in (1, 2, 3))
    return [*CLAUSE, *shown[3:25], *cut[5:], *hidden[:20]]


class World:
    """The tenants, the vocabulary of their words, and the owner of each token."""

    def __init__(self, num_tenants: int) -> None:
        self.tenants = [f"tenant{number:03}" for number in range(num_tenants)]
        own = {
            t: [t, *(word for c in range(CHUNKS) for word in words_of(t, c))] for t in self.tenants
        }
        words = ["<unk>", END, MARK, "question", "of", *CLAUSE]
        words += [word for tenant in self.tenants for word in own[tenant]]
        self.ids = {word: number for number, word in enumerate(words)}
        self.owner = {self.ids[word]: tenant for tenant in own for word in own[tenant]}
        self.named = {self.ids[tenant] for tenant in self.tenants}
        self.scripts = {
            tenant: [self.ids[word] for word in [*answer_to(tenant), END]]
            for tenant in self.tenants
        }

    def say(self, ids: Any, scores: Any) -> Any:
        """Force the scripted answer of the request's tenant; a logits processor without state."""
        row = ids[0].tolist()
        at = len(row) - 1 - row[::-1].index(self.ids[MARK])
        script = self.scripts[self.tenant_of(row)]
        forced = torch.full_like(scores, -torch.inf)
        forced[:, script[min(len(row) - 1 - at, len(script) - 1)]] = 0.0
        return forced

    def tenant_of(self, token_ids: Any) -> str:
        """Return the tenant of a request from its token ids, which end with the question."""
        return next(self.owner[token] for token in reversed(token_ids) if token in self.named)

    def load(self) -> LLM:
        """Return an LLM of a tiny model with this vocabulary and memory for every namespace."""
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

        from ragaccel import LLM, Memory

        made = Tokenizer(models.WordLevel(self.ids, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)
        tokenizer.chat_template = (
            "{% for message in messages %}{{ message.content }}{% endfor %} " + MARK
        )
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(self.ids), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=1024,
            eos_token_id=self.ids[END], bos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        memory = Memory(256 << 20, len(self.tenants) + 1, vocab_size=len(self.ids))
        model = LlamaForCausalLM(config).eval()
        return LLM(model, tokenizer, memory=memory, token_budget=24, save_measurements=False)


class Seen:
    """Counts over all requests of foreign and of own references, drafts and citations."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.foreign: Counter[str] = Counter()
        self.own: Counter[str] = Counter()
        self.answers = self.wrong = 0
        self._lock = threading.Lock()
        self._looked_at: set[int] = set()

    def draft(self, session: Any, tree: Any) -> None:
        """Count foreign tokens in a draft, and once per session the foreign references."""
        request, owner = session.request, self.world.owner
        tenant = self.world.tenant_of(request.prompt_ids)
        strange = [token for token in tree.token_ids[1:] if owner.get(token, tenant) != tenant]
        with self._lock:
            self.own["draft tokens"] += len(tree) - 1
            self.foreign["drafts"] += bool(strange)
            if id(session) in self._looked_at:
                return
            self._looked_at.add(id(session))
            for reference in request.references:
                named = TENANT.match(reference.passage_id)
                owners = {owner.get(token, tenant) for token in reference.token_ids}
                strange = (named is not None and named.group() != tenant) or owners - {tenant}
                self.foreign["references"] += bool(strange)
                self.own["references"] += not strange

    def answer(self, answer: Any) -> None:
        """Count the foreign passages and citations of an answer, and whether its text is right."""
        words = answer.text.split()
        tenant = next((w for w in map(TENANT.match, words) if w is not None), None)
        name = "" if tenant is None else tenant.group()
        passages, spans = answer.passages, answer.copied_spans
        with self._lock:
            self.answers += 1
            self.wrong += not name or words != answer_to(name)
            self.foreign["passages"] += sum(not p.passage_id.startswith(name) for p in passages)
            self.foreign["citations"] += sum(not s.passage_id.startswith(name) for s in spans)
            self.own["passages"] += sum(p.passage_id.startswith(name) for p in passages)
            self.own["citations"] += sum(s.passage_id.startswith(name) for s in spans)
            self.own["cited words"] += sum(
                len(answer.text[span.start : span.end].split())
                for span in spans
                if span.passage_id.startswith(name)
            )
            self.own["copied tokens"] += answer.stats.accepted_tokens
            self.own["passes"] += answer.stats.verify_passes


@contextmanager
def observed_by(seen: Seen) -> Iterator[None]:
    """Pass every draft of every session and every answer to ``seen`` while the context is open."""
    from ragaccel.answer import Answer
    from ragaccel.decoding import Session

    draft, make = Session.draft, Answer.of
    alive: list[Any] = []  # kept, so that ids of sessions are not used again

    def watched(session: Session) -> Any:
        tree = draft(session)
        alive.append(session)
        seen.draft(session, tree)
        return tree

    def made(*given: Any, **more: Any) -> Answer:
        answer = make(*given, **more)
        seen.answer(answer)
        return answer

    Session.draft, Answer.of = watched, made  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Session.draft, Answer.of = draft, make  # type: ignore[method-assign]


def langchain_of(world: World, llm: LLM, mode: str) -> tuple[Callable[[str], Any], ...]:
    """Return two functions that ask through a LangChain chain: blocking and async."""
    from langchain_core.documents import Document
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables import RunnablePassthrough
    from langchain_ragaccel import ChatRagaccel, collecting_into

    class Finds(BaseRetriever):
        def _get_relevant_documents(self, query: str, *, run_manager: Any = None) -> list[Document]:
            del run_manager
            return [
                Document(text, id=f"{query}-{n}", metadata={"source": FILE, "start_index": 999 * n})
                for n, text in enumerate(chunks_of(query))
            ]

    def joined(documents: list[Document]) -> str:
        return "\n\n".join(shown([document.page_content for document in documents]))

    prompt = ChatPromptTemplate.from_template("{context}\n\nquestion of {question}")
    sources = {"context": Finds() | joined, "question": RunnablePassthrough()}
    model = ChatRagaccel(llm=llm, max_tokens=200, remember=mode != "no memory")

    def chain(tenant: str) -> Any:
        own = {"namespace": tenant} if mode == "namespaces" else {}
        return sources | prompt | model.bind(logits_processors=[world.say], **own)

    def inside(tenant: str) -> Any:
        return collecting_into(namespace=tenant) if mode == "namespaces" else nullcontext()

    def ask(tenant: str) -> None:
        with inside(tenant):
            chain(tenant).invoke(tenant)

    async def aask(tenant: str) -> None:
        with inside(tenant):
            await chain(tenant).ainvoke(tenant)

    return ask, aask


def llama_index_of(world: World, llm: LLM, mode: str) -> tuple[Callable[[str], Any], ...]:
    """Return two functions that ask through a LlamaIndex query engine: blocking and async."""
    from llama_index.core.instrumentation.dispatcher import instrument_tags

    def inside(tenant: str) -> Any:
        if mode != "namespaces":
            return nullcontext()
        return instrument_tags({"ragaccel_namespace": tenant})

    def ask(tenant: str) -> None:
        with inside(tenant):
            query_engine(world, llm, mode, tenant).query(tenant)

    async def aask(tenant: str) -> None:
        with inside(tenant):
            await query_engine(world, llm, mode, tenant).aquery(tenant)

    return ask, aask


def query_engine(world: World, llm: LLM, mode: str, tenant: str) -> Any:
    """Return a new query engine for one request of a tenant."""
    from llama_index.core import PromptTemplate, Settings, get_response_synthesizer
    from llama_index.core.query_engine import RetrieverQueryEngine
    from llama_index.llms.ragaccel import Ragaccel

    own: dict[str, Any] = {"logits_processors": [world.say]}
    if mode == "no memory":
        own["remember"] = False
    model = Ragaccel(
        llm=llm,
        max_new_tokens=200,
        generate_kwargs=own,
        namespace=tenant if mode == "namespaces" else "",
    )
    Settings.tokenizer = model.tokenize
    synthesizer = get_response_synthesizer(
        llm=model, text_qa_template=PromptTemplate("{context_str}\n\nquestion of {query_str}")
    )
    finds, shows = node_classes()
    return RetrieverQueryEngine(finds(), synthesizer, node_postprocessors=[shows()])


@cache
def node_classes() -> tuple[type[Any], type[Any]]:
    """Return two LlamaIndex classes: a retriever of a tenant's chunks, and a postprocessor.

    The postprocessor cuts the chunks to the part that the prompt shows.
    """
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode

    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=FILE)}

    def node_of(tenant: str, number: int, text: str) -> NodeWithScore:
        name, at = f"{tenant}-{number}", 999 * number
        node = TextNode(text=text, id_=name, start_char_idx=at, relationships=source)
        return NodeWithScore(node=node, score=0.5)

    class Finds(BaseRetriever):
        def _retrieve(self, query_bundle: Any) -> list[NodeWithScore]:
            tenant = query_bundle.query_str
            return [node_of(tenant, *chunk) for chunk in enumerate(chunks_of(tenant))]

    class Shows(BaseNodePostprocessor):
        def _postprocess_nodes(self, nodes: Any, query_bundle: Any = None) -> Any:
            del query_bundle
            texts = shown([node.node.get_content() for node in nodes])
            return [NodeWithScore(node=TextNode(text=text), score=0.5) for text in texts]

    return Finds, Shows


def shown(texts: list[str]) -> list[str]:
    """Return the part of retrieved texts that a prompt shows: two chunks, and part of a third."""
    return [texts[0], texts[1], " ".join(texts[2].split()[:SHOWN])]


def ask_all(world: World, llm: LLM, mode: str, count: int) -> dict[str, int]:
    """Ask ``count`` concurrent requests in all four ways; count the errors by message."""
    failed: Counter[str] = Counter()
    chain, achain = langchain_of(world, llm, mode)
    engine, aengine = llama_index_of(world, llm, mode)
    tenants = [world.tenants[number % len(world.tenants)] for number in range(count)]

    def in_threads(ask: Callable[[str], Any], tenants: list[str]) -> None:
        with ThreadPoolExecutor(16) as pool:
            for done in [pool.submit(ask, tenant) for tenant in tenants]:
                if (error := done.exception()) is not None:
                    failed[repr(error)[:200]] += 1

    def in_tasks(ask: Callable[[str], Any], tenants: list[str]) -> None:
        async def gather() -> list[Any]:
            return await asyncio.gather(*map(ask, tenants), return_exceptions=True)

        for error in asyncio.run(gather()):
            if error is not None:
                failed[repr(error)[:200]] += 1

    ways = [(in_threads, chain), (in_tasks, achain), (in_threads, engine), (in_tasks, aengine)]
    drivers = [
        threading.Thread(target=drive, args=(ask, tenants[way :: len(ways)]))
        for way, (drive, ask) in enumerate(ways)
    ]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join()
    return dict(failed)


@cli.experiment(
    cli.integer("--count", 1000, "requests of each mode"),
    cli.integer("--tenants", 50, "who ask them"),
    cli.option("--modes", nargs="+", choices=MODES, default=list(MODES)),
    shown=("modes",),
    broken=lambda document: not all(row["promise kept"] for row in document["modes"]),
    threads=1,
)
def run_tenants(options: Namespace) -> dict[str, Any]:
    """Tenants: does any of many concurrent requests get another tenant's text?

        python -m eval tenants --out eval/results

    Fifty tenants have files of the same name that share one clause. Each request goes through
    LangChain or LlamaIndex, retrieves its own tenant's passages, and a tiny model gives a scripted
    answer: the clause, text that the prompt shows, and text next to it in the same file. Every
    tenant has words of its own, each one token, so that foreign text is recognized in a request's
    references and drafts and in the passages and citations of its answer.
    """
    from ragaccel.drafting import JIT_WARMUP
    from ragaccel.frameworks import default_registry

    os.environ.setdefault("RAGACCEL_HOME", ".cache/tenants")
    JIT_WARMUP.start()
    JIT_WARMUP.wait(300)
    rows = []
    for mode in options.modes:
        world = World(options.tenants)
        llm, seen = world.load(), Seen(world)
        default_registry().clear()
        note(f"{mode}: {MODES[mode]}")
        began = perf_counter()
        with observed_by(seen):
            failed = ask_all(world, llm, mode, options.count)
        kept = all(seen.foreign[kind] == 0 for kind in PROMISES[mode])
        rows.append(
            {
                "mode": mode,
                "answers": seen.answers,
                "wrong answers": seen.wrong,
                "failed": failed,
                "foreign": {kind: seen.foreign[kind] for kind in sorted(KINDS)},
                "own": dict(sorted(seen.own.items())),
                "promise kept": kept and not failed and not seen.wrong,
                "seconds": round(perf_counter() - began, 1),
            }
        )
        note(str(rows[-1]))
    settings = {"count": options.count, "tenants": options.tenants, "ways": list(WAYS)}
    return result("tenants", settings, modes=rows)
