import pytest


@pytest.mark.compile
def test_the_integration_tests_compile():
    pass
