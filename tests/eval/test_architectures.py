"""The table of architectures: what it says is committed, holds here, and is what the page shows."""

import json
import logging
import os
from pathlib import Path

import pytest
import transformers

from eval.experiments import architectures
from eval.experiments.architectures import (
    BEFORE_NAME,
    EQUAL,
    NOT_TRIED,
    REFUSED,
    RESULT_NAME,
    RESULTS,
    WRONG,
    configurations,
    families,
)
from ragaccel import LLM
from ragaccel.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
TABLE = json.loads((RESULTS / RESULT_NAME).read_text(encoding="utf-8"))
EARLIER = json.loads((RESULTS / BEFORE_NAME).read_text(encoding="utf-8"))
SAME_RELEASE = TABLE["machine"]["transformers"] == transformers.__version__
ROWS = {(row["family"], row["variant"]): row for row in TABLE["rows"]}
# One row for each kind of fault that the table once showed, and some that never were at fault.
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


def test_what_was_equal_before_is_refused_only_where_a_longer_check_shows_a_difference():
    assert EARLIER["summary"][WRONG] > 0
    changes = TABLE["compared"]["changes"]
    assert TABLE["compared"] == architectures.compare_results(EARLIER, TABLE)
    for change in changes:
        if change["was"] == EQUAL:
            assert change["is"] == REFUSED
            assert "logits differ by" in change["why"]
            assert "past" in change["why"]


def test_the_page_is_what_the_table_says():
    """After a new table: ``python -m eval architectures --kept --page docs/models.md``."""
    assert PAGE.read_text(encoding="utf-8") == architectures.models_page(TABLE)
    assert "docs/models.md" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_run_writes_its_result_and_the_page(tmp_path, capsys):
    level, offline = logging.getLogger("ragaccel").level, os.environ.get("HF_HUB_OFFLINE")
    arguments = ["--families=llama,bart", "--count=2", f"--out={tmp_path}"]
    architectures.run_architectures([*arguments, f"--page={tmp_path / 'models.md'}"])
    assert logging.getLogger("ragaccel").level == level
    assert os.environ.get("HF_HUB_OFFLINE") == offline
    document = json.loads((tmp_path / RESULT_NAME).read_text())
    assert [row["status"] for row in document["rows"]] == [EQUAL, REFUSED]
    assert "sliding_window" in document["rows"][1]["why"]
    assert document["machine"]["transformers"] == transformers.__version__
    assert "| llama | plain | leftover window |" in (tmp_path / "models.md").read_text()
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert shown["summary"] == document["summary"]


def test_what_is_accepted_and_then_not_answered_is_wrong(monkeypatch):
    def fail(*_, **__):
        raise ConfigurationError("not with this model")

    (plain,) = [one for one in configurations("llama") if one.variant == "plain"]
    monkeypatch.setattr(LLM, "generate", fail)
    row = architectures.try_configuration(plain)
    assert (row["status"], row["why"]) == (WRONG, "ConfigurationError: not with this model")


def test_an_unknown_family_is_named(tmp_path):
    with pytest.raises(SystemExit, match="no model type nonsense"):
        architectures.run_architectures(["--families=nonsense"])
