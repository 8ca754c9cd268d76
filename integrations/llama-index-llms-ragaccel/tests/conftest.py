import os

import pytest
from ragaccel.frameworks import default_registry

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the hub's library is imported


@pytest.fixture(autouse=True)
def _nothing_registered():
    default_registry().clear()
