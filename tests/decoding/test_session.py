import pytest
from fakes import RandomDrafter, RecordingVerifier, ScriptedVerifier, decode_plainly

from ragaccel.decoding import (
    Drafter,
    DraftTree,
    MalformedTreeError,
    NoDrafter,
    Origin,
    Request,
    SampledTokens,
    Session,
    allocate,
    merge,
)
from ragaccel.errors import ConfigurationError


def count_up(context):
    return (context[-1] + 1) % 100


class Oracle(Drafter):
    """Drafts the right tokens, so that blocks are long."""

    def draft(self, context, budget):
        tokens = [(context.token_ids[-1] + 1 + i) % 100 for i in range(budget)]
        origins = [(Origin("oracle", 1, "p", i),) for i in range(budget)]
        return DraftTree.chain([context.token_ids[-1], *tokens], None, [(), *origins])


def run(drafter, request, next_token=count_up, **settings):
    verifier = ScriptedVerifier(next_token)
    session = Session(verifier, drafter, request, **settings)
    return list(session), session, verifier


def test_blocks_are_counted_whole():
    steps, session, verifier = run(Oracle(), Request((0,), max_new_tokens=10), token_budget=3)
    assert [len(step.token_ids) for step in steps] == [4, 4, 2]
    assert [step.num_drafts for step in steps] == [3, 3, 1], "none past the length limit"
    assert steps[0].sources == ("oracle", "oracle", "oracle", "")
    stats = session.result().stats
    assert (stats.verify_passes, stats.new_tokens, stats.draft_tokens) == (3, 10, 7)
    assert stats.accepted_tokens == 7
    assert stats.accepted_by_source == {"oracle": 7}
    assert stats.acceptance_length == pytest.approx(10 / 3)
    assert stats.acceptance_rate == 1.0
    assert verifier.cached == list(range(10))


def test_nothing_past_an_end_token_is_kept():
    request = Request((0,), max_new_tokens=50, eos_ids={6})
    steps, session, verifier = run(Oracle(), request, token_budget=8)
    assert session.result().token_ids == (1, 2, 3, 4, 5, 6)
    assert session.result().finish_reason == "stop"
    assert steps[-1].num_accepted == 6
    assert steps[-1].sources == ("oracle",) * 6
    assert session.stats.accepted_by_source == {"oracle": 6}
    assert session.token_ids == [0, 1, 2, 3, 4, 5, 6]
    assert verifier.cached == [0, 1, 2, 3, 4, 5]


def test_a_zero_budget_and_stateful_processors_never_call_the_drafter():
    class Refuses(Drafter):
        mask_ids = (1, 2)

        def draft(self, context, budget):
            raise AssertionError("asked")

    class Stateful:
        stateful = True

    for request, settings in [
        (Request((0,), max_new_tokens=4), {"token_budget": 0}),
        (Request((0,), max_new_tokens=4, processors=(Stateful(),)), {}),
    ]:
        _, session, verifier = run(Refuses(), request, **settings)
        assert session.result().token_ids == (1, 2, 3, 4)
        assert verifier.largest_tree == 1
        assert session.stats.acceptance_length == 1.0


def test_the_cost_table_is_used_unless_the_budget_is_fixed():
    def run_at(cost_seconds, **settings):
        verifier = ScriptedVerifier(count_up, cost_seconds=cost_seconds)
        session = Session(verifier, Oracle(), Request((0,), max_new_tokens=99), **settings)
        list(session)
        return verifier.largest_tree

    assert run_at(lambda rows: 1.0) == 49  # 17 at first, then 33, then the rest
    assert run_at(lambda rows: float(rows**2)) == 1
    assert run_at(lambda rows: float(rows**2), token_budget=7) == 8


def test_draft_and_accept_give_the_same_steps_as_iterating():
    request = Request((0,), max_new_tokens=30, eos_ids={17})
    expected, whole, _ = run(Oracle(), request, token_budget=4)
    verifier = ScriptedVerifier(count_up)
    session, steps = Session(verifier, Oracle(), request, token_budget=4), []
    while session.finish_reason is None:
        session.draft()
        (tree,) = allocate([session], verifier.cost_seconds, verifier.max_rows)
        steps.append(session.accept(verifier.verify(tree)))
    assert steps == expected
    assert session.result().token_ids == whole.result().token_ids
    with pytest.raises(RuntimeError, match="has ended"):
        session.draft()
    with pytest.raises(RuntimeError, match="call draft first"):
        session.accept(SampledTokens([1]))


def test_a_consumer_may_leave_and_come_back_or_close_the_session():
    verifier = ScriptedVerifier(count_up)
    session = Session(verifier, Oracle(), Request((0,), max_new_tokens=10), token_budget=2)
    steps = iter(session)
    next(steps)
    with pytest.raises(RuntimeError, match="not ended"):
        session.result()
    next(iter(session))
    for _ in range(2):
        session.close()
        assert list(steps) == []
        assert session.result().token_ids == (1, 2, 3, 4, 5, 6)
        assert session.result().finish_reason == "cancelled"
    assert verifier.cached == [0, 1, 2, 3, 4, 5]
    assert not verifier.closed, "whoever opened the verifier closes it"
    _, session, _ = run(NoDrafter(), Request((0,), max_new_tokens=2))
    session.close()
    assert session.result().finish_reason == "length"


class FailsAt(Drafter):
    """Drafts right until its third draft, which comes from ``fail``."""

    def __init__(self, fail):
        self.fail, self.drafts = fail, 0

    def draft(self, context, budget):
        self.drafts += 1
        return self.fail(context) if self.drafts == 3 else Oracle().draft(context, budget)


