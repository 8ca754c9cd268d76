"""What tests without an engine share."""

import pytest

from vllm_ragaccel.batch import BatchDrafter


@pytest.fixture
def equal_steps(monkeypatch):
    """Let all steps take the same time: those of a test take microseconds, and no draft need pay."""
    monkeypatch.setitem(BatchDrafter.__init__.__kwdefaults__, "clock", lambda: 0.0)
