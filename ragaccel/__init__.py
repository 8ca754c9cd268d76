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
    "ModelInfo": "models.load",
    "read_model_info": "models.load",
    "SharedModel": "frameworks.shared_model",
    "get_shared_model": "frameworks.shared_model",
    "Settings": "config",
    "RAG": "rag",
    "Prompt": "prompt",
    "is_documents_only": "frameworks.prompt_parsing",
    "parse_prompt": "frameworks.prompt_parsing",
    "build_prompt": "prompt",
    "adapt_messages": "prompt",
    "Answer": "answer",
    "Stream": "answer",
    "AsyncStream": "answer",
    "Usage": "answer",
    "CopiedSpan": "answer",
    "copied_spans": "answer",
    "citations": "answer",
    "Highlighter": "answer",
    "Segment": "answer",
    "Document": "passage",
    "Passage": "passage",
    "Reference": "decoding.request",
    "Context": "decoding.session",
    "Drafter": "decoding.session",
    "NoDrafter": "decoding.session",
    "DraftTree": "decoding.tree",
    "Origin": "decoding.tree",
    "Stats": "decoding.stats",
    "CopyDrafter": "drafting.ngram",
    "TrieDrafter": "drafting.trie",
    "SpaceDrafter": "drafting.space",
    "PaperSpaceDrafter": "drafting.space",
    "SpaceAdapter": "models.space_adapter",
    "Mixture": "drafting.policy",
    "Memory": "drafting.memory",
    "AnswerMemory": "drafting.answer_memory",
    "Match": "frameworks.registry",
    "ReferenceRegistry": "frameworks.registry",
    "ReferenceScope": "frameworks.registry",
    "reference_scope": "frameworks.registry",
    "current_scope": "frameworks.registry",
    "VisibleReferences": "frameworks.registry",
    "visible_references": "frameworks.registry",
    "auto_references_enabled": "frameworks.registry",
    "default_registry": "frameworks.registry",
    "gather_references": "frameworks.references",
    "ToolCall": "models.tool_calls",
    "ToolFormat": "models.tool_calls",
    "detect_tool_format": "models.tool_calling",
    "ToolCalling": "models.tool_calling",
    "choose_tool": "models.tool_calling",
    "resolve_tool_calling": "models.tool_calling",
    "check_arguments": "errors",
    "is_blank": "errors",
    "custom_generate": "frameworks.hf_generate",
    "Embedder": "retrieval.embedder",
    "load_embedder": "retrieval.embedder",
    "IndexReport": "retrieval.indexing",
    "index_folder": "retrieval.indexing",
    "index_passages": "retrieval.indexing",
    "Retriever": "retrieval.retriever",
    "open_retriever": "retrieval.retriever",
    "FocusedRetriever": "retrieval.focusing",
    "Store": "retrieval.store",
    "Collection": "retrieval.collection",
    "Stored": "retrieval.collection",
    "default_index_path": "retrieval.store",
    "RagaccelError": "errors",
    "ConfigurationError": "errors",
    "UnknownArgumentError": "errors",
    "CapacityError": "errors",
    "MissingExtraError": "errors",
    "ModelNotFoundError": "errors",
    "ModelRefusedError": "errors",
    "DocumentError": "errors",
    "ForkError": "errors",
    "NothingIndexedError": "errors",
    "IndexMismatchError": "errors",
    "IndexCorruptError": "errors",
    "IndexBusyError": "errors",
    "IndexWriteError": "errors",
    "MemoryWriteError": "errors",
}

