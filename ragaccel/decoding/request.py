"""Requests: what to generate, from which tokens, and when to stop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ragaccel import errors as checks
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence


MAX_NEW_TOKENS = 256
"""Default limit of an answer, in tokens."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Token ids of a text that the answer is likely to repeat, such as a retrieved passage.

    The text need not be in the prompt. ``weight`` is its retrieval score, scaled to 0..1; it ranks
    equal matches. ``passage_id`` comes back in the ``Origin`` of every token copied from the
    reference.
    """

    token_ids: tuple[int, ...]
    weight: float = 1.0
    passage_id: str = ""

    def __post_init__(self) -> None:
        ids = checks.token_ids("a reference's token_ids", self.token_ids)
        object.__setattr__(self, "token_ids", ids)
        object.__setattr__(self, "weight", checks.number("a reference's weight", self.weight))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target model samples a token: greedily if the temperature is 0.

    ``top_k`` 0, ``top_p`` 1.0 and ``min_p`` 0.0 turn their filter off. The draw at a position
    depends only on the seed and the position, so drafting never changes a sampled answer.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self, checks.whole, "top_k", "seed")
        _check(self, checks.number, "temperature", "top_p", "min_p")
        _require(self.temperature >= 0.0, "temperature", self.temperature, "0 or more")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1 (off)")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "between 0 (off) and 1")

    @property
    def is_greedy(self) -> bool:
        """Return whether the likeliest token is always taken: the temperature is 0."""
        return self.temperature == 0.0


class StopRule(Protocol):
    """A pure function of the answer's tokens that finds where the answer must end."""

    def cut(self, token_ids: Sequence[int], start: int) -> int | None:
        """Return the number of answer tokens to keep, or None to continue.

        ``token_ids`` holds all new tokens of the answer, including the block just accepted.
        ``start`` is the index of the block's first token. Return the first end inside the block,
        counted from the start of the answer: above ``start`` and at most ``len(token_ids)``.
        Earlier calls have judged the tokens before ``start``.
        """
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """The prompt and all options of one generation, in token ids.

    An end token (``eos_ids``) ends the answer and is part of it. No end token is sampled before
    ``min_new_tokens`` tokens, unless a processor leaves nothing else; stop rules apply from the
    first token on. Both are as in transformers.

    ``processors`` are logits processors: pure functions of (ids, scores) that only the verifier
    calls. One with a true attribute ``stateful`` is called once per token, in order, and forces
    plain decoding. One with a true attribute ``takes_batches`` may be called with several rows of
    equal length at once.
    ``namespace`` names the memory that the request uses; tenants with other names share nothing.

    Raises:
        ConfigurationError: a field has an invalid value; the message names both.
    """

    prompt_ids: tuple[int, ...]
    references: tuple[Reference, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = MAX_NEW_TOKENS
    min_new_tokens: int = 0
    eos_ids: frozenset[int] = frozenset()
    stop_rules: tuple[StopRule, ...] = ()
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    processors: tuple[Any, ...] = ()
    namespace: str = ""

    def __post_init__(self) -> None:
        _check(self, checks.token_ids, "prompt_ids")
        for name in ("references", "stop_rules", "processors"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "eos_ids", frozenset(self.eos_ids))
        if not isinstance(self.namespace, str):
            raise ConfigurationError(f"namespace must be a string, not {self.namespace!r}")
        if not self.prompt_ids:
            raise ConfigurationError("the prompt is empty: give at least one token")
        _check(self, checks.whole, "max_new_tokens", "min_new_tokens", "no_repeat_ngram_size")
        _check(self, checks.number, "repetition_penalty")
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "1 or more")
        limits = f"between 0 and max_new_tokens ({self.max_new_tokens})"
        _require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            self.min_new_tokens,
            limits,
        )
        _require(
            self.repetition_penalty > 0.0, "repetition_penalty", self.repetition_penalty, "above 0"
        )
        _require(
            self.no_repeat_ngram_size >= 0,
            "no_repeat_ngram_size",
            self.no_repeat_ngram_size,
            "0 (off) or more",
        )

    @property
    def is_plain(self) -> bool:
        """Return whether a stateful processor forbids drafting: it must see each token once."""
        return any(getattr(processor, "stateful", False) for processor in self.processors)


def _check(settings: object, check: checks.Check, *names: str) -> None:
    for name in names:
        object.__setattr__(settings, name, check(name, getattr(settings, name)))


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ConfigurationError(f"{name} must be {wanted}, not {value}")


class Cancelled(RuntimeError):  # noqa: N818 - nothing went wrong
    """The request was cancelled before its end."""


class Cancellation:
    """A flag that any thread can set and nobody can clear; decoding checks it between two steps.

    It takes no lock, so it can be set during garbage collection.
    """

    __slots__ = ("is_cancelled",)

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        """Set the flag, so that decoding ends after the current step."""
        self.is_cancelled = True
