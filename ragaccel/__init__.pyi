# The public names, once: they are loaded when first used, and type checkers read them here.

from .answer import (
    Answer as Answer,
    AsyncStream as AsyncStream,
    Stream as Stream,
    citations as citations,
    copied_spans as copied_spans,
)
from .config import Settings as Settings
from .decoding.request import Reference as Reference
from .decoding.session import (
    Context as Context,
    Drafter as Drafter,
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
    ConfigurationError as ConfigurationError,
    DocumentError as DocumentError,
    EmptyIndexError as EmptyIndexError,
    IndexBusyError as IndexBusyError,
    IndexUnusableError as IndexUnusableError,
    MissingExtraError as MissingExtraError,
    ModelNotFoundError as ModelNotFoundError,
    RagaccelError as RagaccelError,
    StorageError as StorageError,
    UnsupportedModelError as UnsupportedModelError,
)
from .frameworks.hf_generate import custom_generate as custom_generate
from .frameworks.registry import reference_scope as reference_scope
from .llm import LLM as LLM
from .models.space_adapter import SpaceAdapter as SpaceAdapter
from .passage import (
    Document as Document,
    Passage as Passage,
)
from .prompt import (
    Prompt as Prompt,
    build_prompt as build_prompt,
)
from .rag import RAG as RAG
from .retrieval.collection import Collection as Collection
from .retrieval.compression import CompressingRetriever as CompressingRetriever
from .retrieval.embedder import (
    Embedder as Embedder,
    load_embedder as load_embedder,
)
from .retrieval.indexing import (
    index_documents as index_documents,
    index_folder as index_folder,
    index_passages as index_passages,
)
from .retrieval.retriever import (
    Retriever as Retriever,
    open_retriever as open_retriever,
)
from .retrieval.store import Store as Store, default_index_path as default_index_path

__version__: str