def broken(context):
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("fail", "error"),
    [
        (broken, ZeroDivisionError),
        (lambda context: None, MalformedTreeError),
        (lambda context: DraftTree.chain([context.token_ids[-1] + 1]), MalformedTreeError),
        (lambda context: DraftTree.chain([context.token_ids[-1]] * 9), MalformedTreeError),
    ],
)
def test_a_broken_drafter_costs_an_error_and_no_token(fail, error):
    verifier = ScriptedVerifier(count_up)
    request = Request((0,), max_new_tokens=20)
    session = Session(verifier, FailsAt(fail), request, token_budget=2)
    with pytest.raises(error, match="FailsAt drafted" if error is MalformedTreeError else None):
        list(session)
    assert session.answer_ids == [1, 2, 3, 4, 5, 6]
    assert verifier.cached == [0, 1, 2, 3, 4, 5]
    list(session)
    assert session.result().token_ids == tuple(range(1, 21))


def chains_only(next_token, **settings):
    verifier = RecordingVerifier(next_token, **settings)
    verifier.chains_only = True
    return verifier


class Probing(RandomDrafter):
    mask_ids = (7, 7)


@pytest.mark.parametrize("token_budget", [None, 12])
def test_a_verifier_of_chains_is_given_chains(token_budget):
    def last_two(context):
        return sum(context[-2:]) % 7

    class Branching(RandomDrafter):
        """Drafts the right tokens on one branch, and many wrong ones."""

        def draft(self, context, budget):
            text = list(context.token_ids)
            for _ in range(min(budget, 4)):
                text.append(last_two(text))
            right = text[len(context.token_ids) - 1 :]
            chain = DraftTree.chain(right, [0.9**i for i in range(len(right))])
            return merge([super().draft(context, budget), chain], budget)

    request = Request((1, 3), max_new_tokens=60)
    verifier = chains_only(last_two, max_rows=16)
    session = Session(verifier, Branching(1, 7), request, token_budget=token_budget)
    list(session)
    assert session.result().token_ids == decode_plainly(last_two, request)[0]
    assert all(tree.is_chain for tree in verifier.trees)
    assert max(tree.num_drafts for tree in verifier.trees) >= 4
    assert session.stats.acceptance_length > 2


def test_mask_tokens_are_attached_where_they_fit_and_never_accepted():
    request = Request((3,), max_new_tokens=12)
    verifier = RecordingVerifier(lambda context: 7, max_rows=16)
    session = Session(verifier, Probing(1, 9), request)
    list(session)
    assert session.result().token_ids == (7,) * 12
    assert session.stats.accepted_by_source.keys() <= {"random"}
    assert verifier.largest_tree <= 16
    assert any(tree.num_masks for tree in verifier.trees)
    assert max(verifier.trees[-1].depths()) == 0


def test_a_drafter_chooses_the_nodes_that_mask_tokens_hang_under():
    class Choosing(Oracle):
        mask_ids, selects_masks = (7,), True

        def mask_gains(self, context, tree):
            return [0.0] * tree.num_drafts + [1.0]

    verifier = RecordingVerifier(count_up)
    list(Session(verifier, Choosing(), Request((0,), max_new_tokens=8), token_budget=2))
    hung = [parent for tree in verifier.trees for parent in tree.parents[1 + tree.num_drafts :]]
    assert hung == [2, 2]


def test_impossible_settings_are_refused_at_once():
    request, many = Request((0,), max_new_tokens=4), NoDrafter()
    many.mask_ids = tuple(range(64))
    for verifier, drafter, settings, message in (
        (ScriptedVerifier(count_up), NoDrafter(), {"token_budget": -1}, "token_budget"),
        (ScriptedVerifier(count_up), many, {}, "64 mask tokens and a root exceed the 64 rows"),
        (chains_only(count_up), Probing(1, 9), {}, "does not support mask tokens"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            Session(verifier, drafter, request, **settings)
    plain = Session(chains_only(count_up), Probing(1, 9), request, token_budget=0)
    assert [step.token_ids for step in plain] == [(1,), (2,), (3,), (4,)]


def test_seconds_add_up_and_leave_the_consumer_out():
    from time import sleep

    session = Session(ScriptedVerifier(count_up), Oracle(), Request((0,), max_new_tokens=9))
    for _ in session:
        sleep(0.05)
    stats = session.result().stats
    parts = stats.prefill_seconds + stats.draft_seconds + stats.verify_seconds
    assert stats.total_seconds == pytest.approx(parts)
    assert stats.total_seconds < 0.05
    assert stats.as_dict()["tokens_per_second"] == stats.tokens_per_second > 0


class Wrong(Drafter):
    """Drafts wrong tokens with high probabilities."""

    def __init__(self):
        self.calls = 0

    def draft(self, context, budget):
        self.calls += 1
        return DraftTree.chain([context.token_ids[-1], *[200] * budget], [1.0] * (budget + 1))


def test_a_drafter_that_is_always_wrong_is_soon_disabled():
    drafter = Wrong()
    verifier = ScriptedVerifier(count_up, cost_seconds=lambda rows: 1.0 + 0.02 * rows)
    session = Session(verifier, drafter, Request((10,), max_new_tokens=1_000))
    list(session)
    assert session.answer_ids == [(11 + i) % 100 for i in range(1_000)]
    assert drafter.calls < 80
    fixed = Wrong()
    session = Session(verifier, fixed, Request((10,), max_new_tokens=100), token_budget=4)
    list(session)
    assert fixed.calls >= 99, "a fixed width is the caller's affair"
