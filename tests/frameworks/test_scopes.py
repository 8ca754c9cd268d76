"""A passage is visible to the caller who retrieved it, and to nobody else."""

import asyncio
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest

from ragaccel.frameworks import (
    ReferenceRegistry,
    ReferenceScope,
    current_scope,
    default_registry,
    gather_references,
    reference_scope,
    visible_references,
)
from ragaccel.passage import Passage

CLAUSE = (
    "This agreement is made between the parties named below and governs the use of the services "
    "described in it, as amended."
)
SECRET = " The boat Petrel is mortgaged for ever, and nobody outside of the family may hear of it."
OURS = Passage("ours", CLAUSE + SECRET, "Ours", "handbook.md", 100, 100 + len(CLAUSE + SECRET))
NEXT = Passage("next", "The keeper of the light writes down every ship.", "", "handbook.md", 400)


class Untouched:
    """A tokenizer that must not be used."""


def names(visible, text=CLAUSE, namespace=""):
    return [match.passage.passage_id for match in visible.match(text, namespace)]


@pytest.fixture(autouse=True)
def empty_registry():
    default_registry().clear()
    yield
    default_registry().clear()


def test_a_passage_that_stands_there_in_part_is_handed_out_as_that_part():
    registry = ReferenceRegistry()
    registry.register([OURS, NEXT])
    asked = f"What does this mean?\n{CLAUSE.replace(' ', '  ')} Really?"
    (match,) = registry.match(asked)
    assert (match.passage.text, match.whole) == (CLAUSE, False)
    assert (match.passage.start, match.passage.end) == (100, 100 + len(CLAUSE))
    (found,) = gather_references(
        asked, registry=registry, tokenizer=Untouched(), adjacent_chunks=False
    )
    assert found == match.passage
    assert [one.passage_id for one in registry.adjacent_chunks([found])] == ["ours", "next"]


def test_the_rest_of_a_passage_without_a_path_is_its_only_adjacent_chunk():
    registry = ReferenceRegistry()
    whole = Passage("7", CLAUSE + SECRET)
    registry.register([Passage("7", NEXT.text * 3), whole, Passage("8", SECRET)])
    (match,) = registry.match(CLAUSE)
    assert registry.adjacent_chunks([match.passage]) == [whole]


def test_every_piece_of_a_passage_in_the_prompt_is_matched():
    middle = " ".join(f"word{number}" for number in range(60))
    registry = ReferenceRegistry()
    registry.register(Passage("p", f"{CLAUSE} {middle} {SECRET}{SECRET[::-1]}", start=7))
    found = registry.match(f"{SECRET}{SECRET[::-1]} and {CLAUSE}")
    assert [match.passage.text.strip() for match in found] == [
        f"{SECRET}{SECRET[::-1]}".strip(),
        CLAUSE,
    ]
    assert {match.passage.passage_id for match in found} == {"p"}


def test_a_request_sees_only_what_it_was_given():
    default_registry().register([OURS, NEXT])
    default_registry().register(OURS, "theirs")
    assert names(visible_references()) == []
    assert names(visible_references(namespace="ours"), namespace="ours") == []
    assert names(visible_references(namespace="theirs"), namespace="theirs") == ["ours"]
    assert names(visible_references(default_registry())) == ["ours"]


def test_a_scope_is_known_inside_of_its_block_and_forgotten_with_it():
    with reference_scope() as scope:
        scope.register([OURS, NEXT])
        assert names(visible_references()) == ["ours"]
        with reference_scope():
            assert names(visible_references()) == []
        assert names(visible_references()) == ["ours"]
    assert current_scope() is None
    assert names(visible_references()) == []
    gone = weakref.ref(scope)
    del scope
    gc.collect()
    assert gone() is None


def test_a_scope_follows_its_context_and_no_other():
    async def inside():
        with reference_scope() as scope:
            scope.register(OURS)
            return await asyncio.gather(asyncio.to_thread(visible_names), as_task())

    async def as_task():
        return visible_names()

    async def both():
        return await asyncio.gather(inside(), as_task(), as_task())

    def visible_names():
        return names(visible_references())

    assert asyncio.run(both()) == [[["ours"], ["ours"]], [], []]
    with reference_scope() as scope, ThreadPoolExecutor(1) as pool:
        scope.register(OURS)
        assert pool.submit(visible_names).result() == []
        assert pool.submit(copy_context().run, visible_names).result() == ["ours"]

        def entered():
            with reference_scope(scope):
                return visible_names()

        assert pool.submit(entered).result() == ["ours"]


def test_adjacent_chunks_come_from_the_registry_of_the_passage():
    shared = ReferenceRegistry()
    theirs = Passage("theirs", SECRET, path="handbook.md", start=300)
    shared.register(theirs)
    scope = ReferenceScope()
    scope.register([OURS, NEXT])
    visible = visible_references(shared, scopes=[scope])
    found = [match.passage for match in visible.match(OURS.text)]
    assert found == [OURS]
    assert visible.adjacent_chunks(found) == [NEXT]


def test_a_callers_own_goes_before_what_a_registry_knows_of_the_same_text():
    registry, scope = ReferenceRegistry(), ReferenceScope()
    registry.register(Passage("theirs", OURS.text, path="/srv/theirs.pdf"))
    scope.register(OURS)
    assert names(visible_references(registry, scopes=[scope]), OURS.text) == ["ours"]


def test_equal_scopes_have_equal_states_and_registries_have_their_own():
    first, second = ReferenceScope(), ReferenceScope()
    states = [visible_references(scopes=[first]).state]
    for scope in (first, second):
        scope.register(OURS)
    states.append(visible_references(scopes=[first]).state)
    assert states[1] == visible_references(scopes=[second]).state
    second.register(NEXT)
    states.append(visible_references(scopes=[second]).state)
    states += [visible_references(ReferenceRegistry()).state for _ in range(2)]
    assert len(set(states)) == 5
