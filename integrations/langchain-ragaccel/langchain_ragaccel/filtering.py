"""Filtering: conditions on documents, written as a dictionary or as a function."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

from langchain_core.documents import Document
from ragaccel import ConfigurationError

Filter = Mapping[str, Any] | Callable[[Document], bool]
Condition = Callable[[Document], bool]


def as_condition(given: Filter | None) -> Condition | None:
    """Turn a filter into a condition on a document; None if there is none.

    ``{"source": "log.pdf"}`` asks for equal metadata, ``{"year": {"$gte": 1874}}`` compares
    (``$eq $ne $gt $gte $lt $lte $in $nin``, ``$exists``), ``$and``, ``$or`` and ``$not`` combine.
    What metadata lacks, or cannot be compared, meets no condition but ``$ne``, ``$nin`` and
    ``{"$exists": False}``.

    Raises:
        ConfigurationError: It is neither a dictionary of such kind nor a function.
    """
    if given is None or callable(given):
        return given
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"a filter is a dictionary or a function, not {given!r}")
    conditions = [_on_metadata(name, asked) for name, asked in given.items()]
    return lambda document: all(holds(document.metadata) for holds in conditions)


def _on_metadata(name: str, asked: Any) -> Callable[[Mapping[str, Any]], bool]:
    if name in ("$and", "$or"):
        joined = all if name == "$and" else any
        parts = [_on_all(part) for part in _several(name, asked)]
        return lambda metadata: joined(holds(metadata) for holds in parts)
    if name == "$not":
        holds = _on_all(asked)
        return lambda metadata: not holds(metadata)
    if name.startswith("$"):
        raise ConfigurationError(f"a filter combines by $and, $or and $not, not by {name}")
    if not (isinstance(asked, Mapping) and any(str(key).startswith("$") for key in asked)):
        return lambda metadata: name in metadata and metadata[name] == asked
    tests = [_comparison(key, value) for key, value in asked.items()]
    return lambda metadata: all(test(metadata, name) for test in tests)


def _on_all(asked: Any) -> Callable[[Mapping[str, Any]], bool]:
    if not isinstance(asked, Mapping):
        raise ConfigurationError(f"a part of a filter is a dictionary, not {asked!r}")
    conditions = [_on_metadata(name, value) for name, value in asked.items()]
    return lambda metadata: all(holds(metadata) for holds in conditions)


def _comparison(key: str, value: Any) -> Callable[[Mapping[str, Any], str], bool]:
    if key == "$exists":
        return lambda metadata, name: (name in metadata) == bool(value)
    if key in ("$ne", "$nin"):
        same = _comparison("$eq" if key == "$ne" else "$in", value)
        return lambda metadata, name: not same(metadata, name)
    if key == "$in":
        values = _several(key, value)
        return lambda metadata, name: name in metadata and metadata[name] in values
    if key not in _ORDERS:
        raise ConfigurationError(f"{key} is no comparison: use one of {', '.join(_KNOWN)}")
    return lambda metadata, name: name in metadata and _compares(key, metadata[name], value)


def _compares(key: str, held: Any, value: Any) -> bool:
    try:
        return bool(_ORDERS[key](held, value))
    except TypeError:  # a text and a number have no order
        return False


def _several(key: str, value: Any) -> Collection[Any]:
    if isinstance(value, str | Mapping) or not isinstance(value, Collection):
        raise ConfigurationError(f"{key} takes a list, not {value!r}")
    return list(value)


_ORDERS = {
    "$eq": operator.eq,
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}
_KNOWN = (*_ORDERS, "$ne", "$in", "$nin", "$exists")
