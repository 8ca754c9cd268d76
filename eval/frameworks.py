"""Frameworks: does a chain answer as fast as the LLM in it would alone, and word for word the same?

    python -m eval.frameworks --model reader --task demo
    python -m eval.frameworks --model random:llama-135m --task llma --data DATA --limit 8

Each question is answered by ``LLM.generate`` with its prompt and passages in hand, by a LangChain
chain (retriever, prompt, ``ChatRagaccel``) and by a LlamaIndex query engine (``Ragaccel``) with the
same prompt, in turns. Retrieval costs nothing here: retrievers look up the example's passages. So
what a chain takes longer is the framework, the hook, and finding the passages in the prompt. Each
contender has an ``LLM`` of its own over the same weights, and forgets its prompts' states before
every round, so that none meets a prefix that another or a round before left behind; the first round
of each is not counted. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from eval.chains import langchain_chain, llama_index_engine, written
from eval.examples import load_task
from eval.ledger import kept_beside
from eval.machine import current_commit
from eval.ratios import paired_ratio
from eval.script import measured, new_parser, note, result
from eval.tables import frameworks_table
from eval.targets import (
    add_dtype_option,
    add_target_options,
    chosen_target,
    describe_target,
)
from ragaccel import LLM, build_prompt
from ragaccel.frameworks.prompt_parsing import is_documents_only

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eval.examples import Example

BARE = "bare"


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("frameworks", measure, parse(arguments))
    print(frameworks_table(document))
    print(json.dumps(document["contenders"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("frameworks", __doc__)
    add_target_options(parser)
    add_dtype_option(parser)
    add = parser.add_argument
    add("--task", default="demo", help="a file of eval/tasks, or a .jsonl file of your own")
    add("--limit", type=int, help="first examples only")
    add("--rounds", type=int, default=5, help="counted ones (default: %(default)s)")
    add("--max-new-tokens", type=int, default=64)
    add("--out", type=Path, help="result file; rows stand beside it, and a second run goes on")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure whatever the ledger lacks and compare."""
    target = chosen_target(options, options.dtype)
    examples = [one for one in load_task(options.task, options.limit, options.data) if one.passages]
    settings = {
        **describe_target(options),
        "task": Path(options.task).name,
        "examples": len(examples),
        "max_new_tokens": options.max_new_tokens,
        "rounds": options.rounds,
        "commit": current_commit(),
    }
    ledger = kept_beside(options.out, settings)
    llms = {name: LLM(target.ours, target.tokenizer) for name in MAKERS}
    contenders = {
        name: make(llms[name], examples, options.max_new_tokens) for name, make in MAKERS.items()
    }
    done = {(row["example"], row["round"]) for row in ledger.rows}
    for number in range(options.rounds + 1):
        for llm in llms.values():
            llm.engine.prefix_cache.clear()  # it keeps whole prompts: of few questions, all
        for at, example in enumerate(examples):
            if (example.example_id, number) not in done:
                rows = ask_all(contenders, example, number, at)
                ledger.add(*rows)
        note(f"round {number} of {options.rounds}")
    return result("frameworks", settings, contenders=compare(ledger.rows))


def ask_all(
    contenders: dict[str, Callable[[Example], str]], example: Example, number: int, at: int
) -> list[dict[str, Any]]:
    """Ask every contender one question, another one first each time."""
    names = list(contenders)
    first = (number + at) % len(names)
    rows = []
    for name in (*names[first:], *names[:first]):
        began = perf_counter()
        text = contenders[name](example)
        seconds = perf_counter() - began
        row = {"example": example.example_id, "round": number, "contender": name}
        rows.append({**row, "seconds": seconds, "text": text})
    return rows


def compare(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Speeds relative to the bare LLM's, of all rounds but the first."""
    speeds: dict[str, dict[tuple[str, int], float]] = {name: {} for name in MAKERS}
    texts: dict[str, dict[str, str]] = {name: {} for name in MAKERS}
    for row in rows:
        texts[row["contender"]][row["example"]] = row["text"]
        if row["round"] > 0:
            key = row["example"], row["round"]
            speeds[row["contender"]][key] = 1 / row["seconds"]
    return {name: _figures(name, speeds, texts) for name in MAKERS}


def _figures(
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
    """The LLM alone, its prompt and passages in hand."""
    apart, chats = is_documents_only(llm.tokenizer), llm.tokenizer.has_chat_template
    settings: Any = {"max_new_tokens": max_new_tokens, "remember": False}

    def ask(example: Example) -> str:
        if apart:
            room = (llm.context_length or 1 << 20) - max_new_tokens
            built = build_prompt(llm.tokenizer, example.question, example.passages, max_tokens=room)
            return llm.generate(built, **settings).text
        text = written(example.question, example.passages)
        prompt: Any = [{"role": "user", "content": text}] if chats else text
        return llm.generate(prompt, references=example.passages, **settings).text

    return ask


def langchain(
    llm: LLM, examples: Sequence[Example], max_new_tokens: int
) -> Callable[[Example], str]:
    """A chain of a retriever, a prompt and our chat model."""
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever

    found = {
        example.question: [
            Document(one.text, id=one.passage_id, metadata={"title": one.title})
            for one in example.passages
        ]
        for example in examples
    }

    class Known(BaseRetriever):
        def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
            return found[query]

    chain = langchain_chain(llm, Known(), max_new_tokens, remember=False)
    return lambda example: chain.invoke(example.question)


def llama_index(
    llm: LLM, examples: Sequence[Example], max_new_tokens: int
) -> Callable[[Example], str]:
    """A query engine of a retriever, a prompt and our LLM."""
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

    found = {
        example.question: [
            NodeWithScore(
                node=TextNode(
                    text=one.text,
                    id_=one.passage_id,
                    metadata={"title": one.title},
                    excluded_llm_metadata_keys=["title"],
                )
            )
            for one in example.passages
        ]
        for example in examples
    }

    class Known(BaseRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            return found[query_bundle.query_str]

    engine = llama_index_engine(llm, Known(), max_new_tokens, settings={"remember": False})
    return lambda example: str(engine.query(example.question))


MAKERS = {BARE: bare, "langchain": langchain, "llama_index": llama_index}

if __name__ == "__main__":
    main()
