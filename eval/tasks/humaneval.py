"""HumanEval: Python functions from their descriptions, which copy little.

Most solutions are short, so consecutive tasks are joined, prompts with prompts and solutions with
solutions, until the solutions hold 400 characters: 54 requests of more than 100 tokens each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eval.examples import Example, in_data, read_rows

if TYPE_CHECKING:
    from pathlib import Path

_CHARACTERS = 400  # more than 100 tokens of Llama 2 or Qwen


def load(limit: int | None = None, data: Path | None = None) -> list[Example]:
    """Join tasks until there are enough; what is left at the end and too short is dropped."""
    examples: list[Example] = []
    together: list[dict[str, Any]] = []
    for row in read_rows(in_data("prompts/humaneval.jsonl", data)):
        together.append(row)
        answer = "".join(part["canonical_solution"] for part in together)
        if len(answer) >= _CHARACTERS and (limit is None or len(examples) < limit):
            prompt = "\n\n".join(part["prompt"] for part in together)
            examples.append(Example(together[0]["task_id"], prompt=prompt, answer=answer))
            together = []
    return examples
