"""Answer questions about a folder of documents on this machine.

python demos/ask_folder.py FOLDER "a question"      # one answer
python demos/ask_folder.py FOLDER                   # a prompt, until Ctrl-D
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ragaccel import LLM, RAG, CompressingRetriever, Retriever, Store
from ragaccel import default_index_path, index_folder, load_embedder

DOCUMENTS = Path(__file__).parent / "documents"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=DOCUMENTS)
    parser.add_argument("question", nargs="?", help="without one, questions are read in a loop")
    parser.add_argument("--model", help="folder or hub name; without one, the bundled reader")
    options = parser.parse_args()

    console = Console(highlight=False)
    embedder = load_embedder()
    with Store(default_index_path(options.folder)) as store:
        with console.status(f"indexing what is new in {options.folder}"):
            report = index_folder(store, embedder, options.folder)
        console.print(f"{report.passages:,} passages", style="dim")
        for path, reason in report.failed.items():
            console.print(f"not read: {path}: {reason}", style="yellow", markup=False)

        retriever = Retriever(store, embedder)
        # the small bundled reader needs few sentences
        compressed = CompressingRetriever(retriever, sentences=1, margin=0.05)
        source = retriever if options.model else compressed
        rag = RAG(LLM.load(options.model), source)
        if options.question:
            answer_question(console, rag, options.question, [])
        else:
            prompt_loop(console, rag)


def prompt_loop(console: Console, rag: RAG) -> None:
    """Answer questions until the input ends; each may refer to earlier ones."""
    history: list[dict[str, str]] = []
    while True:
        try:
            question = console.input("[bold]question> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if question:
            text = answer_question(console, rag, question, history)
            history += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": text},
            ]


def answer_question(
    console: Console, rag: RAG, question: str, history: list[dict[str, str]]
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
