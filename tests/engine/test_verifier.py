import weakref
from contextlib import closing
from threading import Thread
from time import perf_counter, sleep

import pytest
import torch
from tiny_models import random_prompt, tiny_model

from ragaccel.decoding import DraftTree, NoDrafter, Request, Session
from ragaccel.engine import Engine, Scheduler
from ragaccel.models import HuggingFaceModel

PROMPT = random_prompt(40)


@pytest.fixture
def engine():
    return Engine(HuggingFaceModel(tiny_model("llama"), self_check=False), prefill_chunk=16)


class Computing:
    """Logits that a device has not computed yet: reading them takes time."""

    def __init__(self, logits):
        self.logits, self.since = logits, perf_counter()
        self.shape = logits.shape

    def __getitem__(self, place):
        sleep(max(0.0, self.since + DEVICE_SECONDS - perf_counter()))
        return self.logits[place]


DEVICE_SECONDS = 0.05


@pytest.mark.parametrize("together", [False, True])
def test_a_prompts_seconds_are_those_of_the_device(engine, together):
    forward = engine.model.forward
    engine.model.forward = lambda rows, keep: (
        Computing(forward(rows, keep)) if keep < rows.num_rows else forward(rows, keep)
    )
    request = Request(PROMPT, max_new_tokens=3)
    with closing(engine.open(request)) as verifier:
        session = Session(verifier, NoDrafter(), request)
        list(Scheduler(engine).steps(session) if together else session)
    chunks = -(-(len(PROMPT) - 1) // engine.prefill_chunk)
    assert session.stats.prefill_seconds >= chunks * DEVICE_SECONDS


def test_a_verifier_serves_one_session_and_continues_its_prompt(engine):
    request = Request(PROMPT, max_new_tokens=12)
    with closing(engine.open(request)) as verifier:
        with pytest.raises(RuntimeError, match="serves one session"):
            verifier.prefill(Request(PROMPT))
        engine.prefill(verifier)
        cache = verifier.cache
        assert not verifier.is_prefilled
        for _ in range(2):
            verifier.prefill(request)
            assert verifier.is_prefilled
        assert verifier.cache is cache
        assert engine.prefilled_rows == len(PROMPT) - 1
        with pytest.raises(RuntimeError, match="no tree was verified"):
            verifier.commit([0])
        list(Session(verifier, NoDrafter(), request))
        with pytest.raises(RuntimeError, match="serves one session"):
            list(Session(verifier, NoDrafter(), request))


@pytest.mark.parametrize("moment", ["prefill", "verify"])
def test_a_request_closed_during_its_pass_leaves_its_cache_to_the_pass(engine, moment):
    """As when its caller is interrupted twice while another thread computes the pass."""
    verifier, forward = engine.open(Request(PROMPT[:12], max_new_tokens=4)), engine.model.forward
    while moment == "verify" and not verifier.is_prefilled:
        engine.prefill(verifier)

    def closing_forward(rows, keep):
        closer = Thread(target=verifier.close)
        closer.start()
        closer.join()
        assert engine.prefix_cache.num_idle == 0
        return forward(rows, keep)

    engine.model.forward = closing_forward
    if moment == "prefill":
        engine.prefill(verifier)
    else:
        engine.verify([(verifier, DraftTree.chain(PROMPT[11:12]), 0)])
    assert engine.prefix_cache.num_idle == 1


def test_memory_that_a_request_releases_during_anothers_pass_is_used_by_it(engine):
    finished = engine.open(Request(random_prompt(40, 1), max_new_tokens=4))
    while not finished.is_prefilled:
        engine.prefill(finished)
    held, forward = weakref.ref(finished.cache), engine.model.forward

    def full_forward(rows, keep):
        closer = Thread(target=finished.close)
        closer.start()
        closer.join()
        if held() is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(rows, keep)

    engine.model.forward = full_forward
    verifier = engine.open(Request(PROMPT[:12], max_new_tokens=4))
    engine.prefill(verifier)
    assert verifier.is_prefilled
