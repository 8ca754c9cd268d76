"""Measure LangChain and LlamaIndex chains, and the registry of references.

All chains write the same prompt around the retrieved passages, so that only the frameworks differ.
A framework is imported when the first chain of it is made.
"""

from __future__ import annotations

import importlib
import random
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter, thread_time
from typing import Any

from eval import cli
from eval.data import Example
from eval.measure import paired_ratio
from eval.models import chosen_target, describe_target
from eval.report.tables import show
from eval.runner import (
    in_turns,
    note,
    open_results_log,
    result,
    settings_of,
)
from eval.tasks import load_task
from ragaccel import LLM, RAG, build_prompt
from ragaccel.frameworks import (
    Match,
    ReferenceRegistry,
    is_documents_only,
    remove_whitespace,
)
from ragaccel.models import Tokenizer
from ragaccel.passage import Passage
from ragaccel.prompt import Message, Template
from ragaccel.quotes import judging_constraint
from ragaccel.retrieval.source import PassageSource

TEMPLATE = "Answer from the context.\n\n{context}\n\nQuestion: {question}"
PACKAGES = {"langchain": "langchain_ragaccel", "llama_index": "llama_index.llms.ragaccel"}
"""Our package for each framework."""


def is_installed(framework: str) -> bool:
    """Return whether a framework and our package for it can be imported."""
    try:
        importlib.import_module(PACKAGES[framework])
    except ImportError:
        return False
    return True


def written(question: str, passages: Sequence[Passage]) -> str:
    """Return the prompt that every chain gives its model."""
    return TEMPLATE.format(context=joined(passages), question=question)


def joined(passages: Sequence[Passage]) -> str:
    return "\n\n".join(passage.text for passage in passages)


def template_of(tokenizer: Tokenizer) -> Template | None:
    """Return the template with which ``RAG`` writes the frameworks' prompt.

    Return None for a documents-only model, which gets passages apart from the question, in the
    frameworks as well.
    """

    def write(
        question: str, passages: Sequence[Passage], _history: Sequence[Message]
    ) -> str | list[Message]:
        text = written(question, passages)
        return [{"role": "user", "content": text}] if tokenizer.has_chat_template else text

    return None if is_documents_only(tokenizer) else write


def langchain_pieces(
    llm: LLM, source: PassageSource, k: int, max_new_tokens: int
) -> Callable[[str], Any]:
    """Return a function that streams the answer of a chain of retriever, prompt and our model."""
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import PromptTemplate
    from langchain_core.runnables import RunnablePassthrough
    from langchain_ragaccel import ChatRagaccel, RagaccelLLM, RagaccelRetriever

    def show(documents: Sequence[Any]) -> str:
        return "\n\n".join(document.page_content for document in documents)

    kind = ChatRagaccel if llm.tokenizer.has_chat_template else RagaccelLLM
    model = kind(llm=llm, max_tokens=max_new_tokens)
    context = RagaccelRetriever(index=source, k=k) | show
    sources: Any = {"context": context, "question": RunnablePassthrough()}
    return (sources | PromptTemplate.from_template(TEMPLATE) | model | StrOutputParser()).stream


def llama_index_pieces(
    llm: LLM, source: PassageSource, k: int, max_new_tokens: int
) -> Callable[[str], Any]:
    """Return a function that streams the answer of a query engine of retriever, prompt and LLM."""
    from llama_index.core import PromptTemplate
    from llama_index.core.query_engine import RetrieverQueryEngine
    from llama_index.core.response_synthesizers import get_response_synthesizer
    from llama_index.llms.ragaccel import Ragaccel
    from llama_index.retrievers.ragaccel import RagaccelRetriever

    model = Ragaccel(llm=llm, max_new_tokens=max_new_tokens)
    template = PromptTemplate(
        TEMPLATE.replace("context}", "context_str}").replace("question}", "query_str}")
    )
    synthesizer = get_response_synthesizer(llm=model, text_qa_template=template, streaming=True)
    engine = RetrieverQueryEngine(RagaccelRetriever(source, similarity_top_k=k), synthesizer)
    return lambda question: engine.query(question).response_gen


def bare_pieces(
    llm: LLM, source: PassageSource, k: int, max_new_tokens: int
) -> Callable[[str], Any]:
    """Return a function that streams a ``RAG``'s answer, without checking its quotes."""
    template = template_of(llm.tokenizer)
    return RAG(
        llm,
        source,
        k=k,
        template=template,
        max_new_tokens=max_new_tokens,
        check_quotes=False,
    ).stream


PiecesMaker = Callable[[LLM, PassageSource, int, int], Callable[[str], Any]]
STREAMING: dict[str, PiecesMaker] = {
    "bare": bare_pieces,
    "langchain": langchain_pieces,
    "llama_index": llama_index_pieces,
}
"""By framework: the function that makes a streaming chain from a model and an index."""


