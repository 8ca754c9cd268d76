# The names that this package offers, loaded when first used.

from .chunking import (
    MAX_TITLE_CHARS as MAX_TITLE_CHARS,
    sections as sections,
    split_document as split_document,
)
from .collection import Collection as Collection
from .compression import (
    CompressingRetriever as CompressingRetriever,
    nearest_sentences as nearest_sentences,
)
from .embedder import (
    DEFAULT_EMBEDDER as DEFAULT_EMBEDDER,
    Embedder as Embedder,
    FunctionEmbedder as FunctionEmbedder,
    SentenceTransformerEmbedder as SentenceTransformerEmbedder,
    file_sha256 as file_sha256,
    find_model_folder as find_model_folder,
    load_embedder as load_embedder,
)
from .encoder import run_single_threaded as run_single_threaded
from .files import (
    IgnoreRules as IgnoreRules,
    list_folder as list_folder,
)
from .indexing import (
    Progress as Progress,
    index_documents as index_documents,
    index_folder as index_folder,
    index_passages as index_passages,
    read_passages as read_passages,
    scan_passages as scan_passages,
)
from .retriever import (
    MODES as MODES,
    Reranker as Reranker,
    Retriever as Retriever,
    fuse as fuse,
    open_retriever as open_retriever,
    raise_files as raise_files,
)
from .store import (
    SCHEMA_VERSION as SCHEMA_VERSION,
    Store as Store,
    StoredPassage as StoredPassage,
    default_index_path as default_index_path,
    index_command as index_command,
)
from .vector_index import VectorIndex as VectorIndex
