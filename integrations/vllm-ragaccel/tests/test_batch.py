"""Drafts for a batch of which only the tokens are known."""

import logging
import random
import tracemalloc
from time import perf_counter

import numpy as np
import pytest
from ragaccel.decoding import Context, DraftTree
from ragaccel.drafting import TrieDrafter
from vllm_batch import Engine

from vllm_ragaccel import BatchDrafter, StepCosts
from vllm_ragaccel.batch import MAX_DRAFTED_STEPS, MAX_UNSEEN_STEPS, MIN_PLAIN_STEPS, DraftSelector


class Proposer:
    """A ``BatchDrafter`` with vLLM's call, and a clock by which all steps are equal."""

    def __init__(self, num_tokens=16, max_len=512, vocab_size=1000, **options):
        options.setdefault("clock", lambda: 0.0)
        self.batch = BatchDrafter(num_tokens, max_len, vocab_size, **options)

    def propose(self, new_ids, sizes, token_ids, slot_mappings=None):
        return self.batch.draft(new_ids, sizes, token_ids)


def text_of(seed, length):
    return random.Random(seed).choices(range(10, 1000), k=length)


def quoting(seed, length=120, answer=40):
    """A prompt of ``length`` tokens, and an answer that quotes from it."""
    prompt = text_of(seed, length)
    start = seed % 20
    return prompt, prompt[start : start + answer]


def first_prompts(monkeypatch):
    """The lengths of the prompts of all requests that were not recognised."""
    from vllm_ragaccel import batch

    lengths, made = [], batch._Row

    def row(prompt):
        lengths.append(len(prompt))
        return made(prompt)

    monkeypatch.setattr(batch, "_Row", row)
    return lengths


def test_requests_of_all_kinds_are_recognised_and_their_answers_stay_the_same(monkeypatch):
    prompts = first_prompts(monkeypatch)
    proposer = Proposer()
    engine = Engine(proposer)
    asked = [quoting(seed, length) for seed, length in enumerate((30, 200, 65, 64, 129, 300, 41))]
    requests = [engine.add(*one) for one in asked]
    for _ in range(9):
        engine.step()
    engine.preempt(engine.running[0])
    engine.run()
    assert [request.said for request in requests] == [answer for _, answer in asked]
    assert sorted(prompts) == sorted(len(prompt) for prompt, _ in asked)
    assert engine.num_accepted > engine.num_drafted / 2 > 50


def test_equal_prompts_side_by_side_are_told_apart_once_their_answers_differ(monkeypatch):
    prompts = first_prompts(monkeypatch)
    prompt = text_of(1, 100)
    answers = [prompt[10:12] + prompt[start : start + 30] for start in (20, 40, 60)]
    engine = Engine(Proposer())
    requests = [engine.add(prompt, answer) for answer in answers]
    engine.run()
    assert [request.said for request in requests] == answers
    assert prompts == [100, 100, 100]
    assert engine.num_steps < 25


def test_a_request_that_grew_without_being_asked_for_drafts_is_recognised(monkeypatch):
    prompts = first_prompts(monkeypatch)
    near_end, other = text_of(2, 490), quoting(3, answer=60)
    engine = Engine(Proposer())
    engine.add(near_end, text_of(4, 22))
    request = engine.add(*other)
    engine.run()
    assert request.said == other[1]
    assert sorted(prompts) == [120, 490]


