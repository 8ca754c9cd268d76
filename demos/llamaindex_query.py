"""Answer from a folder with a LlamaIndex query engine, faster and with sources.

python demos/llamaindex_query.py
python demos/llamaindex_query.py "How was it trained?" --folder ~/papers --model Qwen/Qwen3-4B

Only the LLM is ragaccel's. It finds the retriever's nodes in the prompt, so the engine does not
pass documents to the model, and any other retriever or index works as well.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from llama_index.core import get_response_synthesizer
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.llms.ragaccel import Ragaccel, citations_of
from llama_index.retrievers.ragaccel import RagaccelRetriever
from rich.console import Console
from rich.text import Text

from ragaccel import CompressingRetriever
from ragaccel import default_index_path, open_retriever

DOCUMENTS = Path(__file__).parent / "documents"
QUESTION = "How high may the swell be for a landing at Gannet Ledge?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--folder", type=Path, default=DOCUMENTS)
    parser.add_argument("--model", help="folder or hub name; without one, the bundled reader")
    options = parser.parse_args()

    console = Console(highlight=False)
    with console.status("indexing what is new"):
        retriever = RagaccelRetriever.from_folder(options.folder, similarity_top_k=4)
    if options.model is None:  # the small bundled reader needs few sentences
        found = open_retriever(default_index_path(options.folder))
        retriever = RagaccelRetriever(CompressingRetriever(found, sentences=5))

    llm = Ragaccel(options.model)
    synthesizer = get_response_synthesizer(llm=llm, streaming=True)
    engine = RetrieverQueryEngine(retriever, synthesizer)

    response = engine.query(options.question)
    pieces = []
    for piece in response.response_gen:
        pieces.append(piece)
        console.print(Text(piece), end="", soft_wrap=True)
    console.print("\n")
    for span in citations_of(response, "".join(pieces)):
        console.print(Text(f"{span['citation']}: {span['text']!r}", style="cyan"))


if __name__ == "__main__":
    main()
