"""Conditions on metadata, from the operators of the frameworks' filters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ragaccel.errors import ConfigurationError

Condition = Callable[[Mapping[str, Any]], bool]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


_TESTS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
    "in": lambda stored, value: stored in value,
    "nin": lambda stored, value: stored not in value,
    "contains": lambda stored, value: value in stored,
    "any": lambda stored, value: any(one in stored for one in value),
    "all": lambda stored, value: all(one in stored for one in value),
    "text_match": lambda stored, value: value in _text(stored),
    "text_match_insensitive": lambda stored, value: value.casefold() in _text(stored).casefold(),
}
_MET_BY_MISSING = ("ne", "nin")


def metadata_condition(name: str, test: str, value: Any) -> Condition:
    """Return a condition on one field of the metadata.

    A missing field meets only ``ne``, ``nin``, ``exists`` with False, and ``is_empty``. Values that
    cannot be compared, such as a text with a number, meet no test.

    Args:
        name: the field.
        test: ``eq``, ``ne``, ``gt``, ``gte``, ``lt``, ``lte``, ``in``, ``nin``, ``contains``,
            ``any``, ``all``, ``text_match``, ``text_match_insensitive``, ``exists``, ``is_empty``.
        value: what the field is compared with.

    Raises:
        ConfigurationError: the test is unknown.
    """
    if test == "exists":
        return lambda metadata: (name in metadata) == bool(value)
    if test == "is_empty":
        return lambda metadata: metadata.get(name) in (None, "", [])
    if test not in _TESTS:
        raise ConfigurationError(f"unknown filter operator {test}: use one of {', '.join(_TESTS)}")
    compare = _TESTS[test]

    def holds(metadata: Mapping[str, Any]) -> bool:
        if name not in metadata:
            return test in _MET_BY_MISSING
        try:
            return bool(compare(metadata[name], value))
        except (TypeError, AttributeError):
            return False

    return holds


def combine(how: str, conditions: Sequence[Condition]) -> Condition:
    """Return the condition that all of these hold (``and``), one (``or``) or none (``not``)."""
    if how == "and":
        return lambda metadata: all(holds(metadata) for holds in conditions)
    if how == "or":
        return lambda metadata: any(holds(metadata) for holds in conditions)
    if how == "not":
        return lambda metadata: not any(holds(metadata) for holds in conditions)
    raise ConfigurationError(f"filters cannot be joined by {how}: use and, or, or not")
