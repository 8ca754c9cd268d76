# The names that this package offers, loaded when first used.

from .answer_memory import (
    AnswerMemory as AnswerMemory,
    SimilarAnswer as SimilarAnswer,
    unit_vector as unit_vector,
)
from .arrays import (
    MIN_MMAP_BYTES as MIN_MMAP_BYTES,
)
from .calibration import (
    INITIAL_VALUE as INITIAL_VALUE,
    Calibration as Calibration,
    Ending as Ending,
    SpaceCalibration as SpaceCalibration,
)
from .expansion import (
    MAX_BEYOND_MATCH as MAX_BEYOND_MATCH,
    MAX_MATCHES as MAX_MATCHES,
    MAX_PAST_MATCHES as MAX_PAST_MATCHES,
    MAX_SUPPORT as MAX_SUPPORT,
    MIN_CLEAR_MATCH as MIN_CLEAR_MATCH,
    MIN_PAST_MATCH as MIN_PAST_MATCH,
    OUTPUT as OUTPUT,
    PAST_ANSWER as PAST_ANSWER,
    PAST_PROMPT as PAST_PROMPT,
    PROMPT as PROMPT,
    REFERENCE as REFERENCE,
    SOURCES as SOURCES,
    MatchWeights as MatchWeights,
    default_match_weights as default_match_weights,
)
from .history import (
    ANSWER_WEIGHT as ANSWER_WEIGHT,
    BYTES_PER_TOKEN as BYTES_PER_TOKEN,
    AnswerMemoryStats as AnswerMemoryStats,
    History as History,
    HistoryStats as HistoryStats,
    bucket_starts as bucket_starts,
    order_positions as order_positions,
)
from .memory import (
    Memory as Memory,
    UnusableFileError as UnusableFileError,
    read_archive as read_archive,
    write_archive as write_archive,
)
from .ngram import (
    MAX_CANDIDATES as MAX_CANDIDATES,
    MAX_N as MAX_N,
    SEQUEL_RANGE as SEQUEL_RANGE,
    CopyDrafter as CopyDrafter,
    FirstMatchIndex as FirstMatchIndex,
    NgramIndex as NgramIndex,
    NgramMatch as NgramMatch,
    path_probs as path_probs,
    sort_positions as sort_positions,
)
from .policy import (
    JIT_WARMUP as JIT_WARMUP,
    DraftingPolicy as DraftingPolicy,
    Mixture as Mixture,
)
from .space import (
    PaperSpaceDrafter as PaperSpaceDrafter,
    SpaceDrafter as SpaceDrafter,
    best_first_tree as best_first_tree,
    predictions_after as predictions_after,
)
from .suffix_array import (
    CONTEXT as CONTEXT,
    MAX_GAP as MAX_GAP,
    MAX_MATCH as MAX_MATCH,
    ROW_BYTES as ROW_BYTES,
    SORT_DEPTH as SORT_DEPTH,
    BigramTable as BigramTable,
    Ids as Ids,
    SuffixArray as SuffixArray,
    empty_bigrams as empty_bigrams,
    empty_suffix_array as empty_suffix_array,
    insertion_rank as insertion_rank,
    match_beyond as match_beyond,
    match_length as match_length,
    with_bigrams as with_bigrams,
)
from .trie import (
    PastTexts as PastTexts,
    RequestText as RequestText,
    TrieDrafter as TrieDrafter,
    backoff_shares as backoff_shares,
)
