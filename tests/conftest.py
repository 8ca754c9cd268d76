"""What holds for every test: nothing is read from or written to the home of whoever runs them."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def home_of_the_suite(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAGACCEL_HOME", str(tmp_path_factory.mktemp("home")))
        yield
