import pytest

from ragaccel.decoding import Reference, Request, Sampling, find_end
from ragaccel.errors import ConfigurationError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Request(()), "prompt is empty"),
        (lambda: Request((1, -2)), "prompt_ids must be 0 or more, not -2"),
        (lambda: Reference((-1,)), "token_ids must be 0 or more"),
        (lambda: Request((1,), max_new_tokens=0), "max_new_tokens must be 1 or more, not 0"),
        (lambda: Request((1,), max_new_tokens=3, min_new_tokens=4), "min_new_tokens must be"),
        (lambda: Request((1,), repetition_penalty=0.0), "repetition_penalty must be above 0"),
        (lambda: Request((1,), no_repeat_ngram_size=-1), "no_repeat_ngram_size"),
        (lambda: Sampling(temperature=-0.1), "temperature must be 0 or more"),
        (lambda: Sampling(top_k=-1), "top_k"),
        (lambda: Sampling(top_p=0.0), "top_p"),
        (lambda: Sampling(min_p=1.5), "min_p"),
        (lambda: Sampling(temperature=float("nan")), "temperature"),
        (lambda: Sampling(seed=1.5), "seed must be a whole number, not 1.5"),
        (lambda: Sampling(top_k=None), "top_k must be a whole number"),
        *(
            (lambda name=name: Request((1,), namespace=name), "namespace")
            for name in (7, None, b"mine", ("a",))
        ),
        (lambda: Request((1,), max_new_tokens=2.5), "max_new_tokens must be a whole number"),
        (lambda: Sampling(temperature="x"), "temperature"),
        (lambda: Request((1,), repetition_penalty=None), "repetition_penalty"),
        (lambda: Request(("a",)), "prompt_ids"),
        *((lambda ids=ids: Reference(ids), "token_ids") for ids in ((1.5,), "ab", (2**70,))),
        *((lambda w=weight: Reference((1,), w), "weight") for weight in (float("nan"), "x")),
    ],
)
def test_settings_that_cannot_work_are_named(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_lists_are_taken_and_a_stateful_processor_makes_a_request_plain():
    request = Request([1, 2], references=[Reference([3])], eos_ids={4})
    assert request == Request((1, 2), (Reference((3,)),), eos_ids=frozenset({4}))
    stateful = type("Stateful", (), {"stateful": True})
    assert Request((1,), processors=[stateful()]).is_plain
    assert not Request((1,), processors=[lambda ids, scores: scores]).is_plain


class EndsAt:
    """A rule that ends the answer at ``end`` tokens and records what it sees."""

    def __init__(self, end):
        self.end, self.shown = end, []

    def cut(self, token_ids, start):
        self.shown.append(tuple(token_ids))
        return self.end if len(token_ids) >= self.end else None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (5, None)),
        ({"max_new_tokens": 5}, (5, "length")),
        ({"max_new_tokens": 4}, (4, "length")),
        ({"eos_ids": {3}}, (4, "stop")),
        ({"eos_ids": {3}, "max_new_tokens": 4}, (4, "stop")),
        ({"eos_ids": {3}, "max_new_tokens": 3}, (3, "length")),
        ({"eos_ids": {3}, "min_new_tokens": 3}, (4, "stop")),
        # The scores allow no early end token; a forced one ends the answer, as in transformers.
        ({"eos_ids": {3}, "min_new_tokens": 4}, (4, "stop")),
        ({"eos_ids": {2, 3}, "min_new_tokens": 3}, (3, "stop")),
        ({"stop_rules": [EndsAt(3)]}, (3, "stop")),
        ({"stop_rules": [EndsAt(3)], "min_new_tokens": 5}, (3, "stop")),
        ({"stop_rules": [EndsAt(4), EndsAt(3)]}, (3, "stop")),
        ({"stop_rules": [EndsAt(4)], "eos_ids": {2}}, (3, "stop")),
        ({"stop_rules": [EndsAt(1)]}, (3, "stop")),
    ],
)
def test_the_earliest_end_wins(settings, expected):
    assert find_end(Request((9,), **settings), [0, 1, 2, 3, 4], start=2) == expected


def test_a_rule_never_sees_tokens_past_another_end():
    rule = EndsAt(9)
    find_end(Request((9,), eos_ids={2}, stop_rules=[rule]), [0, 1, 2, 3, 4], start=1)
    find_end(Request((9,), max_new_tokens=4, stop_rules=[rule]), [0, 1, 2, 3, 4], start=1)
    assert rule.shown == [(0, 1, 2), (0, 1, 2, 3)]
