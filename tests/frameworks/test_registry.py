import os
import random
import threading

import pytest

from ragaccel.errors import ConfigurationError
from ragaccel.frameworks import ReferenceRegistry, default_registry, registry as registry_module
from ragaccel.passage import Passage

FERRY = "The ferry to the island leaves at seven in the morning and returns at nine in the evening."
KEEPER = "The keeper of the light writes down the wind, the sea and every ship that goes by."


def names(matches):
    return [match.passage.passage_id for match in matches]


def sentence(number):
    return f"In the year {number} the harbour master counted {number * 7} ships at the quay."


def filled(count, size=0, **options):
    registry = ReferenceRegistry(**options)
    registry.register(Passage(str(n), sentence(n) + "." * size) for n in range(count))
    return registry


def test_matches_stand_in_the_order_of_the_text():
    registry = ReferenceRegistry()
    registry.register([Passage("ferry", FERRY), Passage("keeper", KEEPER)])
    assert names(registry.match(f"{KEEPER}\n{FERRY}")) == ["keeper", "ferry"]
    assert names(registry.match(f"{FERRY}\n{KEEPER}\n{FERRY}")) == ["ferry", "keeper"]


@pytest.mark.parametrize("text", ["", " \n", "When does the ferry leave?", FERRY[:60], "x" * 500])
def test_a_text_that_holds_none_of_them_has_no_match(text):
    registry = ReferenceRegistry()
    registry.register(Passage("ferry", FERRY))
    assert registry.match(text) == []


def test_the_same_text_is_kept_once_and_its_newest_passage_wins():
    registry = ReferenceRegistry()
    registry.register([Passage("old", FERRY, path="a"), Passage("other", KEEPER, path="a")])
    size = registry.num_bytes
    registry.register(Passage("new", FERRY.replace(" ", "\n  "), path="b", score=0.5))
    assert len(registry) == 2
    assert registry.num_bytes - size == pytest.approx(FERRY.count(" ") * 2, abs=9)
    assert names(registry.match(FERRY)) == ["new"]
    assert registry.adjacent_chunks([Passage("other", KEEPER, path="a")]) == []


def test_texts_that_are_too_short_or_longer_than_any_prompt_are_not_kept():
    registry = ReferenceRegistry()
    registry.register([Passage("19", "0123456789 12345678 9"[:20]), Passage("none", "  ")])
    registry.register(Passage("a library", FERRY.replace(" ", "-") * 12_000))
    assert len(registry) == 0
    registry.register(Passage("20", "01234 56789 01234 56789"))
    assert names(registry.match("in: 01234 56789\n01234 56789.")) == ["20"]


def test_namespaces_do_not_see_each_other():
    registry = ReferenceRegistry()
    registry.register([Passage("ferry", FERRY, path="a"), Passage("keeper", KEEPER, path="a")], "x")
    registry.register(Passage("own", FERRY, path="a"), "y")
    assert names(registry.match(FERRY + KEEPER, "y")) == ["own"]
    assert names(registry.match(FERRY, "x")) == ["ferry"]
    assert registry.match(FERRY) == []
    assert registry.adjacent_chunks([Passage("own", FERRY, path="a")], "y") == []
    registry.clear("x")
    assert len(registry) == 1
    assert registry.match(FERRY, "x") == []
    assert names(registry.match(FERRY, "y")) == ["own"]


def test_keys_that_agree_by_chance_do_not_show_one_namespace_to_another(monkeypatch):
    monkeypatch.setattr(registry_module, "_seed", lambda namespace: 0)
    registry = ReferenceRegistry()
    registry.register(Passage("ferry", FERRY), "x")
    assert registry.match(FERRY, "y") == []


def test_the_least_recently_used_is_evicted():
    registry = filled(50, max_bytes=128 << 10)
    room = len(filled(500, max_bytes=128 << 10))
    assert 50 < room < 200
    assert names(registry.match(sentence(3))) == ["3"]  # used now
    registry.register(Passage("7", sentence(7)))  # and this
    registry.register(Passage(str(n), sentence(n)) for n in range(1_000, 1_000 + room - 12))
    assert names(registry.match(sentence(3))) == ["3"]
    assert names(registry.match(sentence(7))) == ["7"]
    assert registry.match(sentence(4)) == []


