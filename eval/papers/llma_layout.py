"""LLMA's layout: what its experiments came to, in Markdown, the published figures below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eval.markdown import ratio_cell, table
from eval.papers.published import published_table
from eval.recordings import is_fitted_to

if TYPE_CHECKING:
    from collections.abc import Sequence

    Document = dict[str, Any]
    Point = dict[str, Any]

DECODERS = {
    "ours_plain": "plain decoding",
    "llma": "LLMA as published, n = 1, k = 20",
    "ours_trie": "ours, trees",
}
REFERENCES = {
    "answers": "other answers",
    "passages": "passages",
    "both": "other answers and passages",
}
EARLIER = {
    "passages": "this turn's passages",
    "answers": "and earlier answers",
    "earlier passages": "and earlier passages",
}
CACHED = (
    "The outputs that the paper replays for cache-assisted generation are unpublished: here other "
    "answers to the same task are the references, those of other models where the set is "
    "mtrag_human_answers, and the answer itself is left out. With them alone the prompt holds no "
    "passages."
)


def llma_count_table(document: dict[str, Any]) -> str:
    """Lay out tokens a pass by our drafter and by the second count: one row a set and setting."""
    rows = []
    for point in document["grid"]:
        counted = point["counted"]
        cells = [
            *(str(point[name]) for name in ("set", "n", "k", "tokens")),
            f"{point['passes']:,}",
            f"{counted['passes']:,}",
            f"{point['tokens_per_pass']:.3f}",
            f"{counted['tokens_per_pass']:.3f}",
        ]
        rows.append(cells)
    titles = ["set", "n", "k", "tokens", "passes, our drafter", "passes, by its rules"]
    return table([*titles, "tokens a pass, our drafter", "tokens a pass, by its rules"], rows)


def llma_tables_table(document: Document) -> str:
    """Lay out both tables: one row a set, kind of references and decoder."""
    claims = "; ".join(f"{figure['speedup']} ×" for figure in document["published"])
    titles = {
        1: "Table 1, retrieval-augmented: passages as references",
        2: "Table 2, cache-assisted: answers of others as references",
    }
    parts = []
    for number, title in titles.items():
        points = [point for point in document["grid"] if point["table"] == number]
        if points:
            parts += [f"**{title}**", _steps_table(points, claims)]
    if any(point["table"] == 2 for point in document["grid"]):
        same = ", ".join(f"{num} of {name}" for name, num in document["same_answers"].items())
        parts.append(f"{CACHED} Answers that stand word for word among the others: {same}.")
    return "\n\n".join([*parts, _published(document)])


def _steps_table(points: Sequence[Point], claims: str) -> str:
    timed = any("ratio" in point for point in points)
    rows = [
        [
            point["set"],
            REFERENCES[point["references"]],
            DECODERS[point["decoder"]],
            str(point["answers"]),
            f"{point['tokens']:,}",
            f"{point['passes']:,}",
            f"{point['tokens_per_pass']:.2f}",
            f"{100 * point['triggered']:.0f} %",
            f"{point['accepted_per_trigger']:.2f}",
            *_times(point, timed),
            claims if point["decoder"] == "llma" else "",
        ]
        for point in points
    ]
    titles = [
        *("set", "references", "decoder", "answers", "tokens", "decoding steps", "tokens a step"),
        *("steps with a draft", "accepted of one"),
        *["answers timed", "tokens/s", "x plain"] * timed,
        "published speed-up",
    ]
    return table(titles, rows)


def _times(point: Point, timed: bool) -> list[str]:
    if "ratio" not in point:
        return ["", "", ""] * timed
    cells = [str(point["timed_answers"]), f"{point['tokens_per_second']:.1f}"]
    return [*cells, ratio_cell(point, "ratio")]


SWEPT = {
    "tokens_per_pass": "tokens a decoding step",
    "triggered": "share of steps with a draft",
    "accepted_per_trigger": "tokens accepted of a draft",
    "passes": "decoding steps",
    "tokens_per_second": "tokens a second",
    "ratio": "speed-up over plain decoding",
}


def llma_sweep_table(document: Document) -> str:
    """Lay out each quantity over n and k, a set at a time, and how speed follows steps."""
    parts = []
    for name, plain in document["plain"].items():
        points = [point for point in document["grid"] if point["set"] == name]
        for quantity, title in SWEPT.items():
            if all(quantity in point for point in points):
                beside = f"; plain {_number(plain[quantity])}" if quantity in plain else ""
                parts += [f"**{name}: {title}**{beside}", _grid_table(points, quantity)]
    if document["follows"]:
        parts.append(_follows_table(document["follows"]))
    return "\n\n".join([*parts, _published(document)])


def _follows_table(follows: dict[str, Any]) -> str:
    fits = {
        "all points": follows["points"],
        **{f"points of k = {k}": fit for k, fit in follows["by_k"].items()},
        "single answers, all points": follows["answers"],
    }
    rows = [
        [
            over,
            str(fit["pairs"]),
            f"{fit['correlation']:.2f}",
            f"{fit['slope']:.2f}",
            f"{fit['intercept']:+.2f}",
        ]
        for over, fit in fits.items()
        if fit
    ]
    titles = ["speed-up against the reduction of decoding steps, over", "pairs", "correlation"]
    return table([*titles, "slope", "intercept"], rows)


def _grid_table(points: Sequence[Point], quantity: str) -> str:
    lengths = sorted({point["n"] for point in points})
    copies = sorted({point["k"] for point in points})
    cells = {(point["n"], point["k"]): _number(point[quantity]) for point in points}
    rows = [[f"n = {n}", *(cells[n, k] for k in copies)] for n in lengths]
    return table(["", *(f"k = {k}" for k in copies)], rows)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


def llma_dialogue_table(document: Document) -> str:
    """Lay out tokens a step by turn: one column a decoder and kind of references."""
    parts = []
    for name in dict.fromkeys(point["set"] for point in document["grid"]):
        points = [point for point in document["grid"] if point["set"] == name]
        timed = [point for point in points if "ratio" in point]
        parts += [f"**{name}**: tokens a decoding step", _turns_table(points)]
        if timed:
            parts.append(_timed_table(timed))
    return "\n\n".join([*parts, _published(document)])


def _turns_table(points: Sequence[Point]) -> str:
    columns = list(dict.fromkeys((point["decoder"], point["references"]) for point in points))
    answers = {point["turn"]: point["answers"] for point in points}
    found = {(p["turn"], (p["decoder"], p["references"])): p["tokens_per_pass"] for p in points}
    rows = [
        [turn, str(num), *(f"{found[turn, column]:.2f}" for column in columns)]
        for turn, num in answers.items()
    ]
    titles = [f"{DECODERS[decoder]}: {EARLIER[kind]}" for decoder, kind in columns]
    return table(["turn", "answers", *titles], rows)


def _timed_table(points: Sequence[Point]) -> str:
    rows = [
        [DECODERS[point["decoder"]], EARLIER[point["references"]], *_times(point, True)]
        for point in points
    ]
    return table(["decoder", "references", "answers timed", "tokens/s", "x plain"], rows)


def _published(document: Document) -> str:
    told = "From the paper's abstract and repository; its tables and figures are not repeated here."
    return "\n\n".join([published_table(document["published"]), told, *_fitted(document)])


def _fitted(document: Document) -> list[str]:
    """Say which sets our trees' weights were fitted to."""
    trees = [point for point in document["grid"] if point.get("decoder") == "ours_trie"]
    asked = [point["set"] for point in trees if is_fitted_to(point["set"], point["answers"])]
    if not asked:
        return []
    return [
        "What a match is worth to our trees was fitted to recorded answers, some of "
        f"{', '.join(dict.fromkeys(asked))} among them, which may flatter them there. "
        "LLMA has nothing to fit."
    ]
