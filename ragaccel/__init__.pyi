# The public names, once: they are loaded when first used, and type checkers read them here.

from .answer import (
    Answer as Answer,
)
from .answer import (
    AsyncStream as AsyncStream,
)
from .answer import (
    CopiedSpan as CopiedSpan,
)
from .answer import (
    Stream as Stream,
)
from .answer import (
    Usage as Usage,
)
from .answer import (
    citations as citations,
)
from .answer import (
    copied_spans as copied_spans,
)
from .config import Settings as Settings
from .decoding.request import Reference as Reference
from .decoding.session import (
    Context as Context,
)
from .decoding.session import (
    Drafter as Drafter,
)
from .decoding.session import (
    NoDrafter as NoDrafter,
)
from .decoding.stats import Stats as Stats
from .decoding.tree import DraftTree as DraftTree
from .drafting.answer_memory import AnswerMemory as AnswerMemory
from .drafting.memory import Memory as Memory
from .drafting.ngram import CopyDrafter as CopyDrafter
from .drafting.policy import Mixture as Mixture
from .drafting.space import SpaceDrafter as SpaceDrafter
from .drafting.trie import TrieDrafter as TrieDrafter
from .errors import (
    CapacityError as CapacityError,
)
from .errors import (
    ConfigurationError as ConfigurationError,
)
from .errors import (
    DocumentError as DocumentError,
)
from .errors import (
    EmptyIndexError as EmptyIndexError,
)
from .errors import (
    IndexBusyError as IndexBusyError,
)
from .errors import (
    IndexUnusableError as IndexUnusableError,
)
from .errors import (
    MissingExtraError as MissingExtraError,
)
from .errors import (
    ModelNotFoundError as ModelNotFoundError,
)
from .errors import (
    RagaccelError as RagaccelError,
)
from .errors import (
    StorageError as StorageError,
)
from .errors import (
    UnsupportedModelError as UnsupportedModelError,
)
from .frameworks.hf_generate import custom_generate as custom_generate
from .frameworks.registry import reference_scope as reference_scope
from .llm import LLM as LLM
from .models.space_adapter import SpaceAdapter as SpaceAdapter
from .passage import (
    Document as Document,
)
from .passage import (
    Passage as Passage,
)
from .prompt import (
    Prompt as Prompt,
)
from .prompt import (
    build_prompt as build_prompt,
)
from .rag import RAG as RAG
from .retrieval.collection import Collection as Collection
from .retrieval.embedder import (
    Embedder as Embedder,
)
from .retrieval.embedder import (
    load_embedder as load_embedder,
)
from .retrieval.indexing import (
    IndexReport as IndexReport,
)
from .retrieval.indexing import (
    index_folder as index_folder,
)
from .retrieval.indexing import (
    index_passages as index_passages,
)
from .retrieval.retriever import (
    Retriever as Retriever,
)
from .retrieval.retriever import (
    open_retriever as open_retriever,
)
from .retrieval.store import Store as Store

__version__: str
