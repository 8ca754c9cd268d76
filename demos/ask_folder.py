"""Answer questions about a folder of documents on this machine.

python demos/ask_folder.py FOLDER "a question"      # one answer
python demos/ask_folder.py FOLDER                   # a prompt, until Ctrl-D
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ragaccel import RAG, default_index_path

DOCUMENTS = Path(__file__).parent / "documents"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=DOCUMENTS)
    parser.add_argument("question", nargs="?", help="without one, questions are read in a loop")
    parser.add_argument("--model", help="folder or hub name; without one, the bundled reader")
    options = parser.parse_args()

    console = Console(highlight=False)
    # from_folder shows a bar if indexing takes long; with a path, the next run indexes what is new
    rag = RAG.from_folder(options.folder, options.model, path=default_index_path(options.folder))
    if options.question:
        answer_question(console, rag, options.question, [])
    else:
        prompt_loop(console, rag)


def prompt_loop(console: Console, rag: RAG) -> None:
    """Answer questions until the input ends; each may refer to earlier ones."""
    history: list[tuple[str, str]] = []
    while True:
        try:
            question = console.input("[bold]question> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if question:
            history.append((question, answer_question(console, rag, question, history)))


def answer_question(
    console: Console, rag: RAG, question: str, history: list[tuple[str, str]]
) -> str:
    """Stream one answer, then print its sources and speed."""
    with rag.stream(question, history) as stream:
        for piece in stream:
            console.print(Text(piece), end="", soft_wrap=True)
    console.print("\n")
    answer = stream.answer
    for number in answer.cited_numbers:
        passage = answer.passages[number - 1]
        console.print(f"[{number}] {passage.citation}", style="cyan", markup=False)
    stats = answer.stats
    console.print(
        f"{stats.tokens_per_second:.0f} tokens/s, {stats.acceptance_length:.1f} tokens a pass",
        style="dim",
    )
    return answer.text


if __name__ == "__main__":
    main()
