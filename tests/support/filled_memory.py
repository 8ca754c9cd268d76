"""Filled memories, and the trees drafted from them."""

import numpy as np

from ragaccel.decoding import Context
from ragaccel.drafting import Memory, TrieDrafter

VOCABULARY = 60


def teach(namespace_memory, seed, num=12):
    """Add requests that repeat each other, and let the calibration learn."""
    rng = np.random.default_rng(seed)
    runs = rng.integers(0, VOCABULARY, (6, 9)).tolist()
    for _ in range(num):
        prompt = [token for i in rng.integers(0, 6, 4) for token in runs[i]]
        answer = [token for i in rng.integers(0, 6, 2) for token in runs[i]]
        drafter = TrieDrafter(
            past=namespace_memory.history, calibration=namespace_memory.calibration
        )
        context = Context(list(prompt))
        for token in answer:
            drafter.draft(context, 16)
            context.token_ids.append(token)
        drafter.draft(context, 1)
        namespace_memory.remember(prompt, answer)


def drafts(namespace_memory, seed=99):
    """Return the trees drafted for some prompts, with their path probabilities."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(8):
        prompt = rng.integers(0, VOCABULARY, 30).tolist()
        trie = TrieDrafter(past=namespace_memory.history, calibration=namespace_memory.calibration)
        tree = trie.draft(Context(prompt), 64)
        found.append((tree.token_ids, tree.parents, tree.path_probs))
    return found


def opened(path, **changes):
    """Open the memory in that file."""
    return Memory(**{"path": path, "fingerprint": "model", "vocab_size": VOCABULARY, **changes})
