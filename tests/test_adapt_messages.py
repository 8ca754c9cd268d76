"""Turns are changed no more than a chat template needs."""

import pytest

from ragaccel.errors import ConfigurationError
from ragaccel.prompt import adapt_messages


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def rejecting(*roles):
    """A chat template that takes turns of these roles, one after another, and no others."""

    def lay_out(turns):
        if tuple(one["role"] for one in turns) != roles:
            raise ConfigurationError(f"not these roles: {[one['role'] for one in turns]}")

    return lay_out


def test_accepted_messages_stay_as_they_are():
    turns = [turn("system", "a"), turn("user", "b"), turn("user", "c")]
    assert adapt_messages(turns, rejecting("system", "user", "user")) is turns


def test_adjacent_messages_of_one_role_are_merged_first():
    turns = [turn("system", "a"), turn("user", "b"), turn("user", ""), turn("user", "c")]
    taken = adapt_messages(turns, rejecting("system", "user"))
    assert taken == [turn("system", "a"), turn("user", "b\n\nc")]
    assert turns[1] == turn("user", "b")


def test_then_the_system_message_joins_the_users():
    turns = [turn("system", "a"), turn("user", "b"), turn("assistant", "c"), turn("user", "d")]
    taken = adapt_messages(turns, rejecting("user", "assistant", "user"))
    assert taken == [turn("user", "a\n\nb"), turn("assistant", "c"), turn("user", "d")]


def test_tool_messages_and_messages_of_parts_are_not_merged():
    apart = [
        turn("assistant", "", tool_calls=[{}]),
        turn("assistant", "c"),
        turn("tool", "e"),
        turn("tool", "f"),
        turn("user", [{"type": "image"}]),
    ]
    turns = [turn("user", "a"), turn("user", "b"), *apart, turn("user", "g")]
    roles = ("user", "assistant", "assistant", "tool", "tool", "user", "user")
    taken = adapt_messages(turns, rejecting(*roles))
    assert taken == [turn("user", "a\n\nb"), *apart, turn("user", "g")]


def test_the_error_is_that_of_the_messages_as_given():
    turns = [turn("system", "a"), turn("user", "b"), turn("user", "c")]
    with pytest.raises(ConfigurationError, match=r"\['system', 'user', 'user'\]"):
        adapt_messages(turns, rejecting("assistant"))