BARE = "bare"


@cli.experiment(
    *cli.TARGET, cli.DTYPE, cli.TASK, cli.LIMIT, cli.integer("--rounds", 5, "counted ones"),
    cli.integer("--max-new-tokens", 64), table=show, shown=("decoders",),
)  # fmt: skip
def run_frameworks(options: Namespace) -> dict[str, Any]:
    """Frameworks: is a chain as fast as its LLM alone, and is its answer the same word for word?

        python -m eval frameworks --model reader --task demo
        python -m eval frameworks --model random:llama-135m --task llma --data DATA --limit 8

    Each question is answered by ``LLM.generate`` with the prompt and its passages, by a LangChain
    chain (retriever, prompt, ``ChatRagaccel``) and by a LlamaIndex query engine (``Ragaccel``) with
    the same prompt, both streaming, in turn. Retrieval takes no time here: retrievers look up the
    example's passages. The extra time of a chain is therefore the framework, our callbacks, and
    finding the passages in the prompt. Each decoder has an ``LLM`` of its own over the same
    weights, and its memory and prefix cache are cleared before every round, so that nothing remains
    of other decoders or rounds. The first round is not counted.
    """
    target = chosen_target(options, options.dtype)
    examples = [one for one in load_task(options.task, options.limit, options.data) if one.passages]
    settings = describe_target(options) | settings_of(
        options, "task", "max_new_tokens", "rounds", examples=len(examples)
    )
    results_log = open_results_log(options.out, settings)
    llms = {name: LLM(target.ours, target.tokenizer) for name in MAKERS}
    decoders = {
        name: make(llms[name], examples, options.max_new_tokens) for name, make in MAKERS.items()
    }

    def ask(name: str, example: Example) -> dict[str, Any]:
        began = perf_counter()
        text = decoders[name](example)
        return {"seconds": perf_counter() - began, "text": text}

    in_turns(
        results_log,
        list(MAKERS),
        {example.example_id: example for example in examples},
        ask,
        lambda row: f"{1000 * row['seconds']:.0f} ms",
        repeats=options.rounds + 1,
        forget=lambda name: forget_requests(llms[name]),
    )
    return result("frameworks", settings, decoders=compare_frameworks(results_log.rows))


def forget_requests(llm: LLM) -> None:
    """Clear what an LLM knows of earlier requests, but not its latency profile."""
    llm.memory.clear()
    llm.engine.prefix_cache.clear()


