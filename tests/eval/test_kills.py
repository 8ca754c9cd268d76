"""The trial of kills: that it runs, and that it sees what is lost."""

import pytest

from eval.robustness import kills
from eval.robustness.kills import KINDS
from ragaccel.cli.history import History
from ragaccel.retrieval import Collection


def test_a_few_kills_of_each_kind_that_starts_quickly(run_trial, capsys):
    chosen = ["history", "collection", "build", "rebuild"]
    code, document = run_trial("kills", "--kinds", *chosen, "--count", "3")
    assert (code, document["lost"], document["failed"]) == (0, 0, 0)
    assert document["kills"] == 12
    assert sum(found["acknowledged"] for found in document["kinds"].values()) > 0
    assert all(found.get("left behind", 0) == 0 for found in document["kinds"].values())
    assert document["kinds"]["build"]["runs let end"] >= 1


def test_the_kills_are_those_of_every_kind():
    assert kills.COUNTS.keys() == KINDS.keys()
    assert sum(kills.COUNTS.values()) == 1150


@pytest.mark.parametrize(
    ("kind", "make", "acknowledged"),
    [
        ("history", lambda place: History(place).open_conversation("x"), [1, "a", "answered"]),
        ("collection", lambda place: Collection(place).close(), 4),
    ],
)
def test_what_is_lost_is_seen(tmp_path, kind, make, acknowledged):
    trial = KINDS[kind](tmp_path, 1)
    trial.prepare()
    trial.reset()
    make(trial.place)
    trial.check()
    assert trial.counts["lost"] == 0
    trial.acknowledge(acknowledged)
    trial.check()
    assert trial.counts["lost"] == 1
    trial.place.unlink()
    trial.check()
    assert trial.counts["lost"] >= 2


def test_half_a_file_and_an_index_of_neither_kind_are_seen(tmp_path):
    trial = KINDS["build"](tmp_path, 1)
    trial.wanted = ({"a": "new"}, {"a": [["one"], ["two"]]})
    trial.before = ({"a": "old"}, {"a": [["zero"]]})
    for sha256, found, lost in (
        ("old", trial.before, 0),
        ("old", trial.wanted, 0),
        ("new", trial.wanted, 0),
        ("new", trial.before, 1),
        ("new", ({"a": "new"}, {"a": [["one"]]}), 2),
        ("old", ({}, {}), 3),
    ):
        trial._check_file("a", sha256, *found)
        assert trial.counts["lost"] == lost
