import threading
import time
from contextlib import ExitStack

import pytest
import torch
from decoding import OracleDrafter, decode, open_session, run_together
from fakes import RandomDrafter
from tiny_models import VOCAB, generate, random_prompt, tiny_model

from ragaccel.decoding import NoDrafter, Request, Sampling
from ragaccel.engine import Engine, Scheduler
from ragaccel.errors import CapacityError
from ragaccel.models import HuggingFaceModel

LENGTHS = (3, 40, 11, 1, 25, 64, 17)


def make_engine(family="llama", **settings):
    return Engine(HuggingFaceModel(tiny_model(family)), prefill_chunk=16, **settings)


def count_passes(engine):
    """Count the rows and sequences of every pass from now on."""
    seen, forward = [], engine.model.forward

    def watched(rows, keep):
        seen.append((rows.num_rows, len(rows.spans)))
        return forward(rows, keep)

    engine.model.forward = watched
    return seen


@pytest.mark.parametrize(
    ("family", "token_budget"),
    [("llama", None), ("llama", 0), ("llama", 13), ("mistral", None), ("qwen3", 13),
     ("gemma3", None), ("gemma2", 13)],
)  # fmt: skip
def test_a_batch_gives_the_tokens_of_single_requests(family, token_budget):
    prompts = [random_prompt(length, i) for i, length in enumerate(LENGTHS)]
    expected = [generate(tiny_model(family), prompt, 20 + i) for i, prompt in enumerate(prompts)]
    requests = [Request(prompt, max_new_tokens=20 + i) for i, prompt in enumerate(prompts)]
    drafters = [
        RandomDrafter(i, VOCAB) if i % 3 else OracleDrafter(prompt, answer)
        for i, (prompt, answer) in enumerate(zip(prompts, expected, strict=True))
    ]
    engine = make_engine(family)
    seen = count_passes(engine)
    assert run_together(engine, requests, drafters, token_budget) == expected
    assert max(sequences for _, sequences in seen) >= 4


def test_models_that_take_one_sequence_a_pass_are_scheduled_too():
    engine = make_engine("opt")
    engine.model._uses_own_attention = False
    engine.model.network = engine.model.model
    prompts = [random_prompt(length, i) for i, length in enumerate(LENGTHS)]
    requests = [Request(prompt, max_new_tokens=12) for prompt in prompts]
    seen = count_passes(engine)
    drafters = [RandomDrafter(i, VOCAB) for i in range(len(prompts))]
    found = run_together(engine, requests, drafters)
    assert found == [generate(tiny_model("opt"), prompt, 12) for prompt in prompts]
    assert {sequences for _, sequences in seen} == {1}


def test_settings_of_requests_in_one_pass_stay_their_own():
    prompt = random_prompt(20)
    requests = [
        Request(prompt, max_new_tokens=15),
        Request(prompt, max_new_tokens=15, sampling=Sampling(1.0, seed=1)),
        Request(prompt, max_new_tokens=15, sampling=Sampling(1.0, seed=2, top_k=5)),
        Request(prompt, max_new_tokens=15, repetition_penalty=1.7),
        Request(prompt, max_new_tokens=15, no_repeat_ngram_size=2),
    ]
    alone = [decode(make_engine(), request, NoDrafter()) for request in requests]
    drafters = [RandomDrafter(i, VOCAB) for i in range(len(requests))]
    assert run_together(make_engine(), requests, drafters) == alone
    assert len(set(map(tuple, alone))) == len(alone)


def test_few_rows_a_pass_make_several_passes():
    engine = make_engine()
    prompts = [random_prompt(10, i) for i in range(6)]
    seen = count_passes(engine)
    drafters = [RandomDrafter(i, VOCAB) for i in range(6)]
    requests = [Request(prompt, max_new_tokens=10) for prompt in prompts]
    found = run_together(engine, requests, drafters, 9, max_rows=20, max_batch=4)
    assert found == [generate(tiny_model("llama"), prompt, 10) for prompt in prompts]
    assert max(rows for rows, _ in seen) <= 20
    assert max(sequences for _, sequences in seen) <= 4


def test_threads_share_their_passes():
    engine = make_engine()
    scheduler = Scheduler(engine)
    prompts = [random_prompt(9 + 7 * i, i) for i in range(6)]
    expected = [generate(tiny_model("llama"), prompt, 40) for prompt in prompts]
    found, seen = [None] * 6, count_passes(engine)
    start = threading.Barrier(6)

    def work(i):
        request = Request(prompts[i], max_new_tokens=40)
        with ExitStack() as stack:
            session = open_session(engine, request, RandomDrafter(i, VOCAB), stack)
            start.wait()
            found[i] = [token for step in scheduler.steps(session) for token in step.token_ids]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == expected
    assert max(sequences for _, sequences in seen) >= 4


