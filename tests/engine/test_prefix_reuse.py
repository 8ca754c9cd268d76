"""Prefix reuse: which rows are computed, for which namespace, the limits, and equal tokens."""

import pytest
from decoding import OracleDrafter, decode, watch_passes
from fakes import RandomDrafter
from tiny_models import VOCAB, generate, random_prompt, tiny_model

from ragaccel.decoding import Request, Session
from ragaccel.engine import Engine
from ragaccel.models import HuggingFaceModel

CHUNK = 16
PASSAGES = random_prompt(90, 1)
QUESTIONS = [random_prompt(length, 10 + length) for length in (5, 12, 3, 20)]


def make_engine(**settings):
    target = HuggingFaceModel(tiny_model("llama"), self_check=False)
    return Engine(target, prefill_chunk=CHUNK, **settings)


def ask(engine, prompt, new=6, seed=0, **settings):
    """Decode beside a cold engine; return the answer and how many rows were prefilled."""
    before, request = engine.prefilled_rows, Request(prompt, max_new_tokens=new, **settings)
    found = decode(engine, request, RandomDrafter(seed, VOCAB))
    assert found == generate(engine.model.model, prompt, new)
    return found, engine.prefilled_rows - before


def test_a_second_question_on_the_same_passages_computes_little_but_itself():
    engine = make_engine()
    assert ask(engine, [*PASSAGES, *QUESTIONS[0]])[1] == len(PASSAGES) + len(QUESTIONS[0]) - 1
    seen = watch_passes(engine)  # by no hook: a model with other hooks is another one
    for question in QUESTIONS[1:]:
        seen.clear()
        request = Request([*PASSAGES, *question], max_new_tokens=1)
        assert decode(engine, request, token_budget=0)
        assert sum(rows for rows, _ in seen) == len(question)


def test_whatever_is_known_of_a_prompt_is_not_prefilled():
    engine = make_engine()
    prompt = [*PASSAGES, *QUESTIONS[0]]
    answer, _ = ask(engine, prompt, new=20)
    followed = [*prompt, *answer, *QUESTIONS[1]]
    answer, prefilled = ask(engine, followed, new=20)
    assert prefilled == len(QUESTIONS[1])  # the answer's last token was never an input
    assert ask(engine, [*followed, *answer, *QUESTIONS[2]])[1] == len(QUESTIONS[2])
    assert ask(engine, prompt, seed=1)[1] == 0
    assert ask(engine, PASSAGES[:70])[1] == 0


def test_several_prefixes_are_kept_and_the_least_recently_used_is_dropped():
    engine = make_engine()
    starts = [random_prompt(60, 100 + i) for i in range(4)]
    for start in starts:
        ask(engine, [*start, *QUESTIONS[0]])
    for question in QUESTIONS[1:]:
        for start in starts:
            assert ask(engine, [*start, *question])[1] == len(question) - 1
    engine = make_engine(kept_prefixes=2)
    first, second, third = (random_prompt(40, 200 + i) for i in range(3))
    ask(engine, first)
    ask(engine, second)
    assert ask(engine, [*first, 1, 2])[1] == 1
    ask(engine, third)
    assert engine.prefix_cache.num_idle == 2
    assert ask(engine, [*first, 3, 1])[1] == 1
    assert ask(engine, second)[1] == 39


PER_TOKEN = 2 * 2 * 2 * 8 * 8  # keys and values, layers, heads, size, bytes


def test_bytes_are_bounded_and_no_entry_is_kept_if_none_is_allowed():
    for settings in ({"kept_prefixes": 0}, {"kept_bytes": 0}):
        engine = make_engine(**settings)
        assert engine.prefix_cache.bytes_per_token == 0
        for _ in range(2):
            assert ask(engine, PASSAGES)[1] == len(PASSAGES) - 1
        assert engine.prefix_cache.num_idle == 0
        assert engine.prefix_cache.bytes_per_token == PER_TOKEN
    engine = make_engine(kept_bytes=200 * PER_TOKEN)
    for i in range(6):
        ask(engine, random_prompt(60, 300 + i))
        assert 0 < engine.prefix_cache.num_bytes <= 200 * PER_TOKEN
    assert 1 <= engine.prefix_cache.num_idle <= 3


