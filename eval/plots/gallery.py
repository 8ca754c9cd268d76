"""The gallery: every plot that a folder's results have the figures for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eval.captions import caption_of, caption_of_many
from eval.contenders import BASELINE
from eval.matrices import matrices, name_of
from eval.papers.space_layout import papers
from eval.pictures import Picture
from eval.plots.bars import speedup_svg
from eval.plots.grids import AXES, grid_svg, sets_of
from eval.plots.guesses import curves_svg, masks_svg
from eval.plots.lengths import lengths_svg
from eval.plots.passes import cost_svg, curves_of, roofline_svg
from eval.plots.reliability_diagram import reliability_svg
from eval.plots.stages import answer_stages_svg, stages_svg
from eval.script import note

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from eval.matrices import Matrix

    Documents = Mapping[str, dict[str, Any]]


def pictures_of(documents: Documents) -> list[Picture]:
    """Draw what there is, in the order in which a report shows it."""
    found = matrices(documents)
    jobs = (
        *map(_of_matrix, found),
        _cost(documents),
        _rooflines(documents),
        _grids(documents),
        _answers(documents),
        _reliability(documents),
        _guesses(documents),
    )
    return [picture for job in jobs for picture in _as_far_as_drawn(job)]


def _as_far_as_drawn(job: Iterator[Picture]) -> Iterator[Picture]:
    """What can be drawn of some pictures up to the first that cannot, which is said."""
    try:
        yield from job
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        note(f"a picture is left out: its results do not hold what it shows ({error!r})")


def _of_matrix(matrix: Matrix) -> Iterator[Picture]:
    caption = caption_of_many(list(matrix.sets.values()))
    whose = f"{matrix.model}, {matrix.dtype}"
    bars = "; ".join(
        f"{title}: " + ", ".join(_spoken(one["contenders"])) for title, one in matrix.sets.items()
    )
    drawings = [
        ("speed", "how many times as fast as HF greedy, by set", bars, speedup_svg),
        ("lengths", "tokens a pass ends in", "Histograms, one a set.", lengths_svg),
        (
            "stages",
            "where the time of a new token goes",
            "Stacked bars: prefill, drafting, the model's passes and the rest, by decoder and set.",
            stages_svg,
        ),
    ]
    for name, title, alt, draw in drawings:
        if (svg := draw(matrix)) is not None:
            whole = f"{whose}: {title}"
            yield Picture(f"{matrix.stem}-{name}", "matrix", matrix.stem, whole, alt, caption, svg)


def _spoken(contenders: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, figures in contenders.items():
        if name != BASELINE and "ratio_generate" in figures:
            yield f"{name_of(name)} {figures['ratio_generate']:.2f}"


def _cost(documents: Documents) -> Iterator[Picture]:
    curves = curves_of(list(documents.values()))
    if not curves:
        return
    measured = [
        one for one in documents.values() if one["kind"] == "speed" and "milliseconds" in one
    ]
    alt = "; ".join(
        f"{curve.name}: a pass of {max(curve.milliseconds)} rows takes "
        f"{curve.milliseconds[max(curve.milliseconds)] / curve.milliseconds[1]:.2f} times one's"
        for curve in curves
    )
    title = "what a pass costs by its rows"
    yield Picture(
        "pass-cost", "roofline", "", title, alt, caption_of_many(measured), cost_svg(curves)
    )


def _rooflines(documents: Documents) -> Iterator[Picture]:
    for stem, one in documents.items():
        if one["kind"] == "roofline" and one["contexts"]:
            title = f"passes against the memory's bandwidth: {one['settings']['model']}"
            alt = "Milliseconds of a pass by its rows, one line a way of running it."
            yield Picture(stem, "roofline", stem, title, alt, caption_of(one), roofline_svg(one))


def _grids(documents: Documents) -> Iterator[Picture]:
    for stem, one in documents.items():
        kind = one["kind"]
        for title, points in sets_of(one).items() if kind in AXES and "grid" in one else ():
            svg = grid_svg(kind, points)
            if svg is not None:
                (_, across), (_, down) = AXES[kind]
                alt = f"Heat maps: {down} downwards, {across} across. The figures are in its table."
                yield Picture(
                    f"{stem}-{title}",
                    kind,
                    stem,
                    f"{title}: {down} x {across}",
                    alt,
                    caption_of(one),
                    svg,
                )


def _answers(documents: Documents) -> Iterator[Picture]:
    for stem, one in documents.items():
        if one["kind"] == "rag_speedup":
            title = "where the time of an answer goes"
            alt = "Stacked bars: from embedding the question to the last pass, one a way."
            svg = answer_stages_svg(one)
            yield Picture(stem, "rag_speedup", stem, title, alt, caption_of(one), svg)


def _reliability(documents: Documents) -> Iterator[Picture]:
    for stem, one in documents.items():
        if one["kind"] == "reliability":
            title = "estimated chances against the share accepted, by source"
            alt = "Calibration errors: " + ", ".join(
                f"{source} {figures['calibration_error']}"
                for source, figures in one["sources"].items()
            )
            svg = reliability_svg(one["sources"])
            yield Picture(stem, "reliability", stem, title, alt, caption_of(one), svg)


def _guesses(documents: Documents) -> Iterator[Picture]:
    for stem, one in documents.items():
        kind, caption = one["kind"], caption_of(one)
        if kind in ("space_reader", "space_scratch"):
            title = f"tokens a pass by mask tokens, beside copying: {one['settings']['model']}"
            alt = "; ".join(_spoken_guesses(name, found) for name, found in one["sets"].items())
            yield Picture(stem, kind, stem, title, alt, caption, masks_svg(one["sets"]))
        if kind in ("space_curves", "space_scratch") and len(one["curve"]) > 1:
            title = "tokens a pass over the training of an adapter, by mask tokens"
            first, last = one["curve"][0], one["curve"][-1]
            alt = "; ".join(
                f"after {at['step']} steps {at['tokens_per_pass']}" for at in (first, last)
            )
            svg = curves_svg(one["curve"])
            yield Picture(f"{stem}-steps", kind, stem, title, alt, caption, svg)


def _spoken_guesses(name: str, figures: Mapping[str, Any]) -> str:
    told = (f"k = {k} {one['tokens_per_pass']:.2f}" for k, one in papers(figures["greedy"]).items())
    return f"{name}: {', '.join(told)}"
