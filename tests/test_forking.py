"""Forks: a model and an embedder that were used before a process was forked off serve the child."""

import multiprocessing
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="processes are not forked"
)
_WAIT_SECONDS = 120

# In a process of its own: torch has two threads there, and a child that hangs can be ended.
_BEFORE = """
import os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import torch
torch.set_num_threads(2)
from ragaccel import LLM, load_embedder


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
"""


def ran(code):
    return subprocess.run(
        [sys.executable, "-c", _BEFORE + code], capture_output=True, text=True,
        timeout=_WAIT_SECONDS, check=False,
    )  # fmt: skip


def test_a_model_answers_the_same_in_a_child_by_one_thread_and_says_so():
    done = ran("""
llm = LLM.load()
asked = {"prompt": "The lamp burns oil. When?", "max_new_tokens": 8}
wanted = llm.generate(**asked).text
assert in_child(lambda: llm.generate(**asked).text == wanted) == 0
assert in_child(lambda: torch.get_num_threads() == 1) == 0
assert torch.get_num_threads() == 2
""")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("forked from one that held a model") == 1


def test_a_child_that_was_forked_amid_an_answer_is_told_and_the_answer_goes_on():
    done = ran("""
from ragaccel import ForkError

def is_told():
    assert in_child(lambda: True) == 0  # to fork once more mends nothing
    try:
        llm.generate("Who?", max_new_tokens=4)
    except ForkError as error:
        return "forked while another thread" in str(error)

def wait(ids, logits):
    is_amid.set()
    forked.wait(60)
    return logits

llm, is_amid, forked, said = LLM.load(), threading.Event(), threading.Event(), []
asked = {"prompt": "The lamp burns oil. When?", "max_new_tokens": 8}
wanted = llm.generate(**asked).text
thread = threading.Thread(
    target=lambda: said.append(llm.generate(**asked, logits_processors=[wait]).text)
)
thread.start()
assert is_amid.wait(60)
code = in_child(is_told)
forked.set()
thread.join()
assert code == 0, code
assert said == [wanted]
""")
    assert done.returncode == 0, done.stderr


def test_an_embedder_gives_a_child_the_same_vectors():
    pytest.importorskip("sentence_transformers")
    done = ran("""
embedder = load_embedder()
assert in_child(lambda: torch.get_num_threads() == 2) == 0  # nothing has been computed
texts = ["a lamp", "a keeper of lamps"] * 20
vectors = embedder.embed_documents(texts)
assert in_child(lambda: abs(embedder.embed_documents(texts) - vectors).max() < 1e-5) == 0
""")
    assert done.returncode == 0, done.stderr
