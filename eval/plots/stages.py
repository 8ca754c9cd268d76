"""Stages: where the time of a token or of an answer goes, as stacked bars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eval.matrices import name_of
from eval.plots.bars import BAR, GAP, length_of, places_of
from eval.plots.style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, Look, drawn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.figure import Figure

    from eval.matrices import Matrix

    Bars = Mapping[str, Mapping[str, Mapping[str, float]]]  # set, bar, stage: milliseconds

STAGES = {
    "prefill": Look(BLUE),
    "drafting": Look(VERMILLION, "xxx"),
    "model's passes": Look(SKY, "///"),
    "the rest": Look(GREY, "\\\\\\"),
}
ANSWER_STAGES = {
    "embed": Look(GREEN, "|||"),
    "search": Look(ORANGE, "\\\\\\"),
    "prompt": Look(PURPLE, "---"),
    "prefill": Look(BLUE),
    "draft": Look(VERMILLION, "xxx"),
    "verify": Look(SKY, "///"),
    "rest": Look(GREY, "\\\\\\"),
}
WAYS = {"bare": "RAG", "langchain": "LangChain", "llama_index": "LlamaIndex"}


def stages_svg(matrix: Matrix) -> str:
    """Draw milliseconds of a new token, stage by stage, of each decoder on each set."""
    bars = {
        title: {
            name_of(name): stage_milliseconds(one["contenders"][name])
            for name in matrix.contenders
            if name in one["contenders"]
        }
        for title, one in matrix.sets.items()
    }
    return _stacked(bars, STAGES, "milliseconds a new token")


def answer_stages_svg(document: Mapping[str, Any]) -> str:
    """Draw milliseconds of an answer, from its question on, by the way it was asked."""
    bars = {
        _way(name): {stage: 1e3 * seconds for stage, seconds in figures["stages"].items()}
        for name, figures in document["contenders"].items()
    }
    return _stacked({"": bars}, ANSWER_STAGES, "milliseconds an answer, mean")


def _way(name: str) -> str:
    for way, title in WAYS.items():
        if name.startswith(way):
            return title + name.removeprefix(way).replace("_", ", ")
    return name_of(name)


def stage_milliseconds(figures: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds of a token by stage; all stages together are all its time.

    Where the model's passes are not seen from outside, as on a GPU, they are what verifying took.
    """
    seconds = figures["seconds"]
    whole = figures["tokens"] / figures["tokens_per_second"]  # of decoding, all runs
    draft = seconds.get("draft", 0.0)
    model = seconds.get("model", seconds.get("verify", whole))
    parts = {
        "prefill": seconds["prefill"],
        "drafting": draft,
        "model's passes": model,
        "the rest": max(0.0, whole - draft - model),
    }
    return {stage: 1e3 * value / figures["tokens"] for stage, value in parts.items()}


def _stacked(bars: Bars, looks: Mapping[str, Look], unit: str) -> str:
    places = list(places_of(bars))
    downs = [down for down, _, _ in places]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        left = [0.0] * len(places)
        for stage, look in looks.items():
            widths = [bars[title][name].get(stage, 0.0) for _, title, name in places]
            axes.barh(downs, widths, BAR * 0.86, left, label=stage, **look.of_bars)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_yticks(downs, [name for _, _, name in places])
        axes.tick_params(axis="y", length=0)
        for title in bars:
            top = next(down for down, own, _ in places if own == title) - BAR * 0.7
            axes.annotate(title, (0, top), fontweight="bold", annotation_clip=False)
        axes.set_ylim(length_of(places) - GAP / 2, -BAR * 1.8)
        axes.set_xlabel(unit)
        figure.legend(loc="outside upper left", ncols=2, handlelength=1.6, columnspacing=1.0)

    return drawn(draw, 1.2 + 0.17 * (len(looks) // 2) + length_of(places))
