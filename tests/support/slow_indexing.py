"""Indexing in a separate process, slow enough to be killed in the middle."""

import os
import subprocess
import sys
from pathlib import Path

SLOW_INDEXING = """
import sys, time
sys.path.insert(0, sys.argv[1])
from hash_embedder import HashEmbedder
from ragaccel.retrieval import Store, index_folder, indexing

indexing._BATCH_PASSAGES = 3
indexing._EMBED_BATCH = 4

class Slow(HashEmbedder):
    def embed_documents(self, texts):
        time.sleep(float(sys.argv[4]))
        return super().embed_documents(texts)

print("started", flush=True)
index_folder(Store(sys.argv[2]), Slow(), sys.argv[3])
print("finished", flush=True)
"""


def start(store, folder, pause):
    """Index a folder in another process, with a pause before every few passages."""
    arguments = [str(Path(__file__).parent), str(store.path), str(folder), str(pause)]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_INDEXING, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout.readline() == "started\n"
    return process
