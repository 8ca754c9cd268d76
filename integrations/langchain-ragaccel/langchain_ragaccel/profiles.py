"""Profiles: what LangChain's agents ask of a model before it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_core.language_models.model_profile import ModelProfile
    from ragaccel import LLM


def profile_of(model: str | None, llm: LLM | None) -> ModelProfile | None:
    """What is known of a loaded model, or by the files of one in a folder; else None.

    Nothing is loaded for it, so that making a chat model stays a matter of microseconds.
    """
    if llm is not None:
        return _profile(llm.context_length, calls_tools=llm.tokenizer.takes_tools)
    folder = None if model is None else Path(model)
    if folder is None or not (folder / "config.json").is_file():
        return None
    config = _read(folder / "config.json")
    length = config.get("text_config", config).get("max_position_embeddings")
    return _profile(length, calls_tools="tools" in _template(folder))


def _profile(length: int | None, *, calls_tools: bool) -> ModelProfile:
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


def _template(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    path = folder / "tokenizer_config.json"
    return str(_read(path).get("chat_template")) if path.is_file() else ""


def _read(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return read
