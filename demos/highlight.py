"""Stream an answer with every copied span in its passage's colour.

python demos/highlight.py "How high may the swell be for a landing at Gannet Ledge?"

Each span also begins with its passage's number, ``‹2 …›``, so that it is clear without colours.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ragaccel import RAG, default_index_path
from ragaccel.answer import Highlighter, Segment

DOCUMENTS = Path(__file__).parent / "documents"
QUESTION = "How high may the swell be for a landing at Gannet Ledge?"
COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--folder", type=Path, default=DOCUMENTS)
    parser.add_argument("--model", help="folder or hub name; without one, the bundled reader")
    options = parser.parse_args()

    console = Console(highlight=False)
    rag = RAG.from_folder(options.folder, options.model, path=default_index_path(options.folder))

    console.print(Text(options.question, style="bold"), end="\n\n")
    with rag.stream(options.question) as stream:
        show = SpanPrinter(console)
        highlighter = Highlighter(stream.passages)
        for piece in stream:
            show.add(highlighter.feed(piece))
        show.add(highlighter.finish())
        show.finish()

    console.print()
    cited = stream.answer.cited_numbers
    for number, passage in enumerate(stream.passages, start=1):
        line = f"[{number}] {passage.citation}" + (" (cited)" if number in cited else "")
        console.print(Text(line, style=colour_of(number)))


class SpanPrinter:
    """Prints segments as they come, with brackets around copied spans."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.number = 0  # passage number of the open span, or 0

    def add(self, segments: list[Segment]) -> None:
        """Print segments; adjacent segments of one passage are one span."""
        for segment in segments:
            if segment.passage_number != self.number:
                self.open(segment.passage_number)
            self.write(segment.text)

    def open(self, number: int) -> None:
        """Close the open span and open one of the passage ``number``, or none for 0."""
        if self.number:
            self.write("›")
        self.number = number
        if number:
            self.write(f"‹{number} ")

    def finish(self) -> None:
        """Close the last span and end the line."""
        self.open(0)
        self.console.print()

    def write(self, text: str) -> None:
        """Print text in the colour of the open span."""
        self.console.print(Text(text, style=colour_of(self.number)), end="", soft_wrap=True)


def colour_of(number: int) -> str:
    return COLOURS[(number - 1) % len(COLOURS)] if number else ""


if __name__ == "__main__":
    main()
