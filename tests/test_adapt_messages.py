"""Messages are merged no more than a chat template requires."""

import pytest

from ragaccel.errors import ConfigurationError
from ragaccel.prompt import adapt_messages


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def chat(text):
    """Return the messages of "system a, user b"."""
    return [message(*one.split(" ", 1)) for one in text.split(", ")]


def rejecting(roles):
    """Return a template that accepts only messages of these roles, in this order."""

    def render(messages):
        if [one["role"] for one in messages] != roles:
            raise ConfigurationError(f"not these roles: {[one['role'] for one in messages]}")

    return render


UNMERGED = [
    message("assistant", "", tool_calls=[{}]),
    message("assistant", "c"),
    message("tool", "e"),
    message("tool", "f"),
    message("user", [{"type": "image"}]),
]


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        # adjacent messages of one role are merged first
        (chat("system a, user b, user , user c"), chat("system a, user b\n\nc")),
        # then the system message joins the user's
        (chat("system a, user b, assistant c, user d"), chat("user a\n\nb, assistant c, user d")),
        # tool messages, calls, and messages of parts are not merged
        ([*chat("user a, user b"), *UNMERGED, *chat("user g")],
         [*chat("user a\n\nb"), *UNMERGED, *chat("user g")]),
    ],
)  # fmt: skip
def test_messages_are_merged_until_a_template_accepts_them(given, accepted):
    before = [dict(one) for one in given]
    assert adapt_messages(given, rejecting([one["role"] for one in accepted])) == accepted
    assert given == before
    as_given = rejecting([one["role"] for one in given])
    assert adapt_messages(given, as_given) is given
    with pytest.raises(ConfigurationError, match="not these roles") as refused:
        adapt_messages(given, rejecting(["tool"]))
    assert str(refused.value).endswith(str([one["role"] for one in given]))
