"""No test reads or writes the user's home directory."""

import os

import pytest
from ragaccel.frameworks import default_registry

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the hub's library is imported


@pytest.fixture(scope="session", autouse=True)
def home_of_the_suite(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAGACCEL_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(autouse=True)
def _nothing_registered():
    default_registry().clear()