if TYPE_CHECKING:
    from ragaccel.answer import (
        Answer,
        AsyncStream,
        CopiedSpan,
        Highlighter,
        Segment,
        Stream,
        Usage,
        citations,
        copied_spans,
    )
    from ragaccel.config import Settings
    from ragaccel.decoding.request import Reference
    from ragaccel.decoding.session import Context, Drafter, NoDrafter
    from ragaccel.decoding.stats import Stats
    from ragaccel.decoding.tree import DraftTree, Origin
    from ragaccel.drafting.answer_memory import AnswerMemory
    from ragaccel.drafting.memory import Memory
    from ragaccel.drafting.ngram import CopyDrafter
    from ragaccel.drafting.policy import Mixture
    from ragaccel.drafting.space import PaperSpaceDrafter, SpaceDrafter
    from ragaccel.drafting.trie import TrieDrafter
    from ragaccel.errors import (
        CapacityError,
        ConfigurationError,
        DocumentError,
        ForkError,
        IndexBusyError,
        IndexCorruptError,
        IndexMismatchError,
        IndexWriteError,
        MemoryWriteError,
        MissingExtraError,
        ModelNotFoundError,
        ModelRefusedError,
        NothingIndexedError,
        RagaccelError,
        UnknownArgumentError,
        check_arguments,
        is_blank,
    )
    from ragaccel.frameworks.hf_generate import custom_generate
    from ragaccel.frameworks.prompt_parsing import is_documents_only, parse_prompt
    from ragaccel.frameworks.references import gather_references
    from ragaccel.frameworks.registry import (
        Match,
        ReferenceRegistry,
        ReferenceScope,
        VisibleReferences,
        auto_references_enabled,
        current_scope,
        default_registry,
        reference_scope,
        visible_references,
    )
    from ragaccel.frameworks.shared_model import SharedModel, get_shared_model
    from ragaccel.llm import LLM
    from ragaccel.models.load import ModelInfo, read_model_info
    from ragaccel.models.space_adapter import SpaceAdapter
    from ragaccel.models.tool_calling import (
        ToolCalling,
        choose_tool,
        detect_tool_format,
        resolve_tool_calling,
    )
    from ragaccel.models.tool_calls import ToolCall, ToolFormat
    from ragaccel.passage import Document, Passage
    from ragaccel.prompt import Prompt, adapt_messages, build_prompt
    from ragaccel.rag import RAG
    from ragaccel.retrieval.collection import Collection, Stored
    from ragaccel.retrieval.embedder import Embedder, load_embedder
    from ragaccel.retrieval.focusing import FocusedRetriever
    from ragaccel.retrieval.indexing import IndexReport, index_folder, index_passages
    from ragaccel.retrieval.retriever import Retriever, open_retriever
    from ragaccel.retrieval.store import Store, default_index_path

__all__ = [
    "LLM",
    "RAG",
    "Answer",
    "AnswerMemory",
    "AsyncStream",
    "CapacityError",
    "Collection",
    "ConfigurationError",
    "Context",
    "CopiedSpan",
    "CopyDrafter",
    "Document",
    "DocumentError",
    "DraftTree",
    "Drafter",
    "Embedder",
    "FocusedRetriever",
    "ForkError",
    "Highlighter",
    "IndexBusyError",
    "IndexCorruptError",
    "IndexMismatchError",
    "IndexReport",
    "IndexWriteError",
    "Match",
    "Memory",
    "MemoryWriteError",
    "MissingExtraError",
    "Mixture",
    "ModelInfo",
    "ModelNotFoundError",
    "ModelRefusedError",
    "NoDrafter",
    "NothingIndexedError",
    "Origin",
    "PaperSpaceDrafter",
    "Passage",
    "Prompt",
    "RagaccelError",
    "Reference",
    "ReferenceRegistry",
    "ReferenceScope",
    "Retriever",
    "Segment",
    "Settings",
    "SharedModel",
    "SpaceAdapter",
    "SpaceDrafter",
    "Stats",
    "Store",
    "Stored",
    "Stream",
    "ToolCall",
    "ToolCalling",
    "ToolFormat",
    "TrieDrafter",
    "UnknownArgumentError",
    "Usage",
    "VisibleReferences",
    "adapt_messages",
    "auto_references_enabled",
    "build_prompt",
    "check_arguments",
    "choose_tool",
    "citations",
    "copied_spans",
    "current_scope",
    "custom_generate",
    "default_index_path",
    "default_registry",
    "detect_tool_format",
    "gather_references",
    "get_shared_model",
    "index_folder",
    "index_passages",
    "is_blank",
    "is_documents_only",
    "load_embedder",
    "open_retriever",
    "parse_prompt",
    "read_model_info",
    "reference_scope",
    "resolve_tool_calling",
    "visible_references",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
