import os

import pytest

from ragaccel.frameworks import auto_references_enabled, default_registry
from ragaccel.passage import Passage

TEXT = "The ferry to the island leaves at seven in the morning."


def test_there_is_one_default_registry():
    assert default_registry() is default_registry()


@pytest.mark.parametrize("said", ["0", "false", "Off", " no "])
def test_automatic_references_can_be_switched_off(monkeypatch, said):
    monkeypatch.delenv("RAGACCEL_AUTO_REFERENCES", raising=False)
    assert auto_references_enabled()
    monkeypatch.setenv("RAGACCEL_AUTO_REFERENCES", said)
    assert not auto_references_enabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_its_own_whatever_was_held_at_the_fork():
    default_registry().register(Passage("ferry", TEXT))
    with default_registry()._lock:
        child = os.fork()
        if child == 0:
            own = default_registry()
            own.register(Passage("own", TEXT + " And returns at nine."))
            os._exit(len(own))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
