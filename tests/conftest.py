"""What holds for every test: nothing is read from or written to the home of whoever runs them."""

import asyncio
import os
import signal
import warnings

import pytest

# Tiny models gain nothing from threads, and lose much where these wait for one another on a machine
# that others use too. Before torch is imported, and for processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items):
    if "RAGACCEL_SLOW" not in os.environ:
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: RAGACCEL_SLOW=1 runs it"))


@pytest.fixture(scope="session", autouse=True)
def home_of_the_suite(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAGACCEL_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def interrupts():
    """Ctrl-C interrupts, also in tests that were started in the background: there it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def no_event_loop_is_left():
    """Closes what frameworks leave open: an event loop that they made for a call and forgot.

    Where none is set beforehand, most make none; one that they made is lost to asyncio.run.
    """
    asyncio.set_event_loop(None)
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there may be none to be had
        try:
            loop = asyncio.get_event_loop_policy().get_event_loop()
        except RuntimeError:
            return
    loop.close()
    asyncio.set_event_loop(None)
