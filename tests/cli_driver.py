"""The command line in a process of its own, with stand-ins for the models.

The answer is the first passage, a word at a time with SECONDS between two words; embedding a text
takes EMBED_SECONDS. In the folder GATE, if one is named, "waiting" appears when texts are to be
embedded, and they are when "open" does. Without the stand-ins it would be ``python -m ragaccel``.
"""

import os
import time
from pathlib import Path

from fakes import HashEmbedder
from scripted_llm import ScriptedLLM, first_passage

from ragaccel.cli import ask as ask_module
from ragaccel.cli import index as index_module
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
    index_module.load_embedder = lambda settings: SlowEmbedder()
    run()
