"""Tables of sets against decoders, one for each model, from the speed results of single sets.

The results are ``matrix-SHAPE-TASK.json``; in a folder without such files, all speed results with
``model.generate`` are used. A set on which our decoder is not the fastest is marked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from eval.decoders import BASELINE, LOOKUP, STATIC
from eval.report.tables import NAMES, plain_table
from eval.runner import place_of

Document = dict[str, Any]

COLUMNS = {
    BASELINE: "HF greedy",
    STATIC: "HF compiled greedy",
    LOOKUP: "HF prompt lookup",
    "ours_plain": "ours plain",
    "ours_paper": "ours LLMA",
    "ours_tree": "ours trie",
    "ours_full": "ours full, memory cold",
    "ours_warm": "ours full, memory warm",
    "ours_space": "ours full and SPACE",
}
PEERS = {BASELINE: "ratio_generate", STATIC: "ratio_static", LOOKUP: "ratio_lookup"}
MIN_EXAMPLES = 6  # with fewer examples the true median is outside their range in over 5 % of cases
DEFAULTS = (
    "ours_full",
    "ours_tree",
    "ours",
)  # older results lack ours_full


@dataclass(frozen=True, slots=True)
class Matrix:
    """The speed results of one model on one machine, by the names of their sets."""

    stem: str
    model: str
    dtype: str
    sets: dict[str, Document]

    @property
    def decoders(self) -> list[str]:
        """Return the decoders that ran on any set, known ones first in their order."""
        seen = {name: None for one in self.sets.values() for name in one["decoders"]}
        return [*(name for name in COLUMNS if name in seen), *(n for n in seen if n not in COLUMNS)]

    @property
    def title(self) -> str:
        """Return the title: the model and its dtype."""
        return f"{self.model}, {self.dtype}: sets against decoders"


def name_of(decoder: str) -> str:
    """Return a decoder's name for the head of a column or the label of a bar."""
    return COLUMNS.get(decoder) or NAMES.get(decoder, decoder).replace("`", "")


def matrices(documents: Mapping[str, Document]) -> list[Matrix]:
    """Return the speed results as one matrix for each model, dtype and machine."""
    speed = {stem: one for stem, one in documents.items() if one["kind"] == "speed"}
    chosen = {stem: one for stem, one in speed.items() if stem.startswith("matrix-")}
    if not chosen:
        chosen = {stem: one for stem, one in speed.items() if BASELINE in one["decoders"]}
    groups: dict[tuple[str, str, str], dict[str, Document]] = {}
    for stem, one in chosen.items():
        settings = one["settings"]
        key = (settings["model"], settings["dtype"], place_of(one))
        groups.setdefault(key, {})[stem] = one
    found: dict[str, Matrix] = {}
    for (model, dtype, _), group in groups.items():
        one = _matrix(model, dtype, group)
        alike = sum(stem.startswith(one.stem) for stem in found)  # the same on another machine
        stem = f"{one.stem}-{alike + 1}" if alike else one.stem
        found[stem] = replace(one, stem=stem)
    return list(found.values())


def _matrix(model: str, dtype: str, group: Mapping[str, Document]) -> Matrix:
    tasks = [one["settings"]["task"] for one in group.values()]
    sets = {
        task if tasks.count(task) == 1 else f"{task} ({stem})": one
        for (stem, one), task in zip(group.items(), tasks, strict=True)
    }
    shape = model.removeprefix("random:").replace("/", "-")
    device = next(iter(group.values()))["settings"].get("device", "cpu")
    return Matrix(f"matrix-{shape}-{dtype}-{device}", model, dtype, sets)


def matrix_tables(matrix: Matrix) -> str:
    """Return a matrix's tables: tokens per second and ratios, without and with prefill."""
    default = default_of(matrix)
    told = f"; our default is {name_of(default)}" if default else ""
    parts = [
        f"Decoding, tokens/s; below it x HF greedy, median of pairs, 95 % interval{told}:",
        _speeds(matrix),
    ]
    if any(STATIC in one["decoders"] for one in matrix.sets.values()):
        parts += ["Decoding, x HF compiled greedy:", _ratios(matrix, "ratio_static")]
    parts += [
        "The whole answer, the prompt's pass included, x HF greedy:",
        _ratios(matrix, "ratio_generate", whole=True),
    ]
    return "\n\n".join(parts)


def default_of(matrix: Matrix) -> str | None:
    """Return the name of our default decoder, or None if none of ours ran."""
    return next((name for name in DEFAULTS if name in matrix.decoders), None)


def verdict(decoders: Mapping[str, Mapping[str, Any]], default: str) -> str:
    """Return text on the decoders of transformers that our default does not beat on a set.

    Our decoder is slower if it has fewer tokens per second over all examples, and not clearly
    faster if the interval of its paired ratios reaches down to 1. The text also says if the set has
    fewer than ``MIN_EXAMPLES`` examples.
    """
    ours = decoders.get(default)
    peers = [name for name in PEERS if name in decoders]
    if ours is None or not peers:
        return ""
    slower = [
        name for name in peers if ours["tokens_per_second"] < decoders[name]["tokens_per_second"]
    ]
    unclear = [
        name
        for name in peers
        if name not in slower and not _clearly_faster(ours, name, decoders[name])
    ]
    said = [
        f"{words} {', '.join(map(name_of, names))}"
        for words, names in (("**slower than**", slower), ("not clearly faster than", unclear))
        if names
    ]
    if not said:
        beaten = "all of HF's" if peers == list(PEERS) else ", ".join(map(name_of, peers))
        said = [f"faster than {beaten}"]
    examples = ours.get("examples", MIN_EXAMPLES)
    return "; ".join(
        [*said, *[f"too few examples to be sure: {examples}"] * (examples < MIN_EXAMPLES)]
    )


def _clearly_faster(ours: Mapping[str, Any], name: str, other: Mapping[str, Any]) -> bool:
    paired = ours.get(f"{PEERS[name]}_interval")
    if paired is not None:
        return bool(paired[0] > 1.0)
    over = ours.get("ratio_generate_interval")  # older results lack the ratio to prompt lookup
    return over is not None and bool(over[0] > other["ratio_generate"])


def _speeds(matrix: Matrix) -> str:
    names = matrix.decoders
    default = default_of(matrix)
    judged = ["our default is"] if default else []
    rows = []
    for title, one in matrix.sets.items():
        decoders = one["decoders"]
        said = [verdict(decoders, default)] if default else []
        rows.append([title, *said, *(_speed(decoders.get(name), name) for name in names)])
    return plain_table(["set", *judged, *map(name_of, names)], rows)


def _speed(figures: Mapping[str, Any] | None, name: str) -> str:
    if figures is None:
        return "not run"
    speed = f"{figures['tokens_per_second']:.1f}"
    ratio = "" if name == BASELINE else _ratio(figures, "ratio_generate")
    return f"{speed}<br>{ratio}" if ratio else speed


def _ratios(matrix: Matrix, label: str, *, whole: bool = False) -> str:
    over = STATIC if label == "ratio_static" else BASELINE
    names = [name for name in matrix.decoders if name != over]
    rows = []
    for title, one in matrix.sets.items():
        figures = [one["decoders"].get(name, {}) for name in names]
        cells = [_ratio(f.get("end_to_end", {}) if whole else f, label) for f in figures]
        rows.append([title, *cells])
    return plain_table(["set", *map(name_of, names)], rows)


def _ratio(figures: Mapping[str, Any], label: str) -> str:
    if label not in figures:
        return ""
    low, high = figures[f"{label}_interval"]
    return f"{figures[label]:.2f}<br>({low:.2f} to {high:.2f})"
