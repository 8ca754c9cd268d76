"""What tests of trials share."""

import json

import pytest


@pytest.fixture
def run_trial(tmp_path):
    """Run a trial's ``main``; return its exit code and the result that it kept."""

    def run(trial, *arguments):
        with pytest.raises(SystemExit) as ended:
            trial.main([*arguments, "--out", str(tmp_path)])
        (kept,) = tmp_path.glob("*.json")
        return ended.value.code, json.loads(kept.read_text())

    return run
