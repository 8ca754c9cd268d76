import pytest

from ragaccel import ConfigurationError
from ragaccel.frameworks import combine, metadata_condition

METADATA = {"source": "log.pdf", "year": 1874, "tags": ["a", "b"], "none": None, "empty": []}


@pytest.mark.parametrize(
    ("name", "test", "value", "expected"),
    [
        ("year", "eq", 1874, True),
        ("none", "eq", None, True),
        ("missing", "eq", None, False),
        ("year", "ne", 1874, False),
        ("missing", "ne", 1, True),
        ("year", "gt", 1874, False),
        ("year", "gte", 1874, True),
        ("year", "lt", 1874, False),
        ("year", "lte", 1874, True),
        ("year", "gt", "text", False),
        ("missing", "lt", 9, False),
        ("year", "in", [1, 1874], True),
        ("missing", "in", [None], False),
        ("year", "nin", [1, 1874], False),
        ("missing", "nin", [1], True),
        ("tags", "contains", "a", True),
        ("year", "contains", "a", False),
        ("tags", "any", ["c", "b"], True),
        ("tags", "all", ["c", "b"], False),
        ("source", "text_match", "log", True),
        ("source", "text_match", "LOG", False),
        ("tags", "text_match", "a", False),
        ("source", "text_match_insensitive", "LOG", True),
        ("year", "text_match_insensitive", "1", False),
        ("source", "text_match", 3, False),
        ("year", "exists", True, True),
        ("missing", "exists", False, True),
        ("year", "exists", False, False),
        ("missing", "is_empty", None, True),
        ("empty", "is_empty", None, True),
        ("year", "is_empty", None, False),
    ],
)
def test_a_condition_on_one_field(name, test, value, expected):
    assert metadata_condition(name, test, value)(METADATA) is expected


def test_conditions_are_joined():
    true, false = (metadata_condition("year", "eq", year) for year in (1874, 1))
    for how, held in (("and", [1, 1, 0]), ("or", [0, 0, 1]), ("not", [1, 1, 0])):
        some = ([], [true], [true, false]) if how == "and" else ([], [false], [true, false])
        assert [combine(how, each)(METADATA) for each in some] == held
    for refused in (lambda: combine("xor", [true]), lambda: metadata_condition("a", "near", 1)):
        with pytest.raises(ConfigurationError, match=r"filters? .*: use"):
            refused()
