"""The trials of promises see each promise that is broken."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import transformers

from eval.experiments import architectures
from eval.experiments.architectures import (
    EQUAL,
    NOT_TRIED,
    REFUSED,
    RESULT_NAME,
    RESULTS,
    WRONG,
    configurations,
    families,
)
from eval.robustness import encodings, fuzz, patterns, tenants
from eval.robustness.documents import endings, seed_documents
from eval.robustness.kills import KINDS
from ragaccel import LLM
from ragaccel.answer import Answer
from ragaccel.cli.history import History
from ragaccel.decoding import Session
from ragaccel.errors import ConfigurationError
from ragaccel.retrieval import Collection, Store
from ragaccel.retrieval.loaders import READERS, DocumentReader, document_from_bytes

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_trial(run):
    """Run a trial by name; return its exit code and the result that it kept."""

    def tried(name, *arguments):
        done = run(name, *arguments)
        return done.code or 0, done.document

    return tried


@pytest.mark.parametrize("ending", endings())
def test_a_seed_of_every_format_is_read(ending):
    assert document_from_bytes(seed_documents()[ending], f"a{ending}").text.strip()


COUNTS = {
    "documents": 100, "encodings": 42, "indexes": 10, "model_folders": 4, "patterns": 1,
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted({*fuzz.KINDS} - {"settings"}))
def test_a_few_of_every_kind_keep_their_promises(run_trial, monkeypatch, kind):
    monkeypatch.setattr(patterns, "SIZES", (200, 2_000))
    code, document = run_trial("fuzz", kind, f"--count={COUNTS[kind]}", "--seed=3")
    assert (code, document["broken"]) == (0, [])
    assert sum(sum(own.values()) for own in document["counts"].values()) == COUNTS[kind]


def test_every_outcome_is_told_and_the_cases_after_it_are_used(run_trial, monkeypatch):
    def refuse():
        raise ConfigurationError("not so")

    def grow():
        assert b"x" * 150_000_000

    def tell():
        raise fuzz.OutcomeError("unmendable: gone")

    uses = [
        lambda: {"power": 1}, refuse, lambda: [][1], tell, lambda: time.sleep(60),
        lambda: os.kill(os.getpid(), signal.SIGKILL), grow, lambda: None,
    ]  # fmt: skip
    wanted = "ok refused raw unmendable hang died over ok".split()
    if not fuzz.forget_peak():  # this system keeps one peak of a whole process
        wanted[6] = "ok"

    def make(number, rng):
        return "all", f"{number} {rng.random()}", uses[number]

    kind = fuzz.Kind(lambda _folder: make, count=8, seconds=4.0, megabytes=100, batch=3)
    monkeypatch.setattr(fuzz, "kind_of", lambda _name: kind)
    code, document = run_trial("fuzz", "settings")
    assert code == 1
    assert document["counts"] == {"all": {kind: wanted.count(kind) for kind in set(wanted)}}
    told = {one["number"]: one["outcome"].split(":")[0] for one in document["broken"]}
    assert told == {at: kind for at, kind in enumerate(wanted) if kind not in ("ok", "refused")}
    assert document["figures"] == {f"0 {random.Random('1/0').random()}": {"power": 1}}
    again = run_trial("fuzz", "settings", "--first=3", "--count=1")[1]["broken"]
    assert again == [one for one in document["broken"] if one["number"] == 3]


def test_every_format_has_patterns_and_a_square_is_seen(monkeypatch):
    assert len(patterns.patterns()) >= 120
    told = {name.split()[0] for name in patterns.patterns()}
    same = {".xlsm": ".xlsx", ".htm": ".html", ".xhtml": ".html", ".tsv": ".csv"}
    same[".ndjson"] = ".jsonl"
    assert {same.get(ending, ending) for ending in READERS} <= told
    monkeypatch.setattr(patterns, "SIZES", (20_000, 200_000))
    with pytest.raises(fuzz.OutcomeError, match="not linear"):
        patterns.measure(lambda size: sum(1 for _ in range(size * size // 4000)))
    assert patterns.measure(lambda size: " " * size)["power"] <= patterns.LARGEST_POWER


def crash(self, data, name):
    raise ConfigurationError("the library that reads this format crashes on it")


BROKEN = {
    "documents": (DocumentReader, "read", crash, "raw: the library"),
    "encodings": (encodings, "decode_text", lambda data: ("?", "cp1252"), "only 0.0% are right"),
    "indexes": (Store, "check", lambda self: ["simulated"], "unmendable: "),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_promise_of_a_kind_is_told(run_trial, monkeypatch, kind):
    *place, how, said = BROKEN[kind]
    monkeypatch.setattr(*place, how)
    code, document = run_trial("fuzz", kind, "--count=21")
    assert code == 1
    assert said in document["broken"][-1]["outcome"]


FUZZ_SETTINGS = """
import sys, time
from eval.__main__ import main
from eval.robustness import settings
if sys.argv[1] == "broken":
    settings.answer = lambda llm: time.perf_counter()
