"""The one command: every run of its table, the list of them, and a run that does not exist."""

import sys

import pytest

from eval.__main__ import RUNS, main

NAMES = [name for runs in RUNS.values() for name in runs]


def test_names_are_distinct():
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_run_tells_its_options(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["eval"])
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: python -m eval {name} " in capsys.readouterr().out


def test_without_a_run_all_are_listed(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in NAMES)


def test_an_unknown_run_ends_in_one_line():
    with pytest.raises(SystemExit, match="no run 'luck'"):
        main(["luck"])
