"""The trial of damaged indexes: that it runs, and that it sees a broken promise."""

import pytest

from eval.robustness import indexes
from ragaccel.retrieval import Store


def test_a_few_damaged_indexes(run_trial, capsys):
    code, document = run_trial("fuzz_indexes", "--count", "20", "--batch", "10")
    assert (code, document["broken"]) == (0, [])
    steps = sum(sum(found.values()) for found in document["counts"].values())
    assert steps == 20 * 5
    assert sum(found.get("rebuild ok", 0) for found in document["counts"].values()) == 20
    assert document["settings"]["count"] == 20


@pytest.mark.parametrize(
    ("fault", "figure", "least"),
    [("raises", "raw_errors", 3), ("dies", "raw_errors", 3), ("hangs", "hangs", 1)],
)
def test_a_broken_promise_is_seen(run_trial, monkeypatch, capsys, fault, figure, least):
    def files(self):
        if fault == "raises":
            raise KeyError("simulated")
        if fault == "dies":
            indexes.os.kill(indexes.os.getpid(), indexes.signal.SIGKILL)
        indexes.time.sleep(60)

    monkeypatch.setattr(indexes, "LIMIT_SECONDS", 3.0)
    monkeypatch.setattr(indexes, "_list", lambda store: files(store))
    code, document = run_trial(
        "fuzz_indexes", "--count", "1" if fault == "hangs" else "3", "--batch", "2"
    )
    assert code == 1
    assert document[figure] == least


def test_a_rebuild_that_mends_nothing_is_seen(run_trial, monkeypatch, capsys):
    monkeypatch.setattr(Store, "check", lambda self: ["simulated"])
    code, document = run_trial("fuzz_indexes", "--count", "2")
    assert (code, document["unmendable"]) == (1, 2)