def test_a_request_is_forgotten_after_64_steps_outside_the_batch(monkeypatch):
    prompts = first_prompts(monkeypatch)
    for away, known in ((MAX_UNSEEN_STEPS // 2, True), (MAX_UNSEEN_STEPS * 2, False)):
        prompts.clear()
        engine = Engine(Proposer(), slots=1)
        first = engine.add(*quoting(5))
        engine.step()
        engine.step()
        size = len(first.ids)
        engine.preempt(first)
        engine.add(text_of(6, 20), text_of(7, away))
        engine.waiting.reverse()
        engine.run()
        assert prompts == ([120, 20] if known else [120, 20, size])


def test_drafts_equal_those_of_a_context_that_follows_the_same_tokens():
    prompt, answer = quoting(8, 200, 90)
    answer[30:36] = text_of(9, 6)
    drafter, context = TrieDrafter(16, 16, "one"), Context(prompt)
    proposer = Proposer()
    proposer.batch.costs.table = lambda rows, drafts, measured=True: [1.0] * (drafts + 1)
    engine = Engine(proposer, slots=2)
    request = engine.add(prompt, answer)
    expected, ours = [], []

    def propose(new_ids, *rest, **options):
        drafts = proposer.propose(new_ids, *rest, **options)
        if new_ids[0]:
            context.token_ids += new_ids[0]
            expected.append(list(drafter.draft(context, 16).token_ids[1:]))
            ours.append(drafts[0])
        return drafts

    engine.propose = propose
    while not len(request.said) > 40:
        engine.step()
    engine.preempt(request)
    engine.run()
    assert request.said == answer
    assert sum(map(len, ours)) > 100
    assert ours == [tokens[: len(own)] for tokens, own in zip(expected, ours, strict=True)]
    assert sum(map(len, ours)) > 0.9 * sum(map(len, expected[MIN_PLAIN_STEPS:]))


def test_reproducible_drafts_depend_on_the_tokens_of_their_request_alone():
    """Neither on the time that steps take nor on other requests, before or beside them."""

    def drafts_of(others, clock, *, reproducible):
        proposer = Proposer(reproducible=reproducible, clock=clock)
        engine = Engine(proposer)
        prompt, answer = quoting(3)
        for seed in others:
            engine.add(*quoting(seed))
        noted = engine.add(prompt, text_of(8, 9) + answer[:20] + text_of(9, 9) + answer)
        drafts = []
        while noted in engine.waiting or noted in engine.running:
            engine.step()
            drafts.append(noted.draft) if noted.said else None
        return drafts

    def same(reproducible):
        slow = iter(range(10**6))
        alone = drafts_of([], lambda: 0.0, reproducible=reproducible)
        beside = drafts_of([1, 2, 4, 5, 6], lambda: next(slow), reproducible=reproducible)
        return alone == beside, sum(map(len, alone))

    assert not same(reproducible=False)[0]
    is_same, num_drafted = same(reproducible=True)
    assert is_same
    assert num_drafted > 40


def test_history_is_used_only_if_asked():
    prompt, answer = text_of(10, 40), text_of(11, 60)
    steps = {}
    for history in (False, True):
        engine = Engine(Proposer(history=history), slots=1)
        for _ in range(2):
            engine.add(prompt, answer)
            before = engine.num_steps
            engine.run()
        steps[history] = engine.num_steps - before
    assert steps[False] > 50
    assert steps[True] < 20


def test_an_error_while_drafting_is_an_empty_draft_and_logged_once(monkeypatch, caplog):
    prompt, answer = quoting(12)
    proposer = Proposer()
    engine = Engine(proposer)
    request = engine.add(prompt, answer)

    def broken(self, context, budget):
        raise ValueError("no drafts today")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(TrieDrafter, "draft", broken)
        for _ in range(5):
            engine.step()
        assert proposer.propose([[3]], None, None) == [[]]  # sizes of another type
        assert engine.num_drafted == 0
    assert len(caplog.records) == 1
    engine.run()
    assert request.said == answer
    assert engine.num_accepted > 10


def test_ids_outside_of_the_vocabulary_are_not_drafted():
    prompt = [*text_of(13, 20), 2000, -5, *text_of(14, 20)]
    engine = Engine(Proposer())
    request = engine.add(prompt, prompt)
    engine.run()
    assert request.said == prompt


def test_nothing_is_held_of_many_requests_that_have_ended():
    proposer = Proposer()
    token_ids, sizes = np.zeros((4, 512), np.int32), np.full(4, 40)
    rng = np.random.default_rng(0)

    def ask(number):
        for _ in range(number // 4):
            token_ids[:, :40] = rng.integers(10, 1000, (4, 40))
            proposer.propose([[1]] * 4, sizes, token_ids)

    ask(1000)
    tracemalloc.start()
    ask(200)
    before, _ = tracemalloc.get_traced_memory()
    ask(1800)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 200_000
    assert proposer.batch.num_rows <= 4 + 16


def test_drafts_shrink_to_none_when_their_steps_take_longer():
    def drafted(seconds_of_step):
        now = [0.0]
        proposer = Proposer(clock=lambda: now[0])
        engine = Engine(proposer, slots=8)
        for seed in range(8):
            engine.add(*quoting(seed, 300, answer=250))
        while engine.waiting or engine.running:
            before = engine.num_drafted
            engine.step()
            now[0] += seconds_of_step(engine.num_drafted - before)
        return engine.num_drafted

    cheap = drafted(lambda drafts: 1.0 + 0.001 * drafts)
    costly = drafted(lambda drafts: 1.0 + 1.0 * drafts)
    assert cheap > 400
    assert costly < cheap / 3


def test_steps_without_drafts_are_measured_before_the_first_drafts_and_now_and_then():
    """Else they seem as slow as they were assumed to be, and dear drafts would be taken."""
    engine = Engine(Proposer(max_len=4096), slots=1, max_len=4096, num_tokens=16)
    prompt = text_of(1, 60)
    answer = [token for start in range(300) for token in prompt[start % 50 : start % 50 + 5]]
    engine.add(prompt, answer)
    drafted = []
    while engine.waiting or engine.running:
        before = engine.num_drafted
        engine.step()
        drafted.append(engine.num_drafted > before)
    assert drafted[:MIN_PLAIN_STEPS] == [False] * MIN_PLAIN_STEPS
    in_a_row = [len(run) for run in "".join("x" if one else " " for one in drafted).split()]
    assert MAX_DRAFTED_STEPS / 2 < max(in_a_row) <= MAX_DRAFTED_STEPS


def test_a_draft_token_pays_only_if_it_comes_sooner_than_the_tokens_of_other_steps():
    costs = [1.0 + 0.1 * drafts for drafts in range(33)]
    likely = DraftTree.chain(range(17), [1.0] * 17)
    unlikely = DraftTree.chain(range(17), [1.0] + [0.25] * 16)
    selector = DraftSelector()
    (kept,) = selector.select([unlikely], costs)
    assert kept.num_drafts == 16
    for _ in range(200):
        selector.select([likely], costs)
    assert [tree.num_drafts for tree in selector.select([unlikely], costs)] == [0]
    assert [tree.num_drafts for tree in selector.select([likely], costs)] == [16]
    # Other numbers of requests have a speed of their own; chains side by side share their costs.
    kept = selector.select([unlikely, DraftTree.chain(range(17), [1.0] + [0.15] * 16)], costs)
    assert [tree.num_drafts for tree in kept] == [16, 0]


def test_a_new_request_does_not_try_drafts_again_that_did_not_pay_for_others(monkeypatch):
    now, draft, calls = [0.0], TrieDrafter.draft, []

    def slow(self, context, budget):
        now[0] += 0.2
        calls.append(1)
        return draft(self, context, budget)

    monkeypatch.setattr(TrieDrafter, "draft", slow)
    engine = Engine(Proposer(clock=lambda: now[0]), slots=1)
    tried = []
    for seed in range(8):
        engine.add(text_of(seed, 40), text_of(seed + 100, 60))
        before = len(calls)
        while engine.waiting or engine.running:
            engine.step()
            now[0] += 1.0
        tried.append(len(calls) - before)
    assert tried[0] > 20, tried
    assert tried[-1] < tried[0] / 2, tried


def test_costs_are_the_medians_of_what_was_measured():
    costs = StepCosts()
    assumed = costs.table(4, 64)
    assert assumed[0] < assumed[1] < assumed[64]
    for _ in range(9):
        for drafts, seconds in ((0, 1.0), (8, 1.1), (32, 4.0)):
            costs.record(4, drafts, seconds)
    costs.record(4, 8, 90.0)  # one slow step
    table = costs.table(4, 64)
    assert [table[drafts] for drafts in (0, 8, 32)] == pytest.approx([1.0, 1.1, 4.0])
    assert (np.diff(table) >= 0).all()
    assert costs.table(4, 64, measured=False) == assumed
    assert costs.table(1, 8)[0] < 0.1  # measured for four requests only


def test_how_long_drafting_takes():
    """Print it; a shared machine is too slow now and then to judge by."""
    for slots, length in ((1, 4096), (16, 4096)):
        proposer = Proposer(max_len=8192, vocab_size=32_000)
        rng = random.Random(slots)
        prompts = [[rng.randrange(10, 32_000) for _ in range(length)] for _ in range(slots)]
        engine = Engine(proposer, slots=slots, max_len=8192, chunk=8192, vocab_size=32_000)
        for prompt in prompts:
            engine.add(prompt, prompt[100:300] + text_of(slots, 20) + prompt[900:1100])
        seconds = []

        def propose(*given, proposer=proposer, seconds=seconds, slots=slots, **options):
            started = perf_counter()
            drafts = proposer.propose(*given, **options)
            if sum(map(len, drafts)) >= slots:
                seconds.append(perf_counter() - started)
            return drafts

        engine.propose = propose
        engine.run()
        assert len(seconds) > 10
        milliseconds = 1000 * np.median(seconds[1:])
        longest = 1000 * max(seconds)
        print(f"propose, {slots} of {length} tokens: {milliseconds:.2f} ms, at most {longest:.2f}")
