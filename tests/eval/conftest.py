"""What tests of trials share."""

import json

import pytest

from eval.__main__ import find_run


@pytest.fixture
def run_trial(tmp_path):
    """Run a trial by name; return its exit code and the result that it kept."""

    def run(trial, *arguments):
        with pytest.raises(SystemExit) as ended:
            find_run(trial)([*arguments, "--out", str(tmp_path)])
        (kept,) = tmp_path.glob("*.json")
        return ended.value.code, json.loads(kept.read_text())

    return run
