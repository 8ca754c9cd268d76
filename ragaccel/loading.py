"""Loading: from a name or a folder to what an LLM is made of, and what is begun meanwhile."""

from __future__ import annotations

import sys
from os import PathLike
from typing import TYPE_CHECKING, Any, Union

from ragaccel.checks import shown
from ragaccel.errors import ConfigurationError
from ragaccel.models.load import bundled_reader_path, load_model
from ragaccel.models.space_adapter import SpaceAdapter
from ragaccel.rehearsal import REHEARSAL

if TYPE_CHECKING:
    from pathlib import Path

    from ragaccel.models.hf_model import HuggingFaceModel
    from ragaccel.models.tokenizer import Tokenizer

SUGGESTED_MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
"""A model that answers in its own words and that a laptop runs; 3 GB."""
BUNDLED_READER = (
    "no model named: the bundled reader answers, a small one that quotes English sentences"
)


def open_model(
    name_or_path: str | Path | None, *, rehearse: bool, **arguments: Any
) -> tuple[HuggingFaceModel, Tokenizer]:
    """Load a model and its tokenizer; errors are those of ``load_model``.

    Args:
        name_or_path: what to load; None is the bundled reader, and stderr says so.
        rehearse: compile the drafting functions beside the loading.
        **arguments: for ``load_model``.
    """
    if name_or_path is None:
        name_or_path = bundled_reader_path()
        sys.stderr.write(f"ragaccel: {BUNDLED_READER} (another: LLM.load({SUGGESTED_MODEL!r}))\n")
    if not isinstance(name_or_path, str | PathLike):
        raise ConfigurationError(
            f"a model is named by a string or a path, not {shown(name_or_path)}"
        )
    if rehearse:
        REHEARSAL.start()
    return load_model(str(name_or_path), **arguments)


Space = Union["SpaceAdapter", str, "Path", bool]
"""A SPACE adapter, or where one is: a folder, a name on the hub, or, if true, the model's own."""


def use_space(model: HuggingFaceModel, space: Space | None, *, exact: bool) -> range:
    """Let a model wear a SPACE adapter; none if ``space`` is false or ``None``.

    Returns:
        the mask tokens that are worth their rows (``SpaceAdapter.num_useful``).

    Raises:
        ModelNotFoundError: there is none of that name, or the model brings none.
        ConfigurationError: it does not fit the model, or nothing could be guessed with it.
    """
    first = model.vocab_size
    if space is None or space is False:
        return range(first, first)
    if exact:
        raise ConfigurationError(
            "exact mode has no rows for mask tokens: leave out space, or exact=True"
        )
    if space is True:
        revision = getattr(model.model.config, "_commit_hash", None)
        adapter = SpaceAdapter.of_model(model.model.name_or_path, revision)
    else:
        adapter = space if isinstance(space, SpaceAdapter) else SpaceAdapter.load(space)
    model.use_space(adapter)
    return range(first, first + adapter.num_useful)
