"""Answers from your own documents by a local model that copies from what it retrieved.

>>> from ragaccel import LLM
>>> llm = LLM.load()
>>> answer = llm.generate("…", references=["…"])

Names are loaded when they are first used: importing this package loads neither torch nor
transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULE_OF = {
    "LLM": "llm",
    "Settings": "llm",
    "RAG": "rag",
    "Prompt": "prompt",
    "build_prompt": "prompt",
    "Answer": "answer",
    "Stream": "answer",
    "Usage": "answer",
    "CopiedSpan": "citing",
    "copied_spans": "citing",
    "Highlighter": "highlighting",
    "Segment": "highlighting",
    "Document": "passage",
    "Passage": "passage",
    "Reference": "decode.request",
    "Context": "decode.context",
    "Drafter": "decode.interfaces",
    "NoDrafter": "decode.interfaces",
    "DraftTree": "decode.tree",
    "Origin": "decode.tree",
    "Stats": "decode.result",
    "CopyDrafter": "draft.copying",
    "RagaccelError": "errors",
    "ConfigurationError": "errors",
    "CapacityError": "errors",
    "MissingExtraError": "errors",
    "ModelNotFoundError": "errors",
    "ModelRefusedError": "errors",
    "DocumentError": "errors",
    "NothingIndexedError": "errors",
    "IndexMismatchError": "errors",
    "IndexCorruptError": "errors",
    "IndexBusyError": "errors",
}

if TYPE_CHECKING:
    from ragaccel.answer import Answer, Stream, Usage
    from ragaccel.citing import CopiedSpan, copied_spans
    from ragaccel.decode.context import Context
    from ragaccel.decode.interfaces import Drafter, NoDrafter
    from ragaccel.decode.request import Reference
    from ragaccel.decode.result import Stats
    from ragaccel.decode.tree import DraftTree, Origin
    from ragaccel.draft.copying import CopyDrafter
    from ragaccel.errors import (
        CapacityError,
        ConfigurationError,
        DocumentError,
        IndexBusyError,
        IndexCorruptError,
        IndexMismatchError,
        MissingExtraError,
        ModelNotFoundError,
        ModelRefusedError,
        NothingIndexedError,
        RagaccelError,
    )
    from ragaccel.highlighting import Highlighter, Segment
    from ragaccel.llm import LLM, Settings
    from ragaccel.passage import Document, Passage
    from ragaccel.prompt import Prompt, build_prompt
    from ragaccel.rag import RAG

__all__ = [
    "LLM",
    "RAG",
    "Answer",
    "CapacityError",
    "ConfigurationError",
    "Context",
    "CopiedSpan",
    "CopyDrafter",
    "Document",
    "DocumentError",
    "DraftTree",
    "Drafter",
    "Highlighter",
    "IndexBusyError",
    "IndexCorruptError",
    "IndexMismatchError",
    "MissingExtraError",
    "ModelNotFoundError",
    "ModelRefusedError",
    "NoDrafter",
    "NothingIndexedError",
    "Origin",
    "Passage",
    "Prompt",
    "RagaccelError",
    "Reference",
    "Segment",
    "Settings",
    "Stats",
    "Stream",
    "Usage",
    "build_prompt",
    "copied_spans",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
