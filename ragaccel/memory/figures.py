"""Figures: what a memory holds, has let go and was good for, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one namespace: what it remembers, and how many requests it has let go to make room."""

    requests: int
    tokens: int
    num_bytes: int
    evicted_requests: int


@dataclass(frozen=True, slots=True)
class MemoryFigures(Figures):
    """Of all namespaces together.

    ``hits`` and ``misses`` count how often a namespace was asked for and something, or nothing,
    was remembered of it. Requests of a namespace that was let go as a whole are not counted
    among ``evicted_requests``.
    """

    namespaces: int
    evicted_namespaces: int
    hits: int
    misses: int


@dataclass(frozen=True, slots=True)
class AnswerFigures:
    """Of an answer memory; ``hits`` are questions to which something similar was found."""

    entries: int
    num_bytes: int
    evictions: int
    hits: int
    misses: int
