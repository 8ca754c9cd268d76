"""Published figures of the papers and their repositories, each with one source.

If a paper's text and its repository differ, both figures are here. All figures were read at their
source: for LLMA and Lookahead the abstracts and repositories, not the tables and figures of the
papers. Lookahead's repository has more rows; here is each kind of model, set and processor once or
twice, the largest speed-ups included.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from eval.report.tables import plain_table


@dataclass(frozen=True, slots=True)
class Figure:
    """One published result.

    ``experiment`` is the key of :func:`published`. ``speedup`` is over plain decoding by the same
    system, in the source's words. ``plain`` and ``accelerated`` are tokens per second.
    ``tokens_per_pass`` includes the one token that every pass yields.
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

_LOOKAHEAD_SOURCE = "alipay/PainlessInferenceAcceleration, lookahead/README.md"
# A100-80G unless another is named. Public sets: the trie is filled from the train set and settings
# are tuned by grid search; private ones: filled from all but 1,000 samples, decoding_length=128,
# branch_length=32. "Fused": with kernels of their own, on both sides.
_LOOKAHEAD_ROWS = (
    ("Llama2-7b-chat, Dolly", 40.6, 83.7, "2.06"),
    ("Llama2-7b-chat, 5 examples of Dolly", 48.2, 112.9, "2.34"),
    ("Llama2-7b-chat, GSM8K", 41.4, 111.3, "2.69"),
    ("Llama2-7b-chat, fused, Dolly", 50.4, 106.8, "2.12"),
    ("Llama2-7b-chat, fused, Dolly, A10", 31.4, 55.7, "1.77"),
    ("Llama2-7b-chat, fused, HumanEval-X", 51.1, 161.5, "3.16"),
    ("Llama2-13b-chat, fused, HumanEval-X", 35.0, 137.3, "3.92"),
    ("AntGLM-10b, private, Citizen Biz Agent (RAG)", 52.4, 280.9, "5.36"),
    ("AntGLM-10b, private, Enterprise Info QA (RAG)", 50.7, 259.1, "5.11"),
    ("AntGLM-10b, private, Health Suggestion (RAG)", 51.6, 240.2, "4.66"),
)
_LOOKAHEAD = (
    Figure(
        "lookahead",
        "Lookahead",
        "as deployed at Alipay",
        "arXiv 2312.12728v3, abstract",
        "2.66 to 6.26",
    ),
    *(
        Figure("lookahead", "Lookahead", setting, _LOOKAHEAD_SOURCE, speedup, plain, accelerated)
        for setting, plain, accelerated, speedup in _LOOKAHEAD_ROWS
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

FIGURES = (*_LLMA, *_LOOKAHEAD, *_SPACE)


def published(experiment: str) -> list[dict[str, Any]]:
    """Return the published figures of an experiment as dicts, without unknown fields."""
    found = [figure for figure in FIGURES if figure.experiment == experiment]
    if not found:
        known = ", ".join(sorted({figure.experiment for figure in FIGURES}))
        raise ValueError(f"nothing published on {experiment!r}: take one of {known}")
    return [{k: v for k, v in asdict(f).items() if v not in ("", None)} for f in found]


def published_table(figures: list[dict[str, Any]]) -> str:
    """Return a table of published figures, one row each, with their sources."""
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
    return plain_table(heads, rows)
