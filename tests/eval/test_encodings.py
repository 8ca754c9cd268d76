"""The measurement of encodings: whole, small, and honest about what it finds."""

import json

import pytest

from eval.robustness import encodings


def test_a_small_measurement_keeps_the_promise(tmp_path, capsys):
    encodings.run_encodings(["--count", "3", "--out", str(tmp_path)])
    document = json.loads((tmp_path / "encodings.json").read_text())
    assert json.loads(capsys.readouterr().out) == document
    assert len(document["legacy"]) == 8
    assert document["right"] == {"legacy": 1.0, "further": 1.0, "kept": 1.0}
    assert document["promise_kept"]


def test_what_is_read_wrong_is_counted_and_ends_with_1(tmp_path, monkeypatch):
    monkeypatch.setattr(encodings, "decode_text", lambda data: ("?", "cp1252"))
    with pytest.raises(SystemExit, match="1"):
        encodings.run_encodings(["--count", "1", "--out", str(tmp_path / "r.json")])
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["right"]["legacy"] == 0
    assert document["silent_errors"] == 8
    assert document["legacy"][0]["wrong"][0]["read_as"] == "cp1252"