def compare_frameworks(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return speeds relative to the bare LLM's, from all rounds but the first."""
    speeds: dict[str, dict[tuple[str, int], float]] = {name: {} for name in MAKERS}
    texts: dict[str, dict[str, str]] = {name: {} for name in MAKERS}
    for row in rows:
        texts[row["decoder"]][row["example"]] = row["text"]
        if row["round"] > 0:
            key = row["example"], row["round"]
            speeds[row["decoder"]][key] = 1 / row["seconds"]
    return {name: _framework_figures(name, speeds, texts) for name in MAKERS}


def _framework_figures(
    name: str,
    speeds: dict[str, dict[tuple[str, int], float]],
    texts: dict[str, dict[str, str]],
) -> dict[str, Any]:
    ratio = paired_ratio(speeds[name], speeds[BARE])
    return {
        "seconds": median(1 / speed for speed in speeds[name].values()),
        "ratio": ratio.value,
        "ratio_interval": [ratio.low, ratio.high],
        "worst_ratio": ratio.worst,
        "same_text": sum(text == texts[BARE][key] for key, text in texts[name].items()),
        "examples": len(texts[name]),
    }


def bare(
    llm: LLM,
    examples: Sequence[Example],  # noqa: ARG001 - as the others are called
    max_new_tokens: int,
) -> Callable[[Example], str]:
    """Return a function that asks the LLM alone, with the prompt and its passages.

    The bundled reader says one sentence of them, as it does in the frameworks.
    """
    apart, chats = is_documents_only(llm.tokenizer), llm.tokenizer.has_chat_template
    settings: Any = {"max_new_tokens": max_new_tokens}

    def ask(example: Example) -> str:
        if apart:
            room = (llm.context_length or 1 << 20) - max_new_tokens
            built = build_prompt(llm.tokenizer, example.question, example.passages, max_tokens=room)
            rules = [judging_constraint(built, llm.tokenizer)] if llm.is_bundled_reader else []
            return llm.generate(built, logits_processors=rules, **settings).text
        text = written(example.question, example.passages)
        prompt: Any = [{"role": "user", "content": text}] if chats else text
        return llm.generate(prompt, references=example.passages, **settings).text

    return ask


class Known:
    """A source of passages that looks up those of each question."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._found = {example.question: list(example.passages) for example in examples}

    def search(self, query: str, k: int = 6) -> list[Passage]:  # noqa: ARG002
        """Return the passages of a question."""
        return self._found[query]


def streamed(
    make: PiecesMaker, llm: LLM, examples: Sequence[Example], max_new_tokens: int
) -> Callable[[Example], str]:
    """Return a function that reads a streaming chain's answer to its end."""
    most = max(len(example.passages) for example in examples)
    pieces = make(llm, Known(examples), most, max_new_tokens)
    return lambda example: "".join(pieces(example.question))


MAKERS = {BARE: bare} | {
    name: partial(streamed, STREAMING[name]) for name in ("langchain", "llama_index")
}


TEXT_SIZE = 1_000
CUT = slice(300, 700)
PROMPT_SIZES = (3_000, 13_000, 80_000)
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


class Writer:
    """A writer of made-up words with a language's distribution of frequencies."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        draw = self.random.choices
        lengths = [self.random.randint(2, 9) for _ in range(20_000)]
        weights = range(len(_LETTERS), 0, -1)
        self.words = ["".join(draw(_LETTERS, weights, k=size)) for size in lengths]
        self.frequencies = [1 / (rank + 3) for rank in range(len(self.words))]

    def text(self, size: int) -> str:
        """Return a random text of ``size`` characters."""
        words = self.random.choices(self.words, self.frequencies, k=size // 3)
        return " ".join(words)[:size]


def prompt_of(texts: Sequence[str], writer: Writer) -> str:
    """Return a prompt of numbered texts and an unregistered text, as a chain writes it."""
    parts = [f"[{n}] {text}" for n, text in enumerate(texts, start=1)]
    return "\n\n".join(["Answer from these.", *parts, writer.text(300), "Question?"])


def found_again(matches: Sequence[Match], shown: Sequence[str]) -> tuple[int, int]:
    """Return how many shown pieces are in a match, and how many matches contain none of them."""
    texts = [remove_whitespace(match.passage.text) for match in matches]
    pieces = [remove_whitespace(piece) for piece in shown]
    found = sum(any(piece in text for text in texts) for piece in pieces)
    return found, sum(not any(piece in text for piece in pieces) for text in texts)


def measure_prompts(
    registry: ReferenceRegistry, texts: Sequence[str], size: int, num_prompts: int
) -> dict[str, Any]:
    """Search texts, whole and cut, in prompts of one size; return times, recall and extras."""
    writer = Writer(size)
    figures: dict[str, Any] = {"characters": size}
    for name, part in {"whole": slice(None), "cut": CUT}.items():
        count = max(1, (size - 300) // (len(texts[0][part]) + 6))
        seconds, hits, extra = [], 0, 0
        for _ in range(num_prompts):
            shown = [text[part] for text in writer.random.sample(texts, count)]
            prompt = prompt_of(shown, writer)
            started = thread_time()
            matches = registry.match(prompt)
            seconds.append(thread_time() - started)
            found, others = found_again(matches, shown)
            hits, extra = hits + found, extra + others
        figures[name] = {
            "passages": count,
            "match_ms_median": 1000 * median(seconds),
            "match_ms_p99": 1000 * sorted(seconds)[int(0.99 * (len(seconds) - 1))],
            "match_ms_worst": 1000 * max(seconds),
            "recall": hits / (count * num_prompts),
            "extra": extra,
        }
    return figures


def measure_registry(count: int, num_prompts: int) -> dict[str, Any]:
    """Register made-up texts and search them in prompts of every size; return the figures."""
    note(f"{count:,} texts")
    writer, registry, seconds = Writer(0), ReferenceRegistry(), []
    texts = [writer.text(TEXT_SIZE) for _ in range(count)]
    for number, text in enumerate(texts):
        started = thread_time()
        registry.register(Passage(str(number), text, path=f"{number}.md"))
        seconds.append(thread_time() - started)
    prompts = [measure_prompts(registry, texts, size, num_prompts) for size in PROMPT_SIZES]
    return {"texts": count, "register_us_median": 1e6 * median(seconds), "prompts": prompts}


@cli.experiment(
    cli.option("--texts", type=int, nargs="+", default=[1_000, 20_000], help="numbers of texts"),
    cli.integer("--prompts", 50, "of each kind and size"),
)
def run_registry(options: Namespace) -> dict[str, Any]:
    """Registry: the time to register texts and to find the registered texts of a prompt.

        python -m eval registry --out eval/results

    Texts of 1,000 characters are made of words with the frequencies of a language and registered
    one by one. A prompt numbers some of them, whole or cut to 400 characters, before text that is
    not registered. Times are processor times, which other processes do not change. A text is found
    if a match contains all of its shown part; a match that contains no shown part is extra.
    """
    settings = {"texts": options.texts, "prompts": options.prompts}
    figures = [measure_registry(count, options.prompts) for count in options.texts]
    return result("registry", settings, figures=figures)
