"""Messages are merged no more than a chat template requires."""

import pytest

from ragaccel.errors import ConfigurationError
from ragaccel.prompt import adapt_messages


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def rejecting(*roles):
    """Return a template that accepts only messages of these roles, in this order."""

    def render(messages):
        if tuple(one["role"] for one in messages) != roles:
            raise ConfigurationError(f"not these roles: {[one['role'] for one in messages]}")

    return render


def test_accepted_messages_stay_as_they_are():
    messages = [message("system", "a"), message("user", "b"), message("user", "c")]
    assert adapt_messages(messages, rejecting("system", "user", "user")) is messages


def test_adjacent_messages_of_one_role_are_merged_first():
    messages = [
        message("system", "a"),
        message("user", "b"),
        message("user", ""),
        message("user", "c"),
    ]
    accepted = adapt_messages(messages, rejecting("system", "user"))
    assert accepted == [message("system", "a"), message("user", "b\n\nc")]
    assert messages[1] == message("user", "b")


def test_then_the_system_message_joins_the_users():
    messages = [
        message("system", "a"),
        message("user", "b"),
        message("assistant", "c"),
        message("user", "d"),
    ]
    accepted = adapt_messages(messages, rejecting("user", "assistant", "user"))
    assert accepted == [message("user", "a\n\nb"), message("assistant", "c"), message("user", "d")]


def test_tool_messages_and_messages_of_parts_are_not_merged():
    unmerged = [
        message("assistant", "", tool_calls=[{}]),
        message("assistant", "c"),
        message("tool", "e"),
        message("tool", "f"),
        message("user", [{"type": "image"}]),
    ]
    messages = [message("user", "a"), message("user", "b"), *unmerged, message("user", "g")]
    roles = ("user", "assistant", "assistant", "tool", "tool", "user", "user")
    accepted = adapt_messages(messages, rejecting(*roles))
    assert accepted == [message("user", "a\n\nb"), *unmerged, message("user", "g")]


def test_the_error_is_that_of_the_messages_as_given():
    messages = [message("system", "a"), message("user", "b"), message("user", "c")]
    with pytest.raises(ConfigurationError, match=r"\['system', 'user', 'user'\]"):
        adapt_messages(messages, rejecting("assistant"))
