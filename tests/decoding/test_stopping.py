import pytest

from ragaccel.decoding import Request, find_end


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
