"""Own drafter: a drafter of fifteen lines, used through the LLM beside the ones that ship.

python demos/own_drafter.py

A drafter guesses and the model decides, so a bad one costs time and never a token: the table
ends with one that guesses nonsense.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ragaccel import LLM, Context, CopyDrafter, DraftTree, NoDrafter, Passage, build_prompt

PAGE = Path(__file__).parent / "documents" / "history" / "keepers-remembered.txt"
QUESTION = "What did Nora Pell invent?"


class BigramDrafter:
    """Guesses that the last two tokens go on as they did when they last occurred."""

    mask_ids = ()

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Look back for the same pair and copy what followed it."""
        ids = context.token_ids
        for start in range(len(ids) - 3, -1, -1):
            if ids[start : start + 2] == ids[-2:]:
                tokens = ids[start + 2 : start + 2 + min(budget, 12)]
                return DraftTree.chain([ids[-1], *tokens])
        return DraftTree.chain(ids[-1:])


class NonsenseDrafter:
    """Guesses four tokens of the prompt at random."""

    mask_ids = ()

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Make a chain of what is most likely wrong."""
        tokens = random.choices(context.token_ids, k=min(budget, 4))
        return DraftTree.chain([context.token_ids[-1], *tokens])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--page", type=Path, default=PAGE, help="a text to answer from")
    parser.add_argument("--model", help="folder or hub name; without one, the bundled reader")
    options = parser.parse_args()

    llm = LLM.load(options.model)
    sections = options.page.read_text(encoding="utf-8").split("\n\n")
    passages = [Passage(f"section-{n}", section) for n, section in enumerate(sections)]
    prompt = build_prompt(llm.tokenizer, options.question, passages, max_tokens=800)
    plain = llm.generate(prompt, drafter=NoDrafter())

    table = Table("drafter", "passes", "tokens a pass", "tokens/s", "same tokens")
    for drafter in (NoDrafter(), CopyDrafter(), BigramDrafter(), NonsenseDrafter()):
        answer = llm.generate(prompt, drafter=drafter)
        stats = answer.stats
        table.add_row(
            type(drafter).__name__,
            str(stats.verify_passes),
            f"{stats.acceptance_length:.1f}",
            f"{stats.tokens_per_second:.0f}",
            "yes" if answer.token_ids == plain.token_ids else "NO",
        )
    console = Console(highlight=False)
    console.print(plain.text, markup=False)
    console.print(table)


if __name__ == "__main__":
    main()
