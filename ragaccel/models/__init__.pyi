# What other packages, evaluation and tests use of this package; loaded when first used.

from .generation_config import (
    HONOURED as HONOURED,
)
from .generation_config import (
    REFUSED as REFUSED,
)
from .generation_config import (
    SAMPLING as SAMPLING,
)
from .generation_config import (
    WITHOUT_INFLUENCE as WITHOUT_INFLUENCE,
)
from .hf_attention import (
    ATTENTION_NAME as ATTENTION_NAME,
)
from .hf_attention import (
    attention_forward as attention_forward,
)
from .hf_attention import (
    attention_of_pass as attention_of_pass,
)
from .hf_attention import (
    enter_layer as enter_layer,
)
from .hf_attention import (
    make_shared_copy as make_shared_copy,
)
from .hf_attention import (
    use_rowwise_activations as use_rowwise_activations,
)
from .hf_model import (
    HuggingFaceModel as HuggingFaceModel,
)
from .hf_model import (
    WeightVersions as WeightVersions,
)
from .hf_processors import (
    StatefulProcessor as StatefulProcessor,
)
from .hf_processors import (
    logits_processors as logits_processors,
)
from .hf_processors import (
    make_criterion_rules as make_criterion_rules,
)
from .hub import (
    EMBEDDER as EMBEDDER,
)
from .hub import (
    LANGUAGE_MODEL as LANGUAGE_MODEL,
)
from .hub import (
    cached_folder as cached_folder,
)
from .hub import (
    find_folder as find_folder,
)
from .load import (
    bundled_reader_path as bundled_reader_path,
)
from .load import (
    load_for_training as load_for_training,
)
from .load import (
    load_model as load_model,
)
from .load import (
    read_model_info as read_model_info,
)
from .packing import (
    PackedLinear as PackedLinear,
)
from .packing import (
    PackingCache as PackingCache,
)
from .packing import (
    clear_packing_cache as clear_packing_cache,
)
from .packing import (
    has_packed as has_packed,
)
from .packing import (
    pack_linears as pack_linears,
)
from .packing import (
    packed_bytes as packed_bytes,
)
from .packing import (
    packing_cache_path as packing_cache_path,
)
from .self_check import (
    check_model as check_model,
)
from .self_check import (
    expected_passes as expected_passes,
)
from .space_adapter import (
    ADAPTER as ADAPTER,
)
from .space_adapter import (
    CONFIG_FILE as CONFIG_FILE,
)
from .space_adapter import (
    FOLDER as FOLDER,
)
from .space_adapter import (
    MaskRows as MaskRows,
)
from .space_adapter import (
    SpaceAdapter as SpaceAdapter,
)
from .space_adapter import (
    gate_linears as gate_linears,
)
from .space_adapter import (
    linear_sizes as linear_sizes,
)
from .space_adapter import (
    new_adapter as new_adapter,
)
from .space_adapter import (
    ungate_linears as ungate_linears,
)
from .streaming import (
    IncrementalDecoder as IncrementalDecoder,
)
from .streaming import (
    StopStringFilter as StopStringFilter,
)
from .streaming import (
    TextStopRule as TextStopRule,
)
from .streaming import (
    decode_tail as decode_tail,
)
from .support import (
    find_lengths as find_lengths,
)
from .support import (
    make_small_copy as make_small_copy,
)
from .support import (
    refuse_by_config as refuse_by_config,
)
from .tokenizer import (
    SpecialTokenEscaper as SpecialTokenEscaper,
)
from .tokenizer import (
    Tokenizer as Tokenizer,
)
from .tool_calling import (
    ToolCalling as ToolCalling,
)
from .tool_calling import (
    detect_tool_format as detect_tool_format,
)
from .tool_calling import (
    resolve_tool_calling as resolve_tool_calling,
)
from .tool_calling import (
    resolve_tool_choice as resolve_tool_choice,
)
from .tool_calls import (
    ToolCall as ToolCall,
)
from .tool_calls import (
    ToolFormat as ToolFormat,
)
