"""Results of decoding: one ``Step`` per verification pass, one ``GenerationResult`` per request."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ragaccel.decoding.tree import Origin


FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens that one verification pass emitted, and the number of draft tokens it checked.

    ``origins`` has one entry per token: the sources that drafted the token, the most confident
    first. The entry of a bonus token is empty, as is that of a drafter that names no source.
    """

    token_ids: tuple[int, ...]
    num_drafts: int = 0
    num_accepted: int = 0
    origins: tuple[tuple[Origin, ...], ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the source credited with each token; "" for a token that was not drafted."""
        return tuple(origins[0].source if origins else "" for origins in self.origins)


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts and seconds of one request.

    ``accepted_by_source`` credits each accepted token to the most confident source that drafted it;
    its values sum to ``accepted_tokens``. ``verify_seconds`` covers everything between a draft and
    its commit. ``total_seconds`` is the sum of the three stages, without the time that the consumer
    spends between steps. ``graphs`` is "on" where a GPU replays passes as CUDA graphs, or "off" and
    why not; empty on a CPU.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    verify_passes: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0
    graphs: str = ""

    @property
    def acceptance_length(self) -> float:
        """Return the emitted tokens per pass, end token included; 1.0 for plain decoding."""
        return self.new_tokens / max(1, self.verify_passes)

    @property
    def acceptance_rate(self) -> float:
        """Return the share of the verified draft tokens that were accepted."""
        return self.accepted_tokens / max(1, self.draft_tokens)

    @property
    def tokens_per_second(self) -> float:
        """Return the new tokens per second of work, prefill included."""
        return self.new_tokens / self.total_seconds if self.total_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all counts, seconds and ratios, ready for JSON."""
        return {
            **asdict(self),
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished generation, in token ids. The end token is included.

    ``finish_reason`` is "stop" for an end token or a stop rule, "length" for ``max_new_tokens``,
    and "cancelled" for a session closed before its end.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats = field(default_factory=Stats)