def test_the_bound_holds_and_evicted_passages_leave_nothing():
    registry = filled(3_000, max_bytes=256 << 10)
    assert registry.num_bytes <= 256 << 10
    kept = len(registry)
    for count in (20_000, 200_000):  # with all that belongs to it, and the text alone
        registry.register(Passage("large", "".join(f"{n} and " for n in range(count))))
    assert len(registry) == kept
    assert registry.match("".join(f"{n} and " for n in range(900))) == []
    registry.clear()
    empty = ReferenceRegistry(max_bytes=256 << 10)
    assert (len(registry), registry.num_bytes) == (0, empty.num_bytes)
    registry.register(Passage("ferry", FERRY))
    registry.clear("")
    assert (len(registry), registry._numbers, registry._index._positions) == (0, {}, {})
    assert not any(registry._index._counters)


def test_a_passage_that_is_retrieved_again_is_found_again():
    registry = ReferenceRegistry()
    passages = [Passage(str(n), "x" * (20 + n)) for n in range(40)]  # the same fingerprint for all
    registry.register(passages)
    assert registry.match("x" * 23) == []
    registry.register(passages[3])
    assert names(registry.match("x" * 23)) == ["3"]


def test_adjacent_chunks_are_of_the_same_document_nearest_first():
    registry = ReferenceRegistry()
    parts = [Passage(str(n), sentence(n), path="log.md", start=100 * n) for n in range(30)]
    registry.register([*parts, Passage("else", FERRY, path="other.md", start=1_000)])
    near = registry.adjacent_chunks([parts[10]], max_characters=5 * len(sentence(11)))
    assert [passage.passage_id for passage in near] == ["11", "9", "12", "8", "13"]
    near = registry.adjacent_chunks([parts[10], parts[12]])
    assert [passage.passage_id for passage in near[:3]] == ["13", "11", "9"]
    assert len(near) == 28


def test_without_starts_the_newest_passages_of_a_document_are_adjacent():
    registry = ReferenceRegistry()
    registry.register(Passage(str(n), sentence(n), path="log.md") for n in range(200))
    near = registry.adjacent_chunks([Passage("0", sentence(0), path="log.md")], max_characters=250)
    assert [passage.passage_id for passage in near] == ["199", "198", "197"]


def test_adjacent_chunks_that_do_not_fit_are_skipped():
    registry = ReferenceRegistry()
    whole = Passage("whole", "".join(map(sentence, range(200))), path="log.md")
    parts = [Passage(str(n), sentence(n), path="log.md", start=100 * n) for n in (4, 5, 9)]
    registry.register([whole, *parts])
    near = registry.adjacent_chunks([parts[0]], max_characters=300)
    assert [passage.passage_id for passage in near] == ["5", "9"]


def test_threads_find_what_they_registered_while_others_register():
    registry = ReferenceRegistry(max_bytes=2 << 20)
    wrong = []

    def work(thread):
        numbers = random.Random(thread)
        for _ in range(60):
            own = [numbers.randrange(10**6) for _ in range(4)]
            namespace = str(thread % 3)
            registry.register((Passage(str(n), sentence(n)) for n in own), namespace)
            found = names(registry.match("\n".join(map(sentence, own)), namespace))
            if found != list(map(str, own)):
                wrong.append((own, found))
            if numbers.random() < 0.05:
                registry.clear("of nobody")

    threads = [threading.Thread(target=work, args=[n]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert registry.num_bytes <= 2 << 20


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigurationError, match="takes passages, not str"):
        ReferenceRegistry().register(FERRY)
    with pytest.raises(ConfigurationError, match="a namespace must be a string, not None"):
        ReferenceRegistry().match(FERRY, None)
    with pytest.raises(ConfigurationError, match="max_bytes must be 65,536 or more, not 9"):
        ReferenceRegistry(max_bytes=9)


def test_the_version_changes_when_matches_may_change():
    registry = ReferenceRegistry()
    seen = [registry.state]
    for change in (
        lambda: registry.register(Passage("ferry", FERRY)),
        lambda: registry.register(Passage("ferry", FERRY, title="Ferry")),
        lambda: registry.register(Passage("keeper", KEEPER)),
        lambda: registry.clear("another"),
        lambda: registry.clear(),
    ):
        change()
        seen.append(registry.state)
    assert seen[4] == seen[3]  # nothing was in that namespace
    assert len(set(seen)) == 5
    registry.register(Passage("ferry", FERRY))
    known = registry.state
    registry.register(Passage("ferry", FERRY))
    registry.match(FERRY)
    assert registry.state == known


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_a_default_of_its_own_whatever_was_held_at_the_fork():
    default_registry().register(Passage("ferry", FERRY))
    with default_registry()._lock:
        child = os.fork()
        if child == 0:
            default_registry().register(Passage("own", FERRY))
            os._exit(len(default_registry()))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == len(default_registry()) == 1
    default_registry().clear()
