# The names that this package offers, loaded when first used.

from .answer_memory import (
    AnswerMemory as AnswerMemory,
    Entry as Entry,
    Key as Key,
    SimilarAnswer as SimilarAnswer,
    num_bytes as num_bytes,
    pack as pack,
    unit_vector as unit_vector,
    unpack as unpack,
)
from .arrays import (
    MIN_MMAP_BYTES as MIN_MMAP_BYTES,
    Field as Field,
    Table as Table,
    check_state as check_state,
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
    MIN_PROB as MIN_PROB,
    OUTPUT as OUTPUT,
    PAST_ANSWER as PAST_ANSWER,
    PAST_PROMPT as PAST_PROMPT,
    PROMPT as PROMPT,
    REFERENCE as REFERENCE,
    SOURCES as SOURCES,
    Limits as Limits,
    MatchWeights as MatchWeights,
    Scores as Scores,
    build_tree as build_tree,
    default_match_weights as default_match_weights,
    new_scores as new_scores,
    score_matches as score_matches,
    tree_of as tree_of,
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
    BOUNDARY as BOUNDARY,
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
    WIDTH as WIDTH,
    BigramTable as BigramTable,
    Ids as Ids,
    SuffixArray as SuffixArray,
    count_bigram as count_bigram,
    empty_bigrams as empty_bigrams,
    empty_suffix_array as empty_suffix_array,
    insertion_rank as insertion_rank,
    match_beyond as match_beyond,
    match_length as match_length,
    with_bigrams as with_bigrams,
    with_rows as with_rows,
)
from .trie import (
    PastTexts as PastTexts,
    RequestText as RequestText,
    TrieDrafter as TrieDrafter,
    backoff_shares as backoff_shares,
)
