"""Write a drafter in fifteen lines and compare it with those that ship.

python demos/own_drafter.py

The model verifies every draft, so a bad drafter costs time but never changes a token: the last row
of the table is a drafter of random tokens.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ragaccel import LLM, Context, CopyDrafter, Drafter, DraftTree, NoDrafter, Passage, build_prompt

PAGE = Path(__file__).parent / "documents" / "history" / "keepers-remembered.txt"
QUESTION = "What did Nora Pell invent?"


class BigramDrafter(Drafter):
    """Drafts the tokens that followed the last two tokens at their latest occurrence."""

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Return a chain of the tokens after the latest earlier occurrence of the pair."""
        ids = context.token_ids
        for start in range(len(ids) - 3, -1, -1):
            if ids[start : start + 2] == ids[-2:]:
                tokens = ids[start + 2 : start + 2 + min(budget, 12)]
                return DraftTree.chain([ids[-1], *tokens])
        return DraftTree.chain(ids[-1:])


class NonsenseDrafter(Drafter):
    """Drafts four random tokens of the text so far."""

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Return a chain of random tokens."""
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
