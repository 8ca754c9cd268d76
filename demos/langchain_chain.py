"""Answer from a folder with a usual LangChain chain, faster and with sources.

python demos/langchain_chain.py
python demos/langchain_chain.py "How was it trained?" --folder ~/papers --model Qwen/Qwen3-4B

Only the model is ragaccel's. It finds the retriever's documents in the prompt, so the chain does
not pass documents to the model, and any other retriever works as well.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_ragaccel import ChatRagaccel, RagaccelRetriever
from rich.console import Console
from rich.text import Text

from ragaccel import CompressingRetriever
from ragaccel import default_index_path, open_retriever

DOCUMENTS = Path(__file__).parent / "documents"
QUESTION = "How high may the swell be for a landing at Gannet Ledge?"
PROMPT = ChatPromptTemplate.from_template(
    "Answer from these passages, in their own words.\n\n{context}\n\nQuestion: {question}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--folder", type=Path, default=DOCUMENTS)
    parser.add_argument("--model", help="folder or hub name; without one, the bundled reader")
    options = parser.parse_args()

    console = Console(highlight=False)
    with console.status("indexing what is new"):
        retriever = RagaccelRetriever.from_folder(options.folder, k=4)
    if options.model is None:  # the small bundled reader needs few sentences
        found = open_retriever(default_index_path(options.folder))
        retriever = RagaccelRetriever(index=CompressingRetriever(found, sentences=5))

    model = ChatRagaccel(model=options.model)
    sources = {"context": retriever | joined, "question": RunnablePassthrough()}
    chain = sources | PROMPT | model

    answer = None
    for chunk in chain.stream(options.question):
        console.print(Text(chunk.text), end="", soft_wrap=True)
        answer = chunk if answer is None else answer + chunk
    console.print("\n")
    report(console, answer)


def joined(documents: list) -> str:
    return "\n\n".join(document.page_content for document in documents)


def report(console: Console, answer) -> None:
    """Print which words were copied from which passage, and the tokens a pass."""
    metadata = answer.response_metadata["ragaccel"]
    citation_of = {passage["passage_id"]: passage["citation"] for passage in metadata["passages"]}
    for span in metadata["copied_spans"]:
        words = answer.text[span["out_start"] : span["out_end"]]
        console.print(Text(f"{citation_of[span['passage_id']]}: {words!r}", style="cyan"))
    console.print(f"{metadata['acceptance_length']:.1f} tokens a pass", style="dim")


if __name__ == "__main__":
    main()
