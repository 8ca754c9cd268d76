"""Published figures: what the papers and their repositories report, each with one source.

Where a paper's text and its repository differ, both stand here, each as its source has it. A figure
that no source could be found for is not here: of LLMA's Tables 1 and 2 and of its Figures 4 and 5
no stored copy could be read, so that its abstract and its repository stand in their place.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from eval.markdown import table


@dataclass(frozen=True, slots=True)
class Figure:
    """One published result.

    ``experiment`` is what it is looked up by. ``speedup`` is over plain decoding by the same
    system, in its source's words; ``plain`` and ``accelerated`` are tokens a second,
    ``tokens_per_pass`` counts the token that comes with every pass.
    """

    experiment: str
    system: str
    setting: str
    source: str
    speedup: str = ""
    plain: float | None = None
    accelerated: float | None = None
    tokens_per_pass: float | None = None


# Neither says which figure is which scenario's. Retrieval-augmented answers are text-davinci-003's,
# forced, as llma/src/README.md tells.
_LLMA = (
    Figure(
        "llma",
        "LLMA",
        "many practical scenarios, for example search engines and multi-turn conversations",
        "arXiv 2304.04487, abstract",
        "over 2",
    ),
    Figure(
        "llma",
        "LLMA",
        "scenarios such as retrieval-augmented generation and multi-turn conversations",
        "microsoft/LMOps, llma/README.md",
        "2 to 3",
    ),
)

_SPACE_SOURCE = "cteant/SPACE, assets/main_result.png"
_SPACE_SETS = ("XSum", "HumanEval-X", "CIP")
# Tokens a step and speed-up of each set, greedy.
_SPACE_ROWS = {
    "ChatGLM3-6B": ((2.04, "1.48"), (3.34, "2.73"), (1.80, "1.50")),
    "LLaMA2-7B": ((2.23, "1.94"), (3.54, "3.18"), (1.85, "1.71")),
    "LLaMA2-13B": ((2.36, "2.10"), (3.76, "3.44"), (1.99, "1.81")),
    "Qwen-14B": ((2.15, "1.94"), (3.51, "3.18"), (1.85, "1.70")),
    "InternLM-20B": ((2.15, "1.96"), (3.31, "3.19"), (1.80, "1.64")),
    "Falcon-40B": ((2.17, "2.01"), (3.58, "3.61"), (1.96, "2.03")),
    "LLaMA2-70B": ((2.54, "2.35"), (4.32, "4.01"), (2.09, "1.91")),
}
_SPACE = tuple(
    Figure("space", "SPACE", f"{model}, {name}", _SPACE_SOURCE, speedup, tokens_per_pass=length)
    for model, row in _SPACE_ROWS.items()
    for name, (length, speedup) in zip(_SPACE_SETS, row, strict=True)
)

FIGURES = (*_LLMA, *_SPACE)


def published(experiment: str) -> list[dict[str, Any]]:
    """List what was published on an experiment, as documents keep it: what is known alone.

    Raises:
        ValueError: nothing is known of such an experiment; names those there are.
    """
    found = [figure for figure in FIGURES if figure.experiment == experiment]
    if not found:
        known = ", ".join(sorted({figure.experiment for figure in FIGURES}))
        raise ValueError(f"nothing published on {experiment!r}: take one of {known}")
    return [{k: v for k, v in asdict(f).items() if v not in ("", None)} for f in found]


def published_table(figures: list[dict[str, Any]]) -> str:
    """Lay out published figures: one row each, its source behind it."""
    numbers = ("plain", "accelerated", "tokens_per_pass")
    shown = [name for name in numbers if any(name in figure for figure in figures)]
    titles = {
        "plain": "tokens/s, plain",
        "accelerated": "tokens/s, accelerated",
        "tokens_per_pass": "tokens a pass",
    }
    rows = [
        [
            figure["system"],
            figure["setting"],
            f"{figure['speedup']} ×" if "speedup" in figure else "",
            *(str(figure.get(name, "")) for name in shown),
            figure["source"],
        ]
        for figure in figures
    ]
    heads = ["published", "setting", "speed-up", *(titles[name] for name in shown), "source"]
    return table(heads, rows)
