"""Profiles: what LangChain's agents ask of a model, known before its weights are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragaccel import RagaccelError

if TYPE_CHECKING:
    from langchain_core.language_models.model_profile import ModelProfile
    from ragaccel import SharedModel


def profile_of(model: SharedModel) -> ModelProfile | None:
    """What a model can do, by its config and tokenizer; None where they cannot be read.

    Why they cannot is told by the first answer: to the framework a profile may be missing.
    """
    try:
        length, calls_tools = model.context_length, model.tokenizer.takes_tools
    except RagaccelError:
        return None
    profile: ModelProfile = {
        "text_inputs": True,
        "image_inputs": False,
        "audio_inputs": False,
        "video_inputs": False,
        "pdf_inputs": False,
        "text_outputs": True,
        "image_outputs": False,
        "audio_outputs": False,
        "tool_calling": calls_tools,
        "structured_output": False,  # schemas are asked for as tools, and nothing enforces them
    }
    if length:
        profile["max_input_tokens"] = length
    return profile
