# What other packages, evaluation and tests use of this package; loaded when first used.

from .chunking import (
    DEFAULT_PASSAGE_TOKENS as DEFAULT_PASSAGE_TOKENS,
)
from .chunking import (
    MAX_TITLE_CHARS as MAX_TITLE_CHARS,
)
from .chunking import (
    sections as sections,
)
from .chunking import (
    split_document as split_document,
)
from .collection import (
    Collection as Collection,
)
from .collection import (
    StoredPassage as StoredPassage,
)
from .compression import (
    CompressingRetriever as CompressingRetriever,
)
from .compression import (
    nearest_sentences as nearest_sentences,
)
from .embedder import (
    DEFAULT_EMBEDDER as DEFAULT_EMBEDDER,
)
from .embedder import (
    Embedder as Embedder,
)
from .embedder import (
    SentenceTransformerEmbedder as SentenceTransformerEmbedder,
)
from .embedder import (
    file_sha256 as file_sha256,
)
from .embedder import (
    find_model_folder as find_model_folder,
)
from .embedder import (
    load_embedder as load_embedder,
)
from .encoder import run_single_threaded as run_single_threaded
from .files import (
    IgnoreRules as IgnoreRules,
)
from .files import (
    list_folder as list_folder,
)
from .indexing import (
    Progress as Progress,
)
from .indexing import (
    index_folder as index_folder,
)
from .indexing import (
    index_passages as index_passages,
)
from .indexing import (
    read_passages as read_passages,
)
from .indexing import (
    scan_passages as scan_passages,
)
from .reranker import CrossEncoderReranker as CrossEncoderReranker
from .retriever import (
    DENSE_WEIGHT as DENSE_WEIGHT,
)
from .retriever import (
    MODES as MODES,
)
from .retriever import (
    NUM_CANDIDATES as NUM_CANDIDATES,
)
from .retriever import (
    Retriever as Retriever,
)
from .retriever import (
    fuse as fuse,
)
from .retriever import (
    open_retriever as open_retriever,
)
from .store import (
    SCHEMA_VERSION as SCHEMA_VERSION,
)
from .store import (
    Database as Database,
)
from .store import (
    Store as Store,
)
from .store import (
    default_index_path as default_index_path,
)
from .store import (
    embedded_text as embedded_text,
)
from .store import (
    index_command as index_command,
)
from .vector_index import (
    StoreVectorIndex as StoreVectorIndex,
)
from .vector_index import (
    VectorIndex as VectorIndex,
)
