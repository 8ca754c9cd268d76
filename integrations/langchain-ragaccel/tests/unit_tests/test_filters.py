import pytest
from ragaccel import ConfigurationError

from langchain_ragaccel.vectorstores import as_condition

METADATA = {"source": "log.pdf", "year": 1874, "tags": ["a", "b"], "deep": {"x": 1}}


@pytest.mark.parametrize(
    ("given", "holds"),
    [
        ({}, True),
        ({"source": "log.pdf", "year": 1}, False),
        ({"tags": ["a", "b"]}, True),
        ({"deep": {"x": 1}}, True),
        ({"deep": {}}, False),
        *(({"year": {f"${test}": 1874}}, test in ("eq", "gte", "lte"))
          for test in ("eq", "ne", "gt", "gte", "lt", "lte")),
        ({"year": {"$gt": 1800, "$lt": 1850}}, False),
        ({"year": {"$in": [1, 1874]}}, True),
        ({"year": {"$nin": [1, 1874]}}, False),
        ({"missing": {"$exists": False}}, True),
        ({"$and": [{"year": 1874}, {"source": "x"}]}, False),
        ({"$or": []}, False),
        ({"$not": {"year": 1, "source": "log.pdf"}}, True),
        ({"$or": [{"$and": [{"year": 1}]}, {"$not": {"year": 2}}]}, True),
    ],
)  # fmt: skip
def test_a_filter_selects_documents(given, holds):
    assert as_condition(given)(METADATA) is holds


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("source", "must be a dictionary or a function"),
        ({"year": {"$near": 1}}, r"\$near is not a comparison"),
        ({"year": {"$gt": 1, "plain": 2}}, "plain is not a comparison"),
        ({"$xor": []}, r"unknown filter operator \$xor"),
        ({"$and": {"year": 1}}, r"\$and needs a list"),
        ({"$not": ["year"]}, "a filter must be a dictionary"),
        ({"year": {"$in": "1874"}}, r"\$in needs a list"),
    ],
)
def test_a_filter_that_means_nothing_is_refused(given, problem):
    with pytest.raises(ConfigurationError, match=problem):
        as_condition(given)
