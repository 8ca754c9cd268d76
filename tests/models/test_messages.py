"""Mirrored caches: whoever does what the messages say computes the same passes, to the last bit."""

import gc

import pytest
import torch
from decoding import Cheat, decode
from fakes import RandomDrafter
from spread import run_together
from tiny_models import VOCAB, generate, random_prompt, tiny_model

from ragaccel.decode.request import Request
from ragaccel.engine.engine import Engine
from ragaccel.models.huggingface import HuggingFaceModel
from ragaccel.models.messages import ALIVE, PASS, Journal, Mirror, message


class Mirrored:
    """A target model whose every pass is computed a second time, from its message."""

    def __init__(self, family):
        self.target, self.journal = HuggingFaceModel(tiny_model(family)), Journal()
        self.mirror, self.num_passes = Mirror(self.target.device), 0

    def __getattr__(self, name):
        return getattr(self.target, name)

    def new_cache(self, capacity, limit):
        return self.journal.new_cache(capacity, limit)

    def forward(self, rows, keep):
        words = message(PASS, self.journal, rows, keep)
        assert words[1] == len(words)
        kind, own, own_keep = self.mirror.read(words)
        assert (kind, own_keep, own.exact) == (PASS, keep, rows.exact)
        logits = self.target.forward(rows, keep)
        assert torch.equal(self.target.forward(own, keep), logits)
        self.num_passes += 1
        return logits


@pytest.mark.parametrize("family", ["llama", "gemma3", "opt"])
def test_every_pass_is_the_same(family):
    model = Mirrored(family)
    prompt = random_prompt(90)
    expected = generate(tiny_model(family), prompt, 40)
    engine = Engine(model, prefill_chunk=16)
    request = Request(prompt, max_new_tokens=40)
    assert decode(engine, request) == expected
    assert decode(engine, request, Cheat(prompt, expected), 63) == expected
    assert decode(Engine(model, exact=True), request, Cheat(prompt, expected)) == expected
    assert model.num_passes > 40


def test_caches_that_are_copied_reused_and_dropped():
    model = Mirrored("llama")
    prompt = random_prompt(90)
    engine = Engine(model, prefill_chunk=16, kept_prefixes=3)
    for turn in range(3):
        prompts = [[*prompt[: 12 + 7 * i], *random_prompt(turn + i, i)] for i in range(8)]
        requests = [Request(each, max_new_tokens=16) for each in prompts]
        drafters = [RandomDrafter(i, VOCAB) for i in range(8)]
        wanted = [generate(tiny_model("llama"), each, 16) for each in prompts]
        assert run_together(engine, requests, drafters) == wanted
    gc.collect()
    kind, rows, _ = model.mirror.read(message(ALIVE, model.journal))
    assert (kind, rows) == (ALIVE, None)
    assert model.mirror.num_caches == engine.pool.num_idle == 3
    engine.free_memory()
    gc.collect()
    model.mirror.read(message(ALIVE, model.journal))
    assert model.mirror.num_caches == 0


def test_a_pass_over_other_states_is_refused():
    engine = Engine(Mirrored("llama"))
    request = Request(random_prompt(20), max_new_tokens=4)
    decode(engine, request)
    engine.model.mirror._caches.clear()
    with pytest.raises(RuntimeError, match="holds 0 tokens here, not 19"):
        decode(engine, request)
