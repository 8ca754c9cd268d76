import pytest
from ragaccel import ConfigurationError

from langchain_ragaccel.vectorstores import as_condition

METADATA = {
    "source": "log.pdf",
    "year": 1874,
    "tags": ["a", "b"],
    "deep": {"x": 1},
    "none": None,
}


@pytest.mark.parametrize(
    ("given", "holds"),
    [
        ({}, True),
        ({"source": "log.pdf"}, True),
        ({"source": "other"}, False),
        ({"source": "log.pdf", "year": 1}, False),
        ({"missing": None}, False),
        ({"none": None}, True),
        ({"tags": ["a", "b"]}, True),
        ({"deep": {"x": 1}}, True),
        ({"deep": {}}, False),
        ({"year": {"$eq": 1874}}, True),
        ({"year": {"$ne": 1874}}, False),
        ({"missing": {"$ne": 1}}, True),
        ({"year": {"$gt": 1874}}, False),
        ({"year": {"$gte": 1874}}, True),
        ({"year": {"$lt": 1874}}, False),
        ({"year": {"$lte": 1874}}, True),
        ({"year": {"$gt": 1800, "$lt": 1900}}, True),
        ({"year": {"$gt": 1800, "$lt": 1850}}, False),
        ({"year": {"$gt": "text"}}, False),
        ({"missing": {"$gt": 1}}, False),
        ({"year": {"$in": [1, 1874]}}, True),
        ({"tags": {"$in": [["a", "b"]]}}, True),
        ({"missing": {"$in": [None]}}, False),
        ({"year": {"$nin": [1, 1874]}}, False),
        ({"missing": {"$nin": [1]}}, True),
        ({"year": {"$exists": True}}, True),
        ({"missing": {"$exists": False}}, True),
        ({"year": {"$exists": False}}, False),
        ({"$and": [{"year": 1874}, {"source": "log.pdf"}]}, True),
        ({"$and": [{"year": 1874}, {"source": "x"}]}, False),
        ({"$or": [{"year": 1}, {"source": "log.pdf"}]}, True),
        ({"$or": [{"year": 1}, {"source": "x"}]}, False),
        ({"$or": []}, False),
        ({"$not": {"year": 1874}}, False),
        ({"$not": {"year": 1, "source": "log.pdf"}}, True),
        ({"$or": [{"$and": [{"year": 1}]}, {"$not": {"year": 2}}]}, True),
    ],
)
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
        ({"$and": ["year"]}, "a filter must be a dictionary"),
        ({"$not": ["year"]}, "a filter must be a dictionary"),
        ({"year": {"$in": 1}}, r"\$in needs a list"),
        ({"year": {"$in": "1874"}}, r"\$in needs a list"),
    ],
)
def test_a_filter_that_means_nothing_is_refused(given, problem):
    with pytest.raises(ConfigurationError, match=problem):
        as_condition(given)