def test_a_request_that_fails_or_leaves_changes_no_other():
    prompts = [random_prompt(12 + i, i) for i in range(4)]
    expected = [generate(tiny_model("llama"), prompt, 25) for prompt in prompts]

    class Broken(RandomDrafter):
        def draft(self, context, budget):
            if len(context.token_ids) > 20:
                raise ZeroDivisionError("a drafter's own")
            return super().draft(context, budget)

    def refuses(ids, scores):
        if ids.shape[1] > 22:
            raise KeyError("a processor's own")
        return scores

    engine = make_engine()
    scheduler = Scheduler(engine)
    requests = [Request(prompt, max_new_tokens=25) for prompt in prompts]
    requests[1] = Request(prompts[1], max_new_tokens=25, processors=(refuses,))
    drafters = [RandomDrafter(0, VOCAB), NoDrafter(), Broken(2, VOCAB), RandomDrafter(3, VOCAB)]
    with ExitStack() as stack:
        sessions = [
            open_session(engine, request, drafter, stack)
            for request, drafter in zip(requests, drafters, strict=True)
        ]
        running, raised = list(sessions), []
        while running:
            try:
                scheduler.advance(running)
            except (ZeroDivisionError, KeyError) as error:
                raised.append(type(error))
                running.remove(sessions[2 if isinstance(error, ZeroDivisionError) else 1])
            running = [session for session in running if session.finish_reason is None]
        assert sorted(raised, key=str) == [KeyError, ZeroDivisionError]
        assert [sessions[i].answer_ids for i in (0, 3)] == [expected[0], expected[3]]
        for i in (1, 2):
            assert sessions[i].answer_ids == expected[i][: len(sessions[i].answer_ids)]


def test_a_pass_waits_for_a_slow_caller_only_once_and_briefly():
    engine = make_engine()
    scheduler = Scheduler(engine)
    with ExitStack() as stack:
        first, second = (
            open_session(
                engine, Request(random_prompt(9, i), max_new_tokens=30), NoDrafter(), stack
            )
            for i in range(2)
        )
        for _ in range(2):
            other = threading.Thread(target=scheduler.advance, args=([first, second],))
            other.start()
            other.join(30)
        scheduler._pass_seconds = 60.0
        started = time.perf_counter()
        scheduler.advance([first])  # the second does not come
        assert 0.01 < time.perf_counter() - started < 1.0
        started = time.perf_counter()
        scheduler._pass_seconds = 60.0
        scheduler.advance([first])
        assert list(scheduler._expected) == [first]
        assert time.perf_counter() - started < 0.5


def test_a_batch_that_does_not_fit_is_verified_one_by_one():
    engine = make_engine()
    forward = engine.model.forward

    def small(rows, keep):
        if len(rows.spans) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return forward(rows, keep)

    engine.model.forward = small
    prompts = [random_prompt(9, i) for i in range(3)]
    requests = [Request(prompt, max_new_tokens=8) for prompt in prompts]
    found = run_together(engine, requests, [RandomDrafter(i, VOCAB) for i in range(3)])
    assert found == [generate(tiny_model("llama"), prompt, 8) for prompt in prompts]

    def none(rows, keep):
        raise torch.OutOfMemoryError("out of memory")

    engine.model.forward = none
    with pytest.raises(CapacityError, match="no memory left on cpu for a pass of"):
        run_together(engine, requests[:1], [NoDrafter()])
    engine.model.forward = forward
    assert run_together(engine, requests[:1], [NoDrafter()]) == found[:1]


def test_engines_over_one_model_wait_for_one_another():
    target = HuggingFaceModel(tiny_model("llama"))
    first, second = Engine(target), Engine(target)
    inside, overlaps, forward = [], [], target.forward

    def watched(rows, keep):
        overlaps.append(len(inside))
        inside.append(1)
        time.sleep(0.001)
        logits = forward(rows, keep)
        inside.pop()
        return logits

    target.forward = watched
    prompts = [random_prompt(9, i) for i in range(2)]
    found = [None, None]

    def work(i, engine):
        found[i] = decode(engine, Request(prompts[i], max_new_tokens=20), NoDrafter())

    threads = [threading.Thread(target=work, args=each) for each in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(overlaps) == {0}
    assert found == [generate(tiny_model("llama"), prompt, 20) for prompt in prompts]


def test_no_sessions_are_refused():
    with pytest.raises(ValueError, match="sessions must not be empty"):
        Scheduler(make_engine()).advance([])


def test_requests_in_separate_passes_fail_alone():
    engine = make_engine(exact=True)
    prompts = [random_prompt(9 + i, i) for i in range(3)]
    verify = engine._verify

    def failing(batch):
        if batch[0][0].request.prompt_ids == tuple(prompts[1]):
            raise CapacityError("no memory left")
        return verify(batch)

    engine._verify = failing
    scheduler = Scheduler(engine)
    with ExitStack() as stack:
        sessions = [
            open_session(engine, Request(prompt, max_new_tokens=9), NoDrafter(), stack)
            for prompt in prompts
        ]
        running = list(sessions)
        while running:
            try:
                scheduler.advance(running)
            except CapacityError:
                running.remove(sessions[1])
            running = [session for session in running if session.finish_reason is None]
        for i in (0, 2):
            assert sessions[i].answer_ids == generate(tiny_model("llama"), prompts[i], 9)
        assert sessions[1].answer_ids == []
