# The names that this package offers, loaded when first used.

from .generation_config import (
    HONOURED as HONOURED,
    REFUSED as REFUSED,
    SAMPLING as SAMPLING,
    WITHOUT_INFLUENCE as WITHOUT_INFLUENCE,
)
from .hf_attention import (
    ATTENTION_NAME as ATTENTION_NAME,
    attention_forward as attention_forward,
    attention_of_pass as attention_of_pass,
    enter_layer as enter_layer,
    make_shared_copy as make_shared_copy,
    use_rowwise_activations as use_rowwise_activations,
)
from .hf_model import (
    GRAPH_DTYPES as GRAPH_DTYPES,
    HuggingFaceModel as HuggingFaceModel,
    WeightVersions as WeightVersions,
)
from .hf_processors import (
    StatefulProcessor as StatefulProcessor,
    logits_processors as logits_processors,
    make_criterion_rules as make_criterion_rules,
)
from .hub import (
    EMBEDDER as EMBEDDER,
    LANGUAGE_MODEL as LANGUAGE_MODEL,
    cached_folder as cached_folder,
    find_folder as find_folder,
)
from .load import (
    bundled_reader_path as bundled_reader_path,
    load_for_training as load_for_training,
    load_model as load_model,
    read_model_info as read_model_info,
    round_to_int8 as round_to_int8,
)
from .packing import (
    PackedLinear as PackedLinear,
    has_packed as has_packed,
    pack_linears as pack_linears,
    packed_bytes as packed_bytes,
)
from .self_check import (
    check_model as check_model,
    expected_passes as expected_passes,
)
from .space_adapter import (
    ADAPTER as ADAPTER,
    CONFIG_FILE as CONFIG_FILE,
    FOLDER as FOLDER,
    MaskRows as MaskRows,
    SpaceAdapter as SpaceAdapter,
    gate_linears as gate_linears,
    linear_sizes as linear_sizes,
    new_adapter as new_adapter,
)
from .streaming import (
    IncrementalDecoder as IncrementalDecoder,
    StopStringFilter as StopStringFilter,
    TextStopRule as TextStopRule,
    decode_tail as decode_tail,
)
from .support import (
    find_lengths as find_lengths,
    make_small_copy as make_small_copy,
    refuse_by_config as refuse_by_config,
)
from .tokenizer import (
    SpecialTokenEscaper as SpecialTokenEscaper,
    Tokenizer as Tokenizer,
)
from .tool_calling import (
    ToolCalling as ToolCalling,
    detect_tool_format as detect_tool_format,
    resolve_tool_calling as resolve_tool_calling,
    resolve_tool_choice as resolve_tool_choice,
)
from .tool_calls import (
    ToolCall as ToolCall,
    ToolFormat as ToolFormat,
)
