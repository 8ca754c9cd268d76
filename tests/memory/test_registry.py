import pytest

from ragaccel.errors import ConfigurationError
from ragaccel.memory.registry import ReferenceRegistry
from ragaccel.passage import Passage

FERRY = "The ferry to the island leaves at seven in the morning and returns at nine in the evening."


def names(matches):
    return [match.passage.passage_id for match in matches]


def test_a_registered_passage_is_found_where_it_stands():
    registry = ReferenceRegistry()
    registry.register(Passage("ferry", FERRY))
    (match,) = registry.match(f"Answer from this:\n\n[1] {FERRY}\n\nWhen does it leave?")
    assert (match.passage.passage_id, match.whole) == ("ferry", True)
    assert (match.start, match.end) == (23, 23 + len(FERRY))


def test_a_text_that_is_not_there_is_not_found():
    registry = ReferenceRegistry()
    registry.register(Passage("ferry", FERRY))
    assert registry.match("When does the ferry to the island leave?") == []


def test_what_is_no_passage_is_refused():
    with pytest.raises(ConfigurationError, match="takes passages, not str"):
        ReferenceRegistry().register(FERRY)
