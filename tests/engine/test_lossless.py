"""Whatever is drafted, batched, sampled, kept or cut: the tokens are those of plain decoding."""

import pytest
import torch
from decoding import OracleDrafter, decode, run_together, watch_passes
from fakes import RandomDrafter
from static_passes import static_target
from tiny_models import (
    VOCAB,
    generate,
    make_tiny_model,
    random_prompt,
    skip_without_products_of,
    tiny_model,
)

from ragaccel.decoding import NoDrafter, Request, Sampling
from ragaccel.engine import Engine
from ragaccel.models import HuggingFaceModel

CHUNK, NEW = 16, 14
START = random_prompt(60, 99)


class AfterRepeat:
    """A stop rule: ends an answer when a token comes for the third time."""

    def cut(self, token_ids, start):
        counts = ((end, token_ids[:end].count(token_ids[end - 1])) for end in range(1, 1 + start))
        return next((end for end, count in counts if count == 3), None)


SETTINGS = [
    {},
    {"sampling": Sampling(1.0, seed=1)},
    {"eos_ids": frozenset(range(0, VOCAB, 4)), "min_new_tokens": 6},
    {"sampling": Sampling(1.3, seed=2, top_k=20, top_p=0.9), "repetition_penalty": 1.2},
    {"stop_rules": (AfterRepeat(),)},
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 2},
]


def eager(family):
    """A model over its own attention, which takes one sequence a pass."""
    return HuggingFaceModel(make_tiny_model(family, attn_implementation="eager"))


def of(family, dtype=torch.float64):
    return HuggingFaceModel(tiny_model(family, dtype))


def packed():
    """On some processors a row of this model has the same bits in any pass."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "vocab_size": 128}
    skip_without_products_of(torch.bfloat16)
    return HuggingFaceModel(make_tiny_model("llama", torch.bfloat16, **sizes), pack=True)


FAMILIES = ("llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt2", "opt")
ENGINES = {
    **{name: (lambda name=name: of(name), {}, {}) for name in FAMILIES},
    "eager llama": (lambda: eager("llama"), {}, {}),
    "eager opt": (lambda: eager("opt"), {}, {}),
    "few rows": (lambda: of("llama"), {}, {"max_rows": 20, "max_batch": 4}),
    "static": (static_target, {}, {}),
    "exact": (lambda: of("llama", torch.bfloat16), {"exact": True}, {}),
    "exact, batch-invariant": (packed, {"exact": True}, {}),
    "exact, few rows": (lambda: of("llama", torch.bfloat16), {"exact": True, "max_rows": 5}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", ENGINES)
def test_tokens_are_those_of_plain_decoding(name):
    make, settings, limits = ENGINES[name]
    target = make()
    engine = Engine(target, prefill_chunk=CHUNK, **settings)
    cold = Engine(target, prefill_chunk=CHUNK, kept_prefixes=0, **settings)
    seen = watch_passes(engine)
    for turn, token_budget in enumerate((None, 0, 13 if "max_rows" not in limits else 9)):
        prompts = [
            [*START[10 * (turn % 2) : 60 * (i % 3 > 0)], *random_prompt(length, 10 * turn + i)]
            for i, length in enumerate((3, 40, 11, 1, 25, 64, 17))
        ]
        requests = [
            Request(prompt, max_new_tokens=NEW + i, **SETTINGS[(i + turn) % len(SETTINGS)])
            for i, prompt in enumerate(prompts)
        ]
        expected = [decode(cold, request, NoDrafter()) for request in requests]
        assert len(set(map(tuple, expected))) == len(expected)
        lengths = [request.max_new_tokens for request in requests]
        assert any(map(int.__lt__, map(len, expected), lengths)), "some end before"
        if target.model.dtype == torch.float64:
            greedy = -turn % len(SETTINGS)
            assert expected[greedy] == generate(target.model, prompts[greedy], NEW + greedy)
        drafters = [
            OracleDrafter(prompt, answer, turn) if i % 3 == 0 else RandomDrafter(i, VOCAB)
            for i, (prompt, answer) in enumerate(zip(prompts, expected, strict=True))
        ]
        seen.clear()
        assert run_together(engine, requests, drafters, token_budget, **limits) == expected
        together = max(sequences for _, sequences in seen)
        assert together == 1 if engine.separate_passes else together >= 4
        shared = [rows for rows, sequences in seen if sequences > 1]
        assert max(shared, default=0) <= limits.get("max_rows", 256)
        assert together <= limits.get("max_batch", 16)
        for request, drafter, answer in zip(requests, drafters, expected, strict=True):
            assert decode(engine, request, drafter, token_budget) == answer
    assert engine.prefilled_rows < 0.8 * cold.prefilled_rows, "prefixes are kept"
