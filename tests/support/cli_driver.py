"""Run the command line in its own process, with stand-ins for the models.

The model quotes the first passage, a word every SECONDS; embedding a text takes EMBED_SECONDS. If
GATE names a folder, embedding creates "waiting" there and waits until the file "open" exists.
"""

import os
import time
from pathlib import Path

from hash_embedder import HashEmbedder
from scripted_llm import ScriptedLLM, first_passage

from ragaccel.cli import ask as ask_module, index as index_module
from ragaccel.cli.main import run


class SlowEmbedder(HashEmbedder):
    def embed_documents(self, texts):
        time.sleep(float(os.environ.get("EMBED_SECONDS", "0")) * len(texts))
        if gate := os.environ.get("GATE"):
            Path(gate, "waiting").touch()
            while not Path(gate, "open").exists():
                time.sleep(0.01)
        return super().embed_documents(texts)


def wait(number):
    time.sleep(float(os.environ.get("SECONDS", "0")))


if __name__ == "__main__":
    model = ScriptedLLM(first_passage, before_piece=wait)
    ask_module.load_llm = lambda terminal, settings: model
    ask_module.resolve_model = lambda terminal, name: None
    index_module.load_embedder = lambda settings: SlowEmbedder()
    run()
