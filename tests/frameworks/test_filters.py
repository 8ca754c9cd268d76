import pytest

from ragaccel import ConfigurationError
from ragaccel.frameworks import combine, metadata_condition

METADATA = {"source": "log.pdf", "year": 1874, "tags": ["a", "b"], "none": None, "empty": []}


@pytest.mark.parametrize(
    ("name", "test", "right", "wrong"),
    [
        ("year", "eq", [1874], [1, "1874"]),
        ("none", "eq", [None], [0]),
        ("missing", "eq", [], [None]),
        ("year", "ne", [1], [1874]),
        ("missing", "ne", [1], []),
        ("year", "gt", [1873], [1874, "text"]),
        ("year", "gte", [1874], [1875]),
        ("year", "lt", [1875], [1874]),
        ("year", "lte", [1874], [1873]),
        ("missing", "lt", [], [9]),
        ("year", "in", [[1, 1874]], [[1]]),
        ("missing", "in", [], [[None]]),
        ("year", "nin", [[1]], [[1, 1874]]),
        ("missing", "nin", [[1]], []),
        ("tags", "contains", ["a"], ["c"]),
        ("year", "contains", [], ["a"]),
        ("tags", "any", [["c", "b"]], [["c"]]),
        ("tags", "all", [["a", "b"]], [["c", "b"]]),
        ("source", "text_match", ["log"], ["LOG", 3]),
        ("source", "text_match_insensitive", ["LOG"], ["x"]),
        ("tags", "text_match", [], ["a"]),
        ("year", "text_match_insensitive", [], ["1"]),
        ("year", "exists", [True], [False]),
        ("missing", "exists", [False], [True]),
        ("missing", "is_empty", [None], []),
        ("empty", "is_empty", [None], []),
        ("year", "is_empty", [], [None]),
    ],
)
def test_a_condition_on_one_field(name, test, right, wrong):
    assert all(metadata_condition(name, test, value)(METADATA) is True for value in right)
    assert not any(metadata_condition(name, test, value)(METADATA) for value in wrong)


def test_conditions_are_joined():
    true, false = (metadata_condition("year", "eq", year) for year in (1874, 1))
    for how, held in (("and", [1, 1, 0]), ("or", [0, 0, 1]), ("not", [1, 1, 0])):
        some = ([], [true], [true, false]) if how == "and" else ([], [false], [true, false])
        assert [combine(how, each)(METADATA) for each in some] == held
    for refused in (lambda: combine("xor", [true]), lambda: metadata_condition("a", "near", 1)):
        with pytest.raises(ConfigurationError, match=r"filters? .*: use"):
            refused()
