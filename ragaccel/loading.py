"""Loading: from a name or a folder to what an LLM is made of, and what is begun meanwhile."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ragaccel.models.load import bundled_reader_path, load_model
from ragaccel.rehearsal import REHEARSAL

if TYPE_CHECKING:
    from pathlib import Path

    from ragaccel.models.huggingface import HuggingFaceModel
    from ragaccel.models.parallel import ParallelModel
    from ragaccel.models.tokenizer import Tokenizer

_BUNDLED = (
    "ragaccel: no model named, so the bundled reader answers: it quotes one sentence and names its "
    "passage\n"
)


def open_model(
    name_or_path: str | Path | None, *, rehearse: bool, **arguments: Any
) -> tuple[HuggingFaceModel | ParallelModel, Tokenizer]:
    """Load a model and its tokenizer; errors are those of ``load_model``.

    Args:
        name_or_path: what to load; None is the bundled reader, and stderr says so.
        rehearse: compile the drafting functions beside the loading.
        **arguments: for ``load_model``.
    """
    if name_or_path is None:
        name_or_path = bundled_reader_path()
        sys.stderr.write(_BUNDLED)
    if rehearse:
        REHEARSAL.start()
    return load_model(str(name_or_path), **arguments)
