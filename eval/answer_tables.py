"""Tables of a model's own answers: are they the same, and how soon are they there?"""

from __future__ import annotations

from typing import Any

from eval.markdown import ratio_cell, table
from eval.tables import NAMES


def lossless_table(document: dict[str, Any]) -> str:
    """Lay out a lossless result: one row a task, type of numbers and decoder."""
    shown = table(
        [
            *("task", "dtype", "decoder", "answers", "identical", "acceptance length"),
            "largest gap of logits at a first difference",
        ],
        [
            [
                figures["task"],
                figures["dtype"],
                NAMES.get(figures["found"], figures["found"]),
                str(figures["answers"]),
                str(figures["identical"]),
                f"{figures['acceptance_length']:.2f}",
                largest_gap(figures),
            ]
            for figures in document["comparisons"]
        ],
    )
    lacking = document.get("lacking", {})
    told = [f"{dtype} cannot be computed here: {reason}." for dtype, reason in lacking.items()]
    return "\n\n".join([shown, *told])


def exactness_table(document: dict[str, Any]) -> str:
    """Lay out which decoders gave the same answers, and what their modes cost."""
    pairs = table(
        ["decoder", "compared with", "answers", "identical", "largest top-2 gap at a difference"],
        [
            [
                NAMES[pair["found"]],
                NAMES[pair["wanted"]],
                str(pair["answers"]),
                str(pair["identical"]),
                largest_gap(pair),
            ]
            for pair in document["pairs"]
        ],
    )
    costs = table(
        ["costs", "against", "decoding", "prefill", "passes"],
        [
            [
                NAMES[cost["decoder"]],
                NAMES[cost["against"]],
                ratio_cell(cost, "decode_seconds"),
                ratio_cell(cost, "prefill_seconds"),
                f"{cost['passes']:.2f}",
            ]
            for cost in document["costs"]
        ],
    )
    told = "Costs are times those of the other: seconds and passes a token, seconds of a prompt."
    return "\n\n".join([pairs, costs, told])


READER = (
    "The bundled reader quotes one sentence and names its passage, or says that the passages do "
    "not tell, which takes nine tokens. On code, chats and most summaries that is all it says, so "
    "these rows tell how short answers are decoded and nothing about longer ones."
)


def generation_table(document: dict[str, Any]) -> str:
    """Lay out a model's own answers: a row for each kind of prompt, task and decoder."""
    titles = [
        *("kind", "task", "prompts", "tokens an answer", "decoder", "tokens/s", "x `generate`"),
        *("x plain", "with prefill: x `generate`", "acceptance length", "identical"),
        "largest gap of logits at a first difference",
    ]
    rows = [row for group in document["groups"] for row in _group_rows(group)]
    settings = document["settings"]
    asked = "the model's chat template" if settings["chat_template"] else "plain text"
    told = [
        f"Greedy, at most {settings['max_new_tokens']} new tokens, prompts as {asked}. Every task "
        "begins with nothing learned; a second turn follows `generate`'s first answer."
    ]
    left_out = document.get("left_out", {})
    told += [
        f"Not asked, as they do not fit: {number} of {task}." for task, number in left_out.items()
    ]
    if settings["model"] == "reader":
        told.append(READER)
    return f"{table(titles, rows)}\n\n{' '.join(told)}"


def _group_rows(group: dict[str, Any]) -> list[list[str]]:
    head = [group["kind"], group["task"], str(group["prompts"]), f"{group['answer_tokens']:.0f}"]
    same = {one["found"]: one for one in group["same"]}
    rows: list[list[str]] = []
    for name, figures in group["contenders"].items():
        held = same.get(name)
        rows.append(
            [
                *(head if not rows else [""] * len(head)),
                NAMES.get(name, name),
                f"{figures['tokens_per_second']:.1f}",
                ratio_cell(figures, "ratio_generate"),
                ratio_cell(figures, "ratio"),
                ratio_cell(figures["end_to_end"], "ratio_generate"),
                f"{figures['acceptance_length']:.2f}",
                f"{held['identical']} of {held['answers']}" if held else "",
                largest_gap(held) if held else "",
            ]
        )
    return rows


def largest_gap(figures: dict[str, Any]) -> str:
    """The largest gap of the two logits at a first difference; not every one may be a near tie."""
    gaps = [difference["gap"] for difference in figures["differences"]]
    return f"{max(gaps):.2g}" if gaps and None not in gaps else "not a tie" if gaps else ""
