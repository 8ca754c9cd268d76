"""Memories that have learned something, and what they draft."""

import numpy as np

from ragaccel.decoding import Context
from ragaccel.drafting import Memory, TrieDrafter

VOCABULARY = 60


def teach(namespace_memory, seed, num=12):
    """Let each learner learn, from requests that repeat each other."""
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
    """The trees that are grown on some prompts, with the chances of their nodes."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(8):
        prompt = rng.integers(0, VOCABULARY, 30).tolist()
        trie = TrieDrafter(past=namespace_memory.history, calibration=namespace_memory.calibration)
        tree = trie.draft(Context(prompt), 64)
        found.append((tree.token_ids, tree.parents, tree.path_probs))
    return found


def saved(path):
    """Write a file in which two namespaces are remembered."""
    memory = opened(path)
    teach(memory.of("mine"), 1)
    teach(memory.of("theirs"), 2)
    memory.save()
    return path


def opened(path, **changes):
    """A memory in that file."""
    return Memory(**{"path": path, "fingerprint": "model", "vocab_size": VOCABULARY, **changes})
