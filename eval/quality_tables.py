"""Quality tables: retrieval, answers and the sweeps of their settings, in Markdown."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from eval.markdown import table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Document = dict[str, Any]

_SHOWN = ("hit@1", "hit@6", "hit@10", "mrr@10", "ndcg@10", "recall@10")
_MODES = {"dense": "dense", "text": "full-text", "fused": "fused"}
_ANSWERS = {
    "answers_held_out": "XQuAD, articles not trained on; the short answer",
    "answers_demo": "demo; the sentence that answers",
}
_WHOSE = {
    "answer": "what the reader says",
    "answer_when_found": "of it, where its passages hold the sentence",
    "quotation": "the sentence itself, the best a quotation can do",
}


def quality_table(document: Document) -> str:
    """Lay out what search found, then what the reader answered."""
    parts = []
    if document["sets"]:
        titles = ["set", "passages", "questions", "search", *_SHOWN, "fused less this, nDCG@10"]
        parts += [table(titles, _search_rows(document["sets"])), _LEGEND]
    if document["answers"]:
        titles = ["questions", "asked", "scored", "exact match", "F1", "answer contained"]
        parts.append(table(titles, _answer_rows(document["answers"])))
        parts.append("\n".join(map(_judged, document["answers"].values())))
    return "\n\n".join(parts)


_LEGEND = """One relevant passage a question, the one it was written on: another that answers it \
counts as wrong. `msmarco`: the ten passages that a search engine gave for the question, all \
counted as relevant, for no judgement of them is recorded. SQuAD's questions were written with the \
passage in sight, so that they share its words; the embedding model was trained on SQuAD, Natural \
Questions and MS MARCO too, says its model card. In brackets 95 % of the means of other draws of \
articles."""


def _search_rows(sets: Document) -> Iterable[Sequence[str]]:
    for name, figures in sets.items():
        for mode, shown in _MODES.items():
            values = figures["modes"][mode]
            less = figures["fused_over"].get(mode)
            yield (
                name,
                f"{figures['passages']:,}",
                f"{figures['questions']:,}",
                shown,
                *(f"{values[metric][0]:.3f}" for metric in _SHOWN),
                _signed(less["ndcg@10"]) if less else "",
            )


def _answer_rows(answers: Document) -> Iterable[Sequence[str]]:
    for name, figures in answers.items():
        for whose, shown in _WHOSE.items():
            scores = figures[whose]
            if scores:
                asked = figures["found" if whose == "answer_when_found" else "questions"]
                cells = (_within(scores[score]) for score in ("exact", "f1", "contains"))
                yield (_ANSWERS.get(name, name), f"{asked:,}", shown, *cells)


def _judged(figures: Document) -> str:
    right, cited = (f"{figures[name][0]:.1%}".replace("%", " %") for name in ("right", "cited"))
    refused = ""
    if figures["unanswerable"]:
        refused = f"; {figures['refused']} of {figures['unanswerable']} unanswerable refused"
    return (
        f"Of {figures['questions']}: right sentence {right}, right file cited {cited}{refused}.\n"
    )


def quality_sweep_table(document: Document) -> str:
    """Lay out what is chosen and gained, then fusion's weights by offsets, and passage lengths."""
    rows = [
        (
            f"{part}: {name}",
            _described(one["setting"], document[part]["library"]),
            *_gained(one["gain"]),
        )
        for part in ("fusion", "passages")
        for name, one in document[part]["chosen"].items()
    ]
    titles = ["swept", "chosen by half of the articles", "gain on the other half", "by set"]
    usual = document["fusion"]["library_over_usual"]
    gained, by_set = _gained(usual)
    told = (
        f"The library's fusion over reciprocal rank fusion with equal weights and 60: {gained};"
        f" {by_set}. Fusion is judged by nDCG@10, passages by the share of answers that are within"
        " so many tokens of what is found, titles included. Below, the sets' mean nDCG@10."
    )
    parts = (table(titles, rows), told, _weights_table(document, usual["sets"]))
    return "\n\n".join((*parts, _passages_table(document)))


def _described(setting: Document, library: Document) -> str:
    """What a setting has otherwise than the library."""
    other = [f"{key} {value}" for key, value in setting.items() if value != library[key]]
    return ", ".join(other).replace("_", " ") or "the library's"


def _gained(gain: Document) -> tuple[str, str]:
    by_set = (f"{name} {_signed(spread)}" for name, spread in gain["sets"].items())
    return _signed(gain["mean"]), "; ".join(by_set)


def _weights_table(document: Document, sets: Iterable[str]) -> str:
    """The mean nDCG@10 of sets, by the way of fusing and the dense weight, depths the library's."""
    library = document["fusion"]["library"]
    cells: dict[tuple[int, float], list[float]] = defaultdict(list)
    for entry in document["grid"]:
        if entry["sweep"] != "fusion" or entry["set"] not in sets:
            continue
        if all(entry[key] == library[key] for key in ("dense_depth", "text_depth")):
            offset = -1 if entry["offset"] is None else entry["offset"]
            cells[offset, entry["dense_weight"]].append(entry["ndcg@10"])
    ways, weights = (sorted({key[i] for key in cells}) for i in (0, 1))
    rows = [
        (
            "scores" if way < 0 else f"ranks, offset {way}",
            *(f"{sum(v) / len(v):.3f}" for v in (cells[way, weight] for weight in weights)),
        )
        for way in ways
    ]
    return table(["fused by \\ dense weight", *map(str, weights)], rows)


def _passages_table(document: Document) -> str:
    entries = [entry for entry in document["grid"] if entry["sweep"] == "passages"]
    budgets = document["settings"]["budgets"]
    titles = ["set", "tokens a passage", "passages", *(f"within {n:,}" for n in budgets), "mean"]
    rows = (
        (
            entry["set"],
            f"{entry['tokens']}{', overlapping by half' if entry['overlap'] else ''}",
            f"{entry['passages']:,}",
            *(f"{entry[f'within_{n}']:.3f}" for n in budgets),
            f"{entry['worth']:.3f}",
        )
        for entry in sorted(entries, key=lambda e: (e["set"], e["overlap"], e["tokens"]))
    )
    return table(titles, rows)


def _within(spread: Sequence[float]) -> str:
    value, low, high = spread
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def _signed(spread: Sequence[float]) -> str:
    value, low, high = spread
    return f"{value:+.3f} ({low:+.3f} to {high:+.3f})"
