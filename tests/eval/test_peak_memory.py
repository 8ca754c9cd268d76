from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from recorded import write_inputs

from eval.experiments import memory
from eval.models import load_target

ROOT = Path(__file__).parents[2]


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr(
        "eval.experiments.memory.in_own_process", lambda function, *given: function(*given)
    )


@pytest.mark.usefixtures("in_process")
def test_every_decoder_tells_what_it_held_and_is_not_measured_twice(tmp_path, capsys):
    asked = [*write_inputs(tmp_path, 2), "--threads=1", f"--out={tmp_path / 'm.json'}"]
    memory.run_peak_memory(asked)
    decoders = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(decoders) == memory.PEAK_DECODERS.split(",")
    for figures in decoders.values():
        assert figures["peak_bytes"] >= figures["loaded_bytes"] > 50e6
        assert figures["prompt_tokens"] > 20
    memory.run_peak_memory(asked)
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1]) == decoders
    assert "MB at most" not in printed.err


@pytest.mark.usefixtures("in_process")
def test_the_longest_example_is_one_that_has_an_answer(tmp_path, capsys):
    asked = [*write_inputs(tmp_path, 2), "--threads=1", "--decoders=generate"]
    task = tmp_path / "task.jsonl"
    rows = [json.loads(line) for line in task.read_text().splitlines()]
    rows[1]["question"] += " Who trims the wick?" * 9
    del rows[1]["answer"]
    task.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = []
    for limit in (1, 2):
        memory.run_peak_memory([*asked, f"--limit={limit}"])
        figures = json.loads(capsys.readouterr().out.splitlines()[-1])["generate"]
        sizes.append(figures["prompt_tokens"])
    assert sizes[0] == sizes[1]
    task.write_text(json.dumps(rows[1]) + "\n")
    with pytest.raises(SystemExit, match="no recorded answers that generate could follow"):
        memory.run_peak_memory(asked)


PEAK = """
import numpy as np
from eval.experiments import memory

before = memory.forget_peak()
block = np.ones(64 << 20, dtype=np.uint8)  # touched, or it is not resident
del block
grown = memory.peak_resident_bytes() - before
memory.forget_peak()
print(grown, memory.peak_resident_bytes() - before)
"""


@pytest.mark.skipif(not memory._RESET.exists(), reason="only Linux forgets its peak")
def test_a_peak_is_seen_when_it_has_passed_and_then_forgotten():
    # In a process of its own: here, what other tests leave is freed at any moment.
    done = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, cwd=ROOT
    )
    grown, after = map(int, done.stdout.split())
    assert grown > 60e6
    assert after < 30e6


@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_a_target_for_one_side_decodes_as_one_for_both(tmp_path, side):
    model, data, _ = (one.partition("=")[2] for one in write_inputs(tmp_path))
    one, both = (load_target(model, data=tmp_path / "data", side=s) for s in (side, "both"))
    assert data == str(tmp_path / "data")
    assert one.is_random
    assert one.tokenizer.encode("The lamp burns") == both.tokenizer.encode("The lamp burns")
    assert one.ours.vocab_size == both.ours.vocab_size
