import pytest
from ragaccel import default_registry


@pytest.fixture(autouse=True)
def _nothing_registered():
    default_registry().clear()
