"""Outline: what the files of a model tell about it, read without torch and transformers."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ragaccel.models.architecture import read_max_positions

if TYPE_CHECKING:
    from collections.abc import Mapping

_NESTED = ("decoder", "generator", "text_config")
_ROPES = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True, slots=True)
class FileOutline:
    """What is known of a model by its files alone.

    ``context_length`` is the most tokens of a prompt with its answer. Where ``names_tools`` is
    false, no chat template takes tools; where it is true, only laying some out can tell.
    """

    context_length: int
    has_chat_template: bool
    names_tools: bool = True


def read_outline(
    name_or_path: str | Path | None = None, options: Mapping[str, Any] | None = None
) -> FileOutline | None:
    """Read config.json and where a chat template is kept, in about a millisecond.

    Importing transformers takes seconds, in which an event loop would stand still. None where
    only transformers can tell: files that are not here yet, code of a model's own, settings that
    are left to defaults. ``outline_model`` tells then, and what is wrong with a model.

    Args:
        name_or_path: a folder, or a name on the hub; the bundled reader without one.
        options: those of ``load_model``.
    """
    folder = _folder(name_or_path, options or {})
    if folder is None or (folder / "tekken.json").exists():  # brings a template of its own
        return None
    config, words = _json(folder / "config.json"), _json(folder / "tokenizer_config.json")
    if config is None or words is None or "auto_map" in {*config, *words}:
        return None
    length = _context_length(config)
    if length is None:
        return None
    return FileOutline(length, _has_template(folder, words), _names_tools(folder, words))


def _folder(name: str | Path | None, options: Mapping[str, Any]) -> Path | None:
    if name is None:
        return Path(__file__).parent / "reader"
    folder = Path(name).expanduser()
    if os.path.isdir(folder):
        return folder / (options.get("subfolder") or "")
    if isinstance(name, Path):
        return None
    from ragaccel.models.locate import cached_folder

    return cached_folder(name, options)


def _json(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _context_length(config: dict[str, Any]) -> int | None:
    """The same as transformers' config says, if it is written out and nothing there is odd."""
    nested = [config[name] for name in _NESTED if config.get(name) is not None]
    text = nested[0] if nested else config
    if len(nested) > 1 or not isinstance(text, dict) or config.get("is_encoder_decoder"):
        return None
    if not isinstance(text.get("max_position_embeddings"), int):
        return None
    if not all(isinstance(text.get(rope) or {}, dict) for rope in _ROPES):
        return None
    return read_max_positions(SimpleNamespace(**text))


def _has_template(folder: Path, words: dict[str, Any]) -> bool:
    """Whether transformers finds a template to use where none is named."""
    single = folder / "chat_template.jinja"
    if single.is_file() and single.stat().st_size:
        return True
    if any((folder / "additional_chat_templates").glob("*.jinja")):
        return False  # templates that are named count before those of the tokenizer's config
    template = words.get("chat_template")
    if isinstance(template, list):
        template = {one.get("name"): one for one in template if isinstance(one, dict)}
    return "default" in template if isinstance(template, dict) else bool(template)


def _names_tools(folder: Path, words: dict[str, Any]) -> bool:
    """Whether the word stands in any chat template: one that takes tools has to name them."""
    files = [folder / "chat_template.jinja", *(folder / "additional_chat_templates").glob("*")]
    written = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    return any("tools" in text for text in (json.dumps(words.get("chat_template")), *written))
