"""Answer one question plainly, with SPACE alone and with ragaccel's default drafter, live.

python demos/race.py "What caused the fire in the lantern of Wether Holm?"

The lanes run one after the other. SPACE drafts with the model's own mask predictions.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from ragaccel import LLM, RAG, Answer, Drafter, NoDrafter, Prompt, SpaceDrafter
from ragaccel import default_index_path

DOCUMENTS = Path(__file__).parent / "documents"
QUESTION = "What caused the fire in the lantern of Wether Holm?"


class Lane:
    """One lane: its drafter (None is the LLM's default) and its text so far."""

    def __init__(self, name: str, drafter: Drafter | None) -> None:
        self.name, self.drafter = name, drafter
        self.text, self.seconds = "", 0.0

    def run(self, llm: LLM, prompt: Prompt, live: Live, lanes: list[Lane]) -> Answer:
        """Answer the prompt with this lane's drafter and update its panel with every piece."""
        began = time.perf_counter()
        # remember=False, or a lane would draft from the answer of the lane before
        with llm.stream(prompt, drafter=self.drafter, remember=False) as stream:
            for piece in stream:
                self.text += piece
                self.seconds = time.perf_counter() - began
                live.update(track(lanes))
        self.seconds = stream.answer.stats.total_seconds  # excludes the time of the display
        live.update(track(lanes))
        return stream.answer


def track(lanes: list[Lane]) -> Columns:
    return Columns(
        [
            Panel(Text(lane.text), title=lane.name, subtitle=f"{lane.seconds:.2f} s", width=46)
            for lane in lanes
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--folder", type=Path, default=DOCUMENTS)
    parser.add_argument("--model", help="folder or hub name; without one, the bundled reader")
    parser.add_argument("--space", help="SPACE adapter of the model; the bundled reader has one")
    options = parser.parse_args()

    console = Console(highlight=False)
    llm = LLM.load(options.model, space=options.space or options.model is None)
    rag = RAG.from_folder(options.folder, llm, path=default_index_path(options.folder))
    prompt = rag.prompt(options.question)

    llm.generate(prompt, remember=False)  # the first request includes lazy set-up
    lanes = [Lane("plain", NoDrafter()), Lane("ragaccel", None)]
    if llm.mask_ids:
        lanes.insert(1, Lane("SPACE alone", SpaceDrafter(llm.mask_ids)))
    with Live(track(lanes), console=console) as live:
        answers = [lane.run(llm, prompt, live, lanes) for lane in lanes]

    plain, fast = answers[0], answers[-1]
    for lane, answer in zip(lanes, answers, strict=True):
        stats = answer.stats
        console.print(
            f"{lane.name:11} {stats.new_tokens} tokens in {stats.verify_passes} passes, "
            f"{stats.tokens_per_second:.0f} tokens/s"
        )
    console.print(f"{plain.stats.total_seconds / fast.stats.total_seconds:.2f} times as fast")
    same = all(answer.token_ids == plain.token_ids for answer in answers)
    console.print(f"same tokens: {'yes' if same else 'NO'}")


if __name__ == "__main__":
    main()
