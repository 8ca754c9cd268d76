"""Contents that a state file must not have: every kind of file that the library keeps refuses them.

``DAMAGE`` maps a name to a function of the file's right contents.
"""

import pickle


def _becomes(contents):
    return lambda right: contents


def _cut_off(share):
    return lambda right: right[: max(1, int(share * len(right)) - 1)]


DAMAGE = {
    "empty": _becomes(b""),
    "a note": _becomes(b"just some notes\n"),
    "no UTF-8": _becomes(b"\xff\xfe{}"),
    "null": _becomes(b"null"),
    "a list": _becomes(b"[]"),
    "deep": _becomes(b"[" * 100_000),
    "a zip": _becomes(b"PK\x03\x04" + bytes(96)),
    "an array": _becomes(b"\x93NUMPY\x01\x00"),
    "a pickle": _becomes(pickle.dumps({"format": "ragaccel memory"})),
    "zeros": _becomes(bytes(1000)),
    **{f"cut off at {share}": _cut_off(share) for share in (0.0, 0.01, 0.1, 0.3, 0.6, 0.9, 1.0)},
}
