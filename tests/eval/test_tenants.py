"""Many tenants at one time, through both frameworks: nobody is handed another's."""

import json

import pytest

pytest.importorskip("langchain_ragaccel")
pytest.importorskip("llama_index.llms.ragaccel")

from eval.robustness import tenants
from ragaccel.answer import Answer
from ragaccel.decoding import Session


@pytest.mark.parametrize("mode", tenants.MODES)
def test_nobody_is_handed_anothers(mode, tmp_path):
    before = Session.draft, Answer.of
    options = ["--count", "32", "--tenants", "8", "--modes", mode, "--out", str(tmp_path)]
    assert tenants.run_tenants(options) == 0
    assert (Session.draft, Answer.of) == before
    (row,) = json.loads((tmp_path / "tenants.json").read_text())["modes"]
    assert (row["answers"], row["wrong answers"], row["failed"]) == (32, 0, {})
    assert all(row["foreign"][kind] == 0 for kind in tenants.PROMISES[mode])
    own = row["own"]
    assert own["passages"] == own["citations"] == 3 * 32  # all that the prompt shows
    assert own["references"] >= 5 * 32  # and what stands beside it
    assert own["copied tokens"] > 70 * 32


@pytest.mark.parametrize("mode", ["shared", "no memory"])
def test_a_registry_that_all_are_given_breaks_the_promise(mode, monkeypatch):
    """What the trial is there to see is seen: with one registry for all, files of one name meet."""
    from ragaccel import frameworks
    from ragaccel.frameworks import ReferenceScope, default_registry

    def of_all(registry=None, namespace="", *, scopes=()):
        return default_registry()

    monkeypatch.setattr(frameworks, "visible_references", of_all)
    monkeypatch.setattr(
        ReferenceScope,
        "register",
        lambda self, passages: default_registry().register(passages),
    )
    try:
        assert tenants.run_tenants(["--count", "32", "--tenants", "8", "--modes", mode]) == 1
    finally:
        default_registry().clear()
