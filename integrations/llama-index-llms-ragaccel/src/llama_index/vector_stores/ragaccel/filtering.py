"""Filtering: LlamaIndex's metadata filters as conditions on metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
)

from ragaccel import ConfigurationError

Condition = Callable[[Mapping[str, Any]], bool]

_TESTS: dict[FilterOperator, Callable[[Any, Any], bool]] = {
    FilterOperator.EQ: lambda held, value: held == value,
    FilterOperator.NE: lambda held, value: held != value,
    FilterOperator.GT: lambda held, value: held > value,
    FilterOperator.GTE: lambda held, value: held >= value,
    FilterOperator.LT: lambda held, value: held < value,
    FilterOperator.LTE: lambda held, value: held <= value,
    FilterOperator.IN: lambda held, value: held in value,
    FilterOperator.NIN: lambda held, value: held not in value,
    FilterOperator.CONTAINS: lambda held, value: value in held,
    FilterOperator.ANY: lambda held, value: any(one in held for one in value),
    FilterOperator.ALL: lambda held, value: all(one in held for one in value),
    FilterOperator.TEXT_MATCH: lambda held, value: value in _text(held),
    FilterOperator.TEXT_MATCH_INSENSITIVE: lambda held, value: (
        value.casefold() in _text(held).casefold()
    ),
}
_OF_WHAT_IS_MISSING = (FilterOperator.NE, FilterOperator.NIN)


def as_condition(filters: MetadataFilters) -> Condition:
    """Turn filters, which may hold filters, into a condition on a node's metadata.

    What metadata lacks meets only ``NE``, ``NIN`` and ``IS_EMPTY``; what cannot be compared, as a
    text with a number, meets none. ``NOT`` holds when none of its filters does.

    Raises:
        ConfigurationError: An operator or condition that is not known.
    """
    parts = [
        as_condition(part) if isinstance(part, MetadataFilters) else _test(part)
        for part in filters.filters
    ]
    condition = filters.condition or FilterCondition.AND
    if not parts or condition == FilterCondition.AND:
        return lambda metadata: all(part(metadata) for part in parts)
    if condition == FilterCondition.OR:
        return lambda metadata: any(part(metadata) for part in parts)
    if condition == FilterCondition.NOT:
        return lambda metadata: not any(part(metadata) for part in parts)
    raise ConfigurationError(f"filters are joined by AND, OR and NOT, not by {condition}")


def _test(asked: MetadataFilter) -> Condition:
    key, value, operator = asked.key, asked.value, asked.operator
    if operator == FilterOperator.IS_EMPTY:
        return lambda metadata: metadata.get(key) in (None, "", [])
    if operator not in _TESTS:
        raise ConfigurationError(f"{operator} is no operator that is known here")
    test = _TESTS[operator]

    def holds(metadata: Mapping[str, Any]) -> bool:
        held = metadata.get(key)
        if held is None:
            return operator in _OF_WHAT_IS_MISSING
        try:
            return test(held, value)
        except (TypeError, AttributeError):  # such as a text and a number, which have no order
            return False

    return holds


def _text(held: Any) -> str:
    if not isinstance(held, str):
        raise TypeError("no text")
    return held
