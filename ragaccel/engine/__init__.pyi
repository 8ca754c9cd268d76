# The names that this package offers, loaded when first used.

from .attention import (
    CHUNK as CHUNK,
    PassAttention as PassAttention,
)
from .capture import (
    CaptureError as CaptureError,
    GraphRecorder as GraphRecorder,
    SynchronizationGuard as SynchronizationGuard,
    watch_synchronization as watch_synchronization,
)
from .cuda_graphs import (
    KVPool as KVPool,
    LayerKernels as LayerKernels,
    LayerNorm as LayerNorm,
    PassOutput as PassOutput,
    StateLayout as StateLayout,
    StaticPass as StaticPass,
    StepGraphs as StepGraphs,
    Weights as Weights,
    first_slots as first_slots,
    token_bucket as token_bucket,
)
from .engine import (
    DETERMINISTIC_ROWS as DETERMINISTIC_ROWS,
    Engine as Engine,
    EngineVerifier as EngineVerifier,
)
from .interrupts import run_uninterrupted as run_uninterrupted
from .kv_cache import (
    FIRST_CAPACITY as FIRST_CAPACITY,
    KVCache as KVCache,
)
from .latency import (
    LatencyProfile as LatencyProfile,
    PassCost as PassCost,
    PassProfile as PassProfile,
    read_bandwidth as read_bandwidth,
    sampling_mode as sampling_mode,
)
from .measurement import (
    ROWS as ROWS,
    measure_passes as measure_passes,
    measure_threads as measure_threads,
    warm_up_passes as warm_up_passes,
)
from .memory import (
    free_bytes as free_bytes,
    total_bytes as total_bytes,
    with_memory_retry as with_memory_retry,
)
from .model_input import (
    AttentionMasks as AttentionMasks,
    Rows as Rows,
    causal_rows as causal_rows,
    concat_rows as concat_rows,
    is_plain as is_plain,
    tree_rows as tree_rows,
)
from .prefix_cache import (
    PrefixCache as PrefixCache,
    PrefixEntry as PrefixEntry,
)
from .row_blocks import (
    BlockSegment as BlockSegment,
    RowBlocks as RowBlocks,
    num_splits as num_splits,
    pack_bits as pack_bits,
    rows_per_block as rows_per_block,
)
from .sampling import (
    Sampler as Sampler,
    ScoreProcessing as ScoreProcessing,
    TokenNoise as TokenNoise,
    position_keys as position_keys,
    token_paths as token_paths,
)
from .scheduler import Scheduler as Scheduler
