"""Checks: what a caller gives, field by field, before anything is computed from it.

A table maps the name of a field to its check: a function of (name, value) that returns the value as
the rest of the package wants it, or raises ``ConfigurationError`` with the name.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from operator import index
from typing import Any

from ragaccel.errors import ConfigurationError

Check = Callable[[str, Any], Any]

MAX_TOKEN_ID = 2**63 - 1
_MAX_WHOLE = 2**64 - 1
_SHOWN = 60  # characters of a value in a message
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def check_fields(given: Mapping[str, Any], table: Mapping[str, Check]) -> dict[str, Any]:
    """Return the fields that were given, each by its check; None counts as not given.

    Raises:
        ConfigurationError: a value that cannot work, named with its field.
    """
    return {name: table[name](name, value) for name, value in given.items() if value is not None}


def whole(name: str, value: Any) -> int:
    """Check a whole number of at most 64 bits."""
    try:
        number = index(value)
    except (TypeError, ValueError, RuntimeError):  # an array of several numbers is no number
        number = None
    if number is None or isinstance(value, bool):
        raise ConfigurationError(f"{name} must be a whole number, not {shown(value)}")
    if abs(number) > _MAX_WHOLE:
        raise ConfigurationError(f"{name} must be a number of at most 64 bits, not {shown(value)}")
    return number


def positive(name: str, value: Any) -> int:
    """Check a whole number from 1."""
    wanted = whole(name, value)
    if wanted < 1:
        raise ConfigurationError(f"{name} must be 1 or more, not {wanted}")
    return wanted


def not_negative(name: str, value: Any) -> int:
    """Check a whole number from 0."""
    wanted = whole(name, value)
    if wanted < 0:
        raise ConfigurationError(f"{name} must be 0 or more, not {wanted}")
    return wanted


def number(name: str, value: Any) -> float:
    """Check a finite number."""
    try:
        wanted = None if isinstance(value, bool | str | bytes | bytearray) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        wanted = None
    if wanted is None:
        raise ConfigurationError(f"{name} must be a number, not {shown(value)}")
    if not math.isfinite(wanted):
        raise ConfigurationError(f"{name} must be a finite number, not {wanted}")
    return wanted


def flag(name: str, value: Any) -> bool:
    """Check a switch."""
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise ConfigurationError(f"{name} must be True or False, not {shown(value)}")


def truth(name: str, value: Any) -> bool:
    """Check whatever is true or false."""
    try:
        return bool(value)
    except Exception as error:  # an array of several, say
        raise ConfigurationError(f"{name} must be True or False, not {shown(value)}") from error


def text(name: str, value: Any) -> str:
    """Check a text, empty or not, of whole characters."""
    if not isinstance(value, str):
        raise ConfigurationError(f"{name} must be a string, not {shown(value)}")
    if _LONE_SURROGATE.search(value):
        raise ConfigurationError(f"{name} holds a lone surrogate, half a character: {shown(value)}")
    return value


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Check one text or several, none of them empty."""
    given = (
        (value,)
        if isinstance(value, str)
        else _listed(name, value, "a string or a list of strings")
    )
    if not all(isinstance(one, str) and one for one in given):
        raise ConfigurationError(f"{name} is a string or a list of strings, none of them empty")
    return given


def stop_texts(name: str, value: Any) -> tuple[str, ...]:
    """Check texts that an answer may hold."""
    return tuple(text(name, one) for one in texts(name, value))


def callables(name: str, value: Any) -> tuple[Any, ...]:
    """Check a list of functions."""
    if callable(value) and not isinstance(value, Iterable):
        raise ConfigurationError(f"{name} is a list: put this one between brackets")
    given = _listed(name, value, "a list of functions")
    for place, one in enumerate(given):
        if not callable(one) or isinstance(one, type):
            raise ConfigurationError(f"{name}[{place}] cannot be called: {shown(one)}")
    return given


def drafter(name: str, value: Any) -> Any:
    """Check a drafter: ``draft`` and ``probe_ids``."""
    wanted = f"{name} must have draft(context, budget) and probe_ids, as a Drafter has"
    if isinstance(value, type) or not callable(getattr(value, "draft", None)):
        raise ConfigurationError(f"{wanted}, not {shown(value)}")
    try:
        token_ids(f"{name}.probe_ids", value.probe_ids)
    except AttributeError:
        raise ConfigurationError(f"{wanted}, not {shown(value)}") from None
    return value


def path_or(attribute: str) -> Check:
    """Make a check of a path, or of an object that has an attribute."""

    def check(name: str, value: Any) -> Any:
        if isinstance(value, str):
            return text(name, value)
        if not isinstance(value, os.PathLike) and not hasattr(value, attribute):
            raise ConfigurationError(f"{name} must be a path or such an object, not {shown(value)}")
        return value

    return check


def space(name: str, value: Any) -> Any:
    """Check a SPACE adapter, where one is, or a switch."""
    return value if isinstance(value, bool) else path_or("num_masks")(name, value)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Check token ids: whole numbers from 0, each of at most 63 bits."""
    ids = value
    if not isinstance(value, tuple) or not set(map(type, value)) <= {int}:
        if isinstance(value, str | bytes | Mapping):
            raise ConfigurationError(f"{name} must be token ids, not {shown(value)}")
        try:
            ids = tuple(map(index, value))
        except (TypeError, ValueError, RuntimeError):
            raise ConfigurationError(f"{name} must be whole numbers, not {shown(value)}") from None
    if ids and min(ids) < 0:
        raise ConfigurationError(f"{name} must be 0 or more, not {min(ids)}")
    if ids and max(ids) > MAX_TOKEN_ID:
        raise ConfigurationError(f"{name} must be token ids, not {shown(max(ids))}")
    checked: tuple[int, ...] = ids
    return checked


def shown(value: Any) -> str:
    """A value as a message shows it: short, whatever it is."""
    try:
        written = repr(value)
    except Exception:  # a message about a value cannot fail over it
        return f"a {type(value).__name__}"
    return written if len(written) <= _SHOWN else f"{written[: _SHOWN - 1]}…"


def _listed(name: str, value: Any, wanted: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise ConfigurationError(f"{name} is {wanted}, not {shown(value)}")
    try:
        return tuple(value)
    except Exception as error:  # an iterable of the caller's that breaks
        raise ConfigurationError(f"{name} cannot be read as a list: {error}") from error
