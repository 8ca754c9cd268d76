"""What tests without an engine share."""

import pytest

from vllm_ragaccel.batch import BatchDrafter


@pytest.fixture
def equal_steps(monkeypatch):
    """Let all steps take the same time: a test's take microseconds, so that no draft need pay."""
    monkeypatch.setitem(BatchDrafter.__init__.__kwdefaults__, "clock", lambda: 0.0)
