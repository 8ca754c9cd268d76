"""Two checkouts side by side: the same one twice, and one that does something else."""

import json
import shutil
from pathlib import Path

import pytest

from eval.experiments import trees

ROOT = Path(__file__).parents[2]


@pytest.fixture
def documents(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "lamp.md").write_text("# Lamp\n\nThe lamp burns oil.\n")
    return tmp_path / "docs"


def asked(documents, other):
    return [f"--documents={documents}", f"--other={other}", "--only=indexing", "--rounds=2"]


def test_a_checkout_beside_itself_does_the_same(documents, tmp_path, capsys):
    trees.run_trees([*asked(documents, ROOT), f"--out={tmp_path}"])
    found = json.loads(capsys.readouterr().out)["indexing"]
    assert found["pairs"] == 2
    assert found["ratio"] > 0
    document = json.loads((tmp_path / "trees.json").read_text())
    assert document["kinds"] == {"indexing": found}
    assert str(tmp_path) not in json.dumps(document)


def test_checkouts_that_do_otherwise_are_told(documents, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(ROOT / "ragaccel", other / "ragaccel", ignore=shutil.ignore_patterns("*.nbi"))
    chunking = other / "ragaccel" / "retrieval" / "indexing.py"
    chunking.write_text(
        chunking.read_text() + "\n\ndef index_folder(store, embedder, folder):\n"
        "    from types import SimpleNamespace\n"
        "    return SimpleNamespace(added=7, passages=7)\n"
    )
    with pytest.raises(SystemExit, match=r"indexing 0: \[1, 1\] here, \[7, 7\] there"):
        trees.run_trees(asked(documents, other))


def test_ratios_are_of_pairs():
    found = trees.figures([(2.0, 1.0), (3.0, 1.0), (4.0, 4.0)])
    assert (found["ratio"], found["seconds"], found["seconds_other"]) == (2.0, 3.0, 1.0)
