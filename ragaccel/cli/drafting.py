"""Drafting: from the settings to where an answer's guesses come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragaccel.cli.settings import Settings
    from ragaccel.decoding.session import Drafter
    from ragaccel.llm import LLM


def space_of(settings: Settings) -> str | bool | None:
    """Which SPACE adapter the model is to wear: one that is named, its own, or none."""
    drafter, space = settings.drafter, settings.space
    if drafter in ("trees", "copy"):
        return None
    return space or (drafter is not None or None)


def drafter_of(settings: Settings, llm: LLM) -> Drafter | None:
    """Make the drafter that is named; None for the model's own: trees, and SPACE if it is worn."""
    kind = settings.drafter
    if kind == "copy":
        from ragaccel.drafting.ngram import CopyDrafter

        return CopyDrafter()
    if kind == "space":
        from ragaccel.drafting.space import SpaceDrafter

        return SpaceDrafter(llm.probe_ids)
    return None
