"""The RAG table: every way from a question to its answer, and where its time goes."""

from __future__ import annotations

from typing import Any

from eval.markdown import table

WAYS = {
    "bare": "`ragaccel.RAG`",
    "langchain": "LangChain chain",
    "llama_index": "LlamaIndex query engine",
}
STAGES = ("embed", "search", "prompt", "prefill", "draft", "verify", "rest")
_DECODING = {"_plain": "plain", "_again": "accelerated, asked again", "": "accelerated"}


def rag_speedup_table(document: dict[str, Any]) -> str:
    """Lay out a RAG result: a row a way, medians of milliseconds, then means of the stages'."""
    titles = [
        *("asked through", "decoding", "first word, ms", "x plain", "answer, ms", "x plain"),
        *("x `generate`", "tokens a pass", *STAGES, "same text"),
    ]
    rows = [_row(name, figures) for name, figures in document["contenders"].items()]
    return f"{table(titles, rows)}\n\n{_index(document)}"


def _index(document: dict[str, Any]) -> str:
    index, k = document["index"], document["settings"]["k"]
    told = f"{index['passages']:,} passages in the index, {k} in a prompt"
    if "own_found" not in index:
        return f"{told}."
    return f"{told}; of those that answers were written from, {index['own_found']:.0%} are found."


def _row(name: str, figures: dict[str, Any]) -> list[str]:
    stages = figures["stages"]
    return [
        *_names(name),
        f"{1000 * figures['first_token_seconds']:,.0f}",
        _ratio(figures, "ratio_first_token"),
        f"{1000 * figures['total_seconds']:,.0f}",
        _ratio(figures, "ratio"),
        _ratio(figures, "ratio_generate"),
        f"{figures['acceptance_length']:.2f}",
        *(f"{1000 * stages[stage]:,.1f}" if stage in stages else "" for stage in STAGES),
        f"{figures['same_text']} of {figures['answers']}",
    ]


def _names(name: str) -> tuple[str, str]:
    if name == "generate":
        return "the same passages", "`model.generate`"
    suffix = next(suffix for suffix in _DECODING if name.endswith(suffix))
    return WAYS[name.removesuffix(suffix)], _DECODING[suffix]


def _ratio(figures: dict[str, Any], label: str) -> str:
    if label not in figures:
        return ""
    low, high = figures[f"{label}_interval"]
    return f"{figures[label]:.2f} ({low:.2f} to {high:.2f})"
