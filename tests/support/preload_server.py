"""A web server in small that forks its workers when all is set up: ``python preload_server.py``.

Before the fork it opens an index. Each process, the parent as the first, answers on a Unix socket
of its own: a line of JSON in, a line of JSON out.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from hash_embedder import HashEmbedder
from tiny_llm import tiny_llm

from ragaccel import RAG, Passage
from ragaccel.retrieval import Collection, open_retriever

NUM_PROCESSES = 3
_LONGEST = 120  # seconds, for any process


class Server:
    """What the parent opened, and what each process does with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.collection = Collection(folder / "collection.db")
        self.retriever = open_retriever(folder / "index.db", HashEmbedder())
        self.num_reads, self.failures = 0, []

    def prepare(self) -> None:
        """Use, before the fork, what will be used after it."""
        self.search("lamp")
        self.num_passages()

    def ask(self, question: str) -> str:
        return RAG(tiny_llm(), self.retriever, max_new_tokens=4).ask(question).text

    def search(self, words: str) -> list[str]:
        return [passage.text for passage in self.retriever.search(words, k=1)]

    def put(self, name: str) -> None:
        self.collection.put([Passage(name, name)], HashEmbedder().embed_documents([name]))

    def find(self, name: str) -> str:
        found = self.collection.search(HashEmbedder().embed_query(name), 1)
        return found[0].passage.passage_id

    def num_passages(self) -> int:
        return len(self.collection)

    def reads(self) -> list[int | str]:
        """How often the thread of this process that reads all the time has read; its errors."""
        return [self.num_reads, *self.failures]

    def close(self) -> None:
        self.collection.close()

    def read_all_the_time(self) -> None:
        try:
            while True:
                self.search("lamp")
                self.find("start")
                self.num_reads += 1
        except Exception as error:
            self.failures.append(repr(error))

    def serve(self, number: int) -> None:
        listener = socket.socket(socket.AF_UNIX)
        place = self.folder / f"{number}.sock"
        listener.bind(f"{place}.new")
        listener.listen()
        os.rename(f"{place}.new", place)
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as lines:
                name, *arguments = json.loads(lines.readline())
                json.dump(getattr(self, name)(*arguments), lines)


def main() -> None:
    signal.alarm(_LONGEST)
    server = Server(Path(sys.argv[1]))
    server.prepare()
    threading.Thread(target=server.read_all_the_time, daemon=True).start()
    for number in range(1, NUM_PROCESSES):
        if os.fork() == 0:
            signal.alarm(_LONGEST)
            server.serve(number)
    server.serve(0)


if __name__ == "__main__":
    main()
