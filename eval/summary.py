"""Summaries: from the rows of a speed run to one figure per contender and quantity."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict
from statistics import fmean, harmonic_mean, median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from eval.contenders import BASELINE, COPYING, LOOKUP, PLAIN, STATIC
from eval.ratios import paired_ratio
from eval.rows_cost import seconds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Row = dict[str, Any]
Speeds = dict[tuple[str, int], float]


def summarize(
    rows: Sequence[Row], costs: Mapping[int, float] = MappingProxyType({})
) -> dict[str, dict[str, Any]]:
    """Summarize each contender, in order of first appearance.

    ``tokens_per_second`` is all tokens over all decoding seconds, prefill apart; ``ratio``,
    ``ratio_generate``, ``ratio_copying``, ``ratio_static`` and ``ratio_lookup`` are median paired
    speed-ups of decoding over our plain decoding, over ``model.generate``, over one copied span,
    over ``generate`` with a static cache and over its prompt lookup; ``end_to_end`` holds the same
    with prefill included.
    ``acceptance_length`` is all tokens over all passes, ``acceptance_histogram`` how many passes
    gave how many tokens. Seconds are sums over all rows. Where ``costs`` are given, the seconds of
    a pass by its rows, ``efficiency`` is the median share that
    our drafting decoders reached of the ``promised_ratio`` of their passes. ``peak_bytes``, on a
    GPU, is the most that lay there in any run, other decoders' own left out.
    """
    by_name: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_name[row["contender"]].append(row)
    decoding = {name: _speeds(own, "decode_seconds") for name, own in by_name.items()}
    whole = {
        name: _speeds(own, "prefill_seconds", "decode_seconds") for name, own in by_name.items()
    }
    answers = {_key(row): row["answer_hash"] for row in by_name.get(BASELINE, ())}
    return {
        name: {
            **_speed(own, decoding, name, "decode_seconds"),
            "end_to_end": _speed(own, whole, name, "prefill_seconds", "decode_seconds"),
            **_counts(own),
            **_efficiency(own, decoding, name, costs),
            "identical_to_generate": _identical(own, answers),
        }
        for name, own in by_name.items()
    }


def _speed(own: list[Row], speeds: Mapping[str, Speeds], name: str, *parts: str) -> dict[str, Any]:
    seconds = sum(row[part] for row in own for part in parts)
    result: dict[str, Any] = {"tokens_per_second": sum(row["tokens"] for row in own) / seconds}
    for label, other in (
        ("ratio", PLAIN),
        ("ratio_generate", BASELINE),
        ("ratio_copying", COPYING),
        ("ratio_static", STATIC),
        ("ratio_lookup", LOOKUP),
    ):
        if other in speeds:
            ratio = asdict(paired_ratio(speeds[name], speeds[other]))
            result[label] = ratio["value"]
            result[f"{label}_interval"] = [ratio["low"], ratio["high"]]
            result[f"{label}_worst"] = ratio["worst"]
    return result


def _efficiency(
    own: list[Row], speeds: Mapping[str, Speeds], name: str, costs: Mapping[int, float]
) -> dict[str, Any]:
    if not costs or name == PLAIN or PLAIN not in speeds or "draft" not in own[0]["stages"]:
        return {}
    plain = speeds[PLAIN]
    reached = {key: speed / plain[key] for key, speed in speeds[name].items() if key in plain}
    result: dict[str, Any] = {}
    for label, mean in (("efficiency", fmean), ("efficiency_harmonic", harmonic_mean)):
        ratio = paired_ratio(reached, {_key(row): promised_ratio(row, costs, mean) for row in own})
        result[label], result[f"{label}_worst"] = ratio.value, ratio.worst
        result[f"{label}_interval"] = [ratio.low, ratio.high]
    return result


def promised_ratio(
    row: Row, costs: Mapping[int, float], mean: Callable[[Sequence[float]], float]
) -> float:
    """The speed-up that a run's passes promise: acceptance length times the mean of t(1) / t(n).

    The harmonic mean gives what passes alone would take; the arithmetic one is never below it and
    promises a little much where passes differ in their n rows.
    """
    shares = [costs[1] / seconds for seconds in seconds_of(row["rows_of_each"], costs)]
    return float(row["tokens"] / row["passes"] * mean(shares))


def _counts(own: list[Row]) -> dict[str, Any]:
    tokens, passes = sum(row["tokens"] for row in own), sum(row["passes"] for row in own)
    decode = sum(row["decode_seconds"] for row in own)
    stages: defaultdict[str, float] = defaultdict(float)
    for row in own:
        for stage, seconds in row["stages"].items():
            stages[stage] += seconds
    known = stages.get("remember", 0.0) + (
        stages["draft"] + stages["verify"] if "verify" in stages else stages.get("model", decode)
    )
    return {
        "examples": len({row["example"] for row in own}),
        "runs": len(own),
        "tokens": tokens,
        "passes": passes,
        "acceptance_length": tokens / passes,
        "rows_per_pass": sum(row["rows"] for row in own) / passes,
        "draft_tokens": sum(row["draft_tokens"] for row in own),
        "accepted_tokens": sum(row["accepted_tokens"] for row in own),
        **_peak(own),
        "prefill_seconds_median": median(row["prefill_seconds"] for row in own),
        **_first_token(own),
        **_histogram(own),
        "seconds": {
            "prefill": sum(row["prefill_seconds"] for row in own),
            **stages,
            "other": max(0.0, decode - known),
            "forcing": sum(row["forcing_seconds"] for row in own),
        },
    }


def _first_token(own: list[Row]) -> dict[str, float]:
    seconds = [row["first_token_seconds"] for row in own if "first_token_seconds" in row]
    return {"first_token_seconds_median": median(seconds)} if seconds else {}


def _histogram(own: list[Row]) -> dict[str, dict[str, int]]:
    """How many passes emitted how many tokens."""
    passes = Counter(number for row in own for number in row.get("tokens_of_each", ()))
    return {"acceptance_histogram": {str(n): passes[n] for n in sorted(passes)}} if passes else {}


def _peak(own: list[Row]) -> dict[str, int]:
    peaks = [row["peak_bytes"] for row in own if "peak_bytes" in row]
    return {"peak_bytes": max(peaks)} if peaks else {}


def _identical(own: list[Row], answers: Mapping[tuple[str, int], str]) -> float | None:
    """Share of runs whose tokens are those of ``generate`` in the same round."""
    shared = [row["answer_hash"] == answers[_key(row)] for row in own if _key(row) in answers]
    return sum(shared) / len(shared) if shared else None


def _speeds(own: list[Row], *parts: str) -> Speeds:
    return {_key(row): row["tokens"] / sum(row[part] for part in parts) for row in own}


def _key(row: Row) -> tuple[str, int]:
    return row["example"], row["round"]
