# What other packages, evaluation and tests use of this package; loaded when first used.

from .attention import (
    CHUNK as CHUNK,
)
from .attention import (
    PassAttention as PassAttention,
)
from .cuda_graphs import (
    CaptureError as CaptureError,
)
from .cuda_graphs import (
    KVPool as KVPool,
)
from .cuda_graphs import (
    StateLayout as StateLayout,
)
from .cuda_graphs import (
    StaticPass as StaticPass,
)
from .cuda_graphs import (
    StepGraphs as StepGraphs,
)
from .engine import (
    DETERMINISTIC_ROWS as DETERMINISTIC_ROWS,
)
from .engine import (
    ROWS as ROWS,
)
from .engine import (
    Engine as Engine,
)
from .engine import (
    EngineVerifier as EngineVerifier,
)
from .engine import (
    measure_passes as measure_passes,
)
from .engine import (
    measure_threads as measure_threads,
)
from .engine import (
    run_uninterrupted as run_uninterrupted,
)
from .engine import (
    warm_up_passes as warm_up_passes,
)
from .kv_cache import (
    FIRST_CAPACITY as FIRST_CAPACITY,
)
from .kv_cache import (
    KVCache as KVCache,
)
from .latency import (
    LatencyProfile as LatencyProfile,
)
from .latency import (
    PassCost as PassCost,
)
from .latency import (
    PassProfile as PassProfile,
)
from .latency import (
    read_bandwidth as read_bandwidth,
)
from .latency import (
    sampling_mode as sampling_mode,
)
from .memory import (
    free_bytes as free_bytes,
)
from .memory import (
    total_bytes as total_bytes,
)
from .memory import (
    with_memory_retry as with_memory_retry,
)
from .model_input import (
    AttentionMasks as AttentionMasks,
)
from .model_input import (
    Rows as Rows,
)
from .model_input import (
    ancestor_matrix as ancestor_matrix,
)
from .model_input import (
    causal_rows as causal_rows,
)
from .model_input import (
    concat_rows as concat_rows,
)
from .model_input import (
    is_plain as is_plain,
)
from .model_input import (
    tree_rows as tree_rows,
)
from .prefix_cache import (
    PrefixCache as PrefixCache,
)
from .prefix_cache import (
    PrefixEntry as PrefixEntry,
)
from .row_blocks import (
    BlockSegment as BlockSegment,
)
from .row_blocks import (
    RowBlocks as RowBlocks,
)
from .row_blocks import (
    block_table as block_table,
)
from .row_blocks import (
    num_splits as num_splits,
)
from .row_blocks import (
    pack_bits as pack_bits,
)
from .row_blocks import (
    rows_per_block as rows_per_block,
)
from .sampling import (
    Sampler as Sampler,
)
from .sampling import (
    ScoreProcessing as ScoreProcessing,
)
from .sampling import (
    TokenNoise as TokenNoise,
)
from .sampling import (
    position_keys as position_keys,
)
from .sampling import (
    token_paths as token_paths,
)
from .scheduler import Scheduler as Scheduler
