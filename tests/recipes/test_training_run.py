"""The command of a recipe: its arguments, and its end."""

import math
import signal

import pytest

from ragaccel.errors import ConfigurationError
from recipes.training_run import check_arguments, run_command


@pytest.mark.parametrize("tokens", [0.0, -1.0, math.nan, math.inf])
def test_tokens_that_no_run_can_have_are_refused(tokens):
    with pytest.raises(ConfigurationError, match="--tokens"):
        check_arguments(tokens, 1e-3, "cpu")


def test_a_terminated_command_says_how_to_go_on(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["recipe"])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="130"):
            run_command(lambda: signal.raise_signal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert "the same command goes on" in capsys.readouterr().err
