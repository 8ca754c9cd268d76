# What other packages, evaluation and tests use of this package; loaded when first used.

from .answer_memory import (
    AnswerMemory as AnswerMemory,
)
from .answer_memory import (
    Entry as Entry,
)
from .answer_memory import (
    Key as Key,
)
from .answer_memory import (
    SimilarAnswer as SimilarAnswer,
)
from .answer_memory import (
    num_bytes as num_bytes,
)
from .answer_memory import (
    pack as pack,
)
from .answer_memory import (
    unit_vector as unit_vector,
)
from .answer_memory import (
    unpack as unpack,
)
from .arrays import (
    MIN_MMAP_BYTES as MIN_MMAP_BYTES,
)
from .arrays import (
    Table as Table,
)
from .arrays import (
    checked_array as checked_array,
)
from .arrays import (
    compiled as compiled,
)
from .calibration import (
    INITIAL_VALUE as INITIAL_VALUE,
)
from .calibration import (
    Calibration as Calibration,
)
from .calibration import (
    Ending as Ending,
)
from .calibration import (
    SpaceCalibration as SpaceCalibration,
)
from .expansion import (
    MAX_BEYOND_MATCH as MAX_BEYOND_MATCH,
)
from .expansion import (
    MAX_MATCHES as MAX_MATCHES,
)
from .expansion import (
    MAX_PAST_MATCHES as MAX_PAST_MATCHES,
)
from .expansion import (
    MAX_SUPPORT as MAX_SUPPORT,
)
from .expansion import (
    MIN_CLEAR_MATCH as MIN_CLEAR_MATCH,
)
from .expansion import (
    MIN_PAST_MATCH as MIN_PAST_MATCH,
)
from .expansion import (
    MIN_PROB as MIN_PROB,
)
from .expansion import (
    OUTPUT as OUTPUT,
)
from .expansion import (
    PAST_ANSWER as PAST_ANSWER,
)
from .expansion import (
    PAST_PROMPT as PAST_PROMPT,
)
from .expansion import (
    PROMPT as PROMPT,
)
from .expansion import (
    REFERENCE as REFERENCE,
)
from .expansion import (
    SOURCES as SOURCES,
)
from .expansion import (
    Limits as Limits,
)
from .expansion import (
    MatchWeights as MatchWeights,
)
from .expansion import (
    Scores as Scores,
)
from .expansion import (
    build_tree as build_tree,
)
from .expansion import (
    default_match_weights as default_match_weights,
)
from .expansion import (
    new_candidates as new_candidates,
)
from .expansion import (
    new_scores as new_scores,
)
from .expansion import (
    score_matches as score_matches,
)
from .expansion import (
    tree_of as tree_of,
)
from .history import (
    ANSWER_WEIGHT as ANSWER_WEIGHT,
)
from .history import (
    BYTES_PER_TOKEN as BYTES_PER_TOKEN,
)
from .history import (
    AnswerMemoryStats as AnswerMemoryStats,
)
from .history import (
    History as History,
)
from .history import (
    HistoryStats as HistoryStats,
)
from .history import (
    bucket_starts as bucket_starts,
)
from .history import (
    order_positions as order_positions,
)
from .memory import (
    Memory as Memory,
)
from .memory import (
    UnusableFileError as UnusableFileError,
)
from .memory import (
    read_archive as read_archive,
)
from .memory import (
    write_archive as write_archive,
)
from .ngram import (
    BOUNDARY as BOUNDARY,
)
from .ngram import (
    MAX_CANDIDATES as MAX_CANDIDATES,
)
from .ngram import (
    MAX_N as MAX_N,
)
from .ngram import (
    SEQUEL_RANGE as SEQUEL_RANGE,
)
from .ngram import (
    CopyDrafter as CopyDrafter,
)
from .ngram import (
    FirstMatchIndex as FirstMatchIndex,
)
from .ngram import (
    NgramIndex as NgramIndex,
)
from .ngram import (
    NgramMatch as NgramMatch,
)
from .ngram import (
    path_probs as path_probs,
)
from .ngram import (
    sort_positions as sort_positions,
)
from .policy import (
    JIT_WARMUP as JIT_WARMUP,
)
from .policy import (
    DraftingPolicy as DraftingPolicy,
)
from .policy import (
    JitWarmup as JitWarmup,
)
from .policy import (
    Mixture as Mixture,
)
from .space import (
    PaperSpaceDrafter as PaperSpaceDrafter,
)
from .space import (
    SpaceDrafter as SpaceDrafter,
)
from .space import (
    best_first_tree as best_first_tree,
)
from .space import (
    predictions_after as predictions_after,
)
from .suffix_array import (
    CONTEXT as CONTEXT,
)
from .suffix_array import (
    MAX_GAP as MAX_GAP,
)
from .suffix_array import (
    MAX_MATCH as MAX_MATCH,
)
from .suffix_array import (
    ROW_BYTES as ROW_BYTES,
)
from .suffix_array import (
    SORT_DEPTH as SORT_DEPTH,
)
from .suffix_array import (
    WIDTH as WIDTH,
)
from .suffix_array import (
    BigramTable as BigramTable,
)
from .suffix_array import (
    Ids as Ids,
)
from .suffix_array import (
    SuffixArray as SuffixArray,
)
from .suffix_array import (
    count_bigram as count_bigram,
)
from .suffix_array import (
    empty_bigrams as empty_bigrams,
)
from .suffix_array import (
    empty_suffix_array as empty_suffix_array,
)
from .suffix_array import (
    insertion_rank as insertion_rank,
)
from .suffix_array import (
    match_beyond as match_beyond,
)
from .suffix_array import (
    match_length as match_length,
)
from .suffix_array import (
    with_bigrams as with_bigrams,
)
from .suffix_array import (
    with_rows as with_rows,
)
from .trie import (
    NoPast as NoPast,
)
from .trie import (
    PastTexts as PastTexts,
)
from .trie import (
    RequestText as RequestText,
)
from .trie import (
    TrieDrafter as TrieDrafter,
)
from .trie import (
    backoff_shares as backoff_shares,
)
