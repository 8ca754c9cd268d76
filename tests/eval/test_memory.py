"""How a process grows that goes on answering."""

import json
import os
import re
from pathlib import Path

import pytest
from recorded import write_inputs

from eval.experiments import memory
from eval.report import build


def test_each_setting_is_measured_and_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RAGACCEL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(memory, "in_own_process", lambda function, *given: function(*given))
    out = tmp_path / "r" / "m.json"
    sizes = ["--requests=6", "--every=2", "--max-new-tokens=4", "--threads=1"]
    memory.run_memory([*write_inputs(tmp_path), *sizes, f"--out={out}"])
    processes = json.loads(capsys.readouterr().out.splitlines()[-1])
    document = json.loads(out.read_text())
    assert document["processes"] == processes
    assert list(processes) == ["default", "remember=False"]
    for figures in processes.values():
        readings = figures["readings"]
        assert [one["requests"] for one in readings] == [2, 4, 6]
        resident = [one["resident_bytes"] for one in readings]
        assert figures["growth_bytes"] == resident[-1] - resident[0]
        assert figures["answer_tokens_mean"] == 4
    assert processes["default"]["remembered_growth_bytes"] > 0
    assert processes["remember=False"]["remembered_growth_bytes"] == 0
    assert str(tmp_path) not in out.read_text()
    table = build.all_results(tmp_path / "r")
    assert "resident after 2 requests | after 6 requests" in table
    assert "| remember=False | " in table
    with pytest.raises(SystemExit, match="twice --every"):
        memory.run_memory([*write_inputs(tmp_path), "--requests=100"])


def test_a_stopped_run_goes_on_with_the_next_process(tmp_path, monkeypatch, capsys):
    figures = {"growth_bytes": 1, "remembered_growth_bytes": 2, "kept_growth_bytes": 3}
    figures |= {"readings": [{"requests": n, "resident_bytes": n} for n in (2, 4)]}
    asked = []

    def in_own_process(_function, _options, name):
        if asked == ["default"]:
            asked.append("stopped")
            raise KeyboardInterrupt
        asked.append(name)
        return figures

    monkeypatch.setattr(memory, "in_own_process", in_own_process)
    out = tmp_path / "m.json"
    arguments = [*write_inputs(tmp_path), "--requests=4", "--every=2", f"--out={out}"]
    with pytest.raises(KeyboardInterrupt):
        memory.run_memory(arguments)
    memory.run_memory(arguments)
    assert asked == ["default", "stopped", "remember=False"]
    processes = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert processes == dict.fromkeys(memory.MEMORY_SETTINGS, figures)
    assert json.loads(out.read_text())["processes"] == processes
    with pytest.raises(SystemExit, match=r"other settings .*every"):
        memory.run_memory([*arguments, "--every=1"])


def test_a_process_of_its_own_is_a_fresh_one():
    assert memory.in_own_process(os.getpid) != os.getpid()


def test_what_is_resident_is_what_the_system_says():
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("only Linux tells")
    kilobytes = re.search(r"VmRSS:\s+(\d+) kB", status.read_text())[1]
    assert memory.resident_bytes() == pytest.approx(1024 * int(kilobytes), rel=0.05)


def test_where_nothing_tells_it_is_the_most_there_ever_was(monkeypatch):
    def missing(*_args, **_kwargs):
        raise FileNotFoundError

    now = memory.resident_bytes()
    monkeypatch.setattr(Path, "read_text", missing)
    assert memory.resident_bytes() >= 0.95 * now