def test_namespaces_never_share():
    engine = make_engine()
    prompt = [*PASSAGES, *QUESTIONS[0]]
    for namespace in ("", "a", "b"):
        assert ask(engine, prompt, namespace=namespace)[1] == len(prompt) - 1
    for namespace in ("a", "", "b"):
        assert ask(engine, prompt, namespace=namespace)[1] == 0


def test_open_requests_share_by_copying():
    engine = make_engine()
    prompts = [[*PASSAGES, *question] for question in QUESTIONS]
    requests = [Request(prompt, max_new_tokens=15) for prompt in prompts]
    verifiers = [engine.open(request) for request in requests]
    sessions = [
        Session(verifier, RandomDrafter(i, VOCAB), request, token_budget=20)
        for i, (verifier, request) in enumerate(zip(verifiers, requests, strict=True))
    ]
    steps = [iter(session) for session in sessions]
    for one in steps:
        next(one)
    assert engine.prefilled_rows == len(PASSAGES) + sum(len(question) - 1 for question in QUESTIONS)
    assert len({id(verifier.cache) for verifier in verifiers}) == len(verifiers)
    while any(session.finish_reason is None for session in sessions):
        for one in steps:
            next(one, None)
    for session, prompt in zip(sessions, prompts, strict=True):
        assert list(session.result().token_ids) == generate(tiny_model("llama"), prompt, 15)
    for verifier in verifiers:
        verifier.close()


def test_a_branch_that_is_still_to_be_moved_is_copied_right():
    engine = make_engine()
    prompt = [*PASSAGES, *QUESTIONS[0]]
    expected = generate(tiny_model("llama"), prompt, 30)
    request = Request(prompt, max_new_tokens=30)
    first = engine.open(request)
    session = Session(first, OracleDrafter(prompt, expected), request, token_budget=20)
    for _ in session:
        known = [*prompt, *session.answer_ids]
        request = Request([*known, 7], max_new_tokens=1)
        assert decode(engine, request) == generate(tiny_model("llama"), [*known, 7], 1)
    assert list(session.result().token_ids) == expected
    first.close()


@pytest.mark.parametrize(("chunks", "fails"), [(0, False), (1, False), (5, False), (3, True)])
def test_a_prompt_that_is_cancelled_or_fails_midway_leaves_what_was_computed(chunks, fails):
    engine = make_engine()
    prompt = [*PASSAGES, *QUESTIONS[0]]

    def fail(module, args):
        if args[0].shape[1] == CHUNK and engine.prefilled_rows >= chunks * CHUNK:
            raise KeyboardInterrupt

    verifier = engine.open(Request(prompt, max_new_tokens=5))
    for _ in range(chunks):
        engine.prefill(verifier)
    if fails:
        handle = engine.model.network.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            verifier.prefill(verifier.request)
        handle.remove()
    verifier.close()
    assert ask(engine, prompt)[1] == len(prompt) - 1 - chunks * CHUNK


def test_deterministic_mode_reuses_whole_prefill_chunks_only():
    engine = make_engine(exact=True)
    prompt = [*PASSAGES, *QUESTIONS[0]]
    assert ask(engine, prompt, new=40)[1] == len(prompt) - 1
    whole = len(PASSAGES) // CHUNK * CHUNK
    for question in QUESTIONS[1:]:
        assert ask(engine, [*PASSAGES, *question])[1] == len(PASSAGES) - whole + len(question) - 1
    answer = generate(tiny_model("llama"), prompt, 40)
    followed = [*prompt, *answer, *QUESTIONS[1]]
    aligned = (len(prompt) - 1) // CHUNK * CHUNK
    assert ask(engine, followed)[1] == len(followed) - 1 - aligned
    other = [*PASSAGES[:40], *QUESTIONS[3]]
    assert ask(engine, other)[1] == len(other) - 1 - 2 * CHUNK
    assert ask(engine, PASSAGES, seed=1)[1] == len(PASSAGES) - 1 - 5 * CHUNK