main(["fuzz", "settings", "--count=21", "--seed=3", "--out=" + sys.argv[2]])
"""


@pytest.mark.slow
@pytest.mark.parametrize("state", ["sound", "broken"])
def test_settings_are_fuzzed(state, tmp_path):
    out = tmp_path / "result.json"
    # a process of its own, since one that has used a model cannot fork others that use one
    command = [sys.executable, "-c", FUZZ_SETTINGS, state, str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    document = json.loads(out.read_text())
    assert sum(sum(own.values()) for own in document["counts"].values()) == 21, ended.stderr
    told = {one["outcome"].split(":")[0] for one in document["broken"]}
    assert told == ({"changed"} if state == "broken" else set())
    assert ended.returncode == (state == "broken")


@pytest.mark.parametrize(
    ("kind", "make", "acknowledged"),
    [
        ("history", lambda place: History(place).open_conversation("x"), [1, "a", "answered"]),
        ("collection", lambda place: Collection(place).close(), 4),
    ],
)
def test_what_is_lost_is_seen(tmp_path, kind, make, acknowledged):
    trial = KINDS[kind][0](tmp_path, 1)
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
    trial = KINDS["build"][0](tmp_path, 1)
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


TENANTS = ("--count", "32", "--tenants", "8", "--modes")


@pytest.mark.parametrize("mode", tenants.MODES)
def test_nobody_is_handed_anothers(mode, run_trial):
    before = Session.draft, Answer.of
    code, document = run_trial("tenants", *TENANTS, mode)
    (row,) = document["modes"]
    assert (Session.draft, Answer.of) == before
    assert (code, row["answers"], row["wrong answers"], row["failed"]) == (0, 32, 0, {})
    assert all(row["foreign"][kind] == 0 for kind in tenants.PROMISES[mode])
    own = row["own"]
    assert own["passages"] == own["citations"] == 3 * 32  # all that the prompt shows
    assert own["references"] >= 5 * 32  # and what stands beside it
    assert own["copied tokens"] > 70 * 32


def test_a_registry_that_all_are_given_breaks_the_promise(run_trial, monkeypatch):
    """With one registry for all, files of one name meet."""
    from ragaccel.frameworks import ReferenceScope, default_registry

    def of_all(registry=None, namespace="", *, scopes=()):
        return default_registry()

    def register(self, passages):
        default_registry().register(passages)

    monkeypatch.setattr("ragaccel.frameworks.registry.visible_references", of_all)
    monkeypatch.setattr(ReferenceScope, "register", register)
    try:
        assert run_trial("tenants", *TENANTS, "shared")[0] == 1
    finally:
        default_registry().clear()


PAGE = ROOT / "docs" / "models.md"


TABLE = json.loads((RESULTS / RESULT_NAME).read_text(encoding="utf-8"))


SAME_RELEASE = TABLE["machine"]["transformers"] == transformers.__version__


ROWS = {(row["family"], row["variant"]): row for row in TABLE["rows"]}


FAULTS = [
    ("llama", "leftover window"),
    ("gpt_neox", "leftover window"),
    ("gpt_neo", "short lengths"),
    ("doge", "short lengths"),
    ("llama4_text", "scaled queries"),
    ("minimax_m3_vl_text", "mixed windows"),
    ("gemma4_text", "mixed windows"),
    ("falcon", "alibi"),
    ("qwen3_next", "all attention"),
    ("mistral", "sliding window"),
    ("gemma3_text", "mixed windows"),
    ("roberta", "plain"),
]


needs_release = pytest.mark.skipif(not SAME_RELEASE, reason="the table is of another transformers")


@needs_release
@pytest.mark.parametrize(("family", "variant"), FAULTS, ids=" ".join)
def test_rows_of_every_kind_of_fault_hold(family, variant):
    found = [one for one in configurations(family) if one.variant == variant]
    row = architectures.try_configuration(found[0])
    assert row["status"] in (EQUAL, REFUSED)
    assert row["status"] == ROWS[family, variant]["status"]
    if row["status"] == REFUSED:
        assert told(row) == told(ROWS[family, variant])


def told(row):
    """Its cause, without numbers that another processor may round otherwise."""
    return row["why"].partition("(")[0]


@needs_release
def test_every_family_of_this_release_has_a_row():
    assert {family for family, _ in ROWS} == set(families())


def test_nothing_is_wrong_and_enough_was_tried():
    assert TABLE["summary"].get(WRONG, 0) == 0
    assert sum(row["status"] != NOT_TRIED for row in TABLE["rows"]) >= 130
    assert all(row.get("why") for row in TABLE["rows"] if row["status"] != EQUAL)
    assert TABLE["accepted_tokens"] > 10_000


def test_the_page_is_what_the_table_says():
    """After a new table: ``python -m eval architectures --kept --page docs/models.md``."""
    assert PAGE.read_text(encoding="utf-8") == architectures.models_page(TABLE)
    assert "docs/models.md" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_what_is_accepted_and_then_not_answered_is_wrong(monkeypatch):
    def fail(*_, **__):
        raise ConfigurationError("not with this model")

    (plain,) = [one for one in configurations("llama") if one.variant == "plain"]
    monkeypatch.setattr(LLM, "generate", fail)
    row = architectures.try_configuration(plain)
    assert (row["status"], row["why"]) == (WRONG, "ConfigurationError: not with this model")
